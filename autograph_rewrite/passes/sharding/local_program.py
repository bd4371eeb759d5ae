"""Write the program of one device of a model axis: each node once, on its block, with an `ar.reshard` between blocks.

    before   MatMul(x, up) ─► Relu ─► MatMul(., down) ─► y
    after    MatMul(x, up: 8 of 16 columns) ─► Relu ─► MatMul(., down: 8 of 16 rows) ─► ar.reshard: sum ─► y

Every device of the axis runs it: each computes replicated values, as accelerators do, and nothing waits for the first
device. GSPMD (Xu et al., 2021) calls this SPMD partitioning. Later passes see a graph of local shapes; only the mesh
has the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, TypeVar

import numpy as np

from autograph_rewrite.analysis.list_elements import SHAPES_OF_ELEMENTS, future_splits, split_dimension
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import awaited
from autograph_rewrite.ir.format.annotations import Others
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Node, PerInstance, Value
from autograph_rewrite.ir.mesh import MODEL, ONCE, Span
from autograph_rewrite.ir.recorded_shapes import record_shapes
from autograph_rewrite.ir.replace_op import become, take_name
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.opdefs import RESHARD, axis_along, get_op
from autograph_rewrite.ir.variable_ops import ANONYMOUS, dense_inputs, handle_node, is_handle, rows_argument
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import is_local, unit
from autograph_rewrite.ops.facts.windows import NEIGHBOURS, READ, Halo, Rows
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.claims import carried_by
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.sharding.block_rows import BlockRows
from autograph_rewrite.passes.sharding.placements import SEGMENT_SUM, ModelPlacements
from autograph_rewrite.passes.sharding.shard_propagation import ShardedVariable
from autograph_rewrite.passes.sharding.unroll import Conversion, Unroll
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.parts.residence import Sharded, shard_name
from autograph_rewrite.resolve.model_axis import Round
from autograph_rewrite.resolve.wire_types import can_be_sent

T = TypeVar("T")
LOWERINGS = {
    ("partial", "replicated"): "collective_reduce",
    ("partial", "split"): "collective_scatter",
    ("split", "replicated"): "collective_gather",
    ("replicated", "split"): "slice",
    ("replicated", "partial"): "zeros",
    ("split", "split"): "collective_gather",
}


Levels = tuple[tuple[str, Sharded], ...]
"""How a value is cut along axes of the mesh, major to minor: into blocks, and each of these into blocks again."""


@dataclass(frozen=True)
class ModelBlocks:
    """The blocks of the devices of a replica that run one program.

    Attributes:
        of: how variables are cut, by name.
        sums: by the name of a sum of segments of which each device computes its rows, the rows of each device.
        lookups: by the name of a lookup in a value whose rows are split over devices, the rows of each device.
        values: by name, the placements along the model axes of values that differ between devices, and of handles.
    """

    of: Mapping[str, Levels]
    sums: Mapping[str, Levels] = field(default_factory=dict)
    lookups: Mapping[str, Levels] = field(default_factory=dict)
    values: Mapping[str, Others] = field(default_factory=dict)

    def and_then(self, more: ModelBlocks) -> ModelBlocks:
        """Return the blocks after further axes have cut, too."""

        def both(one: Mapping[str, tuple[T, ...]], other: Mapping[str, tuple[T, ...]]) -> dict[str, tuple[T, ...]]:
            return {name: (*one.get(name, ()), *other.get(name, ())) for name in {**one, **other}}

        return ModelBlocks(
            both(self.of, more.of),
            both(self.sums, more.sums),
            both(self.lookups, more.lookups),
            both(self.values, more.values),
        )

    def along(self, value: Value, *, converted: bool = False) -> Others:
        """Return the placements of a value along the model axes, without those that are replicated.

        Args:
            converted: a conversion among replicas has computed it, which keeps its placements along the model axes.
        """
        while self.values and value.name not in self.values:
            node = value.node
            original = node.graph.nodes.get((node.attr(ORIGIN_ATTR) or b"").decode())
            if original is not None and original is not node and original.op == node.op:
                value = original.output(value.index)  # a copy
            elif converted and PASS_ATTR in node.attrs and node.inputs and not axis_along(node):
                value = node.inputs[0]
            else:
                return ()
        return self.values.get(value.name, ())


def blocks_of(rewrite: Rewrite) -> ModelBlocks:
    """Return the blocks of the devices of a replica; empty if they do not run one program."""
    return rewrite.get(ModelBlocks) if rewrite.has(ModelBlocks) else ModelBlocks({})


def obstacle(found: ModelPlacements, cut: Round) -> str:
    """Return why the program of one device cannot be written; empty if it can."""
    state = found.state
    if len(set(cut.sizes)) > 1:
        return "blocks are of several sizes"
    for node in state.order:
        made = state.transfers[node]
        wanted = [want for want in made.operand_reshards.values() if isinstance(want, (Slice, LocalEntry))]
        if any(want.halo is not None and want.halo.alike(cut.sizes[0]) is None for want in wanted):
            return f"'{node.name}' reads rows of its neighbours, and not all devices read as many"
        if node.op == "VariableShape" and handle_node(node.inputs[0]) in found.members:  # a constant
            continue
        if any(node.inputs[i].dtype in (dtypes.RESOURCE, dtypes.VARIANT) for i in made.operand_reshards):
            return f"'{node.name}' hands on what is cut"
        whole = [node.inputs[i] for i, want in made.operand_reshards.items() if want == REPLICATED]
        joined = (state.source(value) for value in (*whole, *(v for v in node.read_outputs if v in state.reduced)))
        if any(not _can_be_joined(fact) for fact in joined):
            return f"'{node.name}' reads or makes what no collective can carry"
        member = found.members.get(node.inputs[0].node) if node.inputs and is_handle(node.inputs[0]) else None
        if member is not None and has(node.op, "reads_rows"):
            is_found = bool(member.axis) or made.outputs[0].placement == PARTIAL
            if node.op != "ResourceGather" or not is_found:
                return f"'{node.name}' takes elements of a variable"
        if any(fact.placement.is_partial and fact.placement.op == "own" for fact in made.outputs):
            return f"'{node.name}' has a value of its own"
    return ""


def _can_be_joined(fact: Fact) -> bool:
    """Return whether a value needs no collective, or a collective can carry it."""
    placement = fact.placement
    if not (placement.is_split or placement.is_partial):
        return True
    return can_be_sent(fact.dtype, placement.op if placement.is_partial else "gather")


@dataclass
class LocalProgram:
    """Writes the program of one coordinate of an axis.

    Attributes:
        found: the placements.
        cut: the tensors to cut, and the sizes of blocks.
        number: of the axis, among the model axes.
        axis: its name in the mesh.
        alike: every coordinate runs all of the program. Otherwise only nodes that differ between coordinates have
            instances along the axis, and others run once, as `Unroll` needs.
        made: the conversions, with the node that computes each.
        conversions: how to unroll each of these nodes.
        sums: as in `ModelBlocks`.
        lookups: as in `ModelBlocks`.
        named: by name of a node that unrolling removes, the node that takes the name.
    """

    found: ModelPlacements
    cut: Round
    number: int = 0
    axis: str = MODEL
    alike: bool = True
    made: list[tuple[EdgePlan, Node]] = field(default_factory=list)
    conversions: dict[Node, Conversion] = field(default_factory=dict)
    sums: dict[str, Levels] = field(default_factory=dict)
    lookups: dict[str, Levels] = field(default_factory=dict)
    named: dict[str, Node] = field(default_factory=dict)
    _instead: list[tuple[Value, Value, Node]] = field(default_factory=list)
    _made: dict[tuple[Value, object], Value] = field(default_factory=dict)

    @property
    def state(self) -> Propagation:
        """The placements."""
        return self.found.state

    @property
    def edges(self) -> tuple[EdgePlan, ...]:
        """The exchanges of the devices of a replica, with the names of values in the program."""
        return tuple(replace(edge, value=node.inputs[0].name, axis=self.number) for edge, node in self.made)

    @property
    def span(self) -> Span:
        """How often nodes run that differ between coordinates."""
        return ONCE if self.alike else frozenset((self.axis,))

    def blocked(self) -> ModelBlocks:
        """Return the blocks of the devices, once the program is written."""
        placed = {value.name: self.state.source(value).placement for value in self.state.facts}
        placed |= {node.output().name: made.after for node, made in self.conversions.items()}
        values = {name: ((self.axis, one),) for name, one in placed.items() if one.differs}
        variables = {name: ((self.axis, cut),) for name, cut in self.variables().items()}
        return ModelBlocks(variables, self.sums, self.lookups, values)

    def variables(self) -> dict[str, Sharded]:
        """Return how variables are cut, by name."""
        members = [(name, self.found.members[handle]) for handle, name in self.found.names.items()]
        return {name: Sharded(one.axis, self.rows_of(one.rows)) for name, one in members}

    def rows_of(self, rows: int) -> tuple[int, ...]:
        """Return the sizes of blocks with `rows` rows per unit."""
        return tuple(size * rows for size in self.cut.sizes)

    def write(self) -> None:
        """Insert the conversions of operands, and record the shapes of blocks."""
        graph, state = self.state.graph, self.state
        anchored, carried = dict.fromkeys(graph.anchors.values()), carried_by(state)
        apart = [] if self.alike else [node for node in state.order if self._is_apart(node)]
        rows = BlockRows(self)
        self._state_shapes_of_elements()
        for node in apart:
            node.set_span(self.span)
        gone = set() if self.alike else self._read_once()
        for node in [node for node in state.order if node not in gone]:
            made, member = state.transfers[node], self.member(node)
            if made.constant:
                self._fold(node, made.outputs)
                continue
            if member is not None and node.op == "VariableShape":
                shape = np.asarray(member.shape, dtypes.numpy_dtype(node.output_dtypes[0]))
                self._become_const(node, {"dtype": node.output_dtypes[0], "value": shape})
                continue
            for index, value in enumerate(node.inputs):
                want = carried.get(node) or self._wanted(node, index, value)
                if want is not None and value.node not in carried:  # a carrier's operand is converted instead
                    node.set_input(index, self.converted(value, want))
            if (window := halo_of(made.operand_reshards)) is not None:
                self._with_window(node, *window)
            if not self.alike:
                rows.rewrite(node, member)
                continue
            if node.op == SEGMENT_SUM and state.source(node.output()).placement == split(0):
                self._sum_rows(node)
            if node.op == "GatherV2" and self._finds_rows(node):
                self.lookups[node.name] = self._rows(node.inputs[0])
        for value in anchored:
            if state.source(value).placement.differs and not is_handle(value):
                self._let_out(value)
        for handle, member in self.found.members.items():
            self._cut_handle(handle, member)
        for node in state.order if self.alike else [node for node in apart if node not in gone]:
            if node in carried:
                record_shapes(node, [None])
            elif any(state.source(value).placement.differs for value in node.outputs if value in state.facts):
                self._record_shapes(node)
        for new, value, reader in self._instead:
            value.replace_all_uses_with(new, keep=[reader])
            graph.move_anchors(value, new)
            self.named[value.node.name] = new.node

    def let_stand(self, new: Value, value: Value, reader: Node) -> None:
        """Replace a value by another one once the program is written, except for `reader`, which computes that one."""
        self._instead.append((new, value, reader))

    def unrolled(self, targets: Collection[str], put: Callable[[Node, int], None] | None = None) -> Unroll:
        """Write the program if coordinates do not run alike, and unroll it; see `Unroll`."""
        self.write()
        unroll = Unroll(self.state.graph, self.axis, len(self.cut.sizes), self.conversions, self.named, targets, put)
        unroll.run()
        return unroll

    def member(self, node: Node) -> ShardedVariable | None:
        """Return the variable in blocks that a node reads or writes, if any."""
        if not node.inputs or not is_handle(node.inputs[0]):
            return None
        return self.found.members.get(handle_node(node.inputs[0]))

    def _is_apart(self, node: Node) -> bool:
        """Return whether a node has an instance at each coordinate, if coordinates do not run alike."""
        state = self.state
        if node in self.found.members or self.member(node) is not None:
            return node.op != "VariableShape"
        if state.transfers[node].constant:
            return False
        if self.is_lookup(node):
            return True
        values = (value for value in node.outputs if value in state.facts and not is_handle(value))
        return any(state.source(value).placement.differs and value not in self.found.tensors for value in values)

    def is_lookup(self, node: Node) -> bool:
        """Return whether a node looks up rows in a value whose rows are split, and its readers need all of them."""
        if self.alike or node.op != "GatherV2" or node.attr("batch_dims", 0):
            return False
        state, (table, _, axis) = self.state, node.inputs
        if table not in state.facts or table in state.reduced or table in self.found.tensors:
            return False
        shape = self.found.whole.facts[table].shape if table in self.found.whole.facts else None
        is_static = shape is not None and all(isinstance(dim, int) for dim in shape[1:])
        is_own = is_static and state.source(table).placement == split(0) and state.facts[axis].value == (0,)
        return is_own and not state.source(node.output()).placement.differs

    def _read_once(self) -> set[Node]:
        """Merge reads of a variable with the same control edges; return the erased reads."""
        graph, first, gone = self.state.graph, dict[tuple[Value, frozenset[Node]], Node](), set[Node]()
        for node in self.state.order:
            if node.op == "ReadVariableOp" and self.member(node) is not None:
                read = first.setdefault((node.inputs[0], frozenset(node.controls)), node)
                if read is not node:
                    graph.replace(node, read)
                    gone.add(node)
        return gone

    def _wanted(self, node: Node, index: int, value: Value) -> Reshard | None:
        state = self.state
        made = state.transfers[node]
        want = made.operand_reshards.get(index)
        sees_block = not made.inputs or made.inputs[index].placement.is_split
        if want is None and value in state.whole_inputs and sees_block:
            fact = state.facts[value]
            return Slice(fact.placement.dim, unit(fact.split_size) or 1)
        if want is None and value in state.reduced and state.source(value).placement.differs:
            return state.reduced[value]
        if not self.alike and value in state.facts:
            return self._wanted_apart(node, index, value, want)
        return want

    def _wanted_apart(self, node: Node, index: int, value: Value, want: Reshard | None) -> Reshard | None:
        """Return the reshard that a node needs if coordinates do not run alike: it uses a variable block by block."""
        member = self.member(node)
        if is_handle(value) or (index == 0 and self.is_lookup(node)):
            return None
        if member is not None and index in dense_inputs(node):
            return Slice(member.axis, member.rows)
        if member is None:
            return REPLICATED if want is None and node.span == ONCE else want
        is_of_rows = member.axis and index == rows_argument(node.op) and self.state.facts[value].shape != ()
        return Slice(member.axis - len(member.shape), member.rows) if is_of_rows else REPLICATED  # columns of all rows

    def unconverted(self, value: Value) -> Value:
        """Return the value that conversions have made another one of: propagation knows only that."""
        while value.node in self.conversions:
            value = value.node.inputs[0]
        return value

    def converted(self, value: Value, want: Reshard) -> Value:
        """Return the conversion of a value that a reader needs; equal conversions exist once."""
        key: tuple[Value, object] = value, want
        if isinstance(want, Slice) and want.halo is not None:
            key = value, (want.dim, self._rows_read(want.halo), want.halo.lowest)
        if key not in self._made:
            self._made[key] = self._convert(value, want)
        return self._made[key]

    def _convert(self, value: Value, want: Reshard) -> Value:
        before = self.state.source(value).placement
        if isinstance(want, LocalEntry):
            return self._with_entry(value, want)
        if isinstance(want, Slice):
            is_there = before == split(want.dim) and (self.alike or value not in self.state.reduced)
            if want.halo is not None:
                source = value if is_there or not before.differs else self.converted(value, REPLICATED)
                return self._with_halo(source, want.dim, want.halo, before if is_there else REPLICATED)
            if is_there:  # a tensor that is cut by hand, and computed in these blocks
                return value
            if before == PARTIAL and self.alike:
                return self._reshard(value, "block", before, split(want.dim), want.dim, want.unit)
            whole = self.converted(value, REPLICATED) if before.differs else value
            return self._reshard(whole, "block", REPLICATED, split(want.dim), want.dim, want.unit)
        if want == PARTIAL:
            if before == PARTIAL:
                return value
            whole = self.converted(value, REPLICATED) if before.differs else value  # zeros may be in blocks
            return self._reshard(whole, "term", REPLICATED, PARTIAL)
        if not before.differs:
            return value
        if isinstance(block := self.state.reduced.get(value), Slice):  # others read it, and it is smaller than the sum
            return self._reshard(self.converted(value, block), "whole", split(block.dim), REPLICATED, *block[:2])
        if before.kind == "local":
            fact = self.state.source(value)
            chosen = [is_local(entry) for entry in fact.value or ()]
            return self._scaled(value, chosen, [self.cut.units], self.cut.sizes[0], "whole", fact.shape)
        dim, rows = (before.dim, unit(self.state.source(value).split_size) or 1) if before.is_split else (0, 0)
        return self._reshard(value, "whole", before, REPLICATED, dim, rows)

    def _reshard(
        self, value: Value, what: str, before: Placement, after: Placement, dim: int = 0, rows: int = 0
    ) -> Value:
        sizes = self.rows_of(rows) if rows else ()
        asks = before.op == "all"  # a test whether a variable has a value: no exchange of a step
        made = self.convert(value, what, Conversion(before, after, sizes), dim=dim, is_exchange=not asks)
        fact = self.state.facts.get(value)
        if fact is not None and self.alike:
            whole = self.found.whole.facts.get(value)
            shape = (whole or fact).shape
            dims = None if shape is None else [size if isinstance(size, int) else None for size in shape]
            if dims is not None and after.is_split:
                dims[dim] = sizes[0]
            record_shapes(made, [None if dims is None else tuple(dims)])
        return made.output()

    def convert(self, value: Value, what: str, made: Conversion, *, dim: int = 0, is_exchange: bool = True) -> Node:
        """Add a conversion.

        Args:
            what: appended to the name of the value.
            dim: the dimension that is cut, before or after it.
            is_exchange: whether it is an edge of the plan.
        """
        said: dict[str, Any] = {
            "over": [self.axis],
            "before": _along(self.axis, made.before),
            "after": _along(self.axis, made.after),
            "dim": dim,
            "shards": list(made.sizes),
        }
        span = self.span if made.after.differs else ONCE
        node = Builder.at(value.node, f"{what}_{value.index}" if value.index else what, span=span).node(
            RESHARD, value, **said
        )
        self.conversions[node] = made
        if is_exchange and made.share():
            lowering = LOWERINGS[made.before.kind, made.after.kind] if self.alike else made.lowering
            dtype = dtypes.dtype_name(value.dtype)
            before, after = repr(made.before), repr(made.after)
            edge = EdgePlan(value.name, before, after, lowering=lowering, dtype=dtype, reason="devices of a replica")
            self.made.append((edge, node))
        return node

    def _spans(self, halo: Halo) -> tuple[Rows, ...]:
        return tuple(halo.span(units) for units in self.cut.places)

    def _rows_read(self, halo: Halo) -> object:
        """Return a key: halos with the same key read the same rows."""
        return halo.alike(self.cut.sizes[0]) if self.alike else self._spans(halo)

    def _with_halo(self, value: Value, dim: int, halo: Halo, before: Placement) -> Value:
        """Return the rows of a value that each coordinate reads, including its neighbours' rows."""
        owned = tuple(halo.own(units) for units in self.cut.places)
        halos = self._spans(halo), owned
        if not self.alike:
            return self.convert(value, "halo", Conversion(before, split(dim), halo=halos), dim=dim).output()
        rows, fact = halo.alike(self.cut.sizes[0]), self.found.whole.facts.get(value)
        assert rows is not None
        sizes = tuple(end - first for first, end in owned)
        made = self.convert(value, "halo", Conversion(before, split(dim), sizes, halos), dim=dim)
        made.set_attr("rows", rows)
        made.set_attr("lowest", halo.lowest)
        if fact is not None and fact.shape is not None:  # unknown for a value that was joined before
            dims = [size if isinstance(size, int) else None for size in fact.shape]
            record_shapes(made, [(*dims[:dim], rows[1] - rows[0], *dims[dim + 1 :])])
        return made.output()

    def _with_window(self, node: Node, dim: int, halo: Halo) -> None:
        """Set the padding of each coordinate, and keep only its rows of the result.

        The kernel adds the padding, as its value depends on the op (zeros, or nothing at all in a maximum). The
        gradient of an input is computed for whole windows and cut to the rows of a coordinate: no window is divided, so
        the first of several equal maxima is the same one.
        """
        owned = [(units[0] * halo.rows, units[1] * halo.rows) for units in self.cut.places]
        if self.alike:
            more = halo._replace(reads=NEIGHBOURS).alike(self.cut.sizes[0])
            assert more is not None
            padded = [_padding(node, dim, (0, 0), halo.beside)]
            made = [(one[0] + more[0], one[0] + more[1]) for one in owned]
        else:
            padded = [_padding(node, dim, halo.padding(units), halo.beside) for units in self.cut.places]
            made = [halo.window.neighbours(one) for one in owned]
        self._set_each(node, "padding", "string", [kind for kind, _ in padded])
        if "explicit_paddings" in get_op(node.op).attrs:
            self._set_each(node, "explicit_paddings", "list(int)", [stated for _, stated in padded])
        if halo.reads == READ or owned == made:
            return
        node.drop_attr("_output_shapes")
        firsts = [one[0] - more[0] for one, more in zip(owned, made, strict=True)]
        begins = [[first if i == dim else 0 for i in range(4)] for first in firsts]
        sizes = [[one[1] - one[0] if i == dim else -1 for i in range(4)] for one in owned]
        if self.alike:
            block = self._shape(self.state.source(node.output()), self.cut.sizes[0]) or ()
            record_shapes(node, [(*block[:dim], made[0][1] - made[0][0], *block[dim + 1 :])])
        value, build = node.output(), Builder.at(node, span=self.span)
        begin, size = (self.each(value, one, "own/limit", dtypes.INT32) for one in (begins, sizes))
        own = build.op("Slice", value, begin, size, what="own")
        self.let_stand(own, value, own.node)

    @staticmethod
    def _set_each(node: Node, attr: str, kind: str, contents: Sequence[Any]) -> None:
        """Set an attribute at each coordinate, or for all of them."""
        raws = [encode(kind, content) for content in contents]
        node.set_raw_attr(attr, raws[0] if len(raws) == 1 else PerInstance(tuple(raws)))

    def _with_entry(self, value: Value, want: LocalEntry) -> Value:
        """Return a shape in which one entry is the size of a block."""
        fact, rows = self.state.facts[value], unit(want.size) or 1
        entries, sizes, whole = fact.value or (), self.rows_of(rows), rows * self.cut.units
        if want.halo is not None:
            same, whole = want.halo.alike(self.cut.sizes[0]) if self.alike else None, want.halo.window.rows
            spans = (same,) * len(sizes) if same is not None else self._spans(want.halo)
            sizes = tuple(end - first for first, end in spans)
        what = f"of_block_{want.position}"
        if entries and all(isinstance(entry, int) for entry in entries):
            contents = [[size if i == want.position else entry for i, entry in enumerate(entries)] for size in sizes]
            return self.each(value, contents, what)
        count = 4 if want.halo is not None else len(entries)
        if not self.alike or want.halo is not None:
            value = self.converted(value, REPLICATED)
        return self._scaled(value, [i == want.position for i in range(count)], sizes, whole, what, fact.shape)

    def _scaled(
        self, value: Value, chosen: Sequence[bool], ups: Sequence[int], down: int, what: str, shape: Shape | None
    ) -> Value:
        """Return sizes of which the chosen ones are multiplied by `ups` (one per coordinate) and divided by `down`."""
        dims = [dim for dim in shape or () if isinstance(dim, int)]

        def numbers(units: int) -> Any:
            return np.array([units if one else 1 for one in chosen]).reshape(dims)

        common = gcd(down, *ups)
        ups, down = [up // common for up in ups], down // common
        apart = self.span if len(set(ups)) > 1 else ONCE
        build = Builder.at(value.node, what, span=apart)
        if any(up != 1 for up in ups):
            up = self.each(value, [numbers(up) for up in ups], f"{what}/up")
            value = build.op("Mul", value, up, what="" if down == 1 else "times")
        return value if down == 1 else build.op("FloorDiv", value, self._const(value, numbers(down), f"{what}/down"))

    def each(self, near: Value, contents: Sequence[object], what: str, dtype: int | None = None) -> Value:
        """Return a constant with a content for each coordinate, of a type, or of the type of `near`."""
        dtype = near.dtype if dtype is None else dtype
        arrays = [np.asarray(content, dtypes.numpy_dtype(dtype)) for content in contents]
        if all(np.array_equal(one, arrays[0]) for one in arrays):
            return self._const(near, arrays[0], what, dtype)
        raws = PerInstance(tuple(encode("tensor", one) for one in arrays))
        return Builder.at(near.node, span=self.span).op("Const", what=what, value=raws, dtype=dtype)

    def _const(self, near: Value, content: object, what: str, dtype: int | None = None) -> Value:
        """Return a constant; it is in the loop of `near`, if that is in one."""
        made = Builder.at(near.node).const(content, near.dtype if dtype is None else dtype, what)
        if near.node in self.state.looped:  # a node without inputs is in no loop
            made.node.add_control(near.node)
        return made

    def _become_const(self, node: Node, attrs: Mapping[str, Any]) -> None:
        waits = [] if node not in self.state.looped else [self._awaited(value) for value in node.inputs]
        become(node, "Const", (), attrs)
        for one in waits:
            node.add_control(one)

    def _awaited(self, value: Value) -> Node:
        return awaited(value, lambda taken: Builder.at(taken.node).op("Identity", taken, what="taken").node)

    def _state_shapes_of_elements(self) -> None:
        """Let lists and arrays into which blocks are put expect the shapes of blocks."""
        state = self.state
        for value, dim in future_splits(state).items():
            operand = value.node.inputs[0]
            stated = state.facts[operand].value if operand.dtype != dtypes.VARIANT else None  # a door has a list there
            if stated is not None and dim < len(stated) and isinstance(stated[dim], int) and stated[dim] != -1:
                content = [self._of_block(size) if i == dim else size for i, size in enumerate(stated)]
                value.node.set_input(0, self._const(operand, content, "of_block"))
        for node in state.order:
            if node.op not in SHAPES_OF_ELEMENTS:
                continue
            (name, left_out), at = SHAPES_OF_ELEMENTS[node.op], split_dimension(state, node)
            stated = node.attr(name)
            if stated is not None and at is not None and left_out <= at < left_out + len(stated):
                shape = [self._of_block(size) if i + left_out == at else size for i, size in enumerate(stated)]
                node.set_attr(name, tuple(shape))

    def _of_block(self, size: Any) -> Any:
        return size if size is None else size // len(self.cut.sizes)

    def _fold(self, node: Node, facts: Iterable[Fact]) -> None:
        """Replace known sizes by constants."""
        for index, fact in enumerate(facts):
            shape = [dim for dim in fact.shape or () if isinstance(dim, int)]
            content = np.array(fact.value, dtypes.numpy_dtype(fact.dtype)).reshape(shape)
            if len(node.output_dtypes) == 1:
                self._become_const(node, {"value": content, "dtype": fact.dtype})
            else:
                known = Builder.at(node).const(content, fact.dtype, f"folded_{index}")
                for value in node.inputs if node in self.state.looped else ():
                    known.node.add_control(self._awaited(value))
                node.output(index).replace_all_uses_with(known)

    def _sum_rows(self, node: Node) -> None:
        """Let each device add up the segments that are its rows; the pass `rows-of-shards` selects them."""
        self.sums[node.name] = rows = self._rows(node.output())
        node.set_input(2, Builder.at(node).const(rows[0][1].sizes[0], node.inputs[2].dtype, "rows_of_block"))

    def _finds_rows(self, node: Node) -> bool:
        """Return whether each device looks up only the rows that it has."""
        state, table = self.state, node.inputs[0]
        is_own = table in state.facts and state.source(table).placement == split(0)  # otherwise it is joined by now
        return is_own and state.source(node.output()).placement == PARTIAL

    def _rows(self, value: Value) -> Levels:
        """Return the number of rows of a value on each device."""
        rows = unit(self.state.source(value).split_size) or 1
        return ((self.axis, Sharded(0, self.rows_of(rows))),)

    def _let_out(self, value: Value) -> None:
        """Let callers read the whole of a value, under its name."""
        graph, node = value.node.graph, value.node
        whole = self.converted(value, REPLICATED)
        graph.move_anchors(value, whole)
        if len(node.output_dtypes) == 1 and self.alike:
            name = node.name
            take_name(graph, node, graph.unique_name(f"{name}/block"))
            take_name(graph, whole.node, name)

    def _cut_handle(self, handle: Node, member: ShardedVariable) -> None:
        cut = Sharded(member.axis, self.rows_of(member.rows))
        if handle.op == "VarHandleOp" and self.alike:
            handle.set_attr("shape", cut.shape(member.shape, 0))
        elif handle.op == "VarHandleOp":
            shapes = [cut.shape(member.shape, k) for k in range(len(cut.sizes))]
            handle.set_raw_attr("shape", PerInstance(tuple(encode("shape", one) for one in shapes)))
            if handle.attr("shared_name") != ANONYMOUS:
                names = [shard_name(self.found.names[handle], k).encode() for k in range(len(cut.sizes))]
                handle.set_raw_attr("shared_name", PerInstance(tuple(encode("string", one) for one in names)))
        handle.drop_attr("_handle_shapes")

    def _record_shapes(self, node: Node) -> None:
        """Record the shapes of a node's blocks."""
        if any(value is own for _, own, _ in self._instead for value in node.outputs):
            return  # with a window it computes more than its block
        facts = [self.state.source(value) for value in node.outputs]
        each = [[self._shape(fact, size) for fact in facts] for size in self.cut.sizes]
        if self.alike:
            record_shapes(node, each[0])
        elif None in each[0]:
            node.drop_attr("_output_shapes")
        else:
            node.set_raw_attr("_output_shapes", PerInstance(tuple(encode("list(shape)", one) for one in each)))

    @staticmethod
    def _shape(fact: Fact, units: int) -> tuple[int | None, ...] | None:
        if fact.shape is None or fact.dtype in (dtypes.RESOURCE, dtypes.VARIANT):
            return None
        return tuple(_size(dim, units) for dim in fact.shape)


def _size(dim: object, units: int) -> int | None:
    rows = unit(dim)  # type: ignore[arg-type]
    return rows * units if rows is not None else dim if isinstance(dim, int) else None


def _along(axis: str, placement: Placement) -> str:
    return repr(placement) if placement == REPLICATED else f"{{{axis}: {placement!r}}}"


def halo_of(reshards: Mapping[int, Reshard]) -> tuple[int, Halo] | None:
    """Return the dimension and the halo of a node's operands, if it reads one."""
    for want in reshards.values():
        if isinstance(want, Slice) and want.halo is not None:
            return want.dim, want.halo
        if isinstance(want, LocalEntry) and want.halo is not None:
            return want.position, want.halo
    return None


def _padding(node: Node, dim: int, rows: Rows, beside: Rows) -> tuple[bytes, tuple[int, ...]]:
    """Return the padding of a window: new in `dim`, for the rows of one coordinate, and unchanged in the other."""
    if not (any(rows) or any(beside)):
        return b"VALID", ()
    first = 2 if node.attr("data_format", b"NHWC").startswith(b"NC") else 1
    stated = [0] * 8
    for at, (before, after) in ((dim, rows), (2 * first + 1 - dim, beside)):
        stated[2 * at : 2 * at + 2] = before, after
    return b"EXPLICIT", tuple(stated)
