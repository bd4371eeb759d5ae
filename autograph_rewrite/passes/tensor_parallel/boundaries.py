"""Where tensors are cut that are placed by hand: copies of them, which say on which axis of the mesh along what.

    before   x ──► MatMul                                            x: axis 0 cuts dimension 0, axis 1 dimension 1
    after    x ──► x/sharded (0: 0) ──► x/sharded_1 (1: 1) ──► MatMul

The copies are made before anything is cut: each device of one axis then has its own of what the next axis cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autograph_rewrite.analysis.rules.base import WHOLE
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.shapes.recorded import record_shapes, static_shape
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.training_graph import TrainingGraph

_CUT = "_autograph_cut"


def mark_boundaries(graph: Graph, item: TrainingGraph, cuts: Mapping[str, Sequence[int | None]]) -> None:
    """Add the copies of all tensors.

    Args:
        graph: which is edited.
        item: whose variables are no tensors.
        cuts: which dimension each axis cuts, by the name of a variable or a tensor.
    """
    for name, dims in cuts.items():
        if name in item.variables:
            continue
        value = graph.value(name)
        for axis, dim in enumerate(dims):
            if dim is None:
                continue
            node = graph.add("Identity", [value], name=f"{graph.value(name).node.name}/sharded", origin=value.node)
            node.set_raw_attr(_CUT, encode("list(int)", [axis, dim]))
            record_shapes(node, [static_shape(value)])
            value.replace_all_uses_with(node.output(), keep=[node])
            value = node.output()


def keep_whole(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> list[Node]:
    """Let readers of tensors see the whole on every axis; return what hands it to them, marked until all is cut.

    Args:
        graph: which is edited.
        item: whose variables are no tensors.
        names: of what is replicated, or on one device.
    """
    kept = []
    for name in names:
        if name in item.variables:
            continue
        value = graph.value(name)
        node = value.node
        if node.op != "Identity":
            node = graph.add("Identity", [value], name=f"{node.name}/whole", origin=node)
            record_shapes(node, [static_shape(value)])
            value.replace_all_uses_with(node.output(), keep=[node])
        node.set_raw_attr(WHOLE, encode("bool", True))
        kept.append(node)
    return kept


def boundaries(graph: Graph, axis: int) -> dict[str, int]:
    """Return the copies that an axis cuts, with the dimension; what they read is whole for all its devices.

    Args:
        graph: which is edited.
        axis: of the mesh.
    """
    found = {}
    for node in graph:
        at, dim = node.attr(_CUT, (-1, -1))
        if at == axis:
            node.drop_attr(_CUT)
            node.set_raw_attr(WHOLE, encode("bool", True))
            found[node.name] = dim
    return found
