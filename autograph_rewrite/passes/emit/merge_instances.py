"""Give every declared output and target one node under its original name.

    before   %loss: partial on each replica          train: NoOp on each replica
    after    loss = Identity(AddN(all(%loss)))       train = NoOp waiting for all instances

Fetching one replica's value of a mirrored graph would leave the other members of its collectives waiting, so a merged
node waits for all instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, PerInstance, Select, prefix
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import grouped, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ops.facts.placement import LOCAL, Fact
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.passes.collectives.key_operands import salted
from autograph_rewrite.passes.reshard.lower_reshards import LoweredReshards
from autograph_rewrite.passes.sharding.residence import split_over_replicas
from autograph_rewrite.plan.parts.collective_keys import group_key
from autograph_rewrite.plan.parts.residence import shard_name
from autograph_rewrite.plan.replica_devices import HOST

INSTANCE_SUFFIX = "/instance"


def merge_instances(rewrite: Rewrite, reshards: LoweredReshards, outputs: Iterable[Value]) -> None:
    """Merge the nodes of declared outputs; all outputs of a node that is read from outside are merged together."""
    reduced = rewrite.state.reduced
    for node, values in grouped((value.node, value) for value in outputs).items():
        if node.span != ONCE or any(one in reduced or rewrite.fact(one).placement.differs for one in values):
            _merge(rewrite, reshards, node, values)


def _merge(rewrite: Rewrite, reshards: LoweredReshards, node: Node, declared: list[Value]) -> None:
    name = node.name
    # Outputs that are not declared keep their positions, since they can be fetched, too.
    values = [_readable(rewrite, reshards, node.output(i)) for i in range(max(v.index for v in declared) + 1)]
    if rewrite.mirrored:
        values = [rewrite.of_replica(value) for value in values]
    moved = {rewrite.current(value): value.index for value in declared}
    take_name(rewrite.graph, node, rewrite.graph.unique_name(name + INSTANCE_SUFFIX))
    selects = {i: Select.FIRST for i, value in enumerate(values) if value.node.span != ONCE}
    op = "Identity" if len(values) == 1 else "IdentityN"
    members = dict.fromkeys(value.node for value in values if value.node.span != ONCE)  # all of their instances run
    merged = Builder(rewrite.graph, name, name, span=ONCE).node(op, *values, controls=members, selects=selects)
    for anchor, value in rewrite.graph.anchors.items():
        if value in moved:
            rewrite.graph.set_anchor(anchor, merged.output(moved[value]))


def _readable(rewrite: Rewrite, reshards: LoweredReshards, value: Value) -> Value:
    """Return the whole of a value; a container and a varying value have none, and are those of replica 0."""
    has_none = value.dtype in (dtypes.VARIANT, dtypes.RESOURCE) or rewrite.fact(value).placement == OWN_VALUE
    return value if has_none else reshards.whole(value, value.node)


def merge_kept(rewrite: Rewrite, reshards: LoweredReshards, names: Iterable[str]) -> list[str]:
    """Merge the kept nodes that the program fetches; return the names of those that it only runs."""
    found = [(name, rewrite.state.transfers.get(node)) for name in names if (node := rewrite.graph.nodes.get(name))]
    fetched = [name for name, transferred in found if transferred is not None and transferred.outputs]
    merge_instances(rewrite, reshards, [rewrite.graph.nodes[name].output() for name in fetched])
    return [name for name, _ in found if name not in fetched]


def merge_targets(rewrite: Rewrite, targets: Iterable[str]) -> dict[str, str]:
    """Give every target that runs on each replica one NoOp that waits for all of its instances.

    Returns:
        The new names of the nodes whose names NoOps have taken: their values may still be fetched.
    """
    moved = {}
    for name in targets:
        node = rewrite.graph.nodes.get(name)
        if node is None or node.span == ONCE:
            continue
        take_name(rewrite.graph, node, rewrite.graph.unique_name(name + INSTANCE_SUFFIX))
        Builder(rewrite.graph, name, name, span=ONCE).node("NoOp", controls=[node])
        moved[name] = node.name
    return moved


@dataclass(frozen=True)
class Merged:
    """Data for fetches by original name.

    Attributes:
        common: nodes whose instances hold the same value.
        spread: facts of the original values whose instances differ.
        moved: new names of nodes, by original names that NoOps now have.
    """

    common: frozenset[Node]
    spread: Mapping[Value, Fact]
    moved: Mapping[str, str]


def _run(rewrite: Rewrite) -> None:
    """Give outputs, train op and initialiser one node each, under their original names."""
    reshards, item = rewrite.get(LoweredReshards), rewrite.item
    common, spread = _common(rewrite), _spread(rewrite.state)
    merge_instances(rewrite, reshards, rewrite.outputs)
    effects = merge_kept(rewrite, reshards, item.keep)
    moved = merge_targets(rewrite, [*item.targets, *effects, *([item.init_op] if item.init_op else [])])
    eliminate_dead_code(rewrite.graph, rewrite.roots)
    hold_shards(rewrite)
    begin_together(rewrite)
    name_resources(rewrite)
    rewrite.put(Merged(frozenset(common), spread, moved))


def _common(rewrite: Rewrite) -> set[Node]:
    """Return the original nodes whose instances hold the same value; instances of an added node are each replica's."""
    state = rewrite.state
    differing = {value.node for value in state.facts if rewrite.fact(value).placement.differs}
    return {node for node in state.transfers if node.span != ONCE and node not in differing}


def _spread(state: Propagation) -> dict[Value, Fact]:
    facts = ((value, state.source(value)) for value in state.facts)
    return {v: fact for v, fact in facts if fact.placement.differs and fact.placement not in (LOCAL, OWN_VALUE)}


MERGE_INSTANCES = Pass("merge-instances", _run, needs=(Homes, LoweredReshards), gives=(Merged,))


# Replicate resources: every device gets its own copy of each variable.
#
#     before   w = VarHandleOp(shared_name=w)
#     after    w @ device 0 (shared_name=w)    replica_1/w @ device 1 (shared_name=replica_1/w)
#
# All copies are assigned the same initial value, since the node that draws it runs once.


NAMED_RESOURCES = {"VarHandleOp": "shared_name", "StackV2": "stack_name", "TensorArrayV3": "tensor_array_name"}


def name_resources(rewrite: Rewrite) -> None:
    """Make the resource names of instances differ.

    To TensorFlow, two handles of one name and container are one variable, on whichever devices they are.
    """
    for node in rewrite.graph:
        attr = NAMED_RESOURCES.get(node.op)
        if attr is None or node.span == ONCE:
            continue
        micro = rewrite.micro if node.span == EACH else 1
        # Iterations of a loop share a name: TensorFlow numbers the stacks and arrays that a step creates.
        same = micro if rewrite.plan.looped else 1
        names = [resource_name(node, i - i % same, micro) for i in range(rewrite.mesh.count(node.span))]
        node.set_raw_attr(attr, PerInstance(tuple(encode("string", name) for name in names)))


def resource_name(node: Node, instance: int, micro: int = 1) -> str:
    """Return the resource name of one instance of a node in its process."""
    own = (node.attr(NAMED_RESOURCES[node.op], b"") or b"").decode() or node.name
    return own if instance == 0 else prefix(instance, micro) + own


def hold_shards(rewrite: Rewrite) -> None:
    """Turn the handle on each replica into that of its shard, for variables that are split over the replicas.

    The shards of other processes get handles, too, for sessions, which read the whole between steps.
    """
    split = split_over_replicas(rewrite)
    for name, cut in split.items():
        variable = rewrite.item.variables[name]
        node = rewrite.graph.nodes.get(variable.handle)
        if node is None or node.op != "VarHandleOp":
            continue
        shapes = [encode("shape", cut.shape(variable.shape or (), k)) for k in range(len(cut.sizes))]
        node.set_raw_attr("shape", rewrite.by_replica(rewrite.of_own_replicas(shapes), node.span))
        for number, device in enumerate(rewrite.devices_along):
            replica, place = divmod(number, rewrite.along)
            process, at = divmod(replica, rewrite.plan.replicas_each)
            if process != rewrite.task:
                attrs = {key: node.attr(key) for key in ("dtype", "container")}
                shared_name = resource_name(node, at * rewrite.along + place)
                attrs |= {"shape": cut.shape(variable.shape or (), replica), "shared_name": shared_name}
                handle = Builder(rewrite.graph, shard_name(node.name, number), node, ONCE).node("VarHandleOp", **attrs)
                rewrite.settle(handle, device)


# Begin together: between two steps a worker may read shards of others, which may have begun the next step.
#
#     before   decay ──► AssignVariableOp(w: split(0))              waits for nobody
#     after    CollectiveReduceV2 among the processes ──^──► AssignVariableOp(w: split(0))
#
# An update that waits for a gradient waits for all workers already.


def begin_together(rewrite: Rewrite) -> None:
    """Let updates of shards that wait for no other process wait until all of them have begun."""
    split = split_over_replicas(rewrite)
    if rewrite.processes == 1 or not split:
        return
    graph, order = rewrite.graph, topological_order(rewrite.graph)
    handles = {graph.nodes.get(rewrite.item.variables[name].handle) for name in split}
    meetings = marks_before(order, {node: 1 for node in order if is_collective(node.op)})
    writes = (node for node in order if has(node.op, "writes") and handle_node(node.inputs[0]) in handles)
    early = [node for node in writes if not meetings[node]]
    if not early:
        return
    plan, build = rewrite.plan, Builder(graph, "autograph_begin", early[0], ONCE)
    hosts = [f"{process}{HOST}" for process in plan.processes]  # no accelerator's queue of collectives waits for it
    group = salted(group_key(hosts), f"begin {plan.digest()}")
    keys = [build.const(number, dtypes.INT32, what)
            for what, number in (("size", len(hosts)), ("group", group), ("instance", 1))]  # fmt: skip
    ready = build.const([1.0], dtypes.FLOAT, "ready")
    all_ready = build.op("CollectiveReduceV2", ready, *keys, what="all", merge_op="Add", final_op="Id")
    for value in (ready, *keys, all_ready):
        rewrite.settle(value.node, hosts[rewrite.task])
    for node in early:
        node.add_control(all_ready.node)
