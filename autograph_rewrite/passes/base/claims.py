"""Export the results of propagation as claims, for a certificate that does not trust the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.claims import OWN, Claim, Claims, Read, Stated
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import REPLICA, Axis
from autograph_rewrite.ops.facts.placement import PARTIAL
from autograph_rewrite.ops.facts.symbolic_dims import BATCH, Sym, unit
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.rules.marked import OF_BLOCK, OF_EACH, STATISTICS, kind_of
from autograph_rewrite.ops.rules.registered import registered
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, MERGES
from autograph_rewrite.plan.plan import Plan


def claims_of(
    state: Propagation, outputs: Sequence[Value], plan: Plan, *, model: int = 1, divided: tuple[Axis, ...] = ()
) -> Claims:
    """Return the claims of a finished propagation.

    Args:
        outputs: the declared outputs.
        plan: the plan with its resolved edges.
        model: how many devices of each replica run one program.
        divided: the axes of those devices, if there are several.
    """
    values = {value.name: _claim(state, value) for value in state.facts}
    carried = carried_by(state)
    reads: dict[tuple[str, int], Read] = {}
    for node in state.order:
        for index, value in enumerate(node.inputs):
            read = _read(state, node, index, value, carried)
            if read != OWN:
                reads[node.name, index] = read
    anchors = state.graph.anchors
    semantics = state.semantics
    return Claims(
        values,
        reads,
        {name: value.name for name, value in anchors.items() if value in set(outputs)},
        plan.instances,
        plan.microbatches,
        semantics.extent.units,
        plan.microbatches > 1 and plan.interleaved,
        len(plan.processes),
        frozenset(node.name for node, transferred in state.transfers.items() if transferred.constant),
        frozenset(node.name for node in carried),
        tuple(_inexact(state, plan)),
        {op: Stated(one.factors, one.linear, one.additive) for op, one in registered().items()},
        model,
        divided,
        semantics.extent.axis,
    )


def _claim(state: Propagation, value: Value) -> Claim:
    fact = state.source(value)
    kind, dim, op = fact.placement[:3]
    shape, axis = fact.shape, state.whole_inputs.get(value)
    if axis is not None and shape is not None and shape[axis] is None:
        shape = (*shape[:axis], Sym(1, (BATCH,)), *shape[axis + 1 :])
    return Claim(kind, dim, op, shape, fact.value, fact.zero, fact.axes)


def carried_by(state: Propagation) -> Mapping[Node, Reshard]:
    """Return the nodes that bring a converted value to a loop, each with the conversion."""
    found: dict[Node, Reshard] = {}
    for node in state.order:
        if node.op in MERGES:
            reduced = {index: state.reduced[value] for index, value in enumerate(node.inputs) if value in state.reduced}
            reshards: Mapping[int, Reshard] = {**reduced, **state.transfers[node].operand_reshards}
            found |= {
                node.inputs[index].node: reshard
                for index, reshard in reshards.items()
                if carries(node.inputs[index].node, node)
            }
    return found


def carries(carrier: Node, merge: Node) -> bool:
    """Return whether a node brings a loop variable to its Merge, and does nothing else: it carries the converted value.

    Nothing may be between the two (`ir.verify.loops`), so the value is converted before its carrier.
    """
    if carrier.op in BACK_EDGES:
        return True
    enters = carrier.op in ENTERS and not carrier.attr("is_constant")
    return enters and all(reader is merge for reader, _ in carrier.output().uses)


def _read(state: Propagation, node: Node, index: int, value: Value, carried: Mapping[Node, Reshard]) -> Read:
    reshard = carried[node] if node in carried else state.transfers[node].operand_reshards.get(index)
    if value.node in carried:
        return OWN
    if reshard is None and value in state.whole_inputs:
        of_batch = state.semantics.extent.axis == REPLICA
        reshard = Slice(state.whole_inputs[value], 1 if of_batch else unit(state.facts[value].split_size) or 1)
    elif reshard is None:
        reshard = state.reduced.get(value)
    sizes = state.semantics.extent.sizes or (0,)
    return _as_read(reshard, sizes[0])


def _as_read(reshard: Reshard | None, units: int = 0) -> Read:
    if reshard is None:
        return OWN
    halo = reshard.halo if isinstance(reshard, (LocalEntry, Slice)) else None
    rows = halo.alike(units) or () if halo is not None and units else ()
    if isinstance(reshard, LocalEntry):
        return Read("entry", reshard.position, 1, reshard.size, rows=rows)
    if isinstance(reshard, Slice):
        is_lowest = halo is not None and halo.lowest
        return Read("split", reshard.dim, reshard.unit, None, reshard.segments, reshard.shards, rows, is_lowest)
    if reshard == PARTIAL:
        return Read("partial")
    return Read(reshard.kind, reshard.dim)


def _inexact(state: Propagation, plan: Plan) -> list[str]:
    """Return the settings that let results differ from those on one device."""
    found, kinds = [], {kind_of(node) for node in state.order}
    if plan.semantics.random == "independent":
        found.append("random: independent")
    if plan.local_sgd is not None:
        found.append("local_sgd")
    elif {OF_BLOCK, STATISTICS} & kinds:
        found.append("batch_norm: local")
    if OF_EACH in kinds:
        found.append("values of each replica")
    if plan.compresses:
        found.append("compressors")
    if plan.is_asynchronous:
        found.append("asynchronous updates")
    return found
