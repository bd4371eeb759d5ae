"""Find the variables and tensors that a configuration or the graph places on the model axis: cut, or on one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Sharding
from autograph_rewrite.config.split_parts import MODEL, OPEN
from autograph_rewrite.diagnostics.faults import FileFault, did_you_mean
from autograph_rewrite.diagnostics.limits import matches
from autograph_rewrite.diagnostics.located_yaml import KeyPath
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.load import sharding_marks
from autograph_rewrite.plan.parts.messages import TensorSharding
from autograph_rewrite.training_graph import TrainingGraph

# The variables and tensors that a configuration or the graph itself places on the model axis.
#
#     sharding: [{match: ".*/up/kernel", split: [1, 2]}]     layer_0/up/kernel: split (1, 2)
#                                                            layer_1/up/kernel: split (1, 2)
#
# Of several entries that match a name the first counts; an annotation in the graph has to agree with it. The checks and
# their order are those of `xla_sharding`: the rank, divisibility if `strict` is set, the product of the parts.


Shape = tuple[int | None, ...] | None


@dataclass(frozen=True)
class Wish:
    """A placement that the configuration or the graph asks for.

    Attributes:
        subject: the placed variable or tensor; several wishes for one subject have to agree.
        said: the place in the program or file that asks for it.
        path: of the configuration, for faults.
        strict: whether parts have to be of one size.
    """

    sharding: TensorSharding
    subject: str
    said: str
    path: KeyPath
    strict: bool


def placed_by_hand(
    item: TrainingGraph, config: Config
) -> tuple[tuple[TensorSharding, ...], list[FileFault], list[str]]:
    """Return the placements, their faults, and notes on them."""
    found: dict[str, Wish] = {}
    faults: list[FileFault] = []
    notes: list[str] = []
    for wish in _wishes(item, config, faults, notes):
        earlier = found.get(wish.subject)
        problem = _problem(wish, _shape(item, wish.sharding.name), config)
        if problem is not None:
            faults.append(config.fault(wish.path, *problem))
        elif earlier is None:
            found[wish.subject] = wish
        elif _placement(earlier, config) != _placement(wish, config):
            if wish.path[0] != earlier.path[0] or wish.path[0] != "sharding":
                faults.append(config.fault(wish.path, *_conflict(earlier, wish)))
        elif wish.sharding.name != earlier.sharding.name:  # another copy of one tensor
            found[wish.sharding.name] = wish
    return tuple(wish.sharding for wish in found.values()), faults, notes


def _wishes(item: TrainingGraph, config: Config, faults: list[FileFault], notes: list[str]) -> Iterator[Wish]:
    """Yield the wishes of the graph, then those of the configuration, entry by entry."""
    assert config.mesh is not None
    count, strict = config.mesh.model_size, config.semantics.strict
    for one in annotations_of(item):
        axes = _axes(one, config.mesh.model_axes)
        note = "" if axes else _order_of_tiles(one)
        notes += [note] if note else []
        if one.tiles[1] > 1 and one.split and not axes:
            message = (
                f"'{one.name}' is cut into {math.prod(one.split)} tiles, each on {one.tiles[1]} devices ({one.said})"
            )
            hint = "partial replication needs a model axis of several dimensions, of which some cut it: mesh.model"
            faults.append(config.fault(("mesh", "model"), message, hint))
            continue
        sharding = TensorSharding(one.name, _counted(one.split, count), one.device, axes)
        yield Wish(sharding, one.subject, one.said, ("mesh", "model"), strict)
    for i, entry in enumerate(config.sharding):
        names = list(_named(item, entry))
        if not names and not entry.optional:
            known = [*item.variables, *item.graph.nodes]
            message = f"sharding[{i}].match: no variable's or tensor's whole name matches '{entry.match}'"
            hint = did_you_mean(entry.match, known, noun="known names")
            faults.append(config.fault(("sharding", i, "match"), message, hint))
        elif not names:
            notes.append(
                f"{config.where('sharding', i)}: sharding[{i}] places nothing: no name matches '{entry.match}'"
            )
        device = -1 if entry.home is None else entry.home
        for name in names:
            sharding = TensorSharding(name, _parts(entry, config), device, entry.axes or ())
            path = ("sharding", i)
            said = f"{config.where(*path)}, sharding[{i}]"
            yield Wish(sharding, name, said, path, strict or entry.strict)


def _axes(one: VariableAnnotation, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that XLA's tiles stand for; empty where `split` alone tells them, or no axes fit."""
    devices, copies = one.tiles
    if not one.split or not devices or (copies == 1 and devices == tuple(range(len(devices)))):
        return ()
    return axes_of_tiles(one.split, devices, sizes) or ()


def _order_of_tiles(one: VariableAnnotation) -> str:
    """Return a note where the order of tiles differs from that of logical devices; else an empty text."""
    devices, copies = one.tiles
    if copies > 1 or not one.split or devices == tuple(range(len(devices))):
        return ""
    return f"{one.said}: the devices of '{one.name}' are listed as {list(devices)}; block k is on logical device k"


def _parts(entry: Sharding, config: Config) -> tuple[int, ...]:
    """Return the number of parts of each dimension, empty where an entry cuts nothing."""
    assert config.mesh is not None
    sizes = config.mesh.model_axes
    if entry.axes is None:
        return _counted(entry.split or (), config.mesh.model_size)
    return tuple(sizes[axis] if 0 <= axis < len(sizes) else 1 for axis in entry.axes)


def _counted(split: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the numbers of parts with `model` replaced by the number of devices of the model axis."""
    return tuple(count if parts == MODEL else parts for parts in split)


def _placement(wish: Wish, config: Config) -> tuple[object, ...]:
    """Return a wish in a form that can be compared: without parts that are all 1, and without axes if there is one."""
    one = wish.sharding
    axes = one.axes if config.mesh is not None and len(config.mesh.model_axes) > 1 else ()
    return (one.split if any(parts != 1 for parts in one.split) else ()), one.device, axes


def _conflict(earlier: Wish, later: Wish) -> tuple[str, str]:
    both = " and ".join(f"{_told(one)} ({one.said})" for one in (earlier, later))
    return f"two placements of '{later.subject}' on the model axis disagree: {both}", "leave one of them out"


def _told(wish: Wish) -> str:
    one = wish.sharding
    if one.device >= 0:
        return f"device {one.device}"
    return f"split [{', '.join(str(parts or '?') for parts in one.split)}]" if one.split else "replicate"


def _shape(item: TrainingGraph, name: str) -> Shape:
    if name in item.variables:
        return item.variables[name].shape
    node, _, index = name.partition(":")
    stated: tuple[Shape, ...] = item.graph.nodes[node].attr("_output_shapes") or ()
    return stated[int(index or 0)] if int(index or 0) < len(stated) else None


def _named(item: TrainingGraph, entry: Sharding) -> Iterator[str]:
    """Yield the names that an entry means: variables, or else the first outputs of nodes."""
    variables = [name for name in item.variables if matches(entry.match, name)]
    yield from _meant(item, entry, variables) or (name for name in item.graph.nodes if matches(entry.match, name))


def _meant(item: TrainingGraph, entry: Sharding, names: list[str]) -> list[str]:
    """Leave out slots of another rank under the name of a variable (Adafactor: statistics of rows, of columns).

    The pattern means the variable, and tells nothing about its statistics.
    """
    rank = len(entry.split or entry.axes or ())
    fitting = [name for name in names if rank and len(item.variables[name].shape or ()) == rank]
    if not any(item.variables[name].trainable for name in fitting):
        return names
    return [name for name in names if name in fitting or item.variables[name].trainable is not False]


def _problem(wish: Wish, shape: Shape, config: Config) -> tuple[str, str] | None:
    """Return the fault of a placement, and a hint; None where there is none."""
    assert config.mesh is not None
    count, one = config.mesh.model_size, wish.sharding
    by = "" if wish.path[0] == "sharding" else f" ({wish.said})"
    if one.device >= count:
        return (
            f"there is no logical device {one.device} for '{one.name}': a replica has {count}{by}",
            "they count from 0",
        )
    if not one.split:
        return None
    if shape is not None and len(shape) != len(one.split):
        key = "axes" if one.axes else "split"
        message = f"'{one.name}' has {len(shape)} dimensions, and {key} names {len(one.split)}{by}"
        return message, "say something for each dimension, where it is not cut 1 (split) or -1 (axes)"
    for dim, (size, parts) in enumerate(zip(shape or (), one.split, strict=False)):
        if size is not None and wish.strict and size % max(parts, 1):
            message = f"dimension {dim} of '{one.name}' ({size}) is not divisible by {parts}{by}"
            return message, "leave strict out to allow it"
        if size is not None and size < parts:
            return f"dimension {dim} of '{one.name}' ({size}) is too small for {parts} parts{by}", "cut another one"
    return _axes_problem(one, config.mesh.model_axes) if one.axes else _parts_problem(one, config.mesh.model_axes, by)


def _parts_problem(one: TensorSharding, sizes: Sequence[int], by: str) -> tuple[str, str] | None:
    count, made = math.prod(sizes), math.prod(parts for parts in one.split if parts != OPEN)
    if made == count or (OPEN in one.split and count % made == 0):
        return None
    message = f"the parts of '{one.name}' are {made}, and a replica has {count} devices{by}"
    several = "; or name the axes that cut it, as in axes: [0, -1]" if len(sizes) > 1 else ""
    return message, "the parts of all dimensions multiply to mesh.model" + several


def _axes_problem(one: TensorSharding, sizes: Sequence[int]) -> tuple[str, str] | None:
    named = [axis for axis in one.axes if axis >= 0]
    if any(axis >= len(sizes) for axis in named):
        return f"there is no axis {max(named)} for '{one.name}': mesh.model has {len(sizes)}", "they count from 0"
    if len(set(named)) < len(named):
        return f"an axis cuts two dimensions of '{one.name}'", "each axis of mesh.model cuts one"
    return None if named else (f"no axis cuts '{one.name}'", "replicate: true keeps it whole")


# The axes of a mesh that a tile assignment of XLA stands for.
#
#     mesh [2, 2]    tiles [2, 2], devices 0 1 2 3              axes [0, 1]
#                    tiles [2, 2], devices 0 2 1 3              axes [1, 0]
#                    tiles [1, 2], devices 0 2 1 3, 2 copies    axes [-1, 1]      each tile on the two devices of axis 0
#
# XLA lists the device of each tile, last dimension fastest; `mesh_split` makes such lists from axes.


def axes_of_tiles(tiles: Sequence[int], devices: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axis that cuts each dimension, -1 where none does; None where no choice of one axis each fits.

    Args:
        tiles: into how many each dimension is cut.
        devices: of the first tile, then of the second, ...; each tile may be on several.
        sizes: of the mesh.
    """
    count, cut = math.prod(tiles), [dim for dim, parts in enumerate(tiles) if parts > 1]
    if not count or len(devices) != math.prod(sizes) or sorted(devices) != list(range(len(devices))):
        return None
    wanted = np.sort(np.reshape(devices, (count, -1)))
    mesh = np.arange(len(devices)).reshape(tuple(sizes))
    for chosen in permutations(range(len(sizes)), len(cut)):
        if [sizes[axis] for axis in chosen] != [tiles[dim] for dim in cut]:
            continue
        rest = [axis for axis in range(len(sizes)) if axis not in chosen]
        if np.array_equal(np.sort(mesh.transpose(*chosen, *rest).reshape(count, -1)), wanted):
            by_dim = dict(zip(cut, chosen, strict=True))
            return tuple(by_dim.get(dim, -1) for dim in range(len(tiles)))
    return None


# Annotations in a graph: `ar.split` and the like, and XLA's sharding annotations, in one form.
#
#     w ──► ReadVariableOp ──► autograph_sharding/split-1x2        'w': split (1, 2), said in model.py:12
#     h ──► Identity(_XlaSharding: tiles [1, 2])                   'h': split (1, 2), said by XlaSharding 'h'
#     VarHandleOp(_XlaSharding: device 1)                          'v': device 1
#
# An annotation of a value that is read from a variable, or of its handle, is one of the variable.


@dataclass(frozen=True)
class VariableAnnotation:
    """An annotation of a variable or a tensor in a graph.

    Attributes:
        name: of the variable, else of the tensor that is cut for its readers.
        subject: annotations of one subject must agree.
        said: its place: the line of the program, or the node.
        split: parts of each dimension, as in `config.split_parts`; empty: the whole is on every device.
        device: the logical device that makes it; -1: several.
        tiles: for XLA's annotations, the device of each tile, and on how many devices each tile is.
    """

    name: str
    subject: str
    said: str
    split: tuple[int, ...] = ()
    device: int = -1
    tiles: tuple[tuple[int, ...], int] = ((), 1)


def annotations_of(item: TrainingGraph) -> Iterator[VariableAnnotation]:
    """Yield the annotations of a graph, in its order.

    Args:
        item: normalised.
    """
    variables = {variable.handle: name for name, variable in item.variables.items()}
    nodes = item.graph.nodes
    for name, node in nodes.items():
        mark = sharding_marks.mark_of(name) if node.op == "Identity" else None
        said = node.attr(sharding_marks.XLA_SHARDING)
        if mark is None and said is None:
            continue
        variable = _variable(node, nodes, variables)
        if mark is not None:
            place = node.attr(sharding_marks.PLACE, b"").decode() or f"'{name}'"
            yield VariableAnnotation(variable or name, variable or _value(node.inputs[0].name), place, *mark)
        elif said is not None:
            yield from _said_to_xla(node, sharding_marks.read_op_sharding(said), variable)


def _said_to_xla(node: Node, sharding: sharding_marks.OpSharding, variable: str | None) -> Iterator[VariableAnnotation]:
    """Yield XLA's annotations of the outputs of a node; none where XLA shall choose."""
    outputs = range(1 if variable is not None else len(node.output_dtypes))
    for index in outputs:
        one = sharding.of(index)
        if one.type not in (sharding_marks.REPLICATED, sharding_marks.MAXIMAL, sharding_marks.OTHER) or (
            sharding.type == sharding_marks.TUPLE and one.type == sharding_marks.REPLICATED
        ):
            continue  # outputs of a tuple without an annotation are REPLICATED
        name = variable or _value(f"{node.name}:{index}")
        said = f"{sharding_marks.XLA_SHARDING} of {node.op} '{node.name}'"
        if one.type == sharding_marks.MAXIMAL:
            if not one.devices:
                raise GraphError("the sharding names no device", node=node)
            yield VariableAnnotation(name, name, said, device=one.devices[0])
            continue
        tiles = [
            OPEN if dim in node.attr(sharding_marks.OPEN_DIMS, ()) else tiles for dim, tiles in enumerate(one.tiles)
        ]
        split = tuple(tiles) if any(count != 1 for count in tiles) else ()
        yield VariableAnnotation(name, name, said, split, tiles=(one.devices, one.copies))


def _variable(node: Node, nodes: Mapping[str, Node], variables: Mapping[str, str]) -> str | None:
    """Return the variable that a node is the handle of, reads, or forwards the value of; None where there is none."""
    if node.name in variables:
        return variables[node.name]
    if node.op == "Identity" and node.inputs:
        read = nodes.get(node.inputs[0].name.partition(":")[0])
        node = read if read is not None else node
    if node.op != "ReadVariableOp":
        return None
    return variables.get(node.inputs[0].name.partition(":")[0])


def _value(name: str) -> str:
    return name.removesuffix(":0")
