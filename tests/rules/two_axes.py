"""A node on two axes of a mesh: what propagation says of it, run on the blocks of each coordinate, gives the whole.

inputs ──placements by axis──► transfer ──► run at (replica i, device j) ──► together along model, then replica
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.analysis.transfer import NodeTransfer, transferred
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import MODEL, REPLICA
from autograph_rewrite.ir.recorded_shapes import record_shapes
from autograph_rewrite.ops.facts.placement import LOCAL, PARTIAL, REPLICATED, Extent, Fact, Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym, on_axis
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Semantics
from autograph_rewrite.ops.traits import has
from tests.rules import harness
from tests.rules.harness import GROWTH, units_of
from tests.rules.nodes import node_of
from tests.rules.runner import number_of, number_of_input, run_once
from tests.rules.sample import DEFAULT_SIZES, Draw, Elements, Known, Sample

AXES = (REPLICA, MODEL)
Blocks = dict[str, tuple[int, ...]]
"""Units of each block, by axis."""


@dataclass(frozen=True)
class Operand:
    """An input: its whole value, and of each axis how many rows of each dimension (or entry) a unit of it has."""

    value: np.ndarray
    units: dict[str, tuple[int, ...]]

    def options(self, axis: str) -> list[Placement]:
        units = self.units[axis]
        if isinstance(self.value, Known):
            return [LOCAL] if any(units) else [REPLICATED]
        found = [split(d) for d, rows in enumerate(units) if rows][:1] or [REPLICATED]
        return [*found, PARTIAL] if self.value.dtype.kind in "fc" else found


def check_on_two_axes(sample: Sample, letters: dict[str, str], blocks: Blocks, *, dynamic: bool) -> int:
    """Check an op; return of how many placements both axes cut what it computes.

    Args:
        letters: which size each axis cuts.
        dynamic: whether nobody states the batch.
    """
    sizes = {letters[axis]: sum(blocks[axis]) for axis in AXES}
    values, attrs = _inputs(sample, sizes)
    operands = _operands(sample, letters, sizes, values)
    expected = run_once(sample.op, values, attrs)
    node, extents = node_of(sample.op, values, attrs), _extents(blocks, dynamic)
    batch = sum(blocks[REPLICA])
    record_shapes(node, [None if isinstance(one, Elements) else _stated(one.shape, batch, dynamic) for one in expected])
    claims = 0
    for placements in _placements(operands):
        facts = tuple(_fact(one, given, dynamic) for one, given in zip(operands, placements, strict=True))
        semantics = Semantics(sample.random, extent=extents[0], more=extents[1:])
        try:
            made = transferred(node, facts, {}, semantics)
            if not made.decompose and not made.constant:
                claims += _check(sample, node, operands, placements, made, blocks, expected, dict(attrs))
        except Exception as error:
            raise AssertionError(f"{sample}: {letters}, blocks {blocks}, inputs {placements}, {dynamic=}") from error
    return claims


def _extents(blocks: Blocks, dynamic: bool) -> tuple[Extent, Extent]:
    batch = sum(blocks[REPLICA])
    return Extent(units=None if dynamic else batch), Extent(MODEL, sum(blocks[MODEL]), blocks[MODEL])


def _inputs(sample: Sample, sizes: dict[str, int]) -> tuple[list[np.ndarray], dict[str, object]]:
    chosen = {letter: DEFAULT_SIZES[letter] for letter in sample.letters} | dict(sample.sizes) | sizes
    attrs = {key: value(chosen) if callable(value) else value for key, value in sample.attrs.items()}
    return list(sample.make(chosen, Draw())), attrs


def _operands(
    sample: Sample, letters: dict[str, str], sizes: dict[str, int], values: list[np.ndarray]
) -> list[Operand]:
    units: dict[str, list[tuple[int, ...]]] = {}
    for axis, letter in letters.items():
        bigger, _ = _inputs(sample, {**sizes, letter: sizes[letter] + GROWTH})
        units[axis] = [units_of(a, b, sizes[letter]) for a, b in zip(values, bigger, strict=True)]
    return [Operand(value, {axis: units[axis][i] for axis in AXES}) for i, value in enumerate(values)]


def _stated(shape: Sequence[int], batch: int, dynamic: bool) -> tuple[int | None, ...]:
    return tuple(None if dynamic and size % max(batch, 1) == 0 else size for size in shape)


def _placements(operands: Sequence[Operand]) -> Iterator[tuple[dict[str, Placement], ...]]:
    """Yield the placements of the inputs: all that both axes cut, what one does, a contribution in place of each.

    Where a contribution of one axis meets nothing of the other, `test_rules` says the same.
    """
    cut = tuple({axis: one.options(axis)[0] for axis in AXES} for one in operands)
    # Blocks of known sizes are those of a whole: what the batch cuts along a dimension is not cut so again.
    cut = tuple({**one, MODEL: REPLICATED} if one[REPLICA] == one[MODEL] else one for one in cut)
    without = {axis: tuple({**one, axis: REPLICATED} for one in cut) for axis in AXES}
    yield from (cut, *without.values())
    for axis, i in itertools.product(AXES, range(len(operands))):
        if PARTIAL in operands[i].options(axis):
            for base in (cut, without[axis]):
                yield (*base[:i], {**base[i], axis: PARTIAL}, *base[i + 1 :])


def _fact(operand: Operand, placements: dict[str, Placement], dynamic: bool) -> Fact:
    """Return what propagation would know of an input; a dimension that both axes cut is that of the minor one."""
    value = operand.value
    dims = value.shape[1:] if isinstance(value, Elements) else value.shape
    whole = value.ravel().tolist() if isinstance(value, Known) else list(dims)
    sizes: list[Dim] = list(whole)
    for axis in AXES:
        for at, rows in enumerate(operand.units[axis]):
            is_cut = placements[axis] == (LOCAL if isinstance(value, Known) else split(at))
            if rows and is_cut:
                sizes[at] = on_axis(Sym(rows, ("b",)), REPLICA, axis)
            elif rows and dynamic and axis == REPLICA and isinstance(sizes[at], int):
                sizes[at] = Sym(rows, ("B",))
    dtype = number_of(value.dtype) if isinstance(value, Known) else number_of_input(value)
    told = (tuple(value.shape), tuple(sizes)) if isinstance(value, Known) else (tuple(sizes), None)
    return Fact(placements[REPLICA], dtype, *told).placed(MODEL, placements[MODEL])


def _check(
    sample: Sample,
    node: Node,
    operands: Sequence[Operand],
    placements: Sequence[dict[str, Placement]],
    made: NodeTransfer,
    blocks: Blocks,
    expected: list[np.ndarray],
    attrs: dict[str, object],
) -> int:
    wanted = {REPLICA: made.operand_reshards, MODEL: made.more.get(MODEL, {})}
    held = []
    for i, operand in enumerate(operands):
        replica, model = ((operand.units[a], placements[i][a], wanted[a].get(i), blocks[a]) for a in AXES)
        held.append([_held(one, *model) for one in _held(operand.value, *replica)])
    if has(sample.op, "refuses_empty") and 0 in blocks[REPLICA]:
        return 0
    results = [
        [run_once(sample.op, [one[i][j] for one in held], attrs) for j in range(len(blocks[MODEL]))]
        for i in range(len(blocks[REPLICA]))
    ]
    for index, fact in enumerate(made.outputs):
        if index in sample.undefined:
            continue
        rows = [[result[index] for result in row] for row in results]
        if has(sample.op, "undefined_when_empty") and fact.placement.is_partial:
            rows = [
                row if all(one[i][0].size for one in held) else [np.zeros_like(one) for one in row]
                for i, row in enumerate(rows)
            ]
        _check_shape(fact, rows, blocks)
        if LOCAL in fact.placements.values():
            _check_sizes(fact, rows, blocks)
            continue
        filled = [i for i, size in enumerate(blocks[REPLICA]) if size or fact.placement.differs]
        along = [harness.together(rows[i], fact.placement_on(MODEL)) for i in filled]
        found = harness.together(along, fact.placement)
        assert found.shape == expected[index].shape, f"output {index}: {found.shape}, whole {expected[index].shape}"
        if sample.compare != "shapes" and expected[index].dtype.kind in "fc":
            tolerance = sample.tolerance
            np.testing.assert_allclose(
                found, expected[index], rtol=tolerance, atol=tolerance, err_msg=f"output {index}"
            )
        elif sample.compare != "shapes":
            np.testing.assert_array_equal(found, expected[index], err_msg=f"output {index}")
    return all(any(fact.placement_on(axis).differs for fact in made.outputs) for axis in AXES)


def _held(
    value: np.ndarray, units: tuple[int, ...], placement: Placement, reshard: Reshard | None, blocks: Sequence[int]
) -> list[np.ndarray]:
    """Return what each instance along an axis reads of a value, which is whole along it."""
    whole = harness.Operand(value, units)
    if reshard is None or isinstance(reshard, LocalEntry):
        held = harness.instances(whole, placement, blocks)
    else:
        held = [value]  # a conversion starts from the whole: the other axis may have cut the dimension of the placement
    if reshard is not None:
        held = harness.converted(whole, held, reshard, blocks)
    return [one.view(type(value)) for one in held]


def _check_shape(fact: Fact, rows: list[list[np.ndarray]], blocks: Blocks) -> None:
    """Compare the claimed shape of each instance."""
    for i, row in enumerate(rows if fact.shape is not None else ()):
        for j, one in enumerate(row):
            actual = one.shape[1:] if isinstance(one, Elements) else one.shape
            assert len(actual) == len(fact.shape or ()), f"rank {len(actual)}, claimed {fact.shape}"
            _check_numbers(actual, fact.shape or (), (i, j), blocks)


def _check_sizes(fact: Fact, rows: list[list[np.ndarray]], blocks: Blocks) -> None:
    """Compare the claimed contents of each instance."""
    for i, row in enumerate(rows if fact.value is not None else ()):
        for j, one in enumerate(row):
            _check_numbers(one.ravel().tolist(), fact.value or (), (i, j), blocks)


def _check_numbers(actual: Sequence[int], claimed: Sequence[Dim], at: tuple[int, int], blocks: Blocks) -> None:
    sizes = {"b": blocks[REPLICA][at[0]], "B": sum(blocks[REPLICA]), f"T:@{MODEL}/b": blocks[MODEL][at[1]]}
    for size, dim in zip(actual, claimed, strict=True):
        number = dim
        if isinstance(dim, Sym) and all(factor in sizes for factor in dim.factors):
            number = dim.coef * int(np.prod([sizes[factor] for factor in dim.factors]))
        assert not isinstance(number, int) or number == size, f"{list(actual)}, claimed {claimed} at {at}"
