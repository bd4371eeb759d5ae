"""The variables and tensors that a configuration or the graph itself places on the model axis.

    sharding: [{match: ".*/up/kernel", split: [1, 2]}]     layer_0/up/kernel: split (1, 2)
                                                           layer_1/up/kernel: split (1, 2)

Of several entries that match a name the first counts; what the graph says itself (`plan.annotations`) has to agree with
it. The checks and their order are those of `xla_sharding`: the rank, divisibility where that is asked for, the product
of the parts. Parts need not be of one size, unless `strict` is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Sharding
from autograph_rewrite.config.split_parts import MODEL, OPEN
from autograph_rewrite.diagnostics.faults import Fault, did_you_mean
from autograph_rewrite.diagnostics.located_yaml import KeyPath
from autograph_rewrite.diagnostics.patterns import matches
from autograph_rewrite.plan.annotations import Annotation, annotations_of
from autograph_rewrite.plan.parts.graph_digest import ItemLike
from autograph_rewrite.plan.parts.messages import TensorSharding
from autograph_rewrite.plan.tile_assignments import axes_of_tiles

Shape = tuple[int | None, ...] | None


@dataclass(frozen=True)
class Wish:
    """A placement that somebody asks for.

    Attributes:
        sharding: what is asked for.
        subject: of what: several wishes for one subject have to agree.
        said: where.
        path: of the configuration, to which a fault belongs.
        strict: whether parts have to be of one size.
    """

    sharding: TensorSharding
    subject: str
    said: str
    path: KeyPath
    strict: bool


def placed_by_hand(item: ItemLike, config: Config) -> tuple[tuple[TensorSharding, ...], list[Fault], list[str]]:
    """Return what is placed, what is wrong with it, and what is to be said of it.

    Args:
        item: whose variables and tensors are meant.
        config: the user's settings.
    """
    found: dict[str, Wish] = {}
    faults: list[Fault] = []
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


def _wishes(item: ItemLike, config: Config, faults: list[Fault], notes: list[str]) -> Iterator[Wish]:
    """Yield what is asked for: by the graph first, then by the configuration, entry by entry."""
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


def _axes(one: Annotation, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that XLA's tiles stand for; none where `split` says as much, or no axes do."""
    devices, copies = one.tiles
    if not one.split or not devices or (copies == 1 and devices == tuple(range(len(devices)))):
        return ()
    return axes_of_tiles(one.split, devices, sizes) or ()


def _order_of_tiles(one: Annotation) -> str:
    """Return a note where tiles are given to devices in another order than that of logical devices."""
    devices, copies = one.tiles
    if copies > 1 or not one.split or devices == tuple(range(len(devices))):
        return ""
    return f"{one.said}: the devices of '{one.name}' are listed as {list(devices)}; block k is on logical device k"


def _parts(entry: Sharding, config: Config) -> tuple[int, ...]:
    """Return into how many parts an entry cuts each dimension, none where it cuts nothing."""
    assert config.mesh is not None
    sizes = config.mesh.model_axes
    if entry.axes is None:
        return _counted(entry.split or (), config.mesh.model_size)
    return tuple(sizes[axis] if 0 <= axis < len(sizes) else 1 for axis in entry.axes)


def _counted(split: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return numbers of parts in which the devices of the model axis are counted."""
    return tuple(count if parts == MODEL else parts for parts in split)


def _placement(wish: Wish, config: Config) -> tuple[object, ...]:
    """Return what is asked for, where nothing is cut as nothing, and of a single axis all is said by the parts."""
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


def _shape(item: ItemLike, name: str) -> Shape:
    if name in item.variables:
        return item.variables[name].shape
    node, _, index = name.partition(":")
    stated: tuple[Shape, ...] = item.graph.nodes[node].attr("_output_shapes") or ()
    return stated[int(index or 0)] if int(index or 0) < len(stated) else None


def _named(item: ItemLike, entry: Sharding) -> Iterator[str]:
    """Yield the names of what an entry means: variables, or else the first outputs of nodes."""
    variables = [name for name in item.variables if matches(entry.match, name)]
    yield from variables or (name for name in item.graph.nodes if matches(entry.match, name))


def _problem(wish: Wish, shape: Shape, config: Config) -> tuple[str, str] | None:
    """Return what is wrong with placing something so, and the way out."""
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
