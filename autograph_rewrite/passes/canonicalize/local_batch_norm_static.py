"""Replace constant sizes in the gradients of batch statistics by shapes, for graphs with a static batch.

    before   RealDiv(Tile(dv, [8, 5, 5, 1]), 200.0)
    after    RealDiv(BroadcastTo(dv, Shape(x)), Cast(Prod(Gather(Shape(x), [0, 1, 2]))))

The same numbers for the whole batch; for a block, those of the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from autograph_rewrite.analysis.facts.symbolic_dims import to_global
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes


def restate_sizes(state: Propagation, means: Iterable[Node]) -> int:
    """Rewrite the gradients of some means over the batch; return how many.

    Args:
        state: placements of a graph with a static batch.
        means: statistics of the batch.
    """
    groups: dict[tuple[tuple[int, ...], int], list[Node]] = {}
    for mean in means:
        whole, axes = _whole_shape(state, mean.inputs[0]), _const(mean.inputs[1])
        if whole is not None and axes is not None:
            count = math.prod(whole[int(axis)] for axis in axes.ravel())
            groups.setdefault((tuple(whole), count), []).append(mean)
    after = descendants([mean for group in groups.values() for mean in group], controls=False)
    tiles = [node for node in state.order if node.op == "Tile" and node in after]
    done = 0
    for (shape, count), group in groups.items():
        fitting = [(tile, found) for tile in tiles if (found := _divisions(state, tile, list(shape), count))]
        # Gradients come in the opposite order: that of a later layer goes into that of an earlier one.
        owners = group[::-1] if len(fitting) == len(group) else group[:1] * len(fitting)
        for mean, (tile, divisions) in zip(owners, fitting, strict=True):
            _restate(state, mean, tile, divisions)
            done += 1
    return done


def _whole_shape(state: Propagation, value: Value) -> list[int] | None:
    shape = state.facts[value].shape
    dims = [to_global(dim, state.semantics.batch) for dim in shape] if shape is not None else [None]
    return [dim for dim in dims if isinstance(dim, int)] if all(isinstance(dim, int) for dim in dims) else None


def _const(value: Value) -> np.ndarray[Any, Any] | None:
    content = value.node.attr("value") if value.node.op == "Const" else None
    return content if isinstance(content, np.ndarray) else None


def _divisions(state: Propagation, tile: Node, whole: list[int], count: int) -> list[Node]:
    """Return what divides a spread gradient by the size of a mean; nothing if it is another mean's."""
    given, times = state.facts[tile.inputs[0]].shape, _const(tile.inputs[1])
    if given is None or times is None or len(given) != len(whole) or tile not in state.transfers:
        return []
    if any(not isinstance(dim, int) or dim * int(n) != size for dim, n, size in zip(given, times, whole, strict=True)):
        return []
    users = [use for use in tile.output().uses if use.node in state.transfers]
    sizes = [_const(use.node.inputs[1]) if use.node.op == "RealDiv" and use.index == 0 else None for use in users]
    fits = all(size is not None and size.size == 1 and float(size.ravel()[0]) == count for size in sizes)
    return [use.node for use in users] if users and fits else []


def _restate(state: Propagation, mean: Node, tile: Node, divisions: list[Node]) -> None:
    graph, x = state.graph, mean.inputs[0]

    def add(op: str, *inputs: Value, what: str, **attrs: object) -> Value:
        return graph.add(op, inputs, name=f"{tile.name}/{what}", attrs=attrs or None, origin=tile).output()

    def const(content: object, what: str) -> Value:
        return add("Const", what=what, value=np.asarray(content, np.int32), dtype=dtypes.INT32)

    shape = add("Shape", x, what="shape")
    tile.output().replace_all_uses_with(add("BroadcastTo", tile.inputs[0], shape, what="spread"))
    sizes = add("GatherV2", shape, mean.inputs[1], const(0, "first"), what="sizes")
    count = add("Prod", sizes, const([0], "all"), what="count", keep_dims=False)
    for division in divisions:
        division.set_input(1, add("Cast", count, what="number", DstT=division.output_dtypes[0]))
