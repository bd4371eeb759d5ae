"""Hand-written batch normalisation with local statistics: the values in between are varying, none is reduced.

    m = Mean(x)   v = Mean((x - m)^2)   y = (x - m) * rsqrt(v)        as if the block were the whole batch
    dv ──► BroadcastTo(dv, Shape(x)) / size(x) ──► dx                 and backwards alike

The nodes between the statistics and their gradients (`analysis.batch_norms`) are marked: what they make is a block's
own, and nobody adds it up. It leaves through an exit: a contribution to a parameter's gradient is added up, a statistic
that feeds a moving average is averaged.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.analysis.batch_norms import BatchNorm, batch_norms, moments_of
from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.analysis.rules.base import AVERAGE, OF_BLOCK, OWN, OWN_VALUE, SUM, LocalEntry
from autograph_rewrite.analysis.rules.nn.normalization import BLOCK_STATISTICS
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.canonicalize.local_batch_norm_static import restate_sizes


def localize_batch_norm(state: Propagation, instances: int) -> Propagation:
    """Mark what each block shall compute by itself; return the placements as they are then.

    Args:
        state: placements, with the means not yet taken apart.
        instances: how many blocks there are.

    Raises:
        PassError: a batch normalisation mixes blocks where nothing says so.
    """
    if state.loops or state.cells:
        return state
    moments = moments_of(state)
    means = [mean for one in moments for mean in one.both]
    if means and state.semantics.batch is not None and restate_sizes(state, means):
        state = revise(state)
    found = batch_norms(state, moments) if moments else []
    if not found:
        return state
    forward, backward = ({node for norm in found for node in part(norm)} for part in (_forward, _backward))
    forward -= backward
    marked = forward | backward | {node for norm in found for node in norm.split}
    for node in marked:
        node.set_raw_attr(OF_BLOCK, encode("string", OWN))
    for division in [division for norm in found for division in norm.divisions]:
        _divide_by_own_size(state, division)
    for node in sorted(forward, key=lambda node: node.name):
        _leave(state, node, marked, AVERAGE, instances)
    for node in sorted(backward, key=lambda node: node.name):
        _leave(state, node, marked, SUM, instances)
    state = revise(state)
    _require_apart(state)
    return state


def block_statistics(state: Propagation) -> list[Node]:
    """Return what takes statistics of its own block: fused batch normalisations, and the means of written-out ones."""
    own = encode("string", OWN)
    return [
        node
        for node in state.order
        if (node.op == "Mean" and node.attrs.get(OF_BLOCK) == own)
        or (has(node.op, "fused_batch_norms") and node.attr(BLOCK_STATISTICS, False))
    ]


def _forward(norm: BatchNorm) -> set[Node]:
    return norm.forward


def _backward(norm: BatchNorm) -> set[Node]:
    return norm.backward


def _require_apart(state: Propagation) -> None:
    """Make sure that a block's own values stay with the block, and that nothing else gets in.

    Raises:
        PassError: they do not; the statistics of the whole batch have to be used.
    """
    for node in state.order:
        transferred = state.transfers[node]
        own = OF_BLOCK in node.attrs
        mixed = [
            i for i, reshard in transferred.operand_reshards.items() if own and not isinstance(reshard, LocalEntry)
        ]
        mixed = [i for i in mixed if state.facts[node.inputs[i]].placement.differs]
        leaks = [value for value in node.inputs if state.facts[value].placement == OWN_VALUE and not own]
        if mixed or (leaks and not has(node.op, "measures")):
            raise PassError(
                f"'{node.name}' joins examples of several blocks in the middle of a batch normalisation",
                node=node,
                hint="set semantics.batch_norm to sync",
            )


def _divide_by_own_size(state: Propagation, division: Node) -> None:
    size = division.inputs[1].node
    own = state.graph.add(
        "Cast", size.inputs, name=f"{size.name}/of_block", attrs={"DstT": size.output_dtypes[0]}, origin=size
    )
    own.set_raw_attr(OF_BLOCK, encode("string", OWN))
    division.set_input(1, own.output())


def _leave(state: Propagation, node: Node, marked: set[Node], kind: str, instances: int) -> None:
    """Let whatever else reads a block's own value read what leaves the block."""
    graph = state.graph
    for value in node.read_outputs:
        others = [use.node for use in value.uses if use.node not in marked and use.node.op != "Shape"]
        anchored = [name for name, anchor in graph.anchors.items() if anchor is value]
        if not others and not anchored:
            continue
        exit_ = _exit(state, value, kind, instances)
        exit_.set_raw_attr(OF_BLOCK, encode("string", kind))
        readers = {use.node for use in value.uses}
        value.replace_all_uses_with(exit_.output(), keep={exit_, *(readers - set(others))})
        if anchored and len(node.output_dtypes) == 1:
            name = node.name
            take_name(graph, node, graph.unique_name(f"{name}/of_block"))
            take_name(graph, exit_, name)


def _exit(state: Propagation, value: Value, kind: str, instances: int) -> Node:
    graph, node = state.graph, value.node
    if kind == SUM:
        return graph.add("Identity", [value], name=f"{node.name}/contribution", origin=node)
    array = np.asarray(1 / instances, dtypes.numpy_dtype(value.dtype))
    attrs = {"value": array, "dtype": value.dtype}
    share = graph.add("Const", name=f"{node.name}/share", attrs=attrs, origin=node).output()
    return graph.add("Mul", [value, share], name=f"{node.name}/average", origin=node)
