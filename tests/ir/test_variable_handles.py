"""Which variable a handle means after branches and loops. None of these tests needs TensorFlow."""

from __future__ import annotations

from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.format.parser import parse
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, updates, written
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.micro_batches.sequencing import accesses_in_order

LOOP = """
%i: int32 = Const() {value=0}
%w: resource = VarHandleOp() {dtype=float32, shape=[], shared_name="w"}
%enter_w = Enter(%w) {frame_name="loop"}
%merge_w = Merge(%enter_w, %next_w)
%enter_i = Enter(%i) {frame_name="loop"}
%merge_i = Merge(%enter_i, %next_i)
%limit: int32 = Const() {value=3}
%enter_limit = Enter(%limit) {frame_name="loop", is_constant=true}
%less = Less(%merge_i, %enter_limit)
%again = LoopCond(%less)
%switch_w = Switch(%merge_w, %again)
%switch_i = Switch(%merge_i, %again)
%body_w = Identity(%switch_w:1)
%enter_one = Enter(%limit) {frame_name="loop", is_constant=true}
%body_i = AddV2(%switch_i:1, %enter_one)
%next_w: resource = NextIteration(%body_w)
%next_i: int32 = NextIteration(%body_i)
%end_w = Exit(%switch_w)
%one: float32 = Const() {value=1.0}
%update = AssignAddVariableOp(%end_w, %one)
%read: float32[] = ReadVariableOp(%body_w)
"""
CHOICE = """
%p: bool = Placeholder()
%a: resource = VarHandleOp() {dtype=float32, shape=[], shared_name="a"}
%b: resource = VarHandleOp() {dtype=float32, shape=[], shared_name="b"}
%switch_a = Switch(%a, %p)
%switch_b = Switch(%b, %p)
%some = Merge(%switch_a, %switch_b:1)
%same = Merge(%switch_a, %switch_a:1)
%one: float32 = Const() {value=1.0}
%write_some = AssignAddVariableOp(%some, %one)
%write_same = AssignAddVariableOp(%same, %one)
"""
COUNTED = """
%n: resource = VarHandleOp() {dtype=int64, shape=[], shared_name="n"}
%count: int64 = ResourceCountUpTo(%n) {limit=5}
%read: int64[] = ReadVariableOp(%n) ^count
"""


def test_a_handle_that_a_loop_carries_is_the_one_that_entered_it() -> None:
    found = parse(LOOP)
    update, read = found.node("update"), found.node("read")
    assert handle_node(update.inputs[0]) is found.node("w")
    assert handle_node(read.inputs[0]) is found.node("w")
    assert {use.node.name for use in handle_uses(found.node("w"))} >= {"update", "read", "enter_w", "end_w"}


def test_a_handle_is_no_single_variable_where_a_branch_chooses_between_two() -> None:
    found = parse(CHOICE)
    assert handle_node(found.node("write_some").inputs[0]) is found.node("some")
    assert handle_node(found.node("write_same").inputs[0]) is found.node("a")
    assert list(updates(found)) == [found.node("some"), found.node("a")]


def test_counting_up_writes_a_variable_so_a_read_behind_it_stays_behind_it() -> None:
    found = parse(COUNTED)
    order = topological_order(found)
    pairs = accesses_in_order(order, unconditional_nodes(order))
    assert [(first.name, second.name) for first, second in pairs] == [("count", "read")]


def test_a_store_of_gradients_is_written_but_is_no_variable() -> None:
    found = parse("""
%sum: resource = ResourceConditionalAccumulator() {dtype=float32, shape=[]}
%step: int64 = Const() {value=0}
%grad: float32 = Const() {value=1.0}
%push = ResourceAccumulatorApplyGradient(%sum, %step, %grad)
""")
    push = found.node("push")
    assert not has(push.op, "writes")
    assert list(written(push)) == [found.node("sum")]
