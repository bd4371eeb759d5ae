"""Give every unseeded random op a seed of its own, so that two runs of one graph draw the same numbers.

An op with `seed = seed2 = 0` asks for a fresh seed in every process. Datasets take their seeds as inputs.
"""

from __future__ import annotations

import zlib

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op

_MAX_SEED = 2**31 - 1


def unseeded(graph: Graph) -> tuple[str, ...]:
    """Return the names of the random ops that draw something else in every run (functions are not looked into)."""
    return tuple(node.name for node in graph if _attrs_are_zero(node) or _inputs_are_zero(node))


def pin(graph: Graph, seed: int) -> tuple[str, ...]:
    """Seed the unseeded random ops of a graph in place, each by its name; return their names."""
    names = unseeded(graph)
    for name in names:
        node = graph.node(name)
        first, second = _seeds(name, seed)
        if _attrs_are_zero(node):
            node.set_attr("seed", first)
            node.set_attr("seed2", second)
        else:
            for index, value in zip(_seed_inputs(node), (first, second), strict=True):
                attrs = {"value": np.array(value, np.int64), "dtype": dtypes.INT64}
                const = graph.add("Const", name=f"{name}/seed", attrs=attrs, device=node.device)
                node.set_input(index, const.output())
    return names


def _seeds(name: str, seed: int) -> tuple[int, int]:
    """Return two seeds above zero that depend on the op's name and on `seed` only."""
    first, second = (zlib.crc32(f"{seed}/{part}/{name}".encode()) % _MAX_SEED + 1 for part in (1, 2))
    return first, second


def _attrs_are_zero(node: Node) -> bool:
    op = find_op(node.op)
    if op is None or not {"seed", "seed2"} <= op.attrs.keys():
        return False
    return not node.attr("seed") and not node.attr("seed2")


def _seed_inputs(node: Node) -> tuple[int, ...]:
    """Return the positions of the inputs `seed` and `seed2`, of ops whose inputs are single tensors."""
    op = find_op(node.op)
    if op is None or any(arg.number_attr or arg.type_list_attr for arg in op.inputs):
        return ()
    return tuple(i for i, arg in enumerate(op.inputs) if arg.name in ("seed", "seed2"))


def _inputs_are_zero(node: Node) -> bool:
    positions = _seed_inputs(node)
    if len(positions) != 2:
        return False
    producers = [node.inputs[index].node for index in positions]
    return all(producer.op == "Const" and _is_zero(producer) for producer in producers)


def _is_zero(const: Node) -> bool:
    value = const.attr("value")
    return isinstance(value, np.ndarray) and value.size == 1 and not value.any()
