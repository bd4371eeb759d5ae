"""Sources of randomness in an input pipeline, because of which two processes that build it alike get different data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autograph_rewrite.ir.format.function_library import Library, called
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ops.traits import operands


class _Op(NamedTuple):
    """A node, of the graph or of a function."""

    name: str
    op: str
    inputs: Sequence[str]
    attrs: Mapping[str, object]


def chances(graph: Graph, source: Node) -> Iterator[str]:
    """Yield the ops, as messages call them, that make what an iterator gives differ from run to run.

    Args:
        graph: holds the pipeline, if not a function of its does.
        source: takes the next element of the iterator.
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
    """Return what is left to chance; empty if nothing is."""
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
