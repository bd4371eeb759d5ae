"""Ops of the package, spans of more axes and places: read as they are written, and refused where they say nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite import GraphError
from autograph_rewrite.errors import PassError, VerifyError
from autograph_rewrite.ir import mesh
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.format.annotations import placements_of, placements_text
from autograph_rewrite.ir.format.parser import parse
from autograph_rewrite.ir.format.printer import line, render
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import ANYWHERE, MICRO, MODEL, REPLICA, STAGE, Axis, Mesh
from autograph_rewrite.ir.types.opdefs import EFFECT, OWN, REGION, RESHARD, SHARD_ALIKE, get_op
from autograph_rewrite.ir.types.placement import PARTIAL, REPLICATED, split
from autograph_rewrite.ir.verify.folded import check_folded
from autograph_rewrite.ir.verify.reshards import Reshard, reshard_of, unlowered
from autograph_rewrite.load import validate
from autograph_rewrite.passes.emit.expand import EXPAND
from tests.ir.test_annotations import AXES, OTHERS, PLACEMENTS

STAGED = Mesh.of(2, places=[Axis(STAGE, 2)])
GRAPH = """\
%x: float32[?,4] = Placeholder() each
%w: resource = VarHandleOp() {dtype=float32, shape=[4,8], shared_name="w"} {shard} server=each(0 | 1)
%w/read: float32[4,8] = ReadVariableOp(%w) {shard} server=each(0 | 1)
%w/whole: float32[4,8] = ar.reshard(%w/read) {after="replicated", before="{shard: split(0)}", edge=3, over=["shard"]}
%h: float32[?,8] = MatMul(%x, %w/whole) {micro, model, replica} stage=1
%in: float32[?,8] = ar.region(%h) {border="begin", over=["replica"], region="own"} {micro, model, replica} stage=1
%w/after: resource = ar.effect(%w) {shard} server=each(0 | 1)
"""


def test_the_short_form_is_read_as_it_was_written() -> None:
    assert render(parse(GRAPH), places=True) == GRAPH


def test_the_full_form_gives_the_same_graph_again() -> None:
    full = render(parse(GRAPH), full=True)
    again = parse(full)
    assert render(again, full=True) == full
    assert render(again, places=True) == GRAPH
    assert again.node("h").span == {MICRO, MODEL, REPLICA}
    assert again.node("h").place == {"stage": 1}
    assert again.node("w").place == {"server": (0, 1)}


def test_copies_keep_what_a_node_says_of_itself() -> None:
    graph = parse(GRAPH)
    assert render(graph.clone(), places=True) == GRAPH
    node = graph.node("w/whole")
    copy = copy_node(graph, node, node.inputs, name="again")
    assert reshard_of(copy) == reshard_of(node) == Reshard(("shard",), {"shard": split(0)}, {}, 3)
    assert copy_node(graph, graph.node("h"), graph.node("h").inputs, name="h2").place == {"stage": 1}


def test_a_pass_makes_a_reshard_as_it_makes_any_op() -> None:
    graph = parse("%x: float32[4] = Placeholder() each")
    attrs = {"over": [REPLICA, MICRO], "before": "partial(sum)", "after": "replicated"}
    node = graph.add(RESHARD, [graph.value("x")], name="sum", attrs=attrs)
    wanted = '%sum: float32 = ar.reshard(%x) {after="replicated", before="partial(sum)", over=["replica", "micro"]}'
    assert line(node) == wanted
    assert (reshard_of(node).edge, reshard_of(node).before) == (-1, {REPLICA: PARTIAL})


@given(PLACEMENTS, OTHERS)
def test_placements_by_axis_are_read_as_they_were_written(placement: object, others: tuple) -> None:  # type: ignore[type-arg]
    found = placements_of(placements_text(placement, others))  # type: ignore[arg-type]
    assert found == ({} if placement == REPLICATED else {REPLICA: placement}) | dict(others)


PLACES = st.dictionaries(st.sampled_from(AXES), st.integers(0, 99) | st.lists(st.integers(0, 9), min_size=1).map(tuple))


@given(st.frozensets(st.sampled_from([*AXES, REPLICA])), PLACES, OTHERS, OTHERS, st.integers(-1, 99))
def test_any_reshard_comes_back(span: frozenset[str], place: dict, before: tuple, after: tuple, edge: int) -> None:  # type: ignore[type-arg]
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": 1})
    attrs = {"before": placements_text(REPLICATED, before), "after": placements_text(PARTIAL, after), "edge": edge}
    node = graph.add(RESHARD, [x.output()], name="r", attrs={**attrs, "over": [REPLICA]}, span=span)
    node.set_place(place)
    for full in (False, True):
        again = parse(render(graph, full=full, places=True)).node("r")
        assert (again.span, dict(again.place), line(again)) == (span, place, line(node))
        assert reshard_of(again) == Reshard((REPLICA,), dict(before), {REPLICA: PARTIAL, **dict(after)}, edge)


@pytest.mark.parametrize(
    ("tail", "column", "problem"),
    [
        ("{model, replicas}", 33, "'replicas' is no axis of a mesh"),
        ("each stag=1", 30, "'stag' is no axis of a mesh"),
        ("stage=1 stage=2", 33, "the place along 'stage' is stated twice"),
        ("stage=one", None, "'stage=one' is not understood"),
        ("{model, }", None, "'}' is wanted where"),
    ],
)
def test_a_wrong_span_or_place_is_found_in_its_line(tail: str, column: int | None, problem: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse(f"%fine = NoOp()\n%a: float32[4] = Abs(%x) {tail}", name="case.txt")
    assert caught.value.problem.startswith(problem) or column is None
    assert (caught.value.where or "").startswith("case.txt:2")
    assert column is None or caught.value.where == f"case.txt:2:{column + 1}"


READ = '%r: float32[4] = ar.reshard(%x) {after="replicated", before="partial(sum)", over=["replica", "micro"]}'


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('["replica", "micro"]', '["replicas"]', "'r' is over replicas: axes of a mesh are wanted, each once"),
        ('["replica", "micro"]', '["micro", "micro"]', "'r' is over micro, micro: axes of a mesh are wanted"),
        ('["replica", "micro"]', "[]", "'r' is over nothing"),
        ("partial(sum)", "replicated", "'r' is over 'replica', along which its value is replicated before and after"),
        ("partial(sum)", "{model: split(1)}", "'r' changes along 'model', and is not over it"),
        ("partial(sum)", "partial(some)", "'r' says before: 'some' combines no contributions"),
        ('before="partial(sum)", ', "", "'r' does not say its before"),
        ("over=", "edge=-2, over=", "'r' is of the edge -2"),
        ('["replica", "micro"]', '["replica"]', "'r' reads 'x', which has instances along 'micro', and is not over it"),
    ],
)
def test_the_verifier_refuses_a_reshard_that_contradicts_itself(old: str, new: str, problem: str) -> None:
    before = READ.replace("partial(sum)", "{replica: partial(sum), micro: partial(sum)}")
    check_folded(parse(f"%x: float32[4] = Placeholder() each\n{before}"), Mesh.of(2, 2))
    text = (READ if "partial" in old or "before" in old else before).replace(old, new)
    with pytest.raises(VerifyError) as caught:
        check_folded(parse(f"%x: float32[4] = Placeholder() each\n{text}"), Mesh.of(2, 2))
    assert problem in str(caught.value)
    assert caught.value.node_name == "r"


def test_what_a_replica_runs_runs_on_all_of_its_devices() -> None:
    graph = parse("""\
%sum: float32[4] = Placeholder() {model}
%block: float32[2] = ar.reshard(%sum) {after="{model_0: split(0)}", before="replicated", over=["model_0"]} each
""")
    divided = (Axis("model_0", 2), Axis("model_1", 2))
    check_folded(graph, Mesh.of(2, model=4, divided=divided))
    with pytest.raises(VerifyError, match="reads 'sum', which has instances along 'model', and is not over it"):
        check_folded(graph, Mesh.of(2, places=[Axis(MODEL, 4)]))


def test_what_changes_its_place_keeps_its_placements() -> None:
    read = '%r: float32[4] = ar.reshard(%x) {after="split(0)", before="split(0)", over=["stage"]} each stage='
    check_folded(parse(f"%x: float32[4] = Placeholder() each stage=0\n{read}1"), STAGED)
    with pytest.raises(VerifyError, match="is over 'stage', along which its value is replicated before and after"):
        check_folded(parse(f"%x: float32[4] = Placeholder() each stage=1\n{read}1"), STAGED)


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        ("each replica=1", "'x' has instances along the axis replica, and a coordinate on it"),
        ("stage=each(0 | 1)", "'x' runs once, and has several places along 'stage'"),
    ],
)
def test_the_verifier_refuses_a_place_that_says_nothing(tail: str, problem: str) -> None:
    with pytest.raises(VerifyError, match=problem):
        check_folded(parse(f"%x: float32[4] = Placeholder() {tail}"), STAGED)


def test_no_op_of_the_package_is_left_when_the_graph_is_expanded() -> None:
    graph = parse(GRAPH)
    graph.current_pass = "insert-reshards"
    graph.add(EFFECT, [graph.value("w")], name="later")
    found = [problem for _, problem in unlowered(graph)]
    assert len(found) == 4
    assert found[-1] == (
        "'later', which 'insert-reshards' has made, is still an ar.effect: a pass has to lower it before 'expand'"
    )
    with pytest.raises(PassError, match=r"'w/whole' is still an ar\.reshard") as caught:
        EXPAND.run(_Stub(graph))  # type: ignore[arg-type]
    assert caught.value.node_name == "w/whole"


class _Stub:
    """As much of a rewrite as `expand` looks at before it refuses."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph


@pytest.mark.parametrize("op", [RESHARD, REGION, EFFECT])
def test_no_graph_of_a_user_has_them(op: str) -> None:
    operand = "%w: resource = VarHandleOp()" if op == EFFECT else "%w: float32[4] = Placeholder()"
    text = f"{operand}\n%y: {'resource' if op == EFFECT else 'float32'} = {op}(%w)"
    with pytest.raises(GraphError, match=f"'y' is an {op}, which stands in a graph between two passes only"):
        validate.check(parse(text))
    with pytest.raises(GraphError, match=f"'y' is an {op}: no GraphDef can say that"):
        serde.to_bytes(parse(text))


def test_a_node_with_a_place_is_no_node_of_a_graph_def() -> None:
    with pytest.raises(GraphError, match="'x' is placed along axes of a mesh"):
        serde.to_bytes(parse("%x: float32 = Placeholder() stage=1"))


def test_ops_of_the_package_are_known_to_the_registry() -> None:
    assert set(OWN) == {RESHARD, SHARD_ALIKE, REGION, EFFECT}
    assert get_op(RESHARD) is OWN[RESHARD]
    assert ANYWHERE == {}
    assert all(map(mesh.is_axis, AXES))
    assert not any(map(mesh.is_axis, ("", "models", "model_", "Model")))
