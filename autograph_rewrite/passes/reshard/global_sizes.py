"""Convert local sizes to global ones: each entry `c*b` becomes `c*B`, and `c*b*T` becomes `c*T*B`.

    before   Prod(Shape(%x each)) = 3*b                         before   Prod(Shape(%x each)) = b*T
    after    Shape(batch)[0] * 3                                after    Shape(batch)[0] * Shape(tokens)[1]

An open dimension T has one size in all blocks, so it is read where it first appears, if that needs no variable: then
micro-batches need no barrier for it. The number of rows that each block happens to have, such as those that a mask
keeps, is read in the same way, and added up. If a factor needs a variable, or an entry is no such product, the sizes
themselves are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.facts.symbolic_dims import (
    BLOCK,
    COMMON,
    Dim,
    Sym,
    is_local,
    is_open,
    rows_of_unit,
    segments,
    shards_of,
)
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.collectives.all_reduce import reduce_between_processes
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.passes.collectives.local_ops import reduce_local
from autograph_rewrite.plan.parts.messages import EdgePlan


def span_of_size(rewrite: Rewrite, value: Value, fact: Fact) -> Span:
    """Return how often the size over the whole batch is computed: once, or in a loop on each device that reads it.

    In a nested loop, TensorFlow 2.21 loses a size that another device needs when it folds what is computed of it
    (GroupCrossDeviceControlEdges), and the step never ends.
    """
    follows = fact.value and all(rows_of_unit(entry) is not None for entry in fact.value if is_local(entry))
    return value.node.span if follows and rewrite.frames.get(value.node) else ONCE


def global_size(rewrite: Rewrite, value: Value, fact: Fact, batch: Value, keys: Keys, span: Span) -> Value:
    """Return the size over the whole batch.

    Args:
        value: sizes of one block.
        fact: of `value`.
        batch: the number of examples of the whole batch.
        keys: of collectives.
        span: that of `span_of_size`.
    """
    sizes = _Sizes(rewrite, value, fact, span)
    edge = rewrite.edges.get((value.name, "replicated"))
    crosses = edge is not None and edge.lowered.crosses  # the plan lets all processes add up
    counted = None if crosses else sizes.product(sizes.local, batch)
    if counted is None:
        counted = sizes.added_up(edge, keys)
    return sizes.with_the_rest(counted)


def read_early(rewrite: Rewrite, node: Node) -> Value | None:
    """Return sizes that all blocks share, read before any micro-batch begins; None if that is needless, or impossible.

    Args:
        node: computes them from one block.
    """
    if rewrite.micro == 1 or node.span == EACH or len(node.output_dtypes) != 1 or node in rewrite.early:
        return None
    if not any(value.node.span == EACH for value in node.inputs):
        return None
    fact = rewrite.state.facts[node.output()]
    if fact.placement.differs or not fact.value or not any(is_open(entry) for entry in fact.value):
        return None
    sizes = _Sizes(rewrite, node.output(), fact)
    return sizes.product([True] * len(fact.value))


class _Sizes:
    """Adds nodes for one tensor of sizes."""

    def __init__(self, rewrite: Rewrite, value: Value, fact: Fact, span: Span = ONCE) -> None:
        self._rewrite = rewrite
        self._value, self._fact = value, fact
        self._entries: Sequence[Dim] = fact.value or ()
        self._shape = [dim for dim in fact.shape or () if isinstance(dim, int)]
        self.local = [is_local(entry) for entry in self._entries]
        self._local = np.array(self.local).reshape(self._shape)
        self._span = span

    def product(self, chosen: Sequence[bool], batch: Value | None = None, name: str = "per_example") -> Value | None:
        """Compute chosen entries from their factors, with zeros for the others; None if a factor cannot be read.

        Args:
            chosen: whether each entry is.
            batch: the number of examples, if the chosen ones are multiples of it.
            name: of the constant coefficients.
        """
        products: dict[tuple[str, ...], list[int]] = {}
        for i, entry in enumerate(self._entries):
            if not chosen[i]:
                continue
            if entry is None:
                return None
            coef, rest = (entry, []) if isinstance(entry, int) else (entry.coef, [*entry.factors])
            if batch is not None and segments(entry):
                coef, rest = sum(segments(entry)), [BLOCK]
            if batch is not None and isinstance(entry, Sym) and shards_of(entry):  # the size of the whole is known
                coef, rest = entry.coef * sum(shards_of(entry)), []
            products.setdefault(tuple(rest), [0] * len(self._entries))[i] = coef
        factors_of_all = {factor for factors in products for factor in factors}
        sources = {factor: self._source(factor) for factor in factors_of_all - {BLOCK}}
        if not products or None in sources.values() or (batch is None and BLOCK in factors_of_all):
            return None
        read = {factor: self._read(*source) for factor, source in sources.items() if source is not None}
        if batch is not None and BLOCK in factors_of_all:
            read[BLOCK] = self._as_number(batch, "batch")
        terms = [
            self._multiplied(
                name, units, [read[factor] for factor in sorted(factors, key=lambda factor: factor != BLOCK)]
            )
            for factors, units in products.items()
        ]
        return functools.reduce(lambda one, other: self._add("AddV2", [one, other], "counted"), terms)

    def _multiplied(self, name: str, units: Sequence[int], factors: Sequence[Value]) -> Value:
        product = self._const(np.array(units).reshape(self._shape), name)
        for factor in factors:
            product = self._add("Mul", [factor, product], "counted")
        return product

    def _source(self, factor: str) -> tuple[Value, int] | None:
        """Return the value and the dimension at which a factor can be read before any variable is, if there are."""
        rewrite = self._rewrite
        if rewrite.frames.get(self._value.node):
            return None
        if factor.startswith(f"{BLOCK}#") and rewrite.micro > 1 and rewrite.processes == 1:
            name, axis = factor.removeprefix(f"{BLOCK}#"), ""
        elif factor.startswith(f"{COMMON}:"):
            name, _, axis = factor.removeprefix(f"{COMMON}:").rpartition("/")
        else:
            return None
        if name.partition(":")[0] not in rewrite.graph.nodes:
            return None
        source = rewrite.graph.value(name)
        fact = rewrite.state.facts.get(source)
        if fact is None or fact.shape is None or source.node not in rewrite.early:
            return None
        at = int(axis) if axis else fact.placement.dim
        is_there = len(fact.shape) > at and fact.shape[at] == Sym(1, (factor,))
        return (source, at) if is_there else None

    def _read(self, source: Value, axis: int) -> Value:
        """Return the global size of a dimension: that of any block, or the sum of those of all blocks."""
        rewrite, name = self._rewrite, f"{source.node.name}/size_{axis}"
        counts = is_local((rewrite.state.facts[source].shape or ())[axis])
        if (source, axis) not in rewrite.open_sizes:
            span, build = source.node.span, FoldedBuilder.of(rewrite, source)
            shape = build.op("Shape", source, what=f"size_{axis}/shape")
            ends = [self._const([at], "at", np.int32) for at in (axis, axis + 1, 1)]
            size = build.op("StridedSlice", shape, *ends, what=f"size_{axis}", shrink_axis_mask=1)
            if span == EACH:  # equal sizes by their maximum, known before any micro-batch begins
                size = reduce_local(rewrite, size, "sum" if counts else "max", name)
            rewrite.open_sizes[source, axis] = size
        return self._as_number(rewrite.open_sizes[source, axis], "size")

    def added_up(self, edge: EdgePlan | None, keys: Keys) -> Value:
        """Return the local entries, added up over all blocks, with zeros for the others."""
        rewrite, value = self._rewrite, self._value
        build = FoldedBuilder.of(rewrite, value, span=EACH)
        mine = build.op("Mul", value, build.const(self._local, self._fact.dtype, "is_local"), what="mine")
        counted = build.gather("AddN", mine, what="counted")
        if edge is not None and edge.lowered.crosses:
            counted = reduce_between_processes(Exchange(rewrite, keys, edge), counted, "sum", changing=False)
        # Each device of a model axis has the same sum, and global sizes exist once.
        return counted if counted.node.span == ONCE else self._add("Identity", [counted], "added_up")

    def with_the_rest(self, counted: Value) -> Value:
        """Return counted entries together with those that are the same in all blocks."""
        if self._local.all():
            return counted
        rest = self.product([not local for local in self.local], name="fixed")
        if rest is None:
            rest = self._add("Mul", [self._value, self._const(~self._local, "is_common")], "common")
        return self._add("AddV2", [counted, rest], "global_size")

    def _as_number(self, value: Value, what: str) -> Value:
        """Return an int32 as a number of the type that the sizes have."""
        if self._fact.dtype == dtypes.INT32:
            return value
        return self._add("Cast", [value], what, DstT=self._fact.dtype)

    def _add(self, op: str, inputs: list[Value], what: str, **attrs: Any) -> Value:
        return FoldedBuilder.of(self._rewrite, self._value, span=self._span).op(op, *inputs, what=what, **attrs)

    def _const(self, content: object, what: str, dtype: object = None) -> Value:
        name = f"{self._value.node.name}/{what}"
        kind = dtypes.numpy_dtype(self._fact.dtype) if dtype is None else dtype
        made = self._rewrite.const(content, kind, name=name, near=self._value)
        made.node.set_span(self._span)
        return made
