"""Seeds: the variables that a model axis may cut, those of repeated layers together, each along every dimension.

    layer_0/query/w [128, 128], layer_1/query/w [128, 128]     one group, seeds (1) and (0)
    dense/kernel [64, 64], dense_1/kernel, dense_2/kernel      and in turn: (1) (0) (1), (0) (1) (0)
    conv/kernel [3, 3, 16, 64]                                 seeds (3) and (2): channels

Layers that repeat have names that differ in numbers. Grouping them is what alpa (Zheng et al., 2022) does by
clustering layers and Unity (Unger et al., 2022) by substitutions that apply everywhere. A dimension counts if the
devices divide it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autograph_rewrite.ir.variable_ops import handle_uses
from autograph_rewrite.strategies.assemble import trained_variables
from autograph_rewrite.strategies.builder import TrainedVariable
from autograph_rewrite.training_graph import TrainingGraph

_NUMBERS, _NUMBERED = re.compile(r"\d+"), re.compile(r"_?\d+")
_CONVOLUTION = re.compile(r".*Conv\d?D.*")


class Seed(NamedTuple):
    """Variables to cut along one dimension.

    Attributes:
        names: of variables that are alike.
        dims: that are cut, in turn.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]

    @property
    def cuts(self) -> dict[str, int]:
        """The dimension by variable."""
        return {name: self.dims[i % len(self.dims)] for i, name in enumerate(self.names)}


def pattern_of(name: str) -> str:
    """Return a regular expression for the name of a variable in all layers."""
    return r"\d+".join(re.escape(part) for part in _NUMBERS.split(name))


def seeds_of(item: TrainingGraph, devices: int) -> Iterator[Seed]:
    """Yield what may be cut into so many blocks, the largest group first; what is cut in turn comes last.

    Args:
        item: normalised.
        devices: on the model axis.
    """
    groups: dict[object, list[TrainedVariable]] = {}
    for name, one in trained_variables(item).items():
        if len(one.shape) > 1 and not one.obstacle:
            groups.setdefault((_NUMBERED.sub("", name), one.shape, one.variable.dtype), []).append(one)
    found: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
    for alike in sorted(groups.values(), key=lambda group: -sum(one.variable.nbytes for one in group)):
        dims = tuple(dim for dim in _dimensions(item, alike[0]) if can_be_cut(alike[0].shape, dim, devices))
        found.append((tuple(one.name for one in alike), dims))
    for names, dims in found:
        yield from (Seed(names, (dim,)) for dim in dims)
    for names, dims in found:
        if len(names) > 1 and len(dims) == 2:
            yield from (Seed(names, turn) for turn in (dims, dims[::-1]))


def can_be_cut(shape: tuple[int | None, ...], dim: int, devices: int) -> bool:
    """Return whether each device gets a block of the same size.

    Args:
        shape: of a variable.
        dim: that is cut.
        devices: on the model axis.
    """
    size = shape[dim] if dim < len(shape) else None
    return size is not None and size >= devices and size % devices == 0


def wanted_in_blocks(item: TrainingGraph, sliced: Mapping[str, int]) -> dict[str, int]:
    """Return the variables of which a reader takes blocks, with the dimension.

    Args:
        item: normalised.
        sliced: values that are cut for their readers, by name, and the dimension.
    """
    handles = {variable.handle: name for name, variable in item.variables.items()}
    found: dict[str, int] = {}
    for value, dim in sliced.items():
        node = item.graph.nodes.get(value.partition(":")[0])
        while node is not None and node.op in ("Identity", "Cast") and node.inputs:
            node = node.inputs[0].node
        if node is not None and node.op == "ReadVariableOp":
            name = handles.get(node.inputs[0].node.name)
            if name is not None:
                found.setdefault(name, dim)
    return found


def _dimensions(item: TrainingGraph, one: TrainedVariable) -> list[int]:
    handle, rank = item.graph.nodes.get(one.variable.handle), len(one.shape)
    reads = [use.node for use in handle_uses(handle) if use.node.op == "ReadVariableOp"] if handle is not None else []
    is_filter = any(_CONVOLUTION.fullmatch(node.op) for read in reads for node, _ in read.output().uses)
    return list(range(rank - 1, rank - 3 if is_filter else -1, -1))
