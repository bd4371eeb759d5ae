"""The program of one device of a model axis: each node once, of its block, with an `ar.reshard` where blocks meet.

    before   MatMul(x, up) ─► Relu ─► MatMul(., down) ─► y
    after    MatMul(x, up: 8 of 16 columns) ─► Relu ─► MatMul(., down: 8 of 16 rows) ─► ar.reshard: sum ─► y

Every device of the axis runs it: a replicated value is computed on each of them, as accelerators do, and nothing waits
for the first. GSPMD (Xu et al., 2021) calls this SPMD partitioning. Later passes see a graph of local shapes; that
there are several such devices, the mesh knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from autograph_rewrite.analysis.list_elements import SHAPES_OF_ELEMENTS, future_splits, split_dimension
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import awaited
from autograph_rewrite.ir.format.annotations import Others, placement_of
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Node, Value
from autograph_rewrite.ir.mesh import MODEL
from autograph_rewrite.ir.recorded_shapes import record_shapes
from autograph_rewrite.ir.replace_op import become, take_name
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import RESHARD, axis_along
from autograph_rewrite.ir.variable_ops import handle_node, is_handle
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import is_local, unit
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.claims import carried_by
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.tensor_parallel.placements import SEGMENT_SUM, ModelPlacements
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.parts.residence import Sharded
from autograph_rewrite.resolve.model_axis import Round
from autograph_rewrite.resolve.wire_types import can_be_sent

T = TypeVar("T")
LOWERINGS = {
    ("partial", "replicated"): "collective_reduce",
    ("partial", "split"): "collective_scatter",
    ("split", "replicated"): "collective_gather",
    ("replicated", "split"): "slice",
    ("replicated", "partial"): "zeros",
}


Levels = tuple[tuple[str, Sharded], ...]
"""How something is cut along axes of the mesh, major to minor: into blocks, and each of these into blocks again."""


@dataclass(frozen=True)
class ModelBlocks:
    """What the devices of a replica have blocks of that run one program.

    Attributes:
        of: how variables are cut, by name.
        sums: sums of segments of which each device makes its rows, by name, with the rows of each.
        lookups: of rows in values of which each device has some, by name, with the rows of each.
        values: the placements along the model axes of what is not alike on all devices, by name; handles of variables
            that are cut among them.
    """

    of: Mapping[str, Levels]
    sums: Mapping[str, Levels] = field(default_factory=dict)
    lookups: Mapping[str, Levels] = field(default_factory=dict)
    values: Mapping[str, Others] = field(default_factory=dict)

    def and_then(self, more: ModelBlocks) -> ModelBlocks:
        """Return what there is once further axes have cut, too."""

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
            converted: a conversion among replicas has made it: it lies along other axes as what was converted.
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
    """Return what the devices of a replica have blocks of; of none where they do not run one program."""
    return rewrite.get(ModelBlocks) if rewrite.has(ModelBlocks) else ModelBlocks({})


def obstacle(found: ModelPlacements, cut: Round) -> str:
    """Return why the program of one device cannot be written, empty where it can."""
    state = found.state
    if len(set(cut.sizes)) > 1:
        return "blocks are of several sizes"
    for node in state.order:
        made = state.transfers[node]
        wanted = [want for want in made.operand_reshards.values() if isinstance(want, (Slice, LocalEntry))]
        if any(want.halo is not None for want in wanted):
            return f"'{node.name}' reads rows of its neighbours"
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
    """Return whether a collective can carry a value, where one has to."""
    placement = fact.placement
    if not (placement.is_split or placement.is_partial):
        return True
    return can_be_sent(fact.dtype, placement.op if placement.is_partial else "gather")


@dataclass
class LocalProgram:
    """Writes the program of one device.

    Attributes:
        found: the placements.
        cut: what is cut, in which sizes.
        number: of the axis, among the model axes.
        axis: what the mesh calls it.
        made: the conversions, with the node that makes each.
        sums: of segments, of which each device makes its rows, by name, with the rows of each.
        lookups: of rows in values of which each device has some, by name, with the rows of each.
    """

    found: ModelPlacements
    cut: Round
    number: int = 0
    axis: str = MODEL
    made: list[tuple[EdgePlan, Node]] = field(default_factory=list)
    sums: dict[str, Levels] = field(default_factory=dict)
    lookups: dict[str, Levels] = field(default_factory=dict)
    _made: dict[tuple[Value, object], Value] = field(default_factory=dict)

    @property
    def state(self) -> Propagation:
        """The placements."""
        return self.found.state

    @property
    def count(self) -> int:
        """How many devices the axis has."""
        return len(self.cut.sizes)

    @property
    def edges(self) -> tuple[EdgePlan, ...]:
        """What the devices of a replica exchange, under the names that values have in the program."""
        return tuple(replace(edge, value=node.inputs[0].name, axis=self.number) for edge, node in self.made)

    def blocked(self) -> ModelBlocks:
        """Return what the devices have blocks of; the program has been written."""
        placed = {value.name: self.state.source(value).placement for value in self.state.facts}
        placed |= {node.output().name: placement_of(edge.to) for edge, node in self.made}
        values = {name: ((self.axis, one),) for name, one in placed.items() if one.differs}
        variables = {name: ((self.axis, cut),) for name, cut in self.variables().items()}
        return ModelBlocks(variables, self.sums, self.lookups, values)

    def variables(self) -> dict[str, Sharded]:
        """Return how variables are cut, by name."""
        members = [(name, self.found.members[handle]) for handle, name in self.found.names.items()]
        return {name: Sharded(one.axis, tuple(size * one.rows for size in self.cut.sizes)) for name, one in members}

    def write(self) -> None:
        """Let nodes read what they want, and state the shapes of blocks."""
        graph, state = self.state.graph, self.state
        anchored, carried = set(graph.anchors.values()), carried_by(state)
        self._state_shapes_of_elements()
        for node in state.order:
            made = state.transfers[node]
            if made.constant:
                self._fold(node, made.outputs)
                continue
            member = self.found.members.get(handle_node(node.inputs[0])) if node.op == "VariableShape" else None
            if member is not None:
                shape = np.asarray(member.shape, dtypes.numpy_dtype(node.output_dtypes[0]))
                self._become_const(node, {"dtype": node.output_dtypes[0], "value": shape})
                continue
            for index, value in enumerate(node.inputs):
                want = carried.get(node) or self._wanted(node, index, value)
                if want is not None and value.node not in carried:  # which hands on what is converted before it
                    node.set_input(index, self.converted(value, want))
            if node.op == SEGMENT_SUM and state.source(node.output()).placement == split(0):
                self._sum_rows(node)
            if node.op == "GatherV2" and self._finds_rows(node):
                self.lookups[node.name] = self._rows(node.inputs[0])
        for value in anchored:
            if state.source(value).placement.differs and not is_handle(value):
                self._let_out(value)
        for handle, member in self.found.members.items():
            self._cut_handle(handle, member.shape, member.axis)
        for node in state.order:
            if node in carried:
                record_shapes(node, [None])
            elif any(state.source(value).placement.differs for value in node.outputs if value in state.facts):
                record_shapes(node, [self._shape(state.source(value)) for value in node.outputs])

    def _wanted(self, node: Node, index: int, value: Value) -> Reshard | None:
        state = self.state
        want = state.transfers[node].operand_reshards.get(index)
        if want is None and value in state.whole_inputs:
            fact = state.facts[value]
            return Slice(fact.placement.dim, unit(fact.split_size) or 1)
        if want is None and value in state.reduced and state.source(value).placement.differs:
            return state.reduced[value]
        return want

    def converted(self, value: Value, want: Reshard) -> Value:
        """Return a value as a reader wants it; equal conversions are made once."""
        key = value, want
        if key not in self._made:
            self._made[key] = self._convert(value, want)
        return self._made[key]

    def _convert(self, value: Value, want: Reshard) -> Value:
        before = self.state.source(value).placement
        if isinstance(want, LocalEntry):
            return self._with_entry(value, want)
        if isinstance(want, Slice):
            if before == split(want.dim):  # a tensor that is cut by hand, where it arises so
                return value
            if before == PARTIAL:
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
        if isinstance(block := self.state.reduced.get(value), Slice):  # which others read, and is less than the sum
            return self._reshard(self.converted(value, block), "whole", split(block.dim), REPLICATED, *block[:2])
        if before.kind == "local":
            fact = self.state.source(value)
            chosen = [is_local(entry) for entry in fact.value or ()]
            return self._scaled(value, chosen, "Mul", "whole", fact.shape)
        dim, rows = (before.dim, unit(self.state.source(value).split_size) or 1) if before.is_split else (0, 0)
        return self._reshard(value, "whole", before, REPLICATED, dim, rows)

    def _reshard(
        self, value: Value, what: str, before: Placement, after: Placement, dim: int = 0, rows: int = 0
    ) -> Value:
        sizes = [size * rows for size in self.cut.sizes] if rows else []
        said: dict[str, Any] = {
            "over": [self.axis],
            "before": _along(self.axis, before),
            "after": _along(self.axis, after),
            "dim": dim,
            "shards": sizes,
        }
        made = Builder.at(value.node, f"{what}_{value.index}" if value.index else what).op(RESHARD, value, **said)
        fact = self.state.facts.get(value)
        if fact is not None:
            whole = self.found.whole.facts.get(value)
            shape = (whole or fact).shape
            dims = None if shape is None else [size if isinstance(size, int) else None for size in shape]
            if dims is not None and after.is_split:
                dims[dim] = sizes[0]
            record_shapes(made.node, [None if dims is None else tuple(dims)])
        lowering = LOWERINGS[before.kind, after.kind]
        edge = EdgePlan(
            value.name, repr(before), repr(after), lowering=lowering, dtype=dtypes.dtype_name(value.dtype),
            reason="devices of a replica",
        )  # fmt: skip
        self.made.append((edge, made.node))
        return made

    def _with_entry(self, value: Value, want: LocalEntry) -> Value:
        """Return a shape whose entry is that of a block."""
        fact = self.state.facts[value]
        entries, rows = fact.value or (), unit(want.size) or 1
        if entries and all(isinstance(entry, int) for entry in entries):
            content = [rows * self.cut.sizes[0] if i == want.position else entry for i, entry in enumerate(entries)]
            return self._const(value, content, f"of_block_{want.position}")
        chosen = [i == want.position for i in range(len(entries))]
        return self._scaled(value, chosen, "FloorDiv", f"of_block_{want.position}", fact.shape)

    def _scaled(self, value: Value, chosen: list[bool], op: str, what: str, shape: Shape | None) -> Value:
        """Return sizes of which some count the elements of all devices instead of one's, or the other way round."""
        dims = [dim for dim in shape or () if isinstance(dim, int)]
        numbers = np.array([self.count if one else 1 for one in chosen]).reshape(dims)
        return Builder.at(value.node, what).op(op, value, self._const(value, numbers, f"{what}/devices"))

    def _const(self, near: Value, content: object, what: str) -> Value:
        """Return a constant of the type of a value; where that is in a loop, in each of its iterations."""
        made = Builder.at(near.node).const(content, near.dtype, what)
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
        """Let lists and arrays expect blocks, where that is what is put into them."""
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
        return size if size is None else size // self.count

    def _fold(self, node: Node, facts: Iterable[Fact]) -> None:
        """Let constants stand for sizes that are known."""
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
        """Let each device add up the segments that are its rows; which those are, `rows-of-shards` says."""
        self.sums[node.name] = rows = self._rows(node.output())
        node.set_input(2, Builder.at(node).const(rows[0][1].sizes[0], node.inputs[2].dtype, "rows_of_block"))

    def _finds_rows(self, node: Node) -> bool:
        """Return whether each device looks up those rows that it has, of all that are asked for."""
        state, table = self.state, node.inputs[0]
        is_own = table in state.facts and state.source(table).placement == split(0)  # else it is joined by now
        return is_own and state.source(node.output()).placement == PARTIAL

    def _rows(self, value: Value) -> Levels:
        """Return how many rows of a value each device has."""
        rows = unit(self.state.source(value).split_size) or 1
        return ((self.axis, Sharded(0, tuple(size * rows for size in self.cut.sizes))),)

    def _let_out(self, value: Value) -> None:
        """Let the outside read the whole of a value, under the name that it has."""
        graph, node = value.node.graph, value.node
        whole = self.converted(value, REPLICATED)
        graph.move_anchors(value, whole)
        if len(node.output_dtypes) == 1:
            name = node.name
            take_name(graph, node, graph.unique_name(f"{name}/block"))
            take_name(graph, whole.node, name)

    def _cut_handle(self, handle: Node, shape: tuple[int, ...], axis: int) -> None:
        local = tuple(size // self.count if i == axis else size for i, size in enumerate(shape))
        if "shape" in handle.attrs and handle.op == "VarHandleOp":
            handle.set_attr("shape", local)
        handle.drop_attr("_handle_shapes")

    def _shape(self, fact: Fact) -> tuple[int | None, ...] | None:
        if fact.shape is None or fact.dtype in (dtypes.RESOURCE, dtypes.VARIANT):
            return None
        return tuple(_size(dim, self.cut.sizes[0]) for dim in fact.shape)


def _size(dim: object, units: int) -> int | None:
    rows = unit(dim)  # type: ignore[arg-type]
    return rows * units if rows is not None else dim if isinstance(dim, int) else None


def _along(axis: str, placement: Placement) -> str:
    return repr(placement) if placement == REPLICATED else f"{{{axis}: {placement!r}}}"
