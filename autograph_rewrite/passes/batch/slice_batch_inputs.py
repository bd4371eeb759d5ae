"""Slice batch inputs that every process produces in full (an iterator inside the graph) to this process's rows.

    before   IteratorGetNext ──► step
    after    IteratorGetNext ──► StridedSlice [first row of this process : first row of the next] ──► step

From then on the part is the batch input, as if it were fed. All processes must produce the same batch, so a pipeline
that draws without a seed is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.format.function_library import Library, called
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import record_shapes
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ops.rules.marked import PINNED, as_mark
from autograph_rewrite.ops.traits import operands
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.parts.batch_split import block_begin, limits

_ENDS = ("begin", "end")


def _slice_batch_inputs(rewrite: Rewrite) -> None:
    """Slice batch inputs that every process produces in full to this process's rows.

    Raises:
        GraphError: the processes would not produce the same batch.
    """
    inputs = dict(rewrite.item.inputs)
    for given in rewrite.plan.batch_inputs:
        if not given.whole or rewrite.processes == 1:
            continue
        info = inputs[given.name]
        value = rewrite.graph.value(info.tensor)
        _require_alike(rewrite.graph, value.node)
        part = _Part(value, given.axis, rewrite.processes, rewrite.task)
        size = info.shape[given.axis] if info.shape is not None else None
        own = part.of_static(size) if size is not None else part.of_measured()
        record_shapes(own, [info.shape])  # the shape of the whole, as for a fed input
        inputs[given.name] = replace(info, tensor=f"{own.name}:0")
    rewrite.item = replace(rewrite.item, inputs=inputs)


class _Part:
    """Adds the nodes that cut one value; they run once in each process."""

    def __init__(self, value: Value, axis: int, processes: int, task: int) -> None:
        self._value = value
        self._axis = axis
        self._processes = processes
        self._task = task
        self._build = Builder.at(value.node, "own_part" + (f"_{value.index}" if value.index else ""))

    def of_static(self, size: int) -> Node:
        """Return the part of a batch of known size."""
        ends = limits(size, self._processes, 1)
        begin, end = (self._const(what, self._at(ends[self._task + i])) for i, what in enumerate(_ENDS))
        return self._cut(begin, end)

    def of_measured(self) -> Node:
        """Return the part of a batch that is measured in each step: it begins at row `q * task + min(task, r)`."""
        shape = self._add("Shape", "shape", self._value)
        axis = [self._const(what, [number]) for what, number in (("axis", self._axis), ("next", self._axis + 1))]
        size = self._add("StridedSlice", "size", shape, *axis, self._const("one", [1]), shrink_axis_mask=1)
        count = self._const("processes", self._processes)
        quotient, rest = self._add("FloorDiv", "quotient", size, count), self._add("FloorMod", "rest", size, count)

        def end(what: str, task: int) -> Value:
            index = self._const(f"{what}_index", self._at(task))
            names = {"Mul": f"{what}_even", "Minimum": f"{what}_more", "AddV2": what}
            begin: Value = block_begin(index, quotient, rest, lambda op, a, b: self._add(op, names[op], a, b))
            return begin

        begin, stop = (end(what, self._task + i) for i, what in enumerate(_ENDS))
        return self._cut(begin, stop)

    def _at(self, number: int) -> list[int]:
        return [0] * self._axis + [number]

    def _cut(self, begin: Value, end: Value) -> Node:
        readers = self._value.uses
        before = (1 << self._axis) - 1
        step = self._const("step", [1] * (self._axis + 1))
        masks = {"begin_mask": before, "end_mask": before}
        part = self._add("StridedSlice", "", self._value, begin, end, step, **masks)
        for reader, index in readers:
            if not reader.name.startswith(self._build.scope):
                reader.set_input(index, part)
        return part.node

    def _const(self, what: str, content: int | Sequence[int]) -> Value:
        return self._build.const(content, dtypes.INT32, what)

    def _add(self, op: str, what: str, *inputs: Value, **attrs: Any) -> Value:
        return self._build.op(op, *inputs, what=what, marks=as_mark(PINNED), **attrs)


def _require_alike(graph: Graph, source: Node) -> None:
    """Refuse a pipeline that would give each process different data.

    Raises:
        GraphError: an op of the pipeline draws without a seed, or does not keep the order.
    """
    for chance in chances(graph, source):
        raise GraphError(
            f"{chance}, so every process would make another batch, of which it is to take its part",
            node=source,
            hint="give it a seed, or set tf.compat.v1.set_random_seed before it is made; where each process reads "
            "data of its own, set input: per_worker",
        )


def _has_whole_inputs(rewrite: Rewrite) -> bool:
    return any(given.whole for given in rewrite.plan.batch_inputs)


SLICE_BATCH_INPUTS = Pass("slice-batch-inputs", _slice_batch_inputs, _has_whole_inputs)


# Find the ops of an input pipeline because of which two processes that run the same pipeline get different data.


class _Op(NamedTuple):
    """A node, of the graph or of a function."""

    name: str
    op: str
    inputs: Sequence[str]
    attrs: Mapping[str, object]


def chances(graph: Graph, source: Node) -> Iterator[str]:
    """Yield a phrase, for messages, on each op that makes the elements of an iterator differ from run to run.

    Args:
        graph: the pipeline is in it or in its functions.
        source: the node that takes the next element of the iterator.
    """
    library = Library(graph.library)
    handles = {value.node for value in source.inputs}
    makers = [node for node in graph if node.op == "MakeIterator" and handles & {value.node for value in node.inputs}]
    nodes = ancestors([source, *makers])
    bodies = [[_Op(n.name, n.op, [value.name for value in n.inputs], n.attrs) for n in nodes]]
    seen: set[str] = set()
    while bodies:
        body = bodies.pop()
        known = {op.name: op for op in body}
        for op in body:
            if why := _chance(op, known):
                yield f"the {op.op} '{op.name}' {why}"
            for name in called(op.op, op.attrs, library):
                if name not in seen and name in library:
                    seen.add(name)
                    bodies.append([_Op(n.name, n.op, n.inputs, n.attrs) for n in library.get(name).nodes])


def _chance(op: _Op, known: Mapping[str, _Op]) -> str:
    """Return why an op's results differ from run to run; empty if they do not."""
    for first in operands(op.op, "dataset_seeds"):
        if all(_is_zero(known.get(name.partition(":")[0])) for name in op.inputs[first : first + 2]):
            return "has no seed"
    seeds = [decode(raw) for key in ("seed", "seed2") if isinstance(raw := op.attrs.get(key), bytes)]
    if len(seeds) == 2 and not any(seeds):
        return "has no seed"
    order = op.attrs.get("deterministic")
    if isinstance(order, bytes) and decode(order) in (b"false", "false"):
        return "does not keep the order (deterministic=False)"
    return ""


def _is_zero(op: _Op | None) -> bool:
    raw = op.attrs.get("value") if op is not None and op.op == "Const" else None
    return isinstance(raw, bytes) and not np.any(decode(raw))
