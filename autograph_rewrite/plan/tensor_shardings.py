"""The variables and tensors that a configuration places on the model axis, each by the first entry that matches it.

    sharding: [{match: ".*/up/kernel", split: [1, 2]}]     layer_0/up/kernel: split (1, 2)
                                                           layer_1/up/kernel: split (1, 2)

The checks and their order are those of `xla_sharding`: the rank, then the product of the parts. Parts need not be of
one size, unless `semantics.strict` is set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Sharding
from autograph_rewrite.diagnostics.faults import Fault, did_you_mean
from autograph_rewrite.diagnostics.patterns import matches
from autograph_rewrite.load.sharding_marks import mark_of
from autograph_rewrite.plan.parts.graph_digest import ItemLike
from autograph_rewrite.plan.parts.messages import TensorSharding

Shape = tuple[int | None, ...] | None


def _marked(item: ItemLike) -> Iterator[TensorSharding]:
    """Yield what the graph itself says of its tensors (`ar.split` and the like); of a variable that is read, of it."""
    handles = {variable.handle: name for name, variable in item.variables.items()}
    for name, node in item.graph.nodes.items():
        mark = mark_of(name)
        if mark is None or node.op != "Identity":
            continue
        read = item.graph.nodes.get(node.inputs[0].name.partition(":")[0])
        is_read = read is not None and read.op == "ReadVariableOp"
        handle = read.inputs[0].name.partition(":")[0] if read is not None and is_read else ""
        yield TensorSharding(handles.get(handle, name), *mark)


def placed_by_hand(item: ItemLike, config: Config) -> tuple[tuple[TensorSharding, ...], list[Fault]]:
    """Return what the entries of `sharding` place, variables first, and what is wrong with them.

    Args:
        item: whose variables and tensors are meant.
        config: the user's settings.
    """
    found: dict[str, TensorSharding] = {}
    faults: list[Fault] = []
    for one in _marked(item):
        device = one.device if one.device >= 0 else None
        entry = Sharding(match=re.escape(one.name), split=one.split or None, assign=device)
        problem = _problem(one.name, _shape(item, one.name), entry, config)
        if problem is not None:
            faults.append(config.fault(("mesh", "model"), *problem))
        found[one.name] = one
    for i, entry in enumerate(config.sharding):
        named = list(_named(item, entry))
        if not named:
            known = [*item.variables, *item.graph.nodes]
            message = f"sharding[{i}].match: no variable's or tensor's whole name matches '{entry.match}'"
            hint = did_you_mean(entry.match, known, noun="known names")
            faults.append(config.fault(("sharding", i, "match"), message, hint))
        for name, shape in named:
            problem = _problem(name, shape, entry, config)
            if problem is not None:
                faults.append(config.fault(("sharding", i), *problem))
            elif name not in found:
                device = -1 if entry.assign is None else entry.assign
                found[name] = TensorSharding(name, entry.split or (), device)
    return tuple(found.values()), faults


def _shape(item: ItemLike, name: str) -> Shape:
    if name in item.variables:
        return item.variables[name].shape
    stated: tuple[Shape, ...] = item.graph.nodes[name].attr("_output_shapes") or (None,)
    return stated[0]


def _named(item: ItemLike, entry: Sharding) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of what an entry means: variables, or else the first outputs of nodes."""
    variables = [(name, one.shape) for name, one in item.variables.items() if matches(entry.match, name)]
    if variables:
        yield from variables
        return
    for name in item.graph.nodes:
        if matches(entry.match, name):
            yield name, _shape(item, name)


def _problem(name: str, shape: Shape, entry: Sharding, config: Config) -> tuple[str, str] | None:
    """Return what is wrong with placing something so, and the way out."""
    assert config.mesh is not None
    count = config.mesh.model_size
    if entry.assign is not None and entry.assign >= count:
        return f"there is no logical device {entry.assign} for '{name}': a replica has {count}", "they count from 0"
    if entry.split is None:
        return None
    if shape is not None and len(shape) != len(entry.split):
        message = f"'{name}' has {len(shape)} dimensions, and split names {len(entry.split)}"
        return message, "say a number of parts for each dimension, 1 where it is not cut"
    for dim, parts in zip(shape or (), entry.split, strict=False):
        if config.semantics.strict and dim is not None and dim % parts:
            return f"dimension {dim} of '{name}' is not divisible by {parts}", "leave semantics.strict out to allow it"
        if dim is not None and dim < parts:
            return f"dimension {dim} of '{name}' is too small for {parts} parts", "cut another one"
    if math.prod(entry.split) != count:
        message = f"the parts of '{name}' are {math.prod(entry.split)}, and a replica has {count} devices"
        return message, "the parts of all dimensions multiply to mesh.model"
    return None
