"""The generic test of a rule: run its op on blocks as the rule says, put the results together, compare with the whole.

    inputs, cut as claimed ──rule.place──► wants ──convert──► run per block ──put together as claimed──► the same?

Numbers are float64 where the kernel has it. Blocks are even, uneven, of one example, and empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autograph_rewrite.analysis.transfer import convert
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ops.facts.placement import LOCAL, PARTIAL, REPLICATED, Extent, Fact, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym, is_local
from autograph_rewrite.ops.rules.base import LocalEntry, Op, Placed, Reshard, Rule, Semantics, Slice, whole
from autograph_rewrite.ops.traits import has
from tests.rules.runner import number_of, number_of_input, run_once
from tests.rules.sample import Draw, Elements, Known, Sample

GROWTH = 7
"""By how much a batch is larger that shows which sizes count its examples."""
BLOCKINGS = ((3, 3), (2, 2, 1), (1, 1, 0))
COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "all": np.logical_and,
}
COMBINE["any"] = np.logical_or


@dataclass(frozen=True)
class Operand:
    """One input: its whole value, and how its sizes or entries count examples.

    `units[d]` is how many rows of dimension d one example has (0: none); for a stated operand, of entry d.
    """

    value: np.ndarray
    units: tuple[int, ...]
    zero: bool = False

    @property
    def states_sizes(self) -> bool:
        return isinstance(self.value, Known)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, Elements)

    def options(self) -> list[Placement]:
        """Return the placements that this input can have."""
        if self.states_sizes:
            return [REPLICATED, LOCAL] if any(self.units) else [REPLICATED]
        if self.zero:
            return [REPLICATED]
        found = [REPLICATED, *(split(d) for d, u in enumerate(self.units) if u)]
        return [*found, PARTIAL] if self.value.dtype.kind in "fc" else found

    def natural(self) -> Placement:
        """Return the placement of an input in a graph where everything that has the batch is split."""
        return next((p for p in self.options() if p.is_split or p == LOCAL), REPLICATED)


@dataclass(frozen=True)
class Case:
    """One op with whole inputs, one size of which is the batch."""

    sample: Sample
    attrs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    blocks: tuple[int, ...]

    @property
    def batch(self) -> int:
        return sum(self.blocks)


def with_zeros(case: Case, index: int) -> Case:
    """Return the case with an input that is known to be zero."""
    zeros = np.zeros_like(case.operands[index].value)
    operands = (
        *case.operands[:index],
        Operand(zeros, case.operands[index].units, zero=True),
        *case.operands[index + 1 :],
    )
    return replace(case, operands=operands)


def make_case(sample: Sample, letter: str, blocks: tuple[int, ...]) -> Case:
    batch = sum(blocks)
    values, attrs = sample.inputs(letter, batch)
    bigger, _ = sample.inputs(letter, batch + GROWTH)
    pairs = zip(values, bigger, strict=True)
    return Case(sample, attrs, tuple(Operand(a, units_of(a, b, batch)) for a, b in pairs), blocks)


def units_of(small: np.ndarray, big: np.ndarray, batch: int, growth: int = GROWTH) -> tuple[int, ...]:
    """Find out which sizes (or stated entries) grow with the batch; only pure multiples count its examples."""
    offset = 1 if isinstance(small, Elements) else 0
    pairs = zip(small.shape[offset:], big.shape[offset:], strict=True)
    if isinstance(small, Known):
        if small.shape != big.shape:
            return ()
        pairs = zip(small.ravel().tolist(), big.ravel().tolist(), strict=True)
    units = [(b - a) // growth for a, b in pairs]
    now = small.ravel().tolist() if isinstance(small, Known) else small.shape[offset:]
    return tuple(u if u > 0 and u * batch == size else 0 for u, size in zip(units, now, strict=True))


def combinations(case: Case) -> Iterator[tuple[Placement, ...]]:
    """Yield placements of the inputs: all where there are few inputs, else all but one whole or natural."""
    options = [operand.options() for operand in case.operands]
    if np.prod([len(o) for o in options]) <= 64:
        yield from itertools.product(*options)
        return
    natural = tuple(operand.natural() for operand in case.operands)
    found = {(REPLICATED,) * len(options): None, natural: None}
    for base, i in itertools.product(tuple(found), range(len(options))):
        found |= {(*base[:i], other, *base[i + 1 :]): None for other in options[i]}
    yield from found


# --- facts -----------------------------------------------------------------------------------------------------


def _size(size: int, unit: int, kind: str) -> Dim:
    return Sym(unit, (kind,)) if unit and kind else size


def fact_of(operand: Operand, placement: Placement, dynamic: bool) -> Fact:
    """Return what propagation would know about an input."""
    whole_kind = "B" if dynamic else ""
    value = operand.value
    dims = value.shape[1:] if operand.is_list else value.shape
    if operand.states_sizes:
        kind = "b" if placement == LOCAL else whole_kind
        entries = value.ravel().tolist()
        contents = tuple(_size(v, u, kind) for v, u in zip(entries, operand.units or (0,) * len(entries), strict=True))
        return Fact(placement, number_of(value.dtype), dims, contents)
    kinds = ["b" if placement == split(d) else whole_kind for d in range(len(dims))]
    shape = tuple(_size(s, u, k) for s, u, k in zip(dims, operand.units, kinds, strict=True))
    dtype = number_of_input(value)
    return Fact(placement, dtype, shape, zero=operand.zero)


def op_of(case: Case, placements: Sequence[Placement], dynamic: bool, expected: Sequence[np.ndarray]) -> Op:
    """Return the node as the rule sees it."""
    definition = get_op(case.sample.op)

    def attr(name: str, default: Any = None) -> Any:
        value = case.attrs.get(name)
        if value is None:
            declared = definition.attrs.get(name)
            return default if declared is None or declared.default is None else decode(declared.default)
        return value.encode() if isinstance(value, str) else value

    inputs = tuple(fact_of(o, p, dynamic) for o, p in zip(case.operands, placements, strict=True))
    static = tuple(_stated(array, case, dynamic) for array in expected)
    known = bool(case.sample.stays_static) and not dynamic and 0 not in case.blocks
    batch = None if dynamic else case.batch
    extent = Extent(units=batch, sizes=case.blocks if known else None)
    semantics = Semantics(random=case.sample.random, extent=extent)
    dtypes = tuple(number_of_input(a) for a in expected)
    return Op(case.sample.op, attr, inputs, dtypes, static, semantics, {})


def _stated(array: np.ndarray, case: Case, dynamic: bool) -> Shape | None:
    """Return the static shape; in a dynamic graph no size that could come from the batch is known."""
    if isinstance(array, Elements):
        return None
    if not dynamic:
        return array.shape
    return tuple(None if size % max(case.batch, 1) == 0 else size for size in array.shape)


# --- values ----------------------------------------------------------------------------------------------------


def _cut(array: np.ndarray, dim: int, unit: int, blocks: Sequence[int]) -> list[np.ndarray]:
    edges = np.cumsum([0, *blocks]) * unit
    return [np.take(array, range(a, b), axis=dim) for a, b in itertools.pairwise(edges)]


def instances(operand: Operand, placement: Placement, blocks: Sequence[int]) -> list[np.ndarray]:
    """Return what each replica holds of an input."""
    value, count = operand.value, len(blocks)
    if placement.is_split:
        return _cut(value, placement.dim + operand.is_list, operand.units[placement.dim], blocks)
    if placement == PARTIAL:
        parts = [Draw(k + 1)(*value.shape, dtype=value.dtype) for k in range(count - 1)]
        rest = value - np.sum(parts, axis=0, dtype=value.dtype) if parts else value
        return [*parts, np.asarray(rest, value.dtype).view(type(value))]
    if placement == LOCAL:
        return [_counting(operand, block) for block in blocks]
    return [value] * count


def _counting(operand: Operand, block: int) -> np.ndarray:
    flat = [u * block if u else v for v, u in zip(operand.value.ravel().tolist(), operand.units, strict=True)]
    return np.asarray(flat, operand.value.dtype).reshape(operand.value.shape)


def converted(operand: Operand, have: list[np.ndarray], reshard: Reshard, blocks: Sequence[int]) -> list[np.ndarray]:
    """Return what each replica holds after a conversion."""
    value = operand.value
    if isinstance(reshard, Slice):
        return _cut(value, reshard.dim + operand.is_list, reshard.unit, blocks)
    if isinstance(reshard, LocalEntry):
        changed = [array.copy() for array in have]
        for array, block in zip(changed, blocks, strict=True):
            array[reshard.position] = evaluate(reshard.size, block, sum(blocks))
        return changed
    if reshard == REPLICATED:
        return [value] * len(blocks)
    if reshard == PARTIAL:
        return [value, *[np.zeros_like(value)] * (len(blocks) - 1)]
    return instances(operand, reshard, blocks)


def evaluate(dim: Dim, block: int, batch: int) -> int | None:
    """Return the number that a symbolic size stands for."""
    if not isinstance(dim, Sym):
        return dim
    number = dim.coef
    for factor in dim.factors:
        number *= {"b": block, "B": batch}[factor]
    return number


def together(parts: Sequence[np.ndarray], placement: Placement) -> np.ndarray:
    """Return the whole value that per-replica results stand for."""
    if placement.is_split:
        return np.concatenate(parts, axis=placement.dim + isinstance(parts[0], Elements)).view(type(parts[0]))
    if placement.is_partial:
        result = parts[0]
        for part in parts[1:]:
            result = COMBINE[placement.op](result, part)
        return result
    return parts[0]


# --- the check -------------------------------------------------------------------------------------------------


def check(
    case: Case, rule: Rule, placements: Sequence[Placement], *, dynamic: bool, expected: list[np.ndarray]
) -> bool:
    """Check one claim; return whether the op works on blocks (False: it falls back to whole values)."""
    n = op_of(case, placements, dynamic, expected)
    placed = rule.place(n)
    if placed is None or placed == whole(n):
        return False
    assert len(placed.outputs) == len(expected), "a placement per output"
    after = n._replace(
        inputs=tuple(
            convert(fact, placed.operand_reshards[i], n.semantics.extent.units)
            if i in placed.operand_reshards
            else fact
            for i, fact in enumerate(n.inputs)
        )
    )
    check_settled(rule, after, placed)
    if placed.decompose:
        return True
    results = [_run_block(case, after, placed, inputs) for inputs in inputs_of_blocks(case, placements, placed)]
    for index in (i for i, zero in enumerate(placed.zero) if zero):
        assert not expected[index].any(), f"output {index} is not zero"
    for index, placement in enumerate(placed.outputs):
        if index in case.sample.undefined:
            continue
        parts = [result[index] for result in results]
        if has(case.sample.op, "undefined_when_empty") and placement.is_partial and cut_into_blocks(after):
            parts = [p if b else np.zeros_like(p) for p, b in zip(parts, case.blocks, strict=True)]
        check_value(case, placement, parts, expected[index], index)
        check_shape(case, rule, after, placement, parts, index)
    return True


def inputs_of_blocks(case: Case, placements: Sequence[Placement], placed: Placed) -> list[list[np.ndarray]]:
    """Return what each replica reads, after conversions."""
    held = [instances(o, p, case.blocks) for o, p in zip(case.operands, placements, strict=True)]
    for i, reshard in placed.operand_reshards.items():
        held[i] = converted(case.operands[i], held[i], reshard, case.blocks)
    return [
        [_typed(values[k], operand) for values, operand in zip(held, case.operands, strict=True)]
        for k in range(len(case.blocks))
    ]


def _run_block(case: Case, after: Op, placed: Placed, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run the op on one block; where its kernel refuses one without examples, as the lowering has it done."""
    splits = {i: f.placement.dim for i, f in enumerate(after.inputs) if f.placement.is_split}
    if not has(case.sample.op, "refuses_empty") or all(inputs[i].shape[dim] for i, dim in splits.items()):
        return run_once(case.sample.op, inputs, case.attrs)
    for i, dim in splits.items():
        inputs[i] = np.zeros([1 if d == dim else size for d, size in enumerate(inputs[i].shape)], inputs[i].dtype)
    results = run_once(case.sample.op, inputs, case.attrs)
    return [r[(slice(None),) * p.dim + (slice(0, 0),)] for r, p in zip(results, placed.outputs, strict=True)]


def cut_into_blocks(after: Op) -> bool:
    """Return whether the op runs on blocks; then the lowering puts zeros where an empty one is undefined."""
    return any(fact.placement.is_split for fact in after.inputs)


def _typed(array: np.ndarray, operand: Operand) -> np.ndarray:
    """Keep a list a list, and stated integers stated, through conversions."""
    return array.view(type(operand.value))


def check_settled(rule: Rule, after: Op, placed: Placed) -> None:
    """A second look, at converted inputs, must give the same answer and want nothing more."""
    again = rule.place(after)
    assert again is not None, "no answer for converted inputs"
    assert again.outputs == placed.outputs, f"converted inputs give {again.outputs}, not {placed.outputs}"
    wanted = {i: w for i, w in again.operand_reshards.items() if w != PARTIAL and not isinstance(w, LocalEntry)}
    assert not wanted, f"converted inputs still want {wanted}"


def check_value(case: Case, placement: Placement, parts: list[np.ndarray], expected: np.ndarray, index: int) -> None:
    if case.sample.compare == "shapes":
        assert together(parts, placement).shape == expected.shape
        return
    # What is the same everywhere is read from a replica that has examples.
    filled = [part for part, block in zip(parts, case.blocks, strict=True) if block]
    candidates = filled if placement == REPLICATED else [together(parts, placement)]
    for found in candidates:
        assert found.shape == expected.shape, f"output {index}: {found.shape}, whole {expected.shape}"
        if expected.dtype.kind in "fc":
            tolerance = case.sample.tolerance
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=f"output {index}")
        else:
            np.testing.assert_array_equal(found, expected, err_msg=f"output {index}")


def check_shape(case: Case, rule: Rule, after: Op, placement: Placement, parts: list[np.ndarray], index: int) -> None:
    """Compare the claimed shape of each instance, as the engine settles it: only the split dimension is local."""
    if rule.shape is None:
        return
    claimed = rule.shape(after)[index]
    if claimed is None:
        return
    for part, block in zip(parts, case.blocks, strict=True):
        actual = part.shape[1:] if isinstance(part, Elements) else part.shape
        assert len(actual) == len(claimed), f"output {index}: rank {len(actual)}, claimed {claimed}"
        for d, dim in enumerate(claimed):
            assert placement == split(d) or not is_local(dim), f"output {index}: {placement}, claimed {claimed}"
            size = evaluate(dim, block, case.batch)
            assert size is None or size == actual[d], f"output {index}: shape {actual}, claimed {claimed}"
