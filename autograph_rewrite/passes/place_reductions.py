"""Decide where sums over replicas are taken and rows are gathered."""

from __future__ import annotations

from autograph_rewrite.analysis import reduction_placement
from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.analysis.reduction_placement import choose_gathers
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact
from autograph_rewrite.ops.facts.symbolic_dims import Dim, shards_of
from autograph_rewrite.ops.rules.marked import make_whole
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize import varying_values
from autograph_rewrite.passes.sharding.shard_variables import by_shards
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import run_devices


def _place(rewrite: Rewrite) -> None:
    """Decide where partial values are summed and rows gathered, so that few bytes travel (a minimum cut)."""
    graph, plan, outputs = rewrite.graph, rewrite.plan, rewrite.outputs
    state, crosses = rewrite.get(Propagation), bool(plan.homes) and len(plan.processes) > 1
    fixed = varying_values.read_with_own(state)
    reduced = reduction_placement.place_reductions(state, outputs, unconditionally=crosses)
    if plan.microbatches > 1:
        reduced |= _added_up_over_shards(state)
    reduced = by_shards({value for value in reduced if value.node not in fixed}, outputs)
    if reduced:
        state = revise(state, reduced=reduced)
    is_once = _share_a_device(plan) and not plan.compresses and not plan.homes and not fixed
    if is_once and compute_once(state, plan.instances):
        state = revise(state)
    gathered = {value for value in choose_gathers(state, outputs) if value.node not in fixed}
    if gathered:
        state = revise(state, reduced=gathered)
    if copies := () if fixed else hoist_gathers(graph, state, plan):
        state = revise(state)
        state = revise(state, reduced=[graph.nodes[name].output() for name in copies])
    rewrite.put(state)


def _added_up_over_shards(state: Propagation) -> set[Value]:
    """Return the partial values computed from shards of variables, and the other partial operands of their readers.

    The former are computed once, not per micro-batch. A loop over micro-batches never holds a sum over all
    micro-batches, so their readers need both as complete sums.
    """
    found = {
        node.output(index)
        for node, made in state.transfers.items()
        for index, fact in enumerate(made.outputs)
        if fact.placement.is_partial and any(shards_of(one.split_size) for one in made.inputs)
    }
    readers = {use.node for value in found for use in value.uses}
    return found | {value for node in readers for value in node.inputs if state.facts[value].placement.is_partial}


def _share_a_device(plan: Plan) -> bool:
    """Return whether all replicas run on one device."""
    if plan.microbatches > 1:  # a gradient of the whole batch would keep the activations of all micro-batches
        return False
    return len(plan.processes) == 1 and plan.replicas > 1 and len(set(run_devices(plan))) == 1


PLACE_REDUCTIONS = Pass("place-reductions", _place, needs=(Propagation,), gives=(Propagation,))


# Compute a weight gradient once, of the global batch, where summing one large contribution per replica costs more.
#
#     before   AddN(MatMul(x0^T, dy0), MatMul(x1^T, dy1))       writes three tensors as large as the weight
#     after    MatMul(x^T, Concat(dy0, dy1))                    writes one, and copies a few rows
#
# Replicas on one device share its memory: for large weights and few rows the additions cost more than all the rest.
# Replicas on several devices compute in parallel, and contributions are the fewest bytes to send.


LARGE = 256 * 1024
"""Bytes of the smallest tensor that is assumed not to fit in the caches."""
TYPICAL_BLOCK = 64
"""The assumed number of examples of a block, where it is unknown."""


def compute_once(state: Propagation, replicas: int) -> int:
    """Mark the contractions that are cheaper to compute once; return their number. The caller propagates again.

    Args:
        state: placements, with the values that are reduced.
        replicas: number that share one device.
    """
    if state.loops or state.cells:
        return 0
    chosen = [node for node in state.order if node.op == "MatMul" and _is_cheaper_once(state, node, replicas)]
    for node in chosen:
        make_whole(node)
    return len(chosen)


def _is_cheaper_once(state: Propagation, node: Node, replicas: int) -> bool:
    value = node.output()
    if state.source(value).placement != PARTIAL or not _is_reduced(state, value):
        return False
    made = _bytes(state.source(value), None)
    if made is None or made < LARGE:
        return False
    joined = 0
    for operand in node.inputs:
        if operand not in state.whole_inputs:
            size = _bytes(state.facts[operand], TYPICAL_BLOCK)
            if size is None:
                return False
            joined += size * replicas
    return 2 * joined < replicas * made  # concatenation reads and writes operands


def _is_reduced(state: Propagation, value: Value) -> bool:
    """Return whether all uses of a value are sums over the replicas, directly or through identities."""
    if value in state.reduced:
        return True
    if not value._uses or any(node.op not in ("Identity", "IdentityN") for node, _ in value._uses):
        return False
    copies = [node.output(index) for node, index in value._uses]
    used = [copy for copy in copies if copy._uses]
    return bool(used) and all(_is_reduced(state, copy) for copy in used)


def _bytes(fact: Fact, block: int | None) -> int | None:
    return dtypes.nbytes(fact.dtype, [_size(dim, block) for dim in fact.shape or (None,)])


def _size(dim: Dim, block: int | None) -> int | None:
    if isinstance(dim, int) or dim is None:
        return dim
    return None if block is None else dim.coef * block ** len(dim.factors)


# Hoist all-gathers out of conditionals: servers and stages exchange values outside of branches only.
#
# before   x ──► Switch ──► Assert(data)                  every worker has its part of x
# after    x ──► Identity, gathered ──► Switch ──► Assert(data)
#
# An example is an update that is skipped if a gradient is not finite: its predicate is known when all micro-batches
# have ended, so no node of a micro-batch may depend on it.


def hoist_gathers(graph: Graph, state: Propagation, plan: Plan) -> list[str]:
    """Copy each value that differs between replicas and that branches only read whole.

    Returns:
        The names of the copies, which are to be gathered.
    """
    # Only stages, and servers of a job, cannot exchange values inside branches.
    if plan.pipeline is None and not (plan.homes and len(plan.processes) > 1):
        return []
    copies: dict[Value, Node] = {}
    for node in state.order:
        if node.op == "Switch" and _wants_whole(state, node):
            value = node.inputs[0]
            if value not in copies:
                name = f"{value.node.name}/before_branch_{value.index}"
                copies[value] = Builder(graph, name, value.node).node("Identity", value)
            node.set_input(0, copies[value].output())
    return [node.name for node in copies.values()]


def _wants_whole(state: Propagation, switch: Node) -> bool:
    """Return whether the value of a Switch differs between replicas, and all readers in branches need it whole."""
    # A Switch on a LoopCond belongs to a loop, not to a branch.
    if switch.inputs[1].node.op == "LoopCond" or not state.source(switch.inputs[0]).placement.differs:
        return False
    uses = [use for value in switch.outputs for use in value.uses]
    return bool(uses) and all(state.transfers[node].operand_reshards.get(index) == REPLICATED for node, index in uses)
