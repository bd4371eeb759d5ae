"""Put a conversion on every edge where producer and consumer disagree.

    before   %dw: partial(sum) ──► ResourceApplyAdam
    after    %dw ──► AddN(all) ──► ResourceApplyAdam             (shared)
             %dw ──► CollectiveReduceV2 ──► ResourceApplyAdam    (mirrored)

Each value is converted once, whoever reads it. Relies on `assign_spans` having marked what each replica runs.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.analysis.batch_groups import batch_groups
from autograph_rewrite.analysis.containers import future_splits
from autograph_rewrite.analysis.dims import rows_per_example, segments
from autograph_rewrite.analysis.fact import PARTIAL, REPLICATED, Fact, split
from autograph_rewrite.analysis.propagate import is_pinned
from autograph_rewrite.analysis.rules.base import LocalEntry, Slice, Want
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.frames import ENTERS
from autograph_rewrite.ir.graph import Node, Select, Span, Value
from autograph_rewrite.ir.walk import BACK_EDGES, ancestors
from autograph_rewrite.passes import combine, compress
from autograph_rewrite.passes.batch import inputs_behind
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.buckets import reduce_bucket
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.fold import fold
from autograph_rewrite.passes.gather import gather_collective, gather_once, gather_parts
from autograph_rewrite.passes.global_size import global_size, read_early
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.passes.predicates import common_predicate
from autograph_rewrite.passes.segments import in_order, piece_with_segments
from autograph_rewrite.passes.spans import differs_by_replica
from autograph_rewrite.plan.parts import EdgePlan


def assign_spans(context: Context) -> None:
    """Mark each node with how often it runs: once, or on every replica."""
    context.future_splits = future_splits(context.state)
    order = context.state.order
    for node in order:
        node.set_span(_span(context, node))
    for node in (*order, *reversed(order)):
        if node.op == "NoOp" and _stands_between_instances(node):
            node.set_span(Span.EACH)


def _stands_between_instances(node: Node) -> bool:
    """Return whether a NoOp lets nodes that every replica runs wait for some: once, it would make the replicas wait."""
    users, each = node.control_users, Span.EACH
    return bool(users) and all(n.span is each for n in users) and any(n.span is each for n in node.controls)


def _span(context: Context, node: Node) -> Span:
    state = context.state
    if node in context.served.nodes:
        return Span.ONCE
    if node.op == "LoopCond":
        return Span.ONCE  # one condition for all replicas
    if differs_by_replica(state, node, context.future_splits):
        return Span.EACH
    if not context.mirrored or is_pinned(node) or node in context.served.devices:
        return Span.ONCE
    is_input = node.op in ("Placeholder", "PlaceholderWithDefault") and node.name not in context.variables
    return Span.ONCE if is_input else Span.EACH


def _carries(carrier: Node, merge: Node) -> bool:
    """Return whether a node brings a loop variable to its Merge, and nothing else."""
    if carrier.op in BACK_EDGES:
        return True
    enters = carrier.op in ("Enter", "RefEnter") and not carrier.attr("is_constant")
    return enters and merge.span is Span.ONCE and all(reader is merge for reader, _ in carrier.output().uses)


class Reshard:
    """Converts values on demand and remembers what it made."""

    def __init__(self, context: Context, blocks: Blocks, keys: Keys) -> None:
        self._context = context
        self._blocks = blocks
        self._blocks_of: dict[Value, Blocks] = {blocks.source: blocks}
        self._keys = keys
        self._whole: dict[Value, Value] = {}
        self._pieces: dict[tuple[Value, Slice, Value], Value] = {}
        self._terms: dict[Value, Value] = {}
        self._predicates: dict[Value, Value] = {}
        self._carried: dict[Node, Want | None] = {}  # what brings values to the Merge of a loop
        self._brought: dict[Value, Value] = {}  # by what is converted for it, the value that has the plan's edge
        state = context.state
        self._entered = {node: node.inputs[0] for node in state.order if node.op in ENTERS}
        matters = context.processes == 1 and blocks.static is None and len(state.whole_inputs) > 1
        self._behind = inputs_behind(state) if matters else {}
        self.groups = batch_groups(state) if matters else None

    def run(self) -> None:
        """Convert every edge of the original graph."""
        self._share_draws()
        self._before_back_edges()
        for node in self._context.state.order:
            answer = self._context.state.answers[node]
            if answer.constant:
                fold(self._context, node, self._read)
                continue
            self._connect(node)
            if (early := read_early(self._context, node)) is not None:
                self._read_instead(node.output(), early)

    def _read_instead(self, value: Value, new: Value) -> None:
        """Let those that read a value as it is read another one."""
        for user, position in value.uses:
            answer = self._context.state.answers.get(user)
            if answer is None or position not in answer.wants:
                self._read(user, position, new)

    def _share_draws(self) -> None:
        """Let all processes use what the first one drew: others draw zeros, and all is added up."""
        context = self._context
        for edge in [edge for edge in context.edges.values() if edge.from_ == "single"]:
            value = context.graph.value(edge.value)
            drawn = context.of_worker_0(value)
            shared = combine.reduce_members(context, drawn, "sum", edge, self._keys, changing=True)
            value.replace_all_uses_with(shared, keep=set(ancestors([shared.node])))
            context.take_place(value, shared)

    def _before_back_edges(self) -> None:
        """Let what brings a loop variable to its Merge carry the converted value, and run where the Merge does.

        Nothing may stand between NextIteration and its Merge; and what only enters a loop is there in the first
        iteration only, while TensorFlow would wait in each for what comes from another device.
        """
        state = self._context.state
        for node in state.order:
            if node.op not in ("Merge", "RefMerge"):
                continue
            for index, value in enumerate(node.inputs):
                want = state.answers[node].wants.get(index, REPLICATED if value in state.reduced else None)
                if _carries(value.node, node) and (want is not None or node.span is Span.ONCE):
                    self._carry(value, node, want)

    def _carry(self, value: Value, merge: Node, want: Want | None) -> None:
        carrier, devices = value.node, self._context.served.devices
        self._brought[carrier.inputs[0]] = value
        self._carried[carrier] = want
        carrier.set_span(merge.span)
        if merge in devices:
            devices[carrier] = devices[merge]

    def _connect(self, node: Node) -> None:
        state = self._context.state
        wants = state.answers[node].wants
        if (carried := self._carried.get(node)) is not None:
            wants = {0: carried}
        for index, value in enumerate(node.inputs):
            want = wants.get(index)
            if value.node in self._carried:
                want = None
            elif want is None and value in state.whole_inputs:
                want = Slice(state.whole_inputs[value], 1)
            elif want is None and value in state.reduced:
                want = REPLICATED
            new = value if want is None else self.convert(value, want, node)
            if index == 1 and node.op in ("Switch", "RefSwitch"):
                new = self._common_predicate(new)
            self._read(node, index, new)

    def _common_predicate(self, value: Value) -> Value:
        """Return one predicate for all replicas."""
        if value.node.span is Span.ONCE:
            return value
        if value not in self._predicates:
            self._predicates[value] = common_predicate(self._context, value)
        return self._predicates[value]

    def _read(self, node: Node, index: int, value: Value) -> None:
        crosses = node.span is Span.ONCE and value.node.span is Span.EACH
        if not crosses and node._inputs[index] is value and not node.selects:
            return
        node.set_input(index, value, Select.FIRST if crosses else None)
        if crosses and self._context.mirrored:
            node.add_control(value.node)  # fetching replica 0's value alone would leave its collectives waiting

    def convert(self, value: Value, want: Want, reader: Node) -> Value:
        """Return `value` as `reader` wants it."""
        if isinstance(want, LocalEntry):
            return self._local_entry(value, want, reader)
        if isinstance(want, Slice):
            return self.piece(value, want, reader)
        if want == PARTIAL:
            return self._term(self.whole(value, reader))
        if want == REPLICATED:
            return self.whole(value, reader)
        raise PassError(f"no conversion of '{value.name}' to {want}", node=reader)

    def whole(self, value: Value, reader: Node) -> Value:
        """Return the whole, global value."""
        if value not in self._whole:
            self._whole[value] = self._make_whole(value, reader)
        return self._whole[value]

    def _make_whole(self, value: Value, reader: Node) -> Value:
        context = self._context
        fact = context.fact(value)
        if value in context.state.whole_inputs:
            return self._whole_input(value, fact)
        if not fact.placement.differs:
            return value
        combine.refuse_container(value, fact, reader)
        if value.node in self._entered:
            return self._enter(value.node, self.whole(self._entered[value.node], reader))
        if fact.is_local:
            batch = context.bring(self.blocks_at(value.node).batch, value)
            return global_size(context, value, fact, batch, self._keys)
        edge = context.edges.get((value.name, "replicated"))
        if edge is None and value in self._brought:
            edge = context.edges.get((self._brought[value].name, "replicated"))
        with context.at(self._home(edge)):
            return self._combined(value, fact, edge)

    def _enter(self, enter: Node, value: Value) -> Value:
        """Return a value in the loop that `enter` leads into: exchanged before it, not by a collective in it."""
        context, name = self._context, f"{enter.name}/whole"
        attrs = {key: enter.attr(key) for key in ("frame_name", "is_constant", "parallel_iterations")}
        # A Merge on another device would wait for the value in every iteration, so each has an Enter of its own.
        span = Span.EACH if value.node.span is Span.EACH else context.common_span
        node = context.add("Enter", [value], name=name, span=span, origin=enter, attrs=attrs, controls=enter.controls)
        context.frames[node] = context.frames[enter]
        return node.output()

    def _home(self, edge: EdgePlan | None) -> str | None:
        """Return where what the replicas of the only process hold is combined, if its owner lives somewhere."""
        served = edge is not None and self._context.processes == 1
        return self._context.served.homes.get(edge.owner) if served and edge is not None else None

    def _combined(self, value: Value, fact: Fact, edge: EdgePlan | None) -> Value:
        context = self._context
        original, value = value, context.current(value)
        if fact.placement.is_partial:
            if edge is not None and edge.bucket:
                return self._from_bucket(original, edge.bucket)
            if edge is not None and edge.compressor != "none":
                return compress.reduce(context, value, fact, edge, self._keys)
            if edge is None or edge.lowering != "collective_reduce":
                return combine.reduce_once(context, value, fact, edge, self._keys)
            return combine.reduce_collective(context, value, fact, edge, self._keys)
        rows, blocks = rows_per_example(fact.split_size), self.blocks_at(original.node)
        if edge is None or edge.lowering != "collective_gather":
            joined = gather_once(context, value, fact, edge, self._keys, blocks, rows)
        else:
            assert rows is not None  # plan edges choose this lowering only then
            joined = gather_collective(context, value, fact, edge, self._keys, blocks, rows)
        parts = segments(fact.split_size)
        return in_order(context, joined, parts, fact.placement.dim, blocks) if parts else joined

    def _whole_input(self, value: Value, fact: Fact) -> Value:
        """Return a whole batch input, of which several processes hold a part each."""
        context = self._context
        if context.processes == 1:
            return value
        edge = context.edges[value.name, "replicated"]
        part = fact._replace(placement=split(context.state.whole_inputs[value]))
        return gather_parts(context, value, part, edge, self._keys, self._blocks, 1)

    def _from_bucket(self, value: Value, bucket: int) -> Value:
        """Reduce a whole bucket, and return the sum of one of its members."""
        context = self._context
        members = [(context.graph.value(edge.value), edge) for edge in context.edges.values() if edge.bucket == bucket]
        self._whole.update(reduce_bucket(context, members, self._keys))
        return self._whole[value]

    def piece(self, value: Value, want: Slice, reader: Node) -> Value:
        """Return this replica's block of the whole value."""
        dim, rows, parts = want
        is_input = self._context.state.whole_inputs.get(value) == dim and not parts
        blocks = self._measured_on(value) if is_input else self.blocks_at(reader)
        key = (value, want, blocks.source)
        if key not in self._pieces:
            fact = self._context.fact(value)
            combine.refuse_container(value, fact, reader)
            whole, part = (value, "part_") if is_input else (self.whole(value, reader), "")
            if blocks.interleaved:
                which = blocks.all_rows("examples" if is_input else "whole_examples", rows)
                self._pieces[key] = combine.rows_at(self._context, whole, which, dim, "block", Span.EACH)
            elif parts:
                self._pieces[key] = piece_with_segments(self._context, whole, parts, dim, blocks)
            else:
                limits = blocks.rows(f"{part}begin", rows), blocks.rows(f"{part}end", rows)
                self._pieces[key] = combine.rows_between(self._context, whole, value.node.name, dim, limits)
            self._context.slices[self._pieces[key]] = whole
        return self._pieces[key]

    def blocks_at(self, node: Node) -> Blocks:
        """Return the blocks by which a node goes: those of a batch input that it depends on, and whose size it has."""
        behind = self._behind.get(node, ())
        alike = self.groups.of(node) if self.groups is not None else ()
        if alike:
            behind = tuple(value for value in behind if value in alike) or alike
        return self._blocks if not behind or self._blocks.source in behind else self._measured_on(behind[0])

    def _measured_on(self, value: Value) -> Blocks:
        """Return the blocks to cut `value` by: a batch input is measured itself, so that it can be fed alone."""
        axis = self._context.state.whole_inputs.get(value)
        if axis is None:
            return self._blocks
        if value not in self._blocks_of:
            self._blocks_of[value] = Blocks(self._context, value, axis, self._keys)
        return self._blocks_of[value]

    def _term(self, source: Value) -> Value:
        """Return the value on replica 0 and zeros elsewhere: a sum of one term."""
        if source not in self._terms:
            context, name = self._context, source.node.name
            first = [index == 0 for index in range(context.replicas)]
            mine = context.const_each(first, np.bool_, name=f"{name}/is_first", near=source)
            zeros = context.add("ZerosLike", [source], name=f"{name}/zeros", span=Span.EACH, origin=source.node)
            node = context.add(
                "SelectV2", [mine, source, zeros.output()], name=f"{name}/term", span=Span.EACH, origin=source.node
            )
            self._terms[source] = node.output()
        return self._terms[source]

    def _local_entry(self, value: Value, want: LocalEntry, reader: Node) -> Value:
        """Return a shape vector whose entry is this replica's size instead of the whole size."""
        context, name = self._context, value.node.name
        rows = rows_per_example(want.size)
        fact = context.fact(value)
        (length,) = (dim if isinstance(dim, int) else 0 for dim in fact.shape or ())
        if rows is None:
            raise PassError(f"the size {want.size} of one block is not known", node=value.node)
        at = np.zeros(length, np.int64)
        at[want.position] = 1
        dtype = dtypes.numpy_dtype(fact.dtype)

        def add(op: str, inputs: list[Value], what: str, **attrs: object) -> Value:
            return context.add(
                op, inputs, name=f"{name}/{what}", span=Span.EACH, origin=value.node, attrs=attrs or None
            ).output()

        mine = context.bring(self.blocks_at(reader).rows("count", rows), value)
        if fact.dtype != dtypes.INT32:
            mine = add("Cast", [mine], "rows", DstT=fact.dtype)
        placed = add("Mul", [mine, context.const(at, dtype, name=f"{name}/entry", near=value)], "placed")
        others = add("Mul", [value, context.const(1 - at, dtype, name=f"{name}/others", near=value)], "kept")
        return add("AddV2", [placed, others], "local_size")
