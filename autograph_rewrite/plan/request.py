"""From a configuration to a request: the part of a plan that does not depend on the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.fields import read_size
from autograph_rewrite.config.sections import Override, Pipeline, Sharding
from autograph_rewrite.config.split_parts import MODEL, OPEN
from autograph_rewrite.diagnostics.faults import FileFault, did_you_mean, raise_if_any
from autograph_rewrite.diagnostics.limits import matches
from autograph_rewrite.diagnostics.located_yaml import KeyPath
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.ir.types.device_names import canonical, on_task, short
from autograph_rewrite.load import sharding_marks
from autograph_rewrite.load.marks import has_segments
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.codecs import plan_name
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.parts.graph_digest import InputLike, ItemLike, NodeLike, graph_digest
from autograph_rewrite.plan.parts.messages import TensorSharding
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.user_extensions import own_ops, own_passes
from autograph_rewrite.plan.variable_policies import policies_of, unmatched

UNUSED = "the sharding annotations of the graph place nothing: there is no model axis (mesh.model)"
_GIGABIT, _BUCKET_SECONDS, _LEAST_BUCKET = 1e9 / 8, 1e-3, 64 * 1024

_PADDINGS = {"auto": "longest", "power_of_two": "power_of_two", "none": "equal"}
"""By configurations' names, those of plans."""


def request(item: ItemLike, config: Config, *, strategy: str) -> Plan:
    """The request in which every variable is replicated and follows `config`: its overrides, else its strategy section.

    It has no id yet.

    Args:
        item: what is to be rewritten.
        config: the user's settings.
        strategy: name that the plan is to carry.

    Raises:
        ConfigError: with every setting that this item does not have.
    """
    raise_if_any(unmatched(item, config, "variables"), error=ConfigError, title=config.where())
    devices = job_devices(config)
    model, notes = _model(item, config)
    policies, faults = policies_of(item, config)
    raise_if_any(faults, error=ConfigError, title=config.where())
    return Plan(
        devices=devices,
        mode=config.mode,
        strategy=strategy,
        graph_digest=graph_digest(item.graph),
        mesh=_mesh(config, len(devices)),
        semantics=messages.Semantics(**config.semantics.model_dump()),
        timeout_seconds=config.timeout_seconds,
        batch_inputs=tuple(
            messages.BatchInput(name, axis, whole=_is_made_alike(item, item.inputs[name], config))
            for name, axis in _batch_axes(item, config).items()
        ),
        default=default_options(config),
        variables=tuple(_variable_requests(item, config)),
        micro=_micro(item, config),
        pipeline=_pipeline(config, len(devices)),
        remat=_remat(item, config),
        model=model,
        passes=own_passes(config),
        ops=own_ops(item, config),
        policies=policies,
        local_sgd=messages.LocalSgd(**config.local_sgd.model_dump()) if config.local_sgd is not None else None,
        steps_per_run=config.steps_per_run if config.steps_per_run > 1 else 0,
        notes=(*_idle_devices(config), *notes),
        padding=_PADDINGS[config.padding],
    )


def _idle_devices(config: Config) -> Iterator[str]:
    if config.idle_devices:
        idle = ", ".join(short(device) for device in config.idle_devices)
        yield f"{config.where('device_assignment')}: {idle} stay idle: no replica of the device_assignment has them"


def _mesh(config: Config, replicas: int) -> tuple[messages.Axis, ...]:
    data = messages.Axis("data", replicas)
    return (data, messages.Axis("model", config.model_size)) if config.model_size > 1 else (data,)


def _model(item: ItemLike, config: Config) -> tuple[messages.Model | None, list[str]]:
    """The model axis, with the variables and tensors that are placed on it by hand, and what is to be said of them.

    Raises:
        ConfigError: with every entry of `sharding` that names nothing, and every placement that cannot be.
    """
    if config.mesh is None or config.model_size == 1:
        said = next(annotations_of(item), None)
        return None, [] if said is None else [f"{said.said}: {UNUSED}"]
    shardings, faults, notes = placed_by_hand(item, config)
    raise_if_any(faults, error=ConfigError, title=config.where())
    return messages.Model(config.mesh.model_axes, _of_all_workers(config), shardings), notes


def _micro(item: ItemLike, config: Config) -> messages.Micro | None:
    if config.pipeline is not None:
        count = _microbatches(item, config, config.pipeline)
        return messages.Micro(count, config.pipeline.layout, loop=config.pipeline.form == "loop")
    if config.microbatches == 1:
        return None
    how = config.accumulation
    return messages.Micro(config.microbatches, how.layout, how.uneven == "allow", how.form == "loop")


def _microbatches(item: ItemLike, config: Config, pipeline: Pipeline) -> int:
    """How many micro-batches go through the stages.

    Raises:
        ConfigError: only their size is given, and the batch cannot be divided by it.
    """
    if pipeline.microbatch_size is None:
        return pipeline.microbatches or config.microbatches
    axes = [(info.shape, info.batch_axis) for info in item.inputs.values()]
    batch = next((shape[axis] for shape, axis in axes if shape is not None and axis is not None and shape[axis]), None)
    each = pipeline.microbatch_size * len(job_devices(config))
    if batch is None or batch % each:
        size = "not known before a step" if batch is None else str(batch)
        message = f"pipeline.microbatch_size is {pipeline.microbatch_size}, but the size of the batch is {size}"
        fault = config.fault(("pipeline", "microbatch_size"), message, "say how many there are: pipeline.microbatches")
        raise_if_any([fault], error=ConfigError, title=config.where())
    return (batch or 0) // each


def _pipeline(config: Config, replicas: int) -> messages.Pipeline | None:
    section = config.pipeline
    if section is None:
        return None
    given, devices = config.replica_devices(), section.devices or ()
    if config.is_driven:
        devices = devices or _of_all_workers(config, config.model_size)
    elif not devices:
        defaults = tuple(canonical(f"CPU:{stage}") for stage in range(section.stages))
        devices = defaults if len(given) % section.stages else given[:: config.model_size]
    schedule = "one_f_one_b" if section.schedule == "1f1b" else section.schedule
    if section.form == "loop":
        schedule = "circular" if section.circular_repeat > 1 else "gpipe"
    return messages.Pipeline(
        section.chunks,
        devices if len(devices) > section.stages else devices * replicas,
        schedule,
        section.boundaries or (),
        section.names or (),
        section.assign,
    )


def _remat(item: ItemLike, config: Config) -> messages.Remat | None:
    section = config.remat
    offload = "" if section.offload == "none" else section.offload
    nodes = item.graph.nodes.values()
    if "policy" not in section.model_fields_set and has_segments((node.name, node.attrs) for node in nodes):
        return messages.Remat("marked", section.names, stages=section.stages, offload=offload)
    policy, _, size = section.policy.partition(":")
    if policy == "none" and not offload:
        return None
    stated = f"budget:{read_size(size)}" if policy == "budget" else section.policy
    return messages.Remat(stated, section.names, section.scopes, section.stages, offload)


def job_devices(config: Config) -> tuple[str, ...]:
    """The devices of all replicas, worker by worker; those of other processes under their full names.

    Raises:
        ConfigError: the configuration names no devices.
    """
    if config.is_driven:
        named, stages = None, 1
        if config.pipeline is not None:
            named, stages = config.pipeline.devices, config.pipeline.stages
        return named[:1] if named is not None else _of_all_workers(config, stages * config.model_size)
    own = config.replicas
    if config.workers == 1 and not (config.cluster is not None and config.cluster.ps):
        return own
    return tuple(on_task(device, "worker", task) for task in range(config.workers) for device in own)


def _of_all_workers(config: Config, every: int = 1) -> tuple[str, ...]:
    """Every so many of the devices of all workers, worker by worker."""
    own = config.replica_devices()
    if config.workers > 1:
        own = tuple(on_task(device, "worker", task) for task in range(config.workers) for device in own)
    return own[::every]


def _batch_axes(item: ItemLike, config: Config) -> dict[str, int]:
    """Return the axis of the examples of each batch input.

    Where no input is known to be a batch, what an iterator draws is one: data that is batched with drop_remainder says
    how many examples there are. Of several processes nobody knows whether that is the whole batch or the part of one.
    """
    axes = {name: tensor.batch_axis for name, tensor in item.inputs.items() if tensor.batch_axis is not None}
    if axes or config.workers > 1:
        return axes
    nodes = item.graph.nodes
    drawn = {
        name: tensor.shape[0]
        for name, tensor in item.inputs.items()
        if tensor.shape
        and (node := nodes.get(tensor.tensor.partition(":")[0])) is not None
        and has(node.op, "elements")
    }
    return dict.fromkeys(drawn, 0) if len(set(drawn.values())) == 1 else {}


def _is_made_alike(item: ItemLike, tensor: InputLike, config: Config) -> bool:
    """Whether an input comes out of an iterator that each process's graph has itself; others are handed to it."""
    if config.workers == 1 or config.input == "per_worker" or config.is_driven:
        return False
    nodes = item.graph.nodes
    made = nodes.get(tensor.tensor.partition(":")[0])
    if made is None or not made.op.startswith("IteratorGetNext"):
        return False
    handle = nodes.get(made.inputs[0].name.partition(":")[0])
    return handle is not None and not handle.op.startswith("Placeholder")


def default_options(config: Config) -> messages.Options:
    """What the strategy section says of every reduction."""
    section = config.strategy
    compressor = plan_name(config, section.compressor, "strategy", "compressor")
    return messages.Options("all_reduce", section.hint, compressor, _bucket_bytes(config))


def _bucket_bytes(config: Config) -> int:
    """What the configuration says; else what the network that it tells of carries in a millisecond, up to the default.

    A collective takes about as long to start: on a slow link, what is ready early is to be on its way early.
    """
    section, network = config.strategy, config.cluster.network if config.cluster is not None else None
    if network is None or "bucket_bytes" in section.model_fields_set:
        return section.bucket_bytes
    carried = int(network.bandwidth_gbps * _GIGABIT * _BUCKET_SECONDS)
    return min(max(carried, _LEAST_BUCKET), section.bucket_bytes)


def override_of(variable: str, config: Config) -> Override | None:
    """The first override whose pattern matches the whole name."""
    return next((o for o in config.variables if matches(o.match, variable)), None)


def _variable_requests(item: ItemLike, config: Config) -> Iterator[messages.VariableRequest]:
    """One for each variable that is trained, as far as one knows, or that an override names."""
    default = default_options(config)
    for name, variable in item.variables.items():
        override = override_of(name, config)
        if override is None and variable.trainable is False:
            continue
        yield messages.VariableRequest(name, options=_overridden(default, override, config))


def _overridden(options: messages.Options, override: Override | None, config: Config) -> messages.Options:
    if override is None:
        return options
    said = override.model_dump(include={"hint", "compressor", "bucket_bytes"}, exclude_none=True)
    if "compressor" in said:
        place = ("variables", config.variables.index(override), "compressor")
        said["compressor"] = plan_name(config, said["compressor"], *place)
    return replace(options, **said)


# The variables and tensors that a configuration or the graph itself places on the model axis.
#
#     sharding: [{match: ".*/up/kernel", split: [1, 2]}]     layer_0/up/kernel: split (1, 2)
#                                                            layer_1/up/kernel: split (1, 2)
#
# Of several entries that match a name the first counts; what the graph says itself (`plan.annotations`) has to agree
# with it. The checks and their order are those of `xla_sharding`: the rank, divisibility where that is asked for, the
# product of the parts. Parts need not be of one size, unless `strict` is set.


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


def placed_by_hand(item: ItemLike, config: Config) -> tuple[tuple[TensorSharding, ...], list[FileFault], list[str]]:
    """Return what is placed, what is wrong with it, and what is to be said of it.

    Args:
        item: whose variables and tensors are meant.
        config: the user's settings.
    """
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


def _wishes(item: ItemLike, config: Config, faults: list[FileFault], notes: list[str]) -> Iterator[Wish]:
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


def _axes(one: VariableAnnotation, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that XLA's tiles stand for; none where `split` says as much, or no axes do."""
    devices, copies = one.tiles
    if not one.split or not devices or (copies == 1 and devices == tuple(range(len(devices)))):
        return ()
    return axes_of_tiles(one.split, devices, sizes) or ()


def _order_of_tiles(one: VariableAnnotation) -> str:
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
    yield from _meant(item, entry, variables) or (name for name in item.graph.nodes if matches(entry.match, name))


def _meant(item: ItemLike, entry: Sharding, names: list[str]) -> list[str]:
    """Leave out what an optimizer keeps of another rank under the name of a variable (Adafactor: of rows, of columns).

    The pattern means the variable; nobody has said how its statistics are cut.
    """
    rank = len(entry.split or entry.axes or ())
    fitting = [name for name in names if rank and len(item.variables[name].shape or ()) == rank]
    if not any(item.variables[name].trainable for name in fitting):
        return names
    return [name for name in names if name in fitting or item.variables[name].trainable is not False]


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


# Which axes of a mesh a tile assignment of XLA stands for.
#
#     mesh [2, 2]    tiles [2, 2], devices 0 1 2 3              axes [0, 1]
#                    tiles [2, 2], devices 0 2 1 3              axes [1, 0]
#                    tiles [1, 2], devices 0 2 1 3, 2 copies    axes [-1, 1]      each tile on the two devices of axis 0
#
# XLA lists the device of each tile, last dimension fastest; `mesh_split` makes such lists from axes.


def axes_of_tiles(tiles: Sequence[int], devices: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axis that cuts each dimension, -1 where none does; None where it is not one axis for each.

    Args:
        tiles: into how many each dimension is cut.
        devices: of each tile in turn; several where each is on several.
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


# What a graph itself says of its tensors: `ar.split` and the like, and XLA's sharding annotations, in one form.
#
#     w ──► ReadVariableOp ──► autograph_sharding/split-1x2        'w': split (1, 2), said in model.py:12
#     h ──► Identity(_XlaSharding: tiles [1, 2])                   'h': split (1, 2), said by XlaSharding 'h'
#     VarHandleOp(_XlaSharding: device 1)                          'v': device 1
#
# What is said of a variable that is read, or of its handle, is said of the variable.


@dataclass(frozen=True)
class VariableAnnotation:
    """What a graph says of a variable or a tensor.

    Attributes:
        name: of the variable, else of the tensor that is cut for its readers.
        subject: what it is about: annotations of one subject must agree.
        said: where: the line of the program, or the node.
        split: parts of each dimension, as in `config.split_parts`; empty: the whole is on every device.
        device: the logical device that makes it; -1: several.
        tiles: of XLA's, the device of each tile, and on how many devices each tile is.
    """

    name: str
    subject: str
    said: str
    split: tuple[int, ...] = ()
    device: int = -1
    tiles: tuple[tuple[int, ...], int] = ((), 1)


def annotations_of(item: ItemLike) -> Iterator[VariableAnnotation]:
    """Yield what a graph says of its tensors, in its order.

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


def _said_to_xla(
    node: NodeLike, sharding: sharding_marks.OpSharding, variable: str | None
) -> Iterator[VariableAnnotation]:
    """Yield what XLA is told of the outputs of a node; nothing where that is that it is to find out."""
    outputs = range(1 if variable is not None else len(node.output_dtypes))
    for index in outputs:
        one = sharding.of(index)
        if one.type not in (sharding_marks.REPLICATED, sharding_marks.MAXIMAL, sharding_marks.OTHER) or (
            sharding.type == sharding_marks.TUPLE and one.type == sharding_marks.REPLICATED
        ):
            continue  # of an op with several outputs, those that nobody spoke of are REPLICATED
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


def _variable(node: NodeLike, nodes: Mapping[str, NodeLike], variables: Mapping[str, str]) -> str | None:
    """Return the variable that a node reads, hands on as it was read, or is; None where that is none."""
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
