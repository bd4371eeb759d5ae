"""How a step uses its variables: what an optimizer keeps for which, and what serves nothing but one update."""

from __future__ import annotations

import pytest

from autograph_rewrite.analysis.propagate import Propagation, propagate
from autograph_rewrite.analysis.variable_uses import update_regions, variable_uses
from autograph_rewrite.ir.format.parser import parse
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.training_graph import Variable

FORWARD = """
%x: float32[4,3] = Placeholder()
%w: resource = VarHandleOp() {dtype=float32, shape=[3,2], shared_name="w"}
%w/read: float32[3,2] = ReadVariableOp(%w)
%y = MatMul(%x, %w/read)
%dw = MatMul(%x, %y) {transpose_a=true}
%rate: float32 = Const() {value=0.1}
%m: resource = VarHandleOp() {dtype=float32, shape=[3,2], shared_name="m"}
"""
FUSED = """
%train = ResourceApplyMomentum(%w, %m, %rate, %dw, %rate)
"""
BY_ELEMENT = """
%m/read: float32[3,2] = ReadVariableOp(%m)
%m/new = AddV2(%m/read, %dw)
%m/write = AssignVariableOp(%m, %m/new)
%m/again: float32[3,2] = ReadVariableOp(%m) ^m/write
%step = Mul(%rate, %m/again)
%train = AssignSubVariableOp(%w, %step)
"""
OF_ROWS = """
%r: resource = VarHandleOp() {dtype=float32, shape=[3], shared_name="r"}
%one: int32[1] = Const() {value=[1]}
%squares = Square(%dw)
%rows = Sum(%squares, %one)
%r/write = AssignAddVariableOp(%r, %rows)
%r/read: float32[3] = ReadVariableOp(%r) ^r/write
%r/column = ExpandDims(%r/read, %one)
%step = Mul(%r/column, %dw)
%train = AssignSubVariableOp(%w, %step)
"""
SHARED = """
%u: resource = VarHandleOp() {dtype=float32, shape=[3,2], shared_name="u"}
%m/read: float32[3,2] = ReadVariableOp(%m)
%step = Mul(%m/read, %dw)
%train = AssignSubVariableOp(%w, %step)
%train_u = AssignSubVariableOp(%u, %step)
"""


def analysed(text: str, **trainable: bool | None) -> tuple[Propagation, dict[str, Variable]]:
    graph = parse(FORWARD + text)
    state = propagate(graph, {graph.node("x").output(): 0}, Semantics())
    handles = [node for node in graph if node.op == "VarHandleOp"]
    variables = {
        node.name: Variable(node.name, node.name, "float32", node.attr("shape"), trainable.get(node.name))
        for node in handles
    }
    return state, variables


@pytest.mark.parametrize("text", [FUSED, BY_ELEMENT])
@pytest.mark.parametrize("w", [True, None])
def test_what_is_written_beside_a_variable_or_read_for_its_update_only_is_its_slot(text: str, w: bool | None) -> None:
    state, variables = analysed(text, w=w, m=False if w else None)
    uses = variable_uses(state, variables)
    assert (uses["w"].slots, uses["w"].owner) == (("m",), None)
    assert (uses["m"].slots, uses["m"].owner) == ((), "w")
    assert [node.name for node in uses["w"].updates] == ["train"]


def test_what_one_op_writes_beside_a_variable_is_its_slot_though_both_are_declared_trained() -> None:
    """TensorFlow runs an op on one device, so that they could not be placed apart."""
    state, variables = analysed(FUSED, w=True, m=True)
    uses = variable_uses(state, variables)
    assert (uses["w"].slots, uses["m"].owner) == (("m",), "w")
    state, variables = analysed(BY_ELEMENT, w=True, m=True)
    assert variable_uses(state, variables)["m"].owner is None, "each has an op of its own"


def test_a_slot_of_another_shape_is_found_by_the_gradient_that_it_is_computed_from() -> None:
    state, variables = analysed(OF_ROWS, w=True, r=False, m=False)
    gradient = state.graph.node("dw").output()
    assert variable_uses(state, variables)["r"].owner is None
    assert variable_uses(state, variables, gradients={gradient: "w"})["r"].owner == "w"


def test_what_serves_two_variables_is_a_slot_of_none() -> None:
    state, variables = analysed(SHARED, w=True, u=True, m=False)
    gradient = state.graph.node("dw").output()
    assert {use.owner for use in variable_uses(state, variables, gradients={gradient: "w"}).values()} == {None}


def test_only_the_slots_that_are_asked_for_are_found() -> None:
    state, variables = analysed(FUSED, w=True, m=False)
    assert variable_uses(state, variables, owners=())["m"].owner is None


def test_another_handle_of_the_same_storage_writes_the_same_variable() -> None:
    again = '%w_1: resource = VarHandleOp() {dtype=float32, shape=[3,2], shared_name="w"}\n'
    state, variables = analysed(again + "%train = AssignSubVariableOp(%w_1, %dw)\n", w=True, m=False)
    del variables["w_1"]
    assert [node.name for node in variable_uses(state, variables)["w"].updates] == ["train"]


LOOKED_UP = """
%ids: int32[4] = Placeholder()
%t: resource = VarHandleOp() {dtype=float32, shape=[9,2], shared_name="t"}
%rows: float32[4,2] = ResourceGather(%t, %ids) {dtype=float32}
%z = Mul(%y, %rows)
%t/size: int32[2] = VariableShape(%t)
%drows = Mul(%y, %y)
%train_t = ResourceScatterSub(%t, %ids, %drows) {dtype=float32}
anchor output z = %z
"""


def test_who_reads_a_variable_is_told_by_its_handle_and_by_the_value_that_was_read() -> None:
    state, variables = analysed(BY_ELEMENT, w=True, m=False)
    uses = variable_uses(state, variables)
    assert [(use.node.name, use.index) for use in uses["w"].reads] == [("y", 1)]
    assert {use.node.name for use in uses["m"].reads} == {"m/new", "step"}


def test_what_is_only_looked_up_is_sparse() -> None:
    state, variables = analysed(LOOKED_UP + FUSED, w=True, m=False, t=True)
    uses = variable_uses(state, variables)
    assert {name for name, use in uses.items() if use.sparse} == {"t"}
    assert [use.node.name for use in uses["t"].reads] == ["rows"]  # neither what measures it nor its update
    also_whole = "%whole: float32[9,2] = ReadVariableOp(%t)\n%sum = Square(%whole)\nanchor output sum = %sum\n"
    state, variables = analysed(LOOKED_UP + also_whole + FUSED, w=True, m=False, t=True)
    assert not variable_uses(state, variables)["t"].sparse


@pytest.mark.parametrize("said", [True, None])
def test_trained_is_what_is_said_to_be_or_else_what_a_step_updates_and_an_output_needs(said: bool | None) -> None:
    idle = '%u: resource = VarHandleOp() {dtype=float32, shape=[3,2], shared_name="u"}\n'
    others = None if said is None else False
    state, variables = analysed(LOOKED_UP + FUSED + idle, w=said, t=said, m=others, u=others)
    assert {name for name, use in variable_uses(state, variables).items() if use.trained} == {"w", "t"}


def test_what_a_step_does_not_update_is_not_trained_by_it() -> None:
    other = '%v: resource = VarHandleOp() {dtype=float32, shape=[3,2], shared_name="v"}\n'
    state, variables = analysed(FUSED + other + "%train_v = AssignSubVariableOp(%v, %dw)\n", w=True, v=True, m=False)
    assert {name for name, use in variable_uses(state, variables).items() if use.trained} == {"v", "w"}
    step = set(state.order) - {state.graph.node("train")}
    assert {name for name, use in variable_uses(state, variables, step=step).items() if use.trained} == {"v"}


def test_many_slots_of_many_variables_are_each_told_once() -> None:
    lines = []
    for i in range(40):
        lines += [
            f'%{n}{i}: resource = VarHandleOp() {{dtype=float32, shape=[3,2], shared_name="{n}{i}"}}' for n in "ab"
        ]
        lines.append(f"%train{i} = ResourceApplyMomentum(%a{i}, %b{i}, %rate, %dw, %rate)")
    said = {f"a{i}": True for i in range(40)} | {f"b{i}": False for i in range(40)}
    state, variables = analysed("\n".join(lines) + FUSED, w=True, m=False, **said)
    uses = variable_uses(state, variables)
    assert all(uses[f"a{i}"].slots == (f"b{i}",) and uses[f"b{i}"].owner == f"a{i}" for i in range(40))


def test_the_region_of_an_update_begins_behind_the_gradient_and_holds_its_slots() -> None:
    state, variables = analysed(BY_ELEMENT, w=True, m=False)
    graph = state.graph
    uses = variable_uses(state, variables)
    found = update_regions(state.order, uses, {"w": [graph.node("dw")]}, [graph.node("y")])
    assert found.keys() == {
        graph.node(name) for name in ("m/read", "m/new", "m/write", "m/again", "rate", "step", "train")
    }
