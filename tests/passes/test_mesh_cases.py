"""What the passes shall make of graphs on meshes of several axes: cases by hand (tests/cases/mesh), and their checks.

Each is read, verified, run instance by instance, and compared with one device. What no pass makes yet is marked so.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from autograph_rewrite.analysis.transfer import transferred
from autograph_rewrite.errors import ConfigError, RewriteError
from autograph_rewrite.inspect.pass_states import placements_of
from autograph_rewrite.ir.format.printer import line, render
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import MICRO, PROCESS, SERVER, STAGE, Axis, Mesh
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import EFFECT, REGION, RESHARD
from autograph_rewrite.ir.types.placement import REPLICATED, Extent
from autograph_rewrite.ir.verify.folded import folded_faults
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.facts.symbolic_dims import Dim, local_symbol
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.ops.rules.inference import const_fact
from tests.support.mesh_cases import FOLDER, Case, Step, alone, mesh_cases, on_mesh, stated
from tests.support.text_cases import optimized

PATHS = mesh_cases()
NOT_YET = pytest.mark.xfail(strict=True, raises=AssertionError, reason="no pass makes it yet")
"""Strict, so that a case that begins to pass is noticed; then it has no `# not yet` any more."""
each_case = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
WITHOUT_RULE = {"Placeholder", "Const", "NoOp", "VarHandleOp", RESHARD, REGION, EFFECT}
PASSES_ON = {"Enter", "Exit", "NextIteration", "Switch", "Merge", "LoopCond", "Identity"}


def test_there_are_twelve() -> None:
    assert len(PATHS) == 12


@each_case
def test_a_case_says_what_it_shows_and_is_written_as_it_would_be_printed(path: Path) -> None:
    case = Case.of(path)
    first = case.before.splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    text = case.graphs[1]
    assert render(text.graph, placements=text.placements, places=True) == case.after


@each_case
def test_the_folded_graph_keeps_the_invariants(path: Path) -> None:
    case = Case.of(path)
    sizes = {PROCESS: 2, SERVER: 2, STAGE: 2, MICRO: 1, **case.mesh}
    mesh = Mesh(tuple(Axis(name, size) for name, size in sizes.items()))
    faults = folded_faults(case.graphs[1].graph, mesh)
    assert [fault.problem for fault in faults] == []


@each_case
def test_all_instances_together_do_what_one_device_does(path: Path) -> None:
    case = Case.of(path)
    if case.name == "local_sgd":
        pytest.skip("each replica trains by itself: the next test")
    one, many = alone(case), on_mesh(case)
    for name in case.outputs:
        told = many.text.placements.get(name)  # an output becomes whole once its instances are merged
        assert told is None or told.readers == REPLICATED or stated({name: told}, many.graph.value(name)) == {}, name
    compared = 0
    for node in one.graph:
        if node.op in WITHOUT_RULE or node.name not in many.graph or "loop" in node.name or not node.output_dtypes:
            continue
        for i in range(len(node.output_dtypes)):
            if node.output(i).dtype == dtypes.RESOURCE:
                continue
            left, right = one.whole(node.output(i)), many.whole(many.graph.node(node.name).output(i))
            if left is None or right is None:
                assert left is right, f"{node.name}: on one device {left}, on the mesh {right}"
                continue
            _assert_close(right, left, node.name)
            compared += 1
    assert compared > 5
    left, right = one.written(), many.written()
    assert left.keys() == right.keys()
    assert left
    for name, value in left.items():
        _assert_close(right[name], value, name)


def _assert_close(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Sums of other orders differ by what the largest terms are rounded by."""
    largest = float(np.max(np.abs(wanted), initial=1))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * largest, err_msg=name)


def test_replicas_that_train_by_themselves_are_averaged() -> None:
    case = Case.of(next(path for path in PATHS if path.stem == "local_sgd"))
    whole, many = alone(case), on_mesh(case)
    blocks = np.array_split(whole.feeds["x"], case.mesh["replica"])
    by_itself = [Step(whole.text, {}, {"x": block}, whole.state) for block in blocks]
    written = many.written()
    for name in whole.written():
        wanted = np.mean([one.written()[name] for one in by_itself], axis=0)
        np.testing.assert_allclose(written[name], wanted, rtol=1e-5, err_msg=name)
    losses = [one.whole(one.graph.value("loss")) for one in by_itself]
    np.testing.assert_allclose(many.whole(many.graph.value("loss")), np.sum(losses), rtol=1e-5)


@each_case
def test_operands_lie_as_rules_ask_on_each_axis(path: Path) -> None:
    """The product's own rules, asked on one axis after another, convert nothing and give what is stated."""
    case = Case.of(path)
    step = on_mesh(case)
    asked = 0
    for node in topological_order(step.graph):
        for axis in case.mesh:
            if node.op in PASSES_ON:
                _passes_on(step, node, axis)
            elif node.op not in WITHOUT_RULE:
                _meets_its_rule(step, node, axis)
                asked += 1
    assert asked


def _passes_on(step: Step, node: Node, axis: str) -> None:
    data = [one for one in node.inputs if not _is_zero(one)] if node.op == "Merge" else node.inputs[:1]
    given = {stated(step.text.placements, value).get(axis, REPLICATED) for value in data}
    outputs = node.outputs[:1] if node.op == "Merge" else node.outputs
    made = {stated(step.text.placements, value).get(axis, REPLICATED) for value in outputs}
    assert given == made, f"{node.name} on {axis}"
    if node.op == "Switch":
        assert stated(step.text.placements, node.inputs[1]) == {}, f"{node.name}: its predicate differs"


def _is_zero(value: Value) -> bool:
    """Return whether a value is zeros, which are a contribution to any sum."""
    return value.node.op == "ZerosLike" or (value.node.op == "Enter" and _is_zero(value.node.inputs[0]))


def _meets_its_rule(step: Step, node: Node, axis: str) -> None:
    values = (*node.inputs, *node.outputs)
    if any(stated(step.text.placements, value).get(axis, REPLICATED).op == "own" for value in values):
        return  # within a region a replica has all there is
    units = [one for value in node.inputs if (one := _cut_size(step, value, axis))]
    unit = min(units, default=0)
    facts = tuple(_fact(step, value, axis, unit) for value in node.inputs)
    found = transferred(node, facts, {}, Semantics(extent=Extent(units=unit or None)))
    asked = {node.inputs[i].name: want for i, want in found.operand_reshards.items()}
    assert not asked, f"{node.name} on {axis}: its rule asks for {asked}"
    assert not found.decompose, f"{node.name} on {axis} has to be decomposed"
    made = [fact.placement for fact in found.outputs]
    wanted = [stated(step.text.placements, value).get(axis, REPLICATED) for value in node.outputs]
    assert made == wanted, f"{node.name} on {axis}"


def _cut_size(step: Step, value: Value, axis: str) -> int:
    """Return how long the whole of the dimension is that an axis cuts; 0 where it cuts none."""
    placement = stated(step.text.placements, value).get(axis, REPLICATED)
    return _sizes(step, value, axis)[placement.dim] if placement.is_split else 0


def _sizes(step: Step, value: Value, axis: str) -> tuple[int, ...]:
    """Return the shape of a value that is whole along one axis."""
    placement = stated(step.text.placements, value).get(axis, REPLICATED)
    shapes = [_shape(step, value, {axis: k}) for k in range(step.mesh[axis])]
    dims = list(shapes[0])
    if placement.is_split:
        dims[placement.dim] = sum(shape[placement.dim] for shape in shapes)
    return tuple(dims)


def _shape(step: Step, value: Value, at: dict[str, int]) -> tuple[int, ...]:
    in_loop = "loop" in value.node.name and value.node.op not in ("Exit", "Enter")
    found = step.value(value, at, 0 if in_loop else None)
    if isinstance(found, Node):
        return step._content(value.node, found, at).shape
    if found is None:  # of the branch that is not taken
        return ()
    return np.shape(found)


def _fact(step: Step, value: Value, axis: str, unit: int) -> Fact:
    placement = stated(step.text.placements, value).get(axis, REPLICATED)
    if value.node.op == "Const":
        return const_fact(value.node)
    dims: list[Dim] = list(_sizes(step, value, axis))
    if placement.is_split:
        size = dims[placement.dim]
        assert isinstance(size, int)
        rows, rest = divmod(size, unit)
        dims[placement.dim] = local_symbol(str(size)) if rest else local_symbol()._replace(coef=rows)
    return Fact(placement, value.dtype, tuple(dims))


@pytest.mark.parametrize(
    ("name", "old", "new", "check", "problem"),
    [
        ("mlp_1x2", "MatMul(%h1/whole, %u2)", "MatMul(%h1, %u2)", "rules", "z2 on model: its rule asks for"),
        ("mlp_1x2", "MatMul(%h1/whole, %u2)", "MatMul(%h1, %u2)", "run", "z2"),
        (
            "mlp_2x2",
            "%train0 = ResourceApplyGradientDescent(%w0, %rate, %dw0/whole)",
            "%train0 = ResourceApplyGradientDescent(%w0, %rate, %dw0/reshard)",
            "rules",
            "train0 on model",
        ),
        ("mlp_2x2", 'ar.reshard(%dw0) {after="replicated"', 'ar.reshard(%dw0) {after="split(0)"', "run", "dw0/reshard"),
        ("fsdp_3", "@ split(0) = VarHandleOp", "@ split(1) = VarHandleOp", "run", "dimension 1"),
        ("fsdp_3", "MatMul(%dy, %r2/again)", "MatMul(%dy, %r2)", "rules", "dh on replica: its rule asks for"),
        ("fsdp_1", "%rate, %dw1/sum/block, %keep)", "%rate, %dw1/sum, %keep)", "rules", "train1 on replica"),
        ("partitioned_ps", "%dw/shards/reshard) ^rate", "%dw/shards/reshard_1) ^rate", "run", "w"),
        ("partitioned_ps", "ConcatV2(%r/part_0, %r/part_1", "ConcatV2(%r/part_1, %r/part_0", "run", "r"),
        ("attention", "%dhq, %dhk, %dhv)", "%dhq, %dhk, %dhq)", "run", "dh"),
        ("vocabulary_loss", "partial(max)", "partial(min)", "rules", "xent/max on model"),
        ("loop_over_time", "Enter(%x/reshard)", "Enter(%x)", "rules", "loop/h/enter on replica"),
        ("stages_x_model", "MatMul(%h1/whole, %u2)", "MatMul(%x/reshard, %u2)", "run", "z2"),
    ],
)
def test_a_case_with_a_mistake_is_noticed(
    name: str, old: str, new: str, check: str, problem: str, tmp_path: Path
) -> None:
    """The checks see what a slip of the hand would make of a case."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    border = text.index("\n===\n")
    assert old in text[border:]
    spoilt = tmp_path / f"{name}.txt"
    spoilt.write_text(text[:border] + text[border:].replace(old, new), encoding="utf-8")
    run = {
        "rules": test_operands_lie_as_rules_ask_on_each_axis,
        "run": test_all_instances_together_do_what_one_device_does,
        "verify": test_the_folded_graph_keeps_the_invariants,
    }[check]
    with pytest.raises((AssertionError, ValueError), match=re.escape(problem)):
        run(spoilt)


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=NOT_YET if Case.of(path).missing else ()) for path in PATHS]
)
def test_the_passes_make_it(path: Path) -> None:
    case = Case.of(path)
    try:
        rewrite, _ = optimized(case.before, case.last)
    except ConfigError:
        raise  # the case is wrong
    except RewriteError as error:
        raise AssertionError(f"refused: {error}") from error
    placements = placements_of(rewrite)
    found = [
        line(node, placements=placements, places=True).partition("  #")[0] for node in topological_order(rewrite.graph)
    ]
    assert sorted(found) == sorted(case.after.splitlines())
