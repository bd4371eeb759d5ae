"""Assign logical devices: which of a replica's devices each node runs on, before devices have names.

    model: [2, 3]      coordinates (0, 0) (0, 1) (0, 2) (1, 0) (1, 1) (1, 2)
                       number         0      1      2      3      4      5

While tensors are cut, each axis of the mesh sets one coordinate; an unset coordinate follows the node's operands. A
node that a later pass makes runs on the device of its operands: a gradient's exchange runs where the gradient is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from types import MappingProxyType

from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import MODEL, Axis, Place
from autograph_rewrite.ir.recorded_shapes import static_shape
from autograph_rewrite.plan.parts.batch_split import bounds
from autograph_rewrite.plan.parts.messages import TensorSharding
from autograph_rewrite.training_graph import TrainingGraph


def axis_of(axis: int) -> str:
    """Return the name in the mesh of an axis of the logical devices while tensors are cut."""
    return f"{MODEL}_{axis}"


def names_of(axes: Sequence[int]) -> dict[int, str]:
    """Return the names in the mesh of the model axes larger than 1, by number; a single one is `model`.

    Args:
        axes: their sizes.
    """
    several = [axis for axis, size in enumerate(axes) if size > 1]
    return {axis: axis_of(axis) if len(several) > 1 else MODEL for axis in several}


def divided_of(axes: Sequence[int]) -> tuple[Axis, ...]:
    """Return the axes that the model axis of a mesh consists of; empty where there is only one."""
    names = names_of(axes)
    return tuple(Axis(name, axes[axis]) for axis, name in names.items()) if len(names) > 1 else ()


def number_of(name: str) -> int:
    """Return the number of a model axis from its name in the mesh."""
    return 0 if name == MODEL else int(name.removeprefix(f"{MODEL}_"))


def put(node: Node, place: int, *, axis: int, keep: bool = False) -> None:
    """Set the coordinate of a node on an axis of the mesh.

    Args:
        node: of the folded graph.
        place: the coordinate.
        axis: number of the model axis.
        keep: leave a coordinate that is set already.
    """
    if not (keep and axis_of(axis) in node.place):
        node.put(axis_of(axis), place)


def assign(node: Node, device: int, axes: Sequence[int]) -> None:
    """Put a node on a logical device.

    Args:
        node: of the folded graph.
        device: its number.
        axes: sizes of the mesh.
    """
    for axis in reversed(range(len(axes))):
        device, place = divmod(device, axes[axis])
        put(node, place, axis=axis)


def settle(order: Sequence[Node], axis: int) -> None:
    """Set missing coordinates: 0 on an axis, and on those before it the coordinate of the operands or readers.

    Args:
        order: all nodes, producers first.
        axis: the last one that was cut.
    """
    for before in map(axis_of, range(axis)):
        for node in order:
            if before not in node.place:
                made = [value.node.at(before) for value in node.inputs if before in value.node.place]
                if made:
                    node.put(before, max(made))
        for node in reversed(order):
            if before not in node.place:
                readers = [user for value in node.read_outputs for user, _ in value.uses]
                node.put(before, min((user.at(before) for user in readers if before in user.place), default=0))
    for node in order:
        put(node, 0, axis=axis, keep=True)


def number_devices(nodes: Iterable[Node], axes: Sequence[int]) -> None:
    """Replace the coordinates of each node by the number of its logical device.

    Args:
        nodes: all of the graph, settled on every axis.
        axes: sizes of the mesh.
    """
    for node in nodes:
        number = 0
        for axis, size in enumerate(axes):
            number = number * size + node.at(axis_of(axis))
        node.set_place(_numbered(number))


@cache
def _numbered(device: int) -> Place:
    return MappingProxyType({MODEL: device})


def logical_devices(order: Iterable[Node]) -> Mapping[Node, int]:
    """Return the logical device of each node.

    Args:
        order: all nodes, producers first.
    """
    found: dict[Node, int] = {}
    for node in order:
        made = (found[value.node] for value in node.inputs if value.node in found)
        found[node] = node.at(MODEL) if MODEL in node.place else max(made, default=0)
    return found


# The tensors that each axis of the mesh cuts, in rounds whose blocks are counted in one unit.
#
#     up/kernel [8, 32], split (1, 2)      32 = 2 units of 16          one round, units 2: sizes 1 1
#     down/kernel [32, 8], split (2, 1)    32 = 2 units of 16
#     head/kernel [8, 5], split (1, 2)      5 = 5 units of 1           another, units 5: sizes 3 2
#
# A dimension that the devices divide evenly is counted in as many units as there are devices, so that all these
# dimensions line up. Any other dimension is counted in its elements, and lines up only with dimensions of equal size.
#
#     model: [2, 2]    split (2, 2)            axis 0 cuts dimension 0, axis 1 dimension 1      `xla_sharding.split`
#                      split (1, 4)            both cut dimension 1: four blocks in a row
#                      axes (1, 0)             axis 1 cuts dimension 0, axis 0 dimension 1   `xla_sharding.mesh_split`
#                      axes (-1, 0)            axis 0 cuts dimension 1; axis 1 nothing


@dataclass(frozen=True)
class Round:
    """The tensors that are cut together.

    Attributes:
        units: the number of units in each dimension that is cut.
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

    @property
    def places(self) -> list[tuple[int, int]]:
        """The first unit of each device, and the first after it."""
        return list(pairwise(accumulate(self.sizes, initial=0)))


def cut_dimensions(one: TensorSharding, axes: Sequence[int]) -> tuple[int | None, ...]:
    """Return which dimension of a tensor each axis of the mesh cuts, None where it cuts none.

    Args:
        axes: sizes of the mesh.

    Raises:
        PlanError: the axes cannot cut each dimension into the number of parts that `one.split` gives.
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
    """Return the rounds of one axis of the mesh, even cuts first; a dimension of one element is not cut.

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
            if extent == 1:  # blocks of one and of no element would look like values that are broadcast
                continue
            units = count if extent % count == 0 else extent
            found.setdefault(units, ({}, {}))[place][name] = dim
    order = sorted(found, key=lambda units: (units != count, -units))
    return [Round(units, sizes_of(units, count), *found[units], frozenset(whole)) for units in order]


def sizes_of(units: int, count: int) -> tuple[int, ...]:
    """Return the number of units of each device: the first devices may have one more."""
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
