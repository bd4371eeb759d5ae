"""Lowering of an edge: which of the table's rows its placements, its devices and its owner's residence call for.

    partial(sum), one process       collective_reduce, or add_n where one copy of a variable serves all
    partial(sum), processes         host_reduce: added up in each process, then among processes
    the same with `hint: ring`, or GPUs   collective_reduce: one ring of all; on GPUs its way through a host is NCCL's
    partial(sum), for a server      accumulator; for all workers host_reduce, but where they are servers themselves

Hierarchical sums: Goyal et al., Accurate, Large Minibatch SGD (2017), section 4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.facts.placement import PARTIAL, REPLICATED, Fact
from autograph_rewrite.analysis.facts.symbolic_dims import is_local, rows_per_example
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse, process_of
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.messages import SIZES, EdgePlan, Options
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.edges import one_shot
from autograph_rewrite.resolve.server_region import find_server_region
from autograph_rewrite.resolve.wire_types import as_sent, can_be_sent, can_gather_collectively
from autograph_rewrite.training_graph import Variable

ACCUMULATED = frozenset((dtypes.HALF, dtypes.FLOAT, dtypes.DOUBLE))
"""The types of conditional accumulators: TensorFlow has no kernel of one for others."""


def homed(
    plan: Plan,
    state: Propagation,
    found: Mapping[tuple[str, str], EdgePlan],
    variables: Mapping[str, Variable],
) -> dict[tuple[str, str], EdgePlan]:
    """Return the edges as they are lowered where variables live on single devices.

    Args:
        plan: says where.
        state: the placements of all values.
        found: the edges, by value and target.
        variables: of the item.
    """
    if not plan.homes:
        return dict(found)
    if len(plan.processes) == 1:
        return {key: replace(edge, lowering=_at_home(plan, state, edge)) for key, edge in found.items()}
    through = {key: replace(edge, lowering=_through_servers(plan, state, edge)) for key, edge in found.items()}
    if not _can_meet_besides(plan) or _reaches_branches(plan.with_edges(through.values()), state, variables):
        return through
    besides = {key: edge for key, edge in found.items() if _is_for_workers(plan, state, edge)}
    return through | besides if _are_worth_a_ring(plan, besides.values()) else through


def _can_meet_besides(plan: Plan) -> bool:
    """Return whether collectives can carry what no server takes, in a job whose workers wait for each other.

    Runs with collectives have one number in all processes (`runtime.session.on_servers.finish_together`). By it, the
    devices at both ends and the name of a node, which is the same in the graphs of all workers, a process tells apart
    what is sent: between two servers, or two devices of one, it could not. Where the server is a worker, who is done
    first would end what that worker runs itself.
    """
    servers = set(plan.homes.values())
    apart = len(servers) == 1 and {process_of(device) for device in servers}.isdisjoint(plan.processes)
    return apart and not plan.is_asynchronous and all(parse(server).kind == "CPU" for server in servers)


def _are_worth_a_ring(plan: Plan, edges: Collection[EdgePlan]) -> bool:
    """Return whether sums take no longer around a ring of n workers than through a server.

    The ring sends 2 (n - 1) messages one after the other, each of them a share of the bytes; a server takes two, of
    all bytes for each worker. Small sums of few workers are in one shot, which takes one.
    """
    return len(plan.processes) <= 2 or one_shot.may_be(plan) or sum(edge.bytes for edge in edges) > one_shot.SENT_MORE


def _reaches_branches(plan: Plan, state: Propagation, variables: Mapping[str, Variable]) -> bool:
    """Return whether processes send to each other in a loop or branch: nobody outside knows that all of it has come.

    What is sent to a branch that is not taken is waited for by nothing that the run computes.
    """
    sometimes = set(state.order) - unconditional_nodes(state.order)
    if not sometimes:
        return False
    region = find_server_region(plan, state, variables)
    copied = {variables[request.name].handle for request in plan.variables if request.server and request.server.proxy}

    def is_there(value: Value) -> bool:
        handle = handle_node(value)
        return (handle in region.handles and handle.name not in copied) or value.node in region.nodes

    return any(node in region.nodes or any(map(is_there, node.inputs)) for node in sometimes)


def _is_for_workers(plan: Plan, state: Propagation, edge: EdgePlan) -> bool:
    """Return whether an edge, which no server takes, is a sum or a gather that collectives can carry."""
    if edge.owner in plan.homes:
        return False
    if edge.to == SIZES or not edge.lowered.does(Operation.REDUCE):
        return edge.lowering != "host_gather"  # its rows may be strings, and any number of them
    fact = as_sent(state.source(state.graph.value(edge.value)))
    return can_be_sent(fact.dtype, fact.placement.op)


def _at_home(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return how values meet on the device of their owner, where one process has all replicas."""
    placement = state.source(state.graph.value(edge.value)).placement
    if edge.owner not in plan.homes or edge.to != repr(REPLICATED):
        return edge.lowering
    if placement.is_split:
        return "concat"
    return ("add_n" if placement == PARTIAL else "fold") if placement.is_partial else edge.lowering


def _through_servers(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return how a value crosses between the processes of a job through a store on a server."""
    fact = state.source(state.graph.value(edge.value))
    if edge.lowering in ("collective_gather", "host_gather"):
        return "server_gather"
    if edge.lowering not in ("collective_reduce", "micro_reduce", "host_reduce"):
        return edge.lowering
    return "accumulator" if fact.placement == PARTIAL and as_sent(fact).dtype in ACCUMULATED else "server_reduce"


def lowering_of(plan: Plan, fact: Fact, target: str, options: Options) -> str:
    """Return the lowering of an edge where no servers hold variables.

    Args:
        plan: the request.
        fact: of the value.
        target: the placement that is asked for, as edges write it.
        options: of the edge's owner.
    """
    if target.startswith("split"):
        return "slice"
    if target.startswith("partial"):
        return "zeros"
    if target == "local":
        return "local_size"
    crosses = len(plan.processes) > 1
    if fact.is_local:
        counted = any(rows_per_example(entry) is None for entry in fact.value or () if is_local(entry))
        return "host_reduce" if crosses and counted else "global_size"
    mirrored = plan.mode == "mirrored" and plan.replicas > 1
    if fact.placement.is_partial:
        wire = wire_types.wire_type(fact.dtype, fact.placement.op)
        if mirrored and wire in wire_types.COLLECTIVE_TYPES and not _is_hierarchical(plan, options):
            return "micro_reduce" if plan.microbatches > 1 else "collective_reduce"
        return by_hosts(plan, fact)
    if (
        mirrored
        and plan.microbatches == 1
        and can_gather_collectively(fact, rows_per_example(fact.split_size), plan.devices)
    ):
        return "collective_gather"
    return "host_gather" if crosses else "concat"


def _is_hierarchical(plan: Plan, options: Options) -> bool:
    """Return whether replicas of a process add up by themselves before processes do.

    Among CPU devices of one memory an AddN moves less than a ring of them all, and the ring among processes is shorter
    (measured: benchmarks/hierarchy.py). NCCL knows the links between GPUs better. Who names a ring gets one. What
    compressors send has an error of each replica's own to feed back.
    """
    several = len(plan.processes) > 1 and plan.replicas_each > 1 and options.hint == "auto"
    return several and options.compressor == NONE and all(parse(device).kind == "CPU" for device in plan.devices)


def by_hosts(plan: Plan, fact: Fact) -> str:
    """Return how the parts of a value are combined on the first device of each process."""
    if len(plan.processes) > 1:
        return "host_reduce"
    return "add_n" if fact.placement == PARTIAL else "fold"
