"""What is cut on the model axis, in rounds whose blocks are counted in one unit.

    up/kernel [8, 32], split (1, 2)      32 = 2 units of 16          one round, units 2: sizes 1 1
    down/kernel [32, 8], split (2, 1)    32 = 2 units of 16
    head/kernel [8, 5], split (1, 2)      5 = 5 units of 1           another, units 5: sizes 3 2

A dimension that the devices divide evenly is counted in as many units as there are devices, so that all such
dimensions line up; one that they do not is counted in its elements, and lines up with its like only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.shapes.recorded import static_shape
from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.parts.batch_split import bounds
from autograph_rewrite.plan.parts.messages import Model, TensorSharding


@dataclass(frozen=True)
class Round:
    """What is cut together.

    Attributes:
        units: in which dimensions are counted.
        sizes: units of each logical device.
        variables: the dimension that is cut, by name.
        tensors: likewise, of values.
        whole: names of variables that stay whole, whatever reads them.
    """

    units: int
    sizes: tuple[int, ...]
    variables: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()


def rounds_of(model: Model, item: GraphItem) -> list[Round]:
    """Return what a model axis cuts, what comes out even first.

    Args:
        model: of the plan.
        item: whose variables and tensors are meant.

    Raises:
        PlanError: something is cut along several dimensions, or its size is not known.
    """
    found: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    for one in model.shardings:
        if not one.split:
            continue
        dim = _dimension(one)
        extent = _extent(one.name, dim, item)
        units = model.size if extent % model.size == 0 else extent
        variables, tensors = found.setdefault(units, ({}, {}))
        (variables if one.name in item.variables else tensors)[one.name] = dim
    order = sorted(found, key=lambda units: (units != model.size, -units))
    whole = frozenset(one.name for one in model.shardings if not one.split)
    return [Round(units, sizes_of(units, model.size), *found[units], whole) for units in order]


def sizes_of(units: int, count: int) -> tuple[int, ...]:
    """Return how many units each of some devices has: the same, or one more for the first ones."""
    ends = bounds(units, count)
    return tuple(end - begin for begin, end in pairwise(ends))


def _dimension(one: TensorSharding) -> int:
    cut = [dim for dim, parts in enumerate(one.split) if parts > 1]
    if len(cut) != 1:
        problem = f"'{one.name}' is cut along {len(cut)} dimensions on the model axis"
        raise PlanError(problem, hint="cut it along one, into as many parts as a replica has devices")
    return cut[0]


def _extent(name: str, dim: int, item: GraphItem) -> int:
    """Return the size of a dimension of a variable or a tensor."""
    variable = item.variables.get(name)
    shape = static_shape(item.graph.value(name)) if variable is None else variable.shape
    extent = shape[dim] if shape is not None and dim < len(shape) else None
    if extent is None:
        problem = f"the size of dimension {dim} of '{name}' is not known, so it cannot be cut"
        raise PlanError(problem, hint="leave it whole")
    return extent
