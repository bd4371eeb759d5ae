"""Compute the transfer function of propagation: a node's placements and reshards from the facts of its operands.

    facts of the inputs ──measure or place──► conversions, facts of the outputs

It is a pure function of op, attributes, facts and semantics, so that equal nodes share one answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import REPLICA
from autograph_rewrite.ir.recorded_shapes import recorded_shapes
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import (
    ANY,
    LOCAL,
    PARTIAL,
    REPLICATED,
    UNKNOWN,
    Extent,
    Fact,
    Placement,
    Shape,
    split,
)
from autograph_rewrite.ops.facts.symbolic_dims import (
    Dim,
    Sym,
    any_local,
    is_local,
    is_segmented,
    joined,
    local_symbol,
    segments,
    shard_symbol,
    to_global,
    unit,
)
from autograph_rewrite.ops.rules.base import (
    OWN_VALUE,
    LocalEntry,
    Op,
    Placed,
    Reshard,
    Rule,
    Semantics,
    Slice,
    whole,
)
from autograph_rewrite.ops.rules.inference import LARGEST_TRACKED
from autograph_rewrite.ops.rules.marked import (
    BLOCK_MARKS,
    BLOCKWISE,
    OF_BLOCK,
    OF_EACH,
    OF_ONE,
    OWN,
    PINNED,
    ROWS_APART,
    WHOLE,
    is_whole,
    kind_of,
    marked,
    place_in_block,
    why_in_block,
)
from autograph_rewrite.ops.rules.table import families, rule_of
from autograph_rewrite.ops.rules.varying import let_out_as, place_of_one, place_varying
from autograph_rewrite.ops.traits import MERGES, has, ops_with

MEASURES = ops_with("measures")


class NodeTransfer(NamedTuple):
    """The answer of propagation for one node."""

    outputs: tuple[Fact, ...]
    operand_reshards: Mapping[int, Reshard] = {}
    decompose: bool = False
    note: str = ""
    holds: tuple[int, int] | None = None
    constant: bool = False  # its outputs are plain integers although its inputs differ between replicas
    inputs: tuple[Fact, ...] = ()  # as propagation saw them
    more: Mapping[str, Mapping[int, Reshard]] = {}  # conversions along axes other than the batch's


def _static_shapes(node: Node, count: int) -> tuple[Shape | None, ...]:
    stated = recorded_shapes(node)
    return tuple(stated) if len(stated) == count else (None,) * count


def transferred(node: Node, inputs: tuple[Fact, ...], cells: Mapping[int, Fact], semantics: Semantics) -> NodeTransfer:
    """Return placements, conversions and facts for one node.

    Args:
        cells: facts of the contents of containers, by the operand that is the handle.
        semantics: what the configuration lets rules assume.
    """
    dtypes_out = node.output_dtypes
    if any(f.placement == UNKNOWN for f in inputs) and node.op not in MERGES:
        return NodeTransfer(tuple(Fact(UNKNOWN, dtype) for dtype in dtypes_out))
    n = Op(node.op, node.attr, inputs, dtypes_out, _static_shapes(node, len(dtypes_out)), semantics, cells)
    if any(fact.others for fact in (*inputs, *cells.values())):
        return _on_every_axis(node, n)
    return _on_one_axis(node, n)


def _on_every_axis(node: Node, n: Op) -> NodeTransfer:
    """Ask the rule on one axis of the mesh after another, the major one first.

        x: {replica: split(0), model: split(1)}, [b, T:@model/b]
        on replica     split(0), [b, 64]                sizes that later axes cut are whole
        on model       split(1), [T:@replica/b, b]      those that earlier axes cut are those of a block

    A conversion applies before the next axis is asked. Blocks of blocks of one dimension are adjacent only within a
    block of the major axis: before a conversion on the major axis, the value is made whole along the minor axes.
    """
    axes, inputs = (n.semantics.extent, *n.semantics.more), list(n.inputs)
    wanted: dict[str, dict[int, Reshard]] = {extent.axis: {} for extent in axes}
    static, answers = n.static, list[NodeTransfer]()
    outputs: list[Fact] = []
    for at, extent in enumerate(axes):
        axis, later = extent.axis, axes[at + 1 :]
        if at and not any(f.placement_on(axis).differs for f in (*inputs, *n.cells.values())):
            continue
        cells = {i: _seen_on(fact, extent, later) for i, fact in n.cells.items()}
        seen = tuple(_seen_on(fact, extent, later) for fact in inputs)
        found = _on_one_axis(
            node, n._replace(inputs=seen, cells=cells, static=static, semantics=n.semantics.on(extent))
        )
        for i, reshard in found.operand_reshards.items():
            wanted[axis][i] = reshard
            inputs[i] = _converted_on(inputs[i], reshard, extent, later, wanted, i)
        pairs = zip(found.outputs, outputs or found.outputs, strict=True)
        outputs = [_settled(fact, earlier, extent) if at else fact for fact, earlier in pairs]
        static = tuple(
            None if f.shape is None else tuple(dim if isinstance(dim, int) else None for dim in f.shape)
            for f in found.outputs
        )
        answers.append(found)
    first = answers[0]
    return first._replace(
        outputs=tuple(outputs),
        decompose=any(found.decompose for found in answers),
        note="; ".join(found.note for found in answers if found.note),
        constant=first.constant and len(answers) == 1,
        inputs=n.inputs,
        more={extent.axis: wanted[extent.axis] for extent in axes[1:] if wanted[extent.axis]},
    )


def _seen_on(fact: Fact, extent: Extent, later: Iterable[Extent]) -> Fact:
    """Return a fact as the rule on one axis sees it: whole along later axes, with the blocks of this one as `b`."""
    for other in later:
        fact = _whole_on(fact, other)
    placement = fact.placement_on(extent.axis)
    return fact.on(extent.axis)._replace(placement=placement._replace(extent=None), others=())


def _whole_on(fact: Fact, extent: Extent) -> Fact:
    """Return a fact with the value whole along an axis."""
    if not fact.placement_on(extent.axis).differs:
        return fact
    seen = convert(fact.on(extent.axis), REPLICATED, extent.units)._replace(placement=fact.placement)
    return seen.on(REPLICA, extent.axis).placed(extent.axis, REPLICATED)


def _converted_on(
    fact: Fact,
    reshard: Reshard,
    extent: Extent,
    later: Iterable[Extent],
    wanted: dict[str, dict[int, Reshard]],
    at: int,
) -> Fact:
    """Return the fact of an operand after its conversion along an axis; note the gathers that it needs before that."""
    before = fact.placement_on(extent.axis)
    touched = {before.dim} if before.is_split else set()
    if isinstance(reshard, Slice):
        touched.add(reshard.dim)
    for other in later:
        minor = fact.placement_on(other.axis)
        if minor.kind == "local" or (minor.is_split and minor.dim in touched):
            fact, wanted[other.axis][at] = _whole_on(fact, other), REPLICATED
    made = convert(fact.on(extent.axis), reshard, extent.units)
    new = made.placement if isinstance(reshard, (LocalEntry, Slice)) else reshard
    return made._replace(placement=fact.placement).on(REPLICA, extent.axis).placed(extent.axis, _of(new, extent))


def _of(placement: Placement, extent: Extent) -> Placement:
    """Return a placement along an axis, with its extent; the batch's needs none."""
    return placement._replace(extent=extent) if placement.differs and extent.axis != REPLICA else placement


def _settled(fact: Fact, earlier: Fact, extent: Extent) -> Fact:
    """Return a result with its placement along an axis, in addition to those along earlier axes."""
    told = fact.on(REPLICA, extent.axis)._replace(placement=earlier.placement, others=earlier.others)
    return told.placed(extent.axis, _of(fact.placement, extent))


def _on_one_axis(node: Node, n: Op) -> NodeTransfer:
    rule, semantics = rule_of(node.op) if kind_of(node) != PINNED else None, n.semantics
    if semantics.segments and any(f.is_segmented for f in n.inputs):
        return _of_segments(node, n, rule)
    found = _answer(node, n, rule)
    if semantics.segments and are_lost(n.op, (), found.outputs):
        return _conclude(node, n, None, whole(n), "")
    return found


def _of_segments(node: Node, n: Op, rule: Rule | None) -> NodeTransfer:
    """Answer for a node that reads blocks with segments, or their sizes: whole, where its rule does not keep them."""
    apart: dict[int, Reshard] = dict.fromkeys(read_whole(n, rule), REPLICATED)
    batch = n.semantics.extent.units
    found = _answer(node, n._replace(inputs=_converted(n.inputs, apart, batch)), rule)
    operand_reshards = {**apart, **found.operand_reshards}
    after = _converted(n.inputs, operand_reshards, batch)
    if are_lost(n.op, after, found.outputs):
        return _conclude(node, n, None, whole(n), "")
    return found._replace(inputs=n.inputs, operand_reshards=operand_reshards)


def _answer(node: Node, n: Op, rule: Rule | None) -> NodeTransfer:
    if (of_block := marked(node, OF_BLOCK)) is not None:
        return _of_block(node, n, rule, of_block)
    if kind_of(node) == OF_EACH:
        return _conclude(node, n, rule, Placed((OWN_VALUE,) * len(n.output_dtypes)), "")
    varies = any(f.placement == OWN_VALUE for f in n.inputs)
    if varies and n.op not in MEASURES and rule is not None:
        return _conclude(node, n, rule, place_varying(n, rule), "")
    try:
        measured = _measured(n, rule) if rule is not None and rule.value is not None else None
        return measured or _conclude(node, n, rule, *_place(n, rule))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # A malformed or unforeseen node must not make the graph unusable: whole is always right.
        return _conclude(node, n, None, whole(n), f"the rule of {node.op} failed ({error!r})")


def _of_block(node: Node, n: Op, rule: Rule | None, mark: str) -> NodeTransfer:
    """Answer for a node that takes its block for the whole batch: partial operands and sizes in casts are complete."""
    seen = n._replace(inputs=tuple(_as_all_there_is(fact, n.op) for fact in n.inputs))
    if mark not in BLOCK_MARKS:
        return NodeTransfer((let_out_as(mark, n.inputs[0]),), inputs=n.inputs)
    placed = (place_of_one(seen), "") if mark == OF_ONE else _place(seen, rule)
    found = _conclude(node, seen, rule, *placed)
    differs = any(fact.placement.differs for fact in n.inputs)
    kind = OWN_VALUE if mark in (OWN, OF_ONE) else PARTIAL
    outputs = [
        fact if fact.placement.is_split or not differs else fact._replace(placement=kind, value=None, zero=False)
        for fact in found.outputs
    ]
    return found._replace(outputs=tuple(outputs), decompose=False, inputs=n.inputs)


def _as_all_there_is(fact: Fact, op: str) -> Fact:
    if fact.placement.is_partial or (op == "Cast" and fact.is_local):
        return fact._replace(placement=REPLICATED, value=None)
    return fact


def _measured(n: Op, rule: Rule) -> NodeTransfer | None:
    """Interpret a size symbolically; None where that is not possible, or where it is no size."""
    assert rule.value is not None
    if any(f.cell for f in n.inputs):
        return None
    differs = n.op in MEASURES and any(f.placement.differs for f in n.inputs)
    local = any(f.is_local for f in n.inputs)
    # For open sizes the kernel also names dimensions that are 1 on both sides by chance; a block may have no row there.
    names = rule.axes is not None and any(n.ints(i) is None for i in range(len(n.inputs)))
    if not (differs or local or names):
        return None
    if any(f.placement.is_split or f.placement.is_partial for f in n.inputs) and n.op not in MEASURES:
        return None
    values = rule.value(n)
    if values is None or any(v is None for v in values):
        return None
    if (not has(n.op, "moves") or n.op == "Size") and any(None in v for v in values if v is not None):
        return None
    shapes = rule.shape(n) if rule.shape is not None else (None,) * len(values)
    outputs = []
    for value, shape, dtype in zip(values, shapes, n.output_dtypes, strict=True):
        placement = LOCAL if any_local(value) else REPLICATED
        outputs.append(Fact(placement, dtype, shape if shape is not None else (len(value or ()),), value))
    if all(fact.placement == REPLICATED for fact in outputs):
        if all(isinstance(entry, int) for fact in outputs for entry in fact.value or ()):
            return NodeTransfer(tuple(outputs), constant=True)
        if local:
            return NodeTransfer(tuple(outputs), {i: REPLICATED for i, f in enumerate(n.inputs) if f.is_local})
    return NodeTransfer(tuple(outputs))


def _place(n: Op, rule: Rule | None) -> tuple[Placed, str]:
    if (stays := place_in_block(n)) is not None:
        return stays, ""
    if (why := marked(n, WHOLE)) is not None:
        return whole(n), why
    if n.op in MEASURES:
        if any(f.placement.is_split and (f.shape is None or n.op == "Size") for f in n.inputs):
            return whole(n), f"{n.op} measures a split value of unknown size"
        return Placed((REPLICATED,) * len(n.output_dtypes)), ""
    if rule is None:
        placed = whole(n)
        return placed, f"{n.op} has no rule" if placed.operand_reshards else ""
    placed_or_none = rule.place(n)
    if placed_or_none is None:
        return whole(n), f"{n.op} has no rule for this case"
    return placed_or_none, placed_or_none.note


def convert(fact: Fact, reshard: Reshard, batch: int | None) -> Fact:
    """Return the fact of an input after its conversion; `batch`: examples of the global batch, where it is static."""
    if isinstance(reshard, LocalEntry):
        value = list(fact.value or ())
        value[reshard.position] = reshard.size
        return fact._replace(placement=LOCAL, value=tuple(value))
    shape = fact.shape
    if shape is not None:
        shape = tuple(to_global(dim, batch) for dim in shape)
    if isinstance(reshard, Slice):
        if shape is not None:
            block = joined(reshard.segments or (reshard.unit,))
            if reshard.shards:
                block = shard_symbol(reshard.shards)._replace(coef=reshard.unit)
            shape = (*shape[: reshard.dim], block, *shape[reshard.dim + 1 :])
        return fact._replace(placement=Placement("split", reshard.dim), shape=shape, value=None)
    value_after = fact.value
    if value_after is not None:
        value_after = tuple(to_global(entry, batch) for entry in value_after)
    return fact._replace(placement=reshard, shape=shape, value=value_after)


def _converted(facts: tuple[Fact, ...], reshards: Mapping[int, Reshard], batch: int | None) -> tuple[Fact, ...]:
    """Return the facts of inputs after their conversions."""
    if not reshards:
        return facts
    return tuple(convert(fact, reshards[i], batch) if i in reshards else fact for i, fact in enumerate(facts))


def stated_as(fact: Fact, placement: Placement, batch: int | None) -> Fact:
    """Return the fact of a value whose placement the caller states.

    Args:
        fact: from its rule.
        batch: examples of the global batch, where it is static.
    """
    if fact.placement == placement:
        return fact
    whole = convert(fact, REPLICATED, batch)
    if not placement.is_split:
        return whole._replace(placement=placement)
    size = whole.shape[placement.dim] if whole.shape is not None else None
    rows = size.coef if isinstance(size, Sym) else (size or 0) // (batch or 1) if batch else 1
    return convert(whole, Slice(placement.dim, max(rows, 1)), batch)


def _conclude(node: Node, n: Op, rule: Rule | None, placed: Placed, note: str) -> NodeTransfer:
    """Work the output facts out from the converted inputs."""
    batch = n.semantics.extent.units
    inputs = _converted(n.inputs, placed.operand_reshards, batch)
    after = n._replace(inputs=inputs)
    count = len(n.output_dtypes)
    shapes: tuple[Shape | None, ...] = (None,) * count
    values: tuple[tuple[Dim, ...] | None, ...] = (None,) * count
    reached = not any(f.placement == UNKNOWN for f in inputs)
    if rule is not None and rule.shape is not None and (reached or node.op in MERGES):
        shapes = rule.shape(after)
    is_size = not any(p.is_split or p.is_partial for p in placed.outputs)
    if rule is not None and rule.value is not None and reached and is_size:
        values = rule.value(after) or values
    if len(shapes) != count or len(placed.outputs) != count:
        raise PassError(f"the rule of {node.op} answers for another number of outputs", node=node)
    for placement, shape in zip(placed.outputs, shapes, strict=True):
        _check_blocks(placement, shape)
    outputs = tuple(_output(after, node, i, placed, shapes[i], values[i]) for i in range(count))
    if rule is not None and rule.axes is not None and reached and None in values:
        outputs = tuple(fact._replace(axes=axes) for fact, axes in zip(outputs, rule.axes(after), strict=True))
    if any(f.held for f in inputs) and all(f.held or f.value is not None for f in inputs):
        outputs = tuple(fact._replace(held=fact.placement.differs) for fact in outputs)
    if any(f.cell for f in inputs):
        outputs = _carry_cells(node, inputs, outputs)
    elif has(node.op, "cell_makers"):
        outputs = (outputs[0]._replace(cell=node.name), *outputs[1:])
    return NodeTransfer(outputs, placed.operand_reshards, placed.decompose, note, placed.holds, False, n.inputs)


def _output(n: Op, node: Node, index: int, placed: Placed, shape: Shape | None, value: tuple[Dim, ...] | None) -> Fact:
    """Return the fact of one output, from the placement, shape and contents that the rule gives."""
    placement, dtype, static = placed.outputs[index], n.output_dtypes[index], n.static[index]
    if dtypes.base(dtype) in (dtypes.VARIANT, dtypes.RESOURCE):
        static = None  # this is the handle's shape; a handle's fact has the shape of its contents
    if shape is None:
        shape = static
    elif static is not None and len(static) == len(shape) and None in shape:
        shape = tuple(s if mine is None else mine for mine, s in zip(shape, static, strict=True))
    if shape is not None:
        shape = _settle_shape(node, index, placement, shape, n.semantics.extent.units)
    if value is not None and len(value) > LARGEST_TRACKED:
        value = None
    zero = bool(placed.zero and placed.zero[index])
    return Fact(placement, dtype, shape, value if placement in (REPLICATED, LOCAL, ANY) else None, zero)


def _check_blocks(placement: Placement, shape: Shape | None) -> None:
    """Refuse an answer that contradicts itself: a block has the examples of one replica along its split dimension only.

    If two dimensions counted examples, one would be another replica's, and a block of one row would be broadcast.
    """
    counted = [i for i, dim in enumerate(shape or ()) if is_local(dim) and placement not in (split(i), OWN_VALUE)]
    if counted:
        raise ValueError(f"{placement} of the shape {shape}, which counts a block in dimension {counted[0]}")


def _settle_shape(node: Node, index: int, placement: Placement, shape: Shape, batch: int | None) -> Shape:
    """Make the split dimension, and no other, a block size."""
    dims = [dim if placement.is_split and i == placement.dim else to_global(dim, batch) for i, dim in enumerate(shape)]
    if placement.is_split and placement.dim < len(dims) and not is_local(dims[placement.dim]):
        size = dims[placement.dim]
        if isinstance(size, int) and batch and size % batch == 0:
            dims[placement.dim] = local_symbol()._replace(coef=size // batch)
        else:
            dims[placement.dim] = local_symbol(f"{node.name}:{index}")
    return tuple(dims)


def _carry_cells(node: Node, inputs: tuple[Fact, ...], outputs: tuple[Fact, ...]) -> tuple[Fact, ...]:
    cell = next(fact.cell for fact in inputs if fact.cell)
    if has(node.op, "forwards_handle"):
        return tuple(f._replace(cell=cell) if f.dtype in (dtypes.RESOURCE, 0) else f for f in outputs)
    if has(node.op, "gradient_cells"):
        source = node.attr("source", b"")
        return (outputs[0]._replace(cell=f"{cell}@{source.decode()}"), *outputs[1:])
    return outputs


# Segments: the blocks of a concatenation along the batch, each made of one block of every operand.
#
#     whole   a0 a1 a2 b0 b1 b2        concat([a, b], 0)
#     blocks  a0 a1 b0 b1 | a2 b2      each replica has its rows of a, then its rows of b
#
# An op that does not depend on the order of rows works on these blocks as on any others: the size of the cut dimension,
# `b[1,1]`, keeps blocks of other rows from lining up with them. Only the op families below read them. Every other op
# reads the whole, in the order of the original; so does an op of these families whose results would lose the segments.


FAMILIES = families(
    "elementwise", "reduce", "contraction", "layout", "layers", "convolutions", "normalization", "pooling",
    "concat_split", "slicing", "sizes", "ensure_shape",
)  # fmt: skip
"""Rules that do not depend on the order of rows, and line blocks up by their sizes only."""


def read_whole(n: Op, rule: Rule | None) -> tuple[int, ...]:
    """Return the inputs with segments that an op has to read whole."""
    found = tuple(i for i, fact in enumerate(n.inputs) if fact.is_segmented and fact.placement.differs)
    if rule is None or is_whole(n) or why_in_block(n) in (BLOCKWISE, ROWS_APART):
        return found
    if has(n.op, "gathers") or n.op == "ResourceGather":
        return tuple(i for i in found if not i and not n.inputs[0].is_local)
    return () if rule.family in FAMILIES else found


def are_lost(op: str, inputs: Sequence[Fact], outputs: Iterable[Fact]) -> bool:
    """Return whether a result that is made of blocks with segments has none that are known."""
    had = any(fact.placement.is_split and is_segmented(fact.split_size) for fact in inputs)
    for fact in outputs:
        size = fact.split_size
        if not fact.placement.is_split or segments(size):
            continue
        if is_segmented(size) or (had and (not has(op, "cuts") or unit(size) is None)):
            return True
    return False
