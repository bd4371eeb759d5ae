"""Insert an `ar.reshard` on every edge whose producer and consumer disagree on the placement.

    before   %dw: partial(sum) ──► ResourceApplyAdam
    after    %dw ──► ar.reshard {before="partial(sum)", after="replicated", edge=0} ──► ResourceApplyAdam

Each value is converted once for all its readers. `assign_spans` must have marked the nodes that each replica runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograph_rewrite.analysis.batch_groups import batch_groups
from autograph_rewrite.analysis.list_elements import future_splits
from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import awaited, frames_of
from autograph_rewrite.ir.format.annotations import placements_text
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import (
    EACH,
    MICRO,
    ONCE,
    PER_REPLICA,
    PROCESS,
    REPLICA,
    SERVER,
    STAGE,
    Select,
    Span,
    is_rarer,
)
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ir.types.opdefs import RESHARD, SHARD_ALIKE, is_over
from autograph_rewrite.ops.facts.placement import LOCAL, PARTIAL, REPLICATED, Fact, Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import shards_of
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.traits import ENTERS, MERGES, SWITCHES, has
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.claims import carried_by, carries, claims_of
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.report import Resolved
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site
from autograph_rewrite.passes.collectives.block_bounds import Blocks, ShardBlocks
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.passes.collectives.wire_values import refuse_container
from autograph_rewrite.passes.reshard.global_sizes import read_early, span_of_size
from autograph_rewrite.passes.sharding.local_program import blocks_of
from autograph_rewrite.plan.parts.lowerings import Medium, Operation
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.replica_devices import run_devices
from autograph_rewrite.resolve.batch import inputs_behind, measured_input
from autograph_rewrite.resolve.server_region import find_server_region
from autograph_rewrite.resolve.spans import differs_by_replica, own_loops
from autograph_rewrite.resolve.stages.assignment import Stages, assign_stages


def assign_spans(rewrite: Rewrite) -> None:
    """Mark each node with how often it runs: once, on every replica, or for every micro-batch of each."""
    rewrite.future_splits = future_splits(rewrite.state)
    order = rewrite.state.order
    handles = rewrite.handles
    for node in order:
        node.set_span(_span(rewrite, node, handles))
    rewrite.frames = frames_of(order)
    own = own_loops(rewrite.state, rewrite.plan)
    rewrite.apart = frozenset(own.values())
    for node in own:
        node.set_span(EACH)
        if node.op in ENTERS:
            node.set_attr("frame_name", rewrite.frame_name(rewrite.frames[node]))
    devices = run_devices(rewrite.plan, rewrite.task)
    if len(set(devices)) > 1 or parse(devices[0]).kind != "CPU":
        _enter_where_it_is_carried(order)
    for node in (*order, *reversed(order)):
        if node.op == "NoOp" and _stands_between_instances(node):
            node.set_span(EACH)


def _stands_between_instances(node: Node) -> bool:
    """Return whether a NoOp is between nodes that every replica runs: one NoOp would make all replicas wait."""
    users, each = node.control_users, EACH
    return bool(users) and all(n.span == each for n in users) and any(n.span == each for n in node.controls)


def _enter_where_it_is_carried(order: Iterable[Node]) -> None:
    """Let values enter a loop on each device that carries them: another one would send them only in one iteration."""
    for node in order:
        enters = node.op in ENTERS and not node.attr("is_constant", False)
        if enters and any(user.span == EACH and user.op in MERGES for user, _ in node.output().uses):
            node.leave(PROCESS)  # also values of servers
            node.leave(SERVER)
            node.set_span(EACH)


def _span(rewrite: Rewrite, node: Node, handles: frozenset[str]) -> Span:
    state = rewrite.state
    if node.is_driven:
        return ONCE
    if node.op == "LoopCond":
        return ONCE  # one condition for all replicas
    if differs_by_replica(state, node, rewrite.future_splits):
        return PER_REPLICA if rewrite.micro > 1 and _is_of_shards(state, node) else EACH
    if not rewrite.mirrored or is_pinned(node) or SERVER in node.place:
        return ONCE
    is_input = has(node.op, "fed") and node.name not in handles
    return ONCE if is_input else rewrite.common_span


def shards_in(fact: Fact) -> tuple[int, ...]:
    """Return the sizes of the shards that a value is in, or that it measures; empty if there are none."""
    dims = (fact.split_size,) if fact.placement.is_split else fact.value or ()
    return next((found for dim in dims if (found := shards_of(dim))), ())


def _is_of_shards(state: Propagation, node: Node) -> bool:
    """Return whether a node works on shards of variables, which a replica has once for all of its micro-batches."""
    reshards = state.transfers[node].operand_reshards
    if is_over(node, REPLICA):
        return isinstance(reshards.get(0), Slice)
    if not node.inputs:
        return node.read_outputs != () and state.facts[node.output()].dtype == dtypes.RESOURCE
    read = [value for i, value in enumerate(node.inputs) if i not in reshards and state.facts[value].placement.differs]
    made = any(isinstance(reshard, Slice) and reshard.shards for reshard in reshards.values())
    return (made or bool(read)) and all(value.node.span == PER_REPLICA for value in read)


@dataclass(frozen=True)
class Conversion:
    """A conversion of a value that a reader needs.

    Attributes:
        value: of the original graph, or its replacement.
        wanted: the placement, the block, or the entry of a shape vector.
        before: the placement that it has.
        blocks: along which the value is split.
        edge: of the plan, if it has one for the conversion.
    """

    value: Value
    wanted: Reshard
    before: Placement
    blocks: Blocks
    edge: EdgePlan | None = None

    @property
    def after(self) -> Placement:
        """The placement after the conversion."""
        if isinstance(self.wanted, Slice):
            return split(self.wanted.dim)
        return LOCAL if isinstance(self.wanted, LocalEntry) else self.wanted


def home_of_edge(rewrite: Rewrite, edge: EdgePlan | None) -> str | None:
    """Return the home of an edge's owner, if any, on which the replicas of a single process are combined."""
    return None if edge is None or rewrite.processes > 1 else rewrite.homes.of.get(edge.owner)


def span_of_whole(rewrite: Rewrite, conversion: Conversion) -> Span:
    """Return the span of the whole of a value that differs: ordinary ops combine all instances along their axes."""
    edge = conversion.edge
    if edge is None:
        return rewrite.of_all
    if edge.compressor != NONE:
        return rewrite.common_span
    span = rewrite.current(conversion.value).node.span
    by_ops = [hop.over for hop in edge.lowered.hops if hop.medium is Medium.OPS]
    return span.difference(*by_ops) or rewrite.of_all


class Reshards:
    """The `ar.reshard` of each value, placement and block that readers need, inserted on demand.

    Args:
        blocks: limits of the replicas' blocks.
        keys: of collectives.
    """

    def __init__(self, rewrite: Rewrite, blocks: Blocks, keys: Keys) -> None:
        self._rewrite, self._blocks, self._keys = rewrite, blocks, keys
        self._blocks_of: dict[Value, Blocks] = {blocks.source: blocks}
        self._whole: dict[Value, Value] = {}
        self._pieces: dict[tuple[Value, Slice, Value], Value] = {}
        self._terms: dict[tuple[Value, Span], Value] = {}
        self._shards: dict[tuple[int, ...], Blocks] = {}
        self._predicates: dict[Value, Value] = {}
        self._carried: dict[Node, Reshard | None] = {}  # nodes that bring values to the Merge of a loop
        self._brought: dict[Value, Value] = {}  # by the value that is converted, the one with the plan's edge
        self.wanted: dict[Node, Conversion] = {}
        self._place_of_edge = {(edge.value, edge.to): i for i, edge in enumerate(rewrite.plan.edges) if not edge.role}
        state = rewrite.state
        self._entered = {node: node.inputs[0] for node in state.order if node.op in ENTERS}
        matters = rewrite.processes == 1 and blocks.static is None and len(state.whole_inputs) > 1
        self._behind = inputs_behind(state) if matters else {}
        self.groups = batch_groups(state) if matters else None

    def run(self) -> None:
        """Convert every edge of the original graph."""
        self._share_draws()
        self._before_back_edges()
        for node in self._rewrite.state.order:
            transferred = self._rewrite.state.transfers[node]
            if transferred.constant:
                constant_size(self._rewrite, node, self._read)
                continue
            if is_over(node, REPLICA):
                self._place_asked(node)
                continue
            if node.op == SHARD_ALIKE:  # the second operand only says how
                become(node, "Identity", node.inputs[:1], {})
            self._connect(node)
            if (early := read_early(self._rewrite, node)) is not None:
                self._read_instead(node.output(), early)

    def _place_asked(self, node: Node) -> None:
        """Complete a reshard that a pass has inserted, as propagation has found."""
        rewrite, value = self._rewrite, node.inputs[0]
        state = rewrite.state
        reshard, fact = state.transfers[node].operand_reshards.get(0), rewrite.fact(value)
        if reshard is None:  # every replica has the whole already
            become(node, "Identity", node.inputs, {})
            self._connect(node)
            return
        if isinstance(reshard, Slice):
            edge = rewrite.edges.get((node.output().name, f"split({reshard.dim})"))
            scatters = edge is not None and edge.lowered.does(Operation.SCATTER)
            source = rewrite.current(value) if scatters else self.whole(value, node)
            conversion = Conversion(
                value, reshard, PARTIAL if scatters else REPLICATED, self._of_shards(reshard.shards), edge
            )
            span = PER_REPLICA if rewrite.micro > 1 else EACH
        else:
            edge = rewrite.edges.get((node.output().name, "replicated"))
            source = rewrite.current(value)
            conversion = Conversion(value, REPLICATED, fact.placement, self._of_shards(shards_in(fact)), edge)
            span = span_of_whole(rewrite, conversion)
            if rewrite.plan.gathers_for_each and all(use.node.span == EACH for use in node.output().uses):
                span = EACH  # with one gather for all micro-batches, all would wait for the last
        node.set_input(0, source)
        node.set_span(span)
        for key in ("dim", "shards"):
            node.drop_attr(key)
        for key, content in self._said(conversion).items():
            node.set_attr(key, content)
        self.wanted[node] = conversion

    def _read_instead(self, value: Value, new: Value) -> None:
        """Let readers of a value that need no conversion read another one."""
        for user, position in value.uses:
            transferred = self._rewrite.state.transfers.get(user)
            if transferred is None or position not in transferred.operand_reshards:
                self._read(user, position, new)

    def _share_draws(self) -> None:
        """Let all processes use the draws of the first one: the others draw zeros, and all draws are added up."""
        rewrite = self._rewrite
        for edge in [edge for edge in rewrite.edges.values() if edge.from_ == "single"]:
            value = rewrite.graph.value(edge.value)
            drawn = rewrite.of_worker_0(value)
            shared = self._add(drawn, Conversion(value, REPLICATED, PARTIAL, self._blocks, edge), value.node.span)
            value.replace_all_uses_with(shared, keep=set(ancestors([shared.node])))
            rewrite.take_place(value, shared)

    def _before_back_edges(self) -> None:
        """Let the node that brings a loop variable to its Merge carry the converted value, on the Merge's device.

        No node may be between NextIteration and its Merge. A value that enters a loop arrives in the first iteration
        only, while TensorFlow waits in each iteration for a value from another device.
        """
        state = self._rewrite.state
        converted = carried_by(state)
        for node in state.order:
            if node.op not in MERGES:
                continue
            for value in node.inputs:
                reshard = converted.get(value.node)
                if reshard is not None or (node.span != EACH and carries(value.node, node)):
                    self._carry(value, node, reshard)

    def _carry(self, value: Value, merge: Node, reshard: Reshard | None) -> None:
        carrier = value.node
        self._brought[carrier.inputs[0]] = value
        self._carried[carrier] = reshard
        carrier.set_span(merge.span)
        if (home := self._rewrite.home_of(merge)) is not None:
            self._rewrite.settle(carrier, home)

    def _connect(self, node: Node) -> None:
        state = self._rewrite.state
        operand_reshards = state.transfers[node].operand_reshards
        if (carried := self._carried.get(node)) is not None:
            operand_reshards = {0: carried}
        for index, value in enumerate(node.inputs):
            reshard = operand_reshards.get(index)
            if value.node in self._carried:
                reshard = None
            elif reshard is None and value in state.whole_inputs:
                reshard = Slice(state.whole_inputs[value], 1)
            elif reshard is None and value in state.reduced:
                reshard = REPLICATED
            new = value if reshard is None else self.convert(value, reshard, node)
            if index == 1 and node.op in SWITCHES:
                new = self._common_predicate(new)
            self._read(node, index, new)

    def _common_predicate(self, value: Value) -> Value:
        """Return one predicate for all replicas, unless each runs the loop by itself, where all find the same one."""
        if value.node.span == ONCE or self._rewrite.is_apart(value.node):
            return value
        if value not in self._predicates:
            self._predicates[value] = common_predicate(self._rewrite, value)
        return self._predicates[value]

    def _read(self, node: Node, index: int, value: Value) -> None:
        crosses = is_rarer(node.span, value.node.span)
        if not crosses and node._inputs[index] is value and not node.selects:
            return
        mirrored = crosses and self._rewrite.mirrored and node.span == ONCE
        if mirrored:
            value = self._rewrite.of_replica(value)
        node.set_input(index, value, Select.FIRST if crosses else None)
        if mirrored:
            node.add_control(value.node)  # fetching replica 0's value alone would leave its collectives waiting

    def convert(self, value: Value, reshard: Reshard, reader: Node) -> Value:
        """Return the conversion of `value` that `reader` needs.

        Args:
            value: before any conversion.
            reshard: the placement or the block that is needed.
            reader: for messages, and for the loop that it is in.
        """
        made, placement = self._converted(value, reshard, reader)
        if made not in self._rewrite.state.facts:
            self._rewrite.converted[made] = placement
        return made

    def _converted(self, value: Value, reshard: Reshard, reader: Node) -> tuple[Value, Placement]:
        if isinstance(reshard, LocalEntry):
            entry = Conversion(value, reshard, REPLICATED, self.blocks_at(reader))
            return self._add(value, entry, EACH), LOCAL
        if isinstance(reshard, Slice):
            return self.piece(value, reshard, reader), split(reshard[0])
        if reshard == PARTIAL:
            return self._term(value, reader), PARTIAL
        if reshard == REPLICATED:
            return self.whole(value, reader), REPLICATED
        raise PassError(f"no conversion of '{value.name}' to {reshard}", node=reader)

    def whole(self, value: Value, reader: Node) -> Value:
        """Return the whole, global value."""
        if value not in self._whole:
            self._whole[value] = self._make_whole(value, reader)
        return self._whole[value]

    def _make_whole(self, value: Value, reader: Node) -> Value:
        rewrite = self._rewrite
        fact, edge = rewrite.fact(value), rewrite.edges.get((value.name, "replicated"))
        if value in rewrite.state.whole_inputs:
            if rewrite.processes == 1:
                return value
            part = Conversion(value, REPLICATED, split(rewrite.state.whole_inputs[value]), self._blocks, edge)
            return self._add(value, part, value.node.span)
        if not fact.placement.differs:
            return value
        refuse_container(value, fact, reader)
        if value.node in self._entered:
            return self._enter(value.node, self.whole(self._entered[value.node], reader))
        if edge is None and value in self._brought and not fact.is_local:
            edge = rewrite.edges.get((self._brought[value].name, "replicated"))
        shards = shards_in(fact)
        blocks = self._of_shards(shards) if shards else self.blocks_at(value.node)
        conversion = Conversion(value, REPLICATED, fact.placement, blocks, edge)
        if fact.is_local:
            return self._add(value, conversion, span_of_size(rewrite, value, fact))
        with rewrite.at(home_of_edge(rewrite, edge)):
            return self._add(rewrite.current(value), conversion, span_of_whole(rewrite, conversion))

    def _enter(self, enter: Node, value: Value) -> Value:
        """Let a whole value enter the loop of `enter`: it is exchanged before the loop, not in it."""
        rewrite, name = self._rewrite, f"{enter.name}/whole"
        attrs = {key: enter.attr(key) for key in ("is_constant", "parallel_iterations")}
        attrs["frame_name"] = rewrite.frame_name(rewrite.frames[enter])
        # A Merge on another device would wait for the value in every iteration, so each device has an Enter.
        span = EACH if value.node.span == EACH or rewrite.is_apart(enter) else rewrite.common_span
        node = rewrite.add("Enter", [value], Site(name, span, enter), attrs=attrs, controls=enter.controls)
        rewrite.frames[node] = rewrite.frames[enter]
        return node.output()

    def piece(self, value: Value, reshard: Slice, reader: Node) -> Value:
        """Return this replica's block of the whole value.

        Args:
            value: replicated, or a batch input.
            reshard: dimension, rows per example and segments.
            reader: for messages, and for the loop that it is in.
        """
        is_input = self.is_of_input(value, reshard)
        blocks = self._measured_on(value) if is_input else self.blocks_at(reader)
        if reshard.shards:
            blocks = self._of_shards(reshard.shards)
        key = (value, reshard, blocks.source)
        if key not in self._pieces:
            refuse_container(value, self._rewrite.fact(value), reader)
            whole = value if is_input else self.whole(value, reader)
            of_replica = reshard.shards and self._rewrite.micro > 1
            span = PER_REPLICA if of_replica else EACH
            self._pieces[key] = self._add(whole, Conversion(value, reshard, REPLICATED, blocks), span)
        return self._pieces[key]

    def is_of_input(self, value: Value, reshard: Slice) -> bool:
        """Return whether a block is that of a batch input along the dimension of the batch."""
        return self._rewrite.state.whole_inputs.get(value) == reshard.dim and not reshard.segments

    def _term(self, value: Value, reader: Node) -> Value:
        """Return the whole value on replica 0 and zeros elsewhere: a sum of one term."""
        source = self.whole(value, reader)
        key = source, PER_REPLICA if reader.span == PER_REPLICA else EACH
        if key not in self._terms:
            self._terms[key] = self._add(source, Conversion(value, PARTIAL, REPLICATED, self._blocks), key[1])
        return self._terms[key]

    def _add(self, source: Value, conversion: Conversion, span: Span) -> Value:
        """Add the `ar.reshard` of a conversion.

        Args:
            source: its operand: the current replacement of the value, or its whole.
        """
        rewrite = self._rewrite
        site = Site(f"{conversion.value.node.name}/reshard", span, conversion.value.node)
        made = rewrite.add(RESHARD, [source], site, attrs=self._said(conversion))
        made.selects = {}  # it reads all instances along the axes that it is over
        self.wanted[made] = conversion
        return made.output()

    def _said(self, conversion: Conversion) -> dict[str, Any]:
        """Return the attributes of the `ar.reshard` of a conversion."""
        rewrite, edge = self._rewrite, conversion.edge
        over = [MICRO, REPLICA] if rewrite.micro > 1 else [REPLICA]  # both split the examples
        before, after = (
            placements_text(one, tuple((axis, one) for axis in over[:-1] if one != REPLICATED))
            for one in (conversion.before, conversion.after)
        )
        place = -1 if edge is None else self._place_of_edge[edge.value, edge.to]
        return {"over": over, "before": before, "after": after, "edge": place}

    def _of_shards(self, sizes: tuple[int, ...]) -> Blocks:
        """Return the blocks of variables that are in shards of these sizes."""
        if sizes not in self._shards:
            self._shards[sizes] = ShardBlocks(self._rewrite, self._blocks, sizes, self._keys)
        return self._shards[sizes]

    def blocks_at(self, node: Node) -> Blocks:
        """Return the blocks of a node: those of a batch input that it depends on, and whose size it has."""
        behind = self._behind.get(node, ())
        alike = self.groups.of(node) if self.groups is not None else ()
        if alike:
            behind = tuple(value for value in behind if value in alike) or alike
        return self._blocks if not behind or self._blocks.source in behind else self._measured_on(behind[0])

    def _measured_on(self, value: Value) -> Blocks:
        """Return the blocks to cut `value` by: a batch input is measured itself, so that it can be fed alone."""
        axis = self._rewrite.state.whole_inputs.get(value)
        if axis is None:
            return self._blocks
        if value not in self._blocks_of:
            self._blocks_of[value] = Blocks(self._rewrite, value, axis, self._keys)
        return self._blocks_of[value]


# Replace a size that propagation has found to be a plain number by a constant.
#
# ShapeN(whole, block) ──► ConcatOffset ──► Slice         Const ──► Slice


def constant_size(rewrite: Rewrite, node: Node, read: Callable[[Node, int, Value], None]) -> None:
    """Replace the outputs of a node by constants.

    Args:
        node: propagation knows its outputs.
        read: lets an input of a node read another value.
    """
    for index, fact in enumerate(rewrite.state.transfers[node].outputs):
        value = node.output(index)
        if not value.uses:
            continue
        dtype = dtypes.numpy_dtype(fact.dtype)
        shape = [dim for dim in fact.shape or () if isinstance(dim, int)]
        content = np.array(fact.value, dtype=dtype).reshape(shape)
        new = rewrite.const(content, dtype, name=f"{node.name}/folded", near=value)
        new.node.set_span(EACH if rewrite.is_apart(node) else rewrite.common_span)
        _wait_for_operands(rewrite, new.node, node)
        for user, position in value.uses:
            read(user, position, new)
        rewrite.graph.move_anchors(value, new)


def _wait_for_operands(rewrite: Rewrite, constant: Node, folded: Node) -> None:
    """Let a constant in a loop wait for the operands of the node that it replaces, not for the node.

    The node must not run: its kernel may compare sizes of blocks with sizes of the whole batch, as ConcatOffset does.
    """
    if folded not in constant.controls:
        return

    def taken(value: Value) -> Node:
        return rewrite.add("Identity", [value], Site(f"{folded.name}/taken", value.node.span, folded))

    inside = [value for value in folded.inputs if rewrite.frames.get(value.node) == rewrite.frames.get(folded)]
    operands = [awaited(value, taken) for value in inside]
    if not operands:
        return
    constant.remove_control(folded)
    for node in (*operands, *folded.controls):
        constant.add_control(node)


# Share one predicate between all replicas: a rounding difference would send them down different branches.
#
#     before   %p each ──► Switch each
#     after    %p each ──► Identity (replica 0's) once ──► Identity each ──► Switch each
#
# A test whether a variable has a value is of each replica's copy, so it must hold on all of them: in the branch taken,
# each replica reads its copy.


def common_predicate(rewrite: Rewrite, value: Value) -> Value:
    """Return the predicate that every replica uses instead of its own.

    Each replica still waits for its own: the branches may write variables that are written before it.
    """
    name = f"{value.node.name}/predicate"
    once = _of_all(rewrite, value, name) if _asks_for_a_value(value) else _of_first(rewrite, value, name)
    each = rewrite.add("Identity", [once], Site(f"{name}/each", value.node.span, value.node))
    each.add_control(value.node)
    return each.output()


def _of_first(rewrite: Rewrite, value: Value, name: str) -> Value:
    value = rewrite.of_replica(value) if rewrite.mirrored else value
    return rewrite.add("Identity", [value], Site(name, ONCE, value.node)).output()


def _of_all(rewrite: Rewrite, value: Value, name: str) -> Value:
    flags = FoldedBuilder.of(rewrite, value, name).gather("Pack", value, what="all", axis=0)
    attrs = {"dtype": dtypes.INT32, "value": np.int32(0)}
    axis = rewrite.add("Const", [], Site(f"{name}/axis", ONCE, value.node), attrs=attrs)
    axis.add_control(flags.node)  # puts it in the loop of the flags
    return rewrite.add("All", [flags, axis.output()], Site(name, ONCE, value.node)).output()


def _asks_for_a_value(value: Value) -> bool:
    """Return whether a condition tests that a variable has a value."""
    while value.node.op == "Identity":
        value = value.node.inputs[0]
    return value.node.op == "VarIsInitializedOp"


def _assign_spans(rewrite: Rewrite) -> None:
    """Decide how often each node runs, and which nodes run where a variable lives."""
    state, plan = rewrite.state, rewrite.plan
    if rewrite.request.certificate is not None:
        claims = claims_of(state, rewrite.outputs, plan, model=rewrite.along, divided=rewrite.divided)
        rewrite.request.certificate.claimed(rewrite.graph, claims)
    put_at_homes(rewrite)
    assign_spans(rewrite)


def _assign_stages(rewrite: Rewrite) -> None:
    """Assign each node to the stage of the pipeline that runs it."""
    found = assign_stages(rewrite.plan, rewrite.get(Propagation), rewrite.outputs, rewrite.item.variables)
    if found is not None:
        stage_of, stages = found
        for node, stage in stage_of.items():
            node.put(STAGE, stage)
        rewrite.put(stages)


def _measure_blocks(rewrite: Rewrite) -> None:
    """Measure the batch: where the block of each replica begins and ends."""
    state = rewrite.get(Propagation)
    source, keys = measured_input(state), Keys(rewrite)
    rewrite.put(keys)
    rewrite.put(Blocks(rewrite, source, state.whole_inputs[source], keys))


def _insert(rewrite: Rewrite) -> None:
    """Insert the conversions of values that their readers need."""
    reshards = Reshards(rewrite, rewrite.get(Blocks), rewrite.get(Keys))
    reshards.run()
    rewrite.put(reshards)


ASSIGN_SPANS = Pass("assign-spans", _assign_spans, needs=(Propagation, Resolved), gives=(Homes,), is_whole=False)
ASSIGN_STAGES = Pass(
    "assign-stages", _assign_stages, lambda rewrite: rewrite.plan.pipeline is not None, (Propagation,), (Stages,), False
)
MEASURE_BLOCKS = Pass("measure-blocks", _measure_blocks, needs=(Homes,), gives=(Keys, Blocks), is_whole=False)
INSERT_RESHARDS = Pass("insert-reshards", _insert, needs=(Homes, Blocks, Keys), gives=(Reshards,))


# Place nodes where variables live: on their devices, and those that run once for the whole job in process 0.


def put_at_homes(rewrite: Rewrite) -> None:
    """Give each node of the server region its place."""
    region = find_server_region(rewrite.plan, rewrite.state, rewrite.item.variables, blocks_of(rewrite).values)
    rewrite.put(Homes(region.homes, sorted(set(region.homes.values()))))
    for node, device in region.devices.items():
        node.set_place(rewrite.on(device))
    for node in region.nodes:
        node.put(PROCESS, 0)
