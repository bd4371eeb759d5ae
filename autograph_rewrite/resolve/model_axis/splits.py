"""What each axis of the mesh cuts, in rounds whose blocks are counted in one unit.

    up/kernel [8, 32], split (1, 2)      32 = 2 units of 16          one round, units 2: sizes 1 1
    down/kernel [32, 8], split (2, 1)    32 = 2 units of 16
    head/kernel [8, 5], split (1, 2)      5 = 5 units of 1           another, units 5: sizes 3 2

A dimension that the devices divide evenly is counted in as many units as there are devices, so that all such
dimensions line up; one that they do not is counted in its elements, and lines up with its like only.

    model: [2, 2]    split (2, 2)            axis 0 cuts dimension 0, axis 1 dimension 1      `xla_sharding.split`
                     split (1, 4)            both cut dimension 1: four blocks in a row
                     axes (1, 0)             axis 1 cuts dimension 0, axis 0 dimension 1      `xla_sharding.mesh_split`
                     axes (-1, 0)            axis 0 cuts dimension 1; axis 1 nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.shapes.recorded import static_shape
from autograph_rewrite.plan.parts.batch_split import bounds
from autograph_rewrite.plan.parts.messages import TensorSharding
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Round:
    """What is cut together.

    Attributes:
        units: in which dimensions are counted.
        sizes: units of each device of the axis.
        variables: the dimension that is cut, by name.
        tensors: likewise, of values.
        whole: names of variables that stay whole, whatever reads them.
    """

    units: int
    sizes: tuple[int, ...]
    variables: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()


def cut_dimensions(one: TensorSharding, axes: Sequence[int]) -> tuple[int | None, ...]:
    """Return which dimension of a tensor each axis of the mesh cuts, None where it cuts none.

    Args:
        axes: sizes of the mesh.

    Raises:
        PlanError: the axes do not make as many parts of each dimension as it says.
    """
    if one.axes:
        return tuple(one.axes.index(axis) if axis in one.axes else None for axis in range(len(axes)))
    found: list[int | None] = [None] * len(axes)
    rest = [axis for axis, size in enumerate(axes) if size > 1]
    for dim, parts in enumerate(one.split):
        while parts > 1:
            if not rest or parts % axes[rest[0]]:
                several = sum(parts > 1 for parts in one.split)
                problem = f"'{one.name}' is cut along {several} dimensions on a model axis of {list(axes)}"
                raise PlanError(problem, hint="let axes of mesh.model make the parts of each dimension, or name `axes`")
            parts //= axes[rest[0]]
            found[rest.pop(0)] = dim
    return tuple(found)


def rounds_of(
    count: int, item: TrainingGraph, variables: Mapping[str, int], tensors: Mapping[str, int], whole: Iterable[str]
) -> list[Round]:
    """Return what one axis of the mesh cuts, what comes out even first.

    Args:
        count: the size of the axis.
        item: whose variables and tensors are meant.
        variables: which dimension of each is cut.
        tensors: likewise, of values.
        whole: names of variables that stay whole.

    Raises:
        PlanError: a size is not known.
    """
    found: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    for place, several in enumerate((variables, tensors)):
        for name, dim in several.items():
            extent = _extent(name, dim, item)
            units = count if extent % count == 0 else extent
            found.setdefault(units, ({}, {}))[place][name] = dim
    order = sorted(found, key=lambda units: (units != count, -units))
    return [Round(units, sizes_of(units, count), *found[units], frozenset(whole)) for units in order]


def sizes_of(units: int, count: int) -> tuple[int, ...]:
    """Return how many units each of some devices has: the same, or one more for the first ones."""
    ends = bounds(units, count)
    return tuple(end - begin for begin, end in pairwise(ends))


def _extent(name: str, dim: int, item: TrainingGraph) -> int:
    """Return the size of a dimension of a variable or a tensor."""
    variable = item.variables.get(name)
    shape = static_shape(item.graph.value(name)) if variable is None else variable.shape
    extent = shape[dim] if shape is not None and dim < len(shape) else None
    if extent is None:
        problem = f"the size of dimension {dim} of '{name}' is not known, so it cannot be cut"
        raise PlanError(problem, hint="leave it whole")
    return extent
