"""One walk over two axes: facts with a placement by axis, from a batch and from weights that a model axis cuts."""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation, propagate
from autograph_rewrite.ir.format.parser import parse
from autograph_rewrite.ir.mesh import MODEL, REPLICA
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Extent, Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym
from autograph_rewrite.ops.rules.base import LocalEntry, Semantics, Slice

EXTENT = Extent(MODEL, 2, (1, 1))
ROWS, COLUMNS = Sym(1, ("b",)), f"T:@{MODEL}/b"
MEGATRON = """
%x: float32[?,8] = Placeholder()
%up: resource = VarHandleOp() {dtype=float32, shape=[8,16], shared_name="up"}
%up/read: float32[8,16] = ReadVariableOp(%up)
%bias: resource = VarHandleOp() {dtype=float32, shape=[16], shared_name="bias"}
%bias/read: float32[16] = ReadVariableOp(%bias)
%down: resource = VarHandleOp() {dtype=float32, shape=[16,8], shared_name="down"}
%down/read: float32[16,8] = ReadVariableOp(%down)
%product = MatMul(%x, %up/read)
%sum = AddV2(%product, %bias/read)
%hidden = Relu(%sum)
%y = MatMul(%hidden, %down/read)
%out = Relu(%y)
%dhidden = MatMul(%y, %down/read) {transpose_b=true}
%dsum = ReluGrad(%dhidden, %hidden)
%axis: int32 = Const() {value=[0]}
%dbias = Sum(%dsum, %axis)
%dup = MatMul(%x, %dsum) {transpose_a=true}
%dx = MatMul(%dsum, %up/read) {transpose_b=true}
"""


def cut(dim: int, *shape: int) -> Fact:
    """Return the fact of a handle whose variable both devices of the model axis have half of."""
    block: list[Dim] = [Sym(n // 2, (COLUMNS,)) if at == dim else n for at, n in enumerate(shape)]
    return Fact(REPLICATED, 20, tuple(block)).placed(MODEL, split(dim)._replace(extent=EXTENT))


def walked(text: str) -> Propagation:
    graph = parse(text)
    given = {graph.node("up").output(): cut(1, 8, 16), graph.node("down").output(): cut(0, 16, 8)}
    batch = {graph.node("x").output(): 0}
    return propagate(graph, batch, Semantics(more=(EXTENT,)), given=given)


def placements(state: Propagation) -> dict[str, dict[str, str]]:
    return {
        value.node.name: {axis: repr(one) for axis, one in fact.placements.items()}
        for value, fact in state.facts.items()
    }


def test_a_layer_of_two_products_meets_once_forward_and_once_backward() -> None:
    found = placements(walked(MEGATRON))
    assert found["product"] == found["hidden"] == found["dsum"] == {REPLICA: "split(0)", MODEL: "split(1)"}
    assert found["y"] == found["dx"] == {REPLICA: "split(0)", MODEL: "partial(sum)"}
    assert found["dup"] == {REPLICA: "partial(sum)", MODEL: "split(1)"}
    assert found["dbias"] == {REPLICA: "partial(sum)", MODEL: "split(0)"}
    assert found["out"] == {REPLICA: "split(0)"}


def test_conversions_are_told_by_axis() -> None:
    state = walked(MEGATRON)
    graph = state.graph
    assert state.transfers[graph.node("out")].operand_reshards == {}
    assert state.transfers[graph.node("out")].more == {MODEL: {0: REPLICATED}}
    assert state.transfers[graph.node("sum")].more == {MODEL: {1: Slice(0, 8)}}
    assert MODEL not in state.transfers[graph.node("y")].more


def test_sizes_of_blocks_are_those_of_their_axes() -> None:
    state = walked(MEGATRON)
    (hidden,) = [fact for value, fact in state.facts.items() if value.node.name == "hidden"]
    assert hidden.shape == (ROWS, Sym(8, (COLUMNS,)))
    assert hidden.on(MODEL).shape == (Sym(1, (f"T:@{REPLICA}/b",)), Sym(8, ("b",)))
    assert hidden.on(MODEL).on(REPLICA, MODEL) == hidden


def test_a_shape_that_counts_blocks_of_both_axes_has_an_entry_of_each() -> None:
    heads = """
%shape: int32 = Const() {value=[-1,2,8]}
%heads = Reshape(%hidden, %shape)
%size: int32 = Shape(%hidden)
"""
    state = walked(MEGATRON + heads)
    found = placements(state)
    assert found["heads"] == {REPLICA: "split(0)", MODEL: "split(1)"}
    assert state.transfers[state.graph.node("heads")].more == {MODEL: {1: LocalEntry(1, Sym(1, ("b",)))}}
    assert found["size"] == {REPLICA: "local", MODEL: "local"}


def test_a_contribution_along_both_axes_is_summed_along_both() -> None:
    state = walked(MEGATRON + "%both: int32 = Const() {value=[0,1]}\n%total = Sum(%y, %both)\n%mean = Exp(%total)\n")
    assert placements(state)["total"] == {REPLICA: "partial(sum)", MODEL: "partial(sum)"}
    reader = state.transfers[state.graph.node("mean")]
    assert (reader.operand_reshards, reader.more) == ({0: REPLICATED}, {MODEL: {0: REPLICATED}})
    assert reader.outputs[0].placements == {}


def test_what_no_model_axis_cuts_is_placed_as_by_one_axis() -> None:
    graph = parse(MEGATRON)
    batch = {graph.node("x").output(): 0}
    one, two = (propagate(graph, batch, Semantics(more=more)).facts for more in ((), (EXTENT,)))
    assert one == two
    assert PARTIAL in {fact.placement for fact in one.values()}
