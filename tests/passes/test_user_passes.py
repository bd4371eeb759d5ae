"""Passes of the user's own: registered or named by a configuration, verified, recorded, and the same in all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite import ConfigError, GraphItem, PassError, Plan, PlanError
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.config.sections import AFTER
from autograph_rewrite.ir.graph import PASS_ATTR
from autograph_rewrite.ir.patterns import Op, find
from autograph_rewrite.load.files import from_printed
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.pass_pipeline import PIPELINE

TWO = {"devices": ["CPU:0", "CPU:1"]}
GRAPH = """\
# output loss = %loss
# target %train
%x: float64[?,3] = Placeholder()
%w: resource = VarHandleOp() {dtype=float64, shape=[3,1], shared_name="w"}
%w/read: float64[3,1] = ReadVariableOp(%w)
%two: float64[] = Const() {value=2.0}
%three: float64[] = Const() {value=3.0}
%h = MatMul(%x, %w/read)
%h2 = Mul(%h, %two)
%h6 = Mul(%three, %h2)
%axes: int32[2] = Const() {value=[0, 1]}
%loss = Sum(%h6, %axes)
%dw = MatMul(%x, %h6) {transpose_a=true}
%train = ResourceApplyGradientDescent(%w, %two, %dw)
%start: float64[3,1] = Const() {value=[1.0, 2.0, 3.0]}
%init = AssignVariableOp(%w, %start)
"""
SCALED_TWICE = Op("Mul", Op("Mul", "x", "a", sole=True), "b", commutes=True)
FILE = '''
from autograph_rewrite.ir.patterns import Op, find


def fuse_scalings(rewrite):
    """Multiply once."""
    for found in find(Op("Mul", Op("Mul", "x", "a", sole=True), "b", commutes=True), rewrite.graph):
        product = rewrite.graph.add("Mul", [found.of["a"], found.of["b"]], name="product")
        rewrite.replace(found.value, rewrite.graph.add("Mul", [found.of["x"], product.output()], name="fused").output())
'''


def fuse_scalings(rewrite: Rewrite) -> None:
    """Multiply by the product of two scalars instead of by one after the other."""
    for found in find(SCALED_TWICE, rewrite.graph):
        product = rewrite.graph.add("Mul", [found.of["a"], found.of["b"]], name="product")
        fused = rewrite.graph.add("Mul", [found.of["x"], product.output()], name="fused")
        rewrite.replace(found.value, fused.output())


def item() -> GraphItem:
    return from_printed(GRAPH, {"init_op": "init"})


@pytest.mark.parametrize("after", AFTER)
def test_a_pass_runs_behind_the_one_that_it_names_and_the_numbers_are_the_same(after: str) -> None:
    ar.register_pass("fuse-scalings", fuse_scalings, after=after)
    new = ar.rewrite(item(), TWO)
    names = [one.name for one in new.report.passes]
    assert "fuse-scalings" in names
    assert after not in names or names.index("fuse-scalings") == names.index(after) + 1
    made = {node.name: node.attr(PASS_ATTR) for node in new.graph if node.op == "Mul" and "fused" in node.name}
    assert not any("h6" in node.name for node in new.graph if node.op == "Mul")
    assert set(made) == {"replica_0/fused", "replica_1/fused"}
    report = ar.verify(item(), TWO, rtol=1e-12)
    assert report.ok, report


def test_a_pass_that_computes_something_else_is_found_by_verify() -> None:
    def halve(rewrite: Rewrite) -> None:
        node = rewrite.graph.nodes["h6"]
        half = rewrite.graph.add("Div", [node.output(), rewrite.graph.nodes["two"].output()], name="half")
        rewrite.replace(node.output(), half.output())

    ar.register_pass("halve", halve, after="propagate")
    assert not ar.verify(item(), TWO).ok


def test_an_output_may_be_replaced() -> None:
    def same_again(rewrite: Rewrite) -> None:
        for value in rewrite.outputs:
            rewrite.replace(value, rewrite.graph.add("Identity", [value], name="again").output())

    ar.register_pass("same-again", same_again, after="eliminate-dead-code")
    report = ar.verify(item(), TWO)
    assert report.ok, report
    assert any("loss/replaced" in node.name for node in ar.rewrite(item(), TWO).graph)


def test_a_plan_records_the_pass_and_runs_only_where_it_is_registered(tmp_path: Path) -> None:
    ar.register_pass("fuse-scalings", fuse_scalings, after="propagate")
    plan = ar.build_plan(item(), TWO)
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert [(one.name, one.after, len(one.code)) for one in loaded.passes] == [("fuse-scalings", "propagate", 12)]
    assert "replica_0/fused" in ar.rewrite(item(), loaded).graph.nodes
    from autograph_rewrite.plan.user_extensions import unregister_pass

    unregister_pass("fuse-scalings")
    with pytest.raises(PlanError, match="'fuse-scalings', which is not registered"):
        ar.rewrite(item(), loaded)


def test_a_plan_is_refused_where_the_code_of_its_pass_has_changed() -> None:
    ar.register_pass("one", fuse_scalings, after="propagate")
    plan = ar.build_plan(item(), TWO)
    ar.register_pass("one", lambda rewrite: None, after="propagate")
    with pytest.raises(PlanError, match="'one' has other code than when the plan was made"):
        ar.rewrite(item(), plan)


def test_other_code_makes_another_plan() -> None:
    def other(rewrite: Rewrite) -> None:
        """Do nothing."""

    digests = []
    for function in (fuse_scalings, other):
        ar.register_pass("one", function, after="propagate")
        digests.append(ar.build_plan(item(), TWO).digest())
    assert digests[0] != digests[1]


def test_a_configuration_names_a_pass_that_runs_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOGRAPH_REWRITE_ALLOW_CODE", "[]")
    file = tmp_path / "my_pass.py"
    file.write_text(FILE)
    config = {**TWO, "passes": [{"file": f"{file}:fuse_scalings", "after": "propagate"}]}
    with pytest.raises(ConfigError, match="runs only if you allow it"):
        ar.rewrite(item(), config)
    ar.allow_code(file)
    assert "replica_0/fused" in ar.rewrite(item(), config).graph.nodes
    assert "replica_0/fused" not in ar.rewrite(item(), TWO).graph.nodes  # another configuration does not name it


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"passes": [{"file": "no.py", "after": "propagate"}]}, "must be path/to/file.py:function"),
        ({"passes": [{"file": "no.py:f", "after": "propagate"}]}, "there is no file 'no.py'"),
        ({"passes": [{"file": "no.py:f", "after": "expand"}]}, "after must be"),
    ],
)
def test_a_wrong_setting_says_what_is_wrong(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ar.rewrite(item(), {**TWO, **config})


@pytest.mark.parametrize(
    ("name", "after", "problem"),
    [("Fold", "propagate", "no name of a pass"), ("fold", "expand", "nothing of one's own runs after 'expand'")],
)
def test_what_cannot_be_registered_says_why(name: str, after: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ar.register_pass(name, fuse_scalings, after=after)


def test_an_exception_in_a_pass_names_it() -> None:
    def broken(rewrite: Rewrite) -> None:
        raise KeyError("x")

    ar.register_pass("broken", broken, after="decompose")
    with pytest.raises(PassError, match="the pass 'broken' of your own has failed: KeyError: 'x'") as error:
        ar.rewrite(item(), TWO)
    assert error.value.where == f"{__file__}:{broken.__code__.co_firstlineno + 1}"


def test_a_mistake_in_what_a_pass_asks_of_the_graph_is_at_the_line_of_the_pass() -> None:
    def broken(rewrite: Rewrite) -> None:
        rewrite.graph.nodes["no such node"].set_input(0, rewrite.graph.nodes["h"].output())

    ar.register_pass("broken", broken, after="decompose")
    with pytest.raises(PassError, match="KeyError") as error:
        ar.rewrite(item(), TWO)
    assert error.value.where == f"{__file__}:{broken.__code__.co_firstlineno + 1}"


def test_a_pass_that_leaves_a_broken_graph_is_refused_by_the_verifier() -> None:
    def cyclic(rewrite: Rewrite) -> None:
        graph = rewrite.graph
        graph.nodes["h"].add_control(graph.nodes["h6"])

    ar.register_pass("cyclic", cyclic, after="propagate")
    with pytest.raises(ar.RewriteError, match="cycle") as error:
        ar.rewrite(item(), TWO)
    assert "while running pass 'cyclic'" in error.value.__notes__


def test_a_pass_reads_placements_behind_propagate() -> None:
    found = {}

    def look(rewrite: Rewrite) -> None:
        found["dw"] = repr(rewrite.get(Propagation).facts[rewrite.graph.nodes["dw"].output()].placement)

    ar.register_pass("look", look, after="propagate")
    ar.rewrite(item(), TWO)
    assert found == {"dw": "partial(sum)"}


def test_passes_of_ones_own_run_behind_passes_that_exist() -> None:
    assert set(AFTER) <= {one.name for one in PIPELINE}


def test_a_pattern_names_one_value_once_and_may_stand_the_other_way_round() -> None:
    graph = item().graph
    squared = Op("Mul", "x", "x")
    assert [found.value.node.name for found in find(SCALED_TWICE, graph)] == ["h6"]
    assert not list(find(Op("Mul", Op("Mul", "x", "a"), "b"), graph))
    assert not list(find(squared, graph))
    assert not list(find(Op("Mul", Op("MatMul", "x", "w", sole=True), "a", "b"), graph))
