"""Propagate on the model axis: from the variables and tensors that are cut to all values.

    up: split(1)      MatMul(x, up): split(1) ─► Relu: split(1) ─► MatMul(., down): partial(sum) ─► one sum
    down: split(0)    bias: read in blocks only, so it is cut like what it is added to

The rules are those of the batch: a logical device holds a block, whose size is known. Nodes that no rule can cut run
once, on whole values. To place few tensors and let the others follow is the way of GSPMD (Xu et al. 2021) and Shardy;
`partial`, and the choice where it is summed, are those of DTensor and this package.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autograph_rewrite.analysis.propagate import Propagation, is_pinned, propagate, restate, revise
from autograph_rewrite.analysis.reduction_placement import Cuts, place_reductions, size_of
from autograph_rewrite.analysis.replicated_regions import maker
from autograph_rewrite.analysis.transfer import convert
from autograph_rewrite.analysis.transfer import transferred as answer_of
from autograph_rewrite.analysis.variable_uses import obstacle
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MODEL
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_handle, written
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Extent, Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import BLOCK, Dim, Sym, is_local, unit
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Semantics, Slice
from autograph_rewrite.ops.rules.marked import is_whole, make_whole, may_be_cut
from autograph_rewrite.ops.rules.table import families, family_of, rule_of
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, MERGES, SWITCHES, has
from autograph_rewrite.passes.base.anchors import outputs_of
from autograph_rewrite.passes.canonicalize import class_axis, decompose
from autograph_rewrite.passes.sharding.residence import with_slots
from autograph_rewrite.passes.sharding.shard_propagation import ShardedVariable
from autograph_rewrite.resolve.model_axis import Round
from autograph_rewrite.training_graph import TrainingGraph

MAX_ROUNDS = 64
_NUMBER = (dtypes.INT32, dtypes.INT64)


@dataclass(frozen=True)
class ModelPlacements:
    """The placements of a graph on the model axis.

    Attributes:
        state: of the graph in which variables and tensors are cut.
        whole: of the same graph in which nothing is cut.
        members: the variables that are cut, by the node that gives the handle.
        tensors: other values that are cut for their readers, with the dimension.
        names: of the members.
    """

    state: Propagation
    whole: Propagation
    members: Mapping[Node, ShardedVariable]
    tensors: Mapping[Value, int]
    names: Mapping[Node, str]


def model_placements(
    graph: Graph,
    item: TrainingGraph,
    cut: Round,
    step: set[Node],
    inputs: Mapping[Value, Fact],
    *,
    axis: str = MODEL,
    alike: bool = False,
) -> ModelPlacements:
    """Find the placements of all values; ops that mix blocks are decomposed.

    Args:
        cut: the variables and tensors that are placed by hand.
        step: the nodes that one step runs.
        inputs: facts of the batch inputs.
        axis: its name in the mesh.
        alike: all devices will run one program on their blocks: each has loops and lists of blocks, and looks up the
            rows that it has.
    """
    free = {name: one for name, one in item.variables.items() if one.shards is None and name not in cut.whole}
    item = replace(item, variables=free)
    whole_already = {node for node in graph if is_whole(node)}
    wanted = dict(cut.variables)
    by_hand = {graph.value(name): dim for name, dim in cut.tensors.items()}
    tensors = dict(by_hand)
    marked: set[Node] = set()
    rows: dict[Value, Fact] = {}
    early: set[Value] = set()
    scattered: dict[Value, Reshard] = {}
    whole = propagate(graph, {}, Semantics(), given=inputs)
    wanted = with_slots(item, whole, step, wanted)
    known: Propagation | None = None
    cuts: Cuts = {}
    for _ in range(MAX_ROUNDS):
        members, names = _members(graph, item, cut, wanted)
        given = dict(inputs) | rows | {handle.output(): _held(handle.output(), one) for handle, one in members.items()}
        if known is None:
            semantics = Semantics(extent=Extent(axis, cut.units, cut.sizes), alike=alike)
            known = propagate(graph, tensors, semantics, given=given)
        else:
            known = restate(known, tensors, given=given, reduced=scattered)
        if alone := [node for node in _not_cut(known, members, alike) if node not in marked]:
            for node in alone:
                make_whole(node)
            marked.update(alone)
        elif mixing := [node for node, made in known.transfers.items() if made.decompose]:
            blocks = decompose.Blocks(len(cut.sizes), cut.units)
            decompose.decompose(known, mixing, blocks)
        elif along := class_axis.cut_classes(known):
            for node, classes in along:
                tensors |= class_axis.decompose_classes(graph, node, classes)
        elif anyway := [value for value in by_hand if value in tensors and _is_cut_anyway(known, value)]:
            tensors = _without(tensors, anyway)
        else:
            reduced = (place_reductions(known, outputs_of(graph, item), cuts=cuts) | early) - scattered.keys()
            if alike and (in_blocks := _sums_in_blocks(known, reduced)):
                scattered |= in_blocks
                continue
            if reduced:
                known = restate(known, tensors, given=given, reduced=scattered | dict.fromkeys(reduced, REPLICATED))
            more = _more(known, item, members, cut.units)
            if not more:
                break
            if more.variables:
                whole = revise(whole)
                wanted = with_slots(item, whole, step, wanted | more.variables)
            rows |= more.rows
            tensors |= more.copies
            early |= more.early
    _forget_marks(graph, whole_already - {value.node for value in tensors})
    assert known is not None
    return ModelPlacements(known, revise(whole), members, tensors, names)


# If a reader takes a block of a sum, all readers get the sum in blocks: half as many bytes are sent, fewer are kept,
# and the ops on it are divided. Along time, this is sequence parallelism (Korthikanti et al., 2022).
#
#     before   y: partial(sum) ──► sum ──► x: split(1) + block of y       after   y ──► block of the sum ──► x + y


def _sums_in_blocks(state: Propagation, reduced: Iterable[Value]) -> dict[Value, Reshard]:
    """Return the sums that all readers get in blocks, with the block."""
    found: dict[Value, Reshard] = {}
    for value in reduced:
        wants = {state.transfers[node].operand_reshards.get(index) for node, index in value._uses}
        blocks = [one for one in wants if isinstance(one, Slice) and one.halo is None and not one.segments]
        if len(blocks) == 1 and state.source(value).placement == PARTIAL and value not in state.graph.anchors.values():
            found[value] = blocks[0]
    return found


def _forget_marks(graph: Graph, keep: Container[Node]) -> None:
    """Remove the marks of nodes that are whole on this axis, as they need not be whole on others."""
    for node in graph:
        if node not in keep:
            may_be_cut(node)


def _without(tensors: Mapping[Value, int], values: Collection[Value]) -> dict[Value, int]:
    """Return the tensors that are cut for their readers, without some; the copies of these become ordinary nodes."""
    for value in values:
        may_be_cut(value.node)
    return {value: dim for value, dim in tensors.items() if value not in values}


def _is_cut_anyway(state: Propagation, value: Value) -> bool:
    """Return whether a tensor that is cut by hand is computed in these blocks anyway, and need not be joined."""
    made, asked = state.facts[value.node.inputs[0]], state.facts[value]
    return made.placement == asked.placement and unit(made.split_size) == unit(asked.split_size) is not None


class _More(NamedTuple):
    """More to cut: variables, copies for some readers, sums of which each device computes its rows, and the
    contributions that are added up before those.
    """

    variables: dict[str, int]
    copies: dict[Value, int]
    rows: dict[Value, Fact]
    early: set[Value]

    def __bool__(self) -> bool:
        return any(self[:])


def _more(state: Propagation, item: TrainingGraph, members: Mapping[Node, ShardedVariable], units: int) -> _More:
    """Return the variables and values that are only read in blocks, and are therefore cut; add copies to the graph."""
    graph, reads = state.graph, block_reads(state, units)
    variables = _variables_read_in_blocks(graph, item, reads, members, units)
    copies = cut_operands(reads, {graph.nodes[item.variables[name].handle] for name in variables})
    rows = {value: convert(state.facts[value], block, units) for value, block in reads.by_rows.items()}
    return _More(variables, copies, rows, reads.early)


def _held(handle: Value, member: ShardedVariable) -> Fact:
    """Return the fact of a handle: each device has a block of the variable."""
    return Fact(split(member.axis), handle.dtype, member.block, held=True)


def _members(
    graph: Graph, item: TrainingGraph, cut: Round, wanted: Mapping[str, int]
) -> tuple[dict[Node, ShardedVariable], dict[Node, str]]:
    members, names = {}, {}
    for name, dim in wanted.items():
        variable = item.variables[name]
        handle = graph.nodes.get(variable.handle)
        if handle is not None:
            shape = tuple(size for size in variable.shape or () if size is not None)
            members[handle], names[handle] = ShardedVariable(shape, dim, shape[dim] // cut.units), name
    return members, names


def _not_cut(state: Propagation, members: Mapping[Node, ShardedVariable], alike: bool) -> Iterator[Node]:
    """Yield the nodes whose placements cannot be carried out, so that they work on whole values.

    Unless devices run alike, they share a tensor array, which holds whole values: its maker is yielded for its readers
    and writers.
    """
    for node, made in state.transfers.items():
        if alike and made.operand_reshards:
            yield from _of_lists(state, node, made.operand_reshards)
        if node in members or is_whole(node):
            continue
        cell = state.facts[node.inputs[0]].cell if node.inputs else ""
        for fact in made.outputs:
            if not alike and fact.placement.differs and cell and not is_whole(maker(state, cell)):
                yield maker(state, cell)
                break
            if fact.placement.differs and not _is_carried_out(state, node, fact, alike) and not _touches(node, members):
                yield node
                break
        else:
            if made.operand_reshards and any(not _is_given(want) for want in made.operand_reshards.values()):
                yield node


def _of_lists(state: Propagation, node: Node, wants: Iterable[int]) -> Iterator[Node]:
    """Yield the nodes that must work on whole values because no op can convert a list.

    First that is the reader that needs the list converted; if it still does afterwards, the maker of the list.
    """
    for index in wants:
        if state.facts[node.inputs[index]].dtype == dtypes.VARIANT:
            source = node
            while is_whole(source) and (source is node or source.op in _DOORS):
                source = source.inputs[index if source is node else 0].node
            yield source


_DOORS = ENTERS | EXITS | MERGES | SWITCHES | BACK_EDGES | {"Identity"}
"""Ops that pass a list on."""


def _touches(node: Node, members: Mapping[Node, ShardedVariable]) -> bool:
    return any(is_handle(value) and handle_node(value) in members for value in node.inputs)


def _is_carried_out(state: Propagation, node: Node, fact: Fact, alike: bool) -> bool:
    """Return whether a value that differs between devices can be computed on each, and joined again."""
    if alike and fact.dtype == dtypes.VARIANT:
        return True
    if (node in state.looped and not alike) or fact.dtype in (dtypes.VARIANT, dtypes.RESOURCE):
        return False
    if fact.placement.is_split:
        return unit(fact.split_size) is not None
    if fact.is_local:
        return fact.value is not None and fact.dtype in _NUMBER and all(map(_is_multiple, fact.value))
    return True


def _is_multiple(entry: Dim) -> bool:
    """Return whether a size is the same for all devices, or known to be a multiple of the units of a block."""
    return entry is not None and (not is_local(entry) or (isinstance(entry, Sym) and BLOCK in entry.factors))


def _is_given(want: Reshard) -> bool:
    if isinstance(want, LocalEntry):
        return _is_multiple(want.size)
    return isinstance(want, Slice) or not want.is_split


def _variables_read_in_blocks(
    graph: Graph, item: TrainingGraph, reads: BlockReads, members: Mapping[Node, ShardedVariable], units: int
) -> dict[str, int]:
    """Return variables of which all reads take blocks of one dimension, with that dimension.

    Of a matrix it is enough that one read does, and none takes blocks of another dimension: this is the weight of a
    layer whose input is cut, and its gradient reads the matrix whole only as long as it is not cut.
    """
    found: dict[str, int] = {}
    for name, variable in item.variables.items():
        handle = graph.nodes.get(variable.handle)
        if handle is None or handle in members or not variable.shape or obstacle(handle) is not None:
            continue
        dims = {dim for use in handle_uses(handle) for dim in _taken(reads, use.node)}
        if len(dims - {None}) != 1 or (None in dims and len(variable.shape) < 2):
            continue
        (dim,) = dims - {None}
        size = variable.shape[dim] if dim is not None else None
        if dim is not None and size is not None and size % units == 0:
            found[name] = dim
    return found


def _taken(reads: BlockReads, node: Node) -> Iterable[int | None]:
    """Yield the dimension of which the readers of a variable take blocks; None if they take more."""
    if node.op == "ReadVariableOp":
        if node.output().uses:
            block = reads.taken(node.output())
            yield None if block is None else block.dim
    elif not written(node) and node.op != "VarIsInitializedOp":
        yield None


# Backward propagation: a value that is only read in blocks is computed in blocks, if its operands can be cut instead.
#
#     before   Einsum(mask, tokens) [E, C, d] ──► its block of experts ──► Einsum(., expert/part_k)
#     after    mask [t, E, C] ──► its block of experts ──► Einsum(., tokens)/part_k ──► Einsum(., expert/part_k)
#
# One walk against the order finds all such nodes: the readers of each take blocks of one dimension, by their placement
# or because the walk has just found them. It goes on only if the operands to cut have no more bytes than the results,
# or if a contraction is divided. GSPMD (Xu et al., 2021) propagates both ways, too.


_CONTRACTIONS = families("contraction")


@dataclass
class BlockReads:
    """The readers that take blocks.

    Attributes:
        of: the block that a reader takes of an operand, if it is one of `moved`.
        moved: the nodes that can run on blocks, with the operand of each that must be cut for that.
        by_rows: sums of segments of which each device can compute the rows that it needs, from all operands.
        early: contributions to such sums that must be added up before them; for a tied table these are fewer bytes.
    """

    state: Propagation
    of: dict[tuple[Node, int], Slice] = field(default_factory=dict)
    moved: dict[Node, int] = field(default_factory=dict)
    by_rows: dict[Value, Slice] = field(default_factory=dict)
    early: set[Value] = field(default_factory=set)

    def taken(self, value: Value) -> Slice | None:
        """Return the block that all readers take of a value; None if they take more, or different blocks."""
        found: Slice | None = None
        for reader, index in value._uses:
            block = self._by(reader, index)
            if block is None or found not in (None, block):
                return None
            found = block
        return found

    def is_cut(self, node: Node, index: int, block: Slice) -> bool:
        """Return whether an operand costs nothing to cut: it is a constant or a variable, or another reader cuts it.

        Args:
            block: the block that the reader would take.
        """
        value = node.inputs[index]
        others = (use for use in value.uses if (use.node, use.index) != (node, index))
        return has(value.node.op, "weights") or any(self._by(*use) == block for use in others)

    def _by(self, reader: Node, index: int) -> Slice | None:
        if reader in self.moved:
            return self.of.get((reader, index))
        made = self.state.transfers.get(reader)
        want = None if made is None else made.operand_reshards.get(index)
        return want if isinstance(want, Slice) and not want.segments and want.halo is None else None


def block_reads(state: Propagation, units: int) -> BlockReads:
    """Find the values that are only read in blocks, and can be computed in blocks.

    Args:
        units: that all blocks have together.
    """
    reads = BlockReads(state)
    anchored = set(state.graph.anchors.values())
    read = _read_in_blocks(state)
    for node in reversed(state.order):
        if node not in read:
            continue
        wanted = {value.index: reads.taken(value) for value in node.read_outputs}
        blocks = {index: block for index, block in wanted.items() if block is not None}
        if not blocks or len(blocks) < len(wanted):
            continue
        is_by_rows = node.op == SEGMENT_SUM and blocks[0] == Slice(0, (_rows(state, node) or 0) // units)
        if is_by_rows and [fact.placement.is_partial for fact in state.transfers[node].inputs] == [True, False, False]:
            reads.early.add(node.inputs[0])
        if not _may_be_cut(state, node) or not anchored.isdisjoint(node.outputs):
            continue
        if is_by_rows:
            reads.by_rows[node.output()] = blocks[0]
            continue
        for index, taken in _ways(reads, node, units, blocks):
            reads.moved[node] = index
            reads.of |= {(node, i): block for i, block in taken.items()}
            read.update(node.inputs[i].node for i in taken)
            break
    return reads


def _read_in_blocks(state: Propagation) -> set[Node]:
    """Return the nodes of which some reader takes a block."""
    return {
        node.inputs[index].node
        for node, made in state.transfers.items()
        if made.operand_reshards
        for index, want in made.operand_reshards.items()
        if isinstance(want, Slice)
    }


def _rows(state: Propagation, node: Node) -> int | None:
    """Return the number of rows of a sum of segments; None if unknown."""
    shape = state.facts[node.output()].shape
    return shape[0] if shape and isinstance(shape[0], int) else None


def cut_operands(reads: BlockReads, follow: Container[Node]) -> dict[Value, int]:
    """Add copies of the operands that must be cut, and are not computed in blocks; return them with the dimension.

    Args:
        reads: of the graph, which is edited.
        follow: handles of variables that will be cut, whose reads need no copy.
    """
    copies: dict[tuple[Value, Slice], Value] = {}
    for node, index in reads.moved.items():
        value, block = node.inputs[index], reads.of[node, index]
        source, made = value.node, value.node in reads.moved or value in reads.by_rows
        if made or (has(source.op, "reads_whole") and handle_node(source.inputs[0]) in follow):
            continue
        if (value, block) not in copies:
            copy = Builder.at(value.node).node("Identity", value, what="in_blocks")
            make_whole(copy)
            copies[value, block] = copy.output()
        node.set_input(index, copies[value, block])
    return {copy: block.dim for (_, block), copy in copies.items()}


def _may_be_cut(state: Propagation, node: Node) -> bool:
    """Return whether a node computes whole values from whole values, and may run on several devices."""
    made = state.transfers.get(node)
    if made is None or not node.inputs or has(node.op, "weights") or node in state.looped or is_whole(node):
        return False
    if (
        rule_of(node.op) is None
        or node.op in EXITS
        or is_pinned(node)
        or any(is_handle(value) for value in (*node.inputs, *node.outputs))
    ):
        return False
    facts = (*made.inputs, *made.outputs)
    return not any(fact.placement.differs or fact.dtype == dtypes.VARIANT for fact in facts)  # no op cuts a list


def _ways(
    reads: BlockReads, node: Node, units: int, wanted: Mapping[int, Slice]
) -> Iterator[tuple[int, dict[int, Slice]]]:
    """Yield each operand that, cut into blocks, gives a node's results in the wanted blocks, with all blocks read."""
    state = reads.state
    facts = state.transfers[node].inputs
    for index, fact in enumerate(facts):
        for dim, size in enumerate(fact.shape or ()):
            if not isinstance(size, int) or size < units or size % units:
                continue
            block = Slice(dim, size // units)
            inputs = tuple(
                convert(one, block, state.semantics.extent.units) if i == index else one for i, one in enumerate(facts)
            )
            made = answer_of(node, inputs, {}, state.semantics)
            if made.decompose or not all(_is(made.outputs[i], one) for i, one in wanted.items()):
                continue
            others = made.operand_reshards
            if not all(isinstance(want, (Slice, LocalEntry)) for want in others.values()):
                continue
            taken = {index: block} | {i: want for i, want in others.items() if isinstance(want, Slice)}
            if _is_worth_it(reads, node, taken, wanted):
                yield index, taken


def _is(fact: Fact, block: Slice) -> bool:
    return fact.placement == split(block.dim) and unit(fact.split_size) == block.unit


def _is_worth_it(reads: BlockReads, node: Node, taken: Mapping[int, Slice], wanted: Mapping[int, Slice]) -> bool:
    """Return whether operands to cut have no more bytes than the results, or a contraction is divided."""
    if family_of(node.op) in _CONTRACTIONS:
        return True
    facts = reads.state.facts
    before = [facts[node.output(index)] for index in wanted]
    after = [facts[node.inputs[index]] for index, block in taken.items() if not reads.is_cut(node, index, block)]
    return sum(map(_bytes, after)) <= sum(map(_bytes, before))


def _bytes(fact: Fact) -> int:
    return math.prod(size_of(dim) for dim in fact.shape or (None,)) * dtypes.width(fact.dtype)


SEGMENT_SUM = "UnsortedSegmentSum"
"""The op of the dense gradient of a table; if that is cut by rows, each device adds up its rows."""
