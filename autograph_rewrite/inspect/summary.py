"""Summarise a graph: inputs, outputs, variables with their slots and updates, ops, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.analysis.propagate import propagate
from autograph_rewrite.analysis.variable_uses import VariableUse, plain_uses, variable_uses
from autograph_rewrite.diagnostics.amounts import few
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.communication import bare
from autograph_rewrite.inspect.export import signature_data
from autograph_rewrite.inspect.graph_source import Source, as_item
from autograph_rewrite.inspect.report_view import plan_of
from autograph_rewrite.inspect.table import drawn, table
from autograph_rewrite.ir.format.function_library import Library
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.recorded_shapes import Shape
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.replica_devices import devices_by_replica
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

OPS_SHOWN = 30


@dataclass(frozen=True)
class VariableLine:
    """A variable with the ops that update it in one step, and its slots.

    In a rewritten graph, `devices` are those of its handles, copies and shards included, and `shards` their sizes.
    """

    name: str
    dtype: str
    shape: Shape | None
    trainable: bool | None
    captured: bool
    updates: tuple[str, ...]
    slots: tuple[str, ...]
    slot_of: str | None
    devices: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()

    @property
    def bytes(self) -> int | None:
        """Its size; None if the shape is not known."""
        return dtypes.nbytes(dtypes.NUMBERS.get(self.dtype, 0), self.shape)

    def data(self) -> dict[str, Any]:
        """Return it as plain data; devices and shards only if the graph has devices."""
        data = {**vars(self), "bytes": self.bytes}
        for key in () if self.devices else ("devices", "shards"):
            del data[key]
        return data


@dataclass(frozen=True)
class Summary:
    """The result of the verb `inspect`."""

    item: TrainingGraph
    variables: tuple[VariableLine, ...]
    ops: Counter[str]
    functions: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        item = self.item
        parts = [
            table("inputs", ("name", "tensor", "type", "batch axis"), _tensor_rows(item.inputs.values())),
            table("outputs", ("name", "tensor", "type", ""), _tensor_rows(item.outputs.values())),
            table(
                "step",
                ("", ""),
                [("runs", ", ".join(item.targets) or "nothing"), ("initialised by", item.init_op or "-")],
            ),
            *self._device_table(),
            self._variable_table(),
            table("ops", ("op", "#nodes"), self._op_rows()),
        ]
        if self.placements:
            parts.append(table("placements", ("placement", "#values"), self.placements.most_common()))
        lines = [f"warning: {warning}" for warning in self.warnings]
        return drawn(*parts) + "".join(f"{line}\n" for line in lines)

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """Return devices[replica][logical] of a rewritten graph with a plan; empty for other graphs."""
        plan = plan_of(self.item)
        return devices_by_replica(plan) if plan is not None else ()

    def _device_table(self) -> Iterator[Any]:
        if self.devices:
            most = max(map(len, self.devices))
            columns = ("#replica", *(f"device {i}" if most > 1 else "device" for i in range(most)))
            rows = ((replica, *map(device_specs.short, own)) for replica, own in enumerate(self.devices))
            yield table("devices", columns, rows)

    def _variable_table(self) -> Any:
        columns = ["name", "type", "#bytes", "trained", "updates per step", "slots"]
        rows = [_variable_row(variable) for variable in self.variables]
        if any(variable.devices for variable in self.variables):
            columns.append("lives on")
            rows = [(*row, _lives_on(variable)) for row, variable in zip(rows, self.variables, strict=True)]
        return table("variables", columns, rows)

    @property
    def placements(self) -> Counter[str]:
        """The number of values with each placement, as far as placements are known."""
        nodes, known = self.item.graph.nodes, self.item.placements.items()
        return Counter(sorted(str(stated) for name, stated in known if name.partition(":")[0] in nodes))

    def _op_rows(self) -> list[tuple[object, ...]]:
        ordered = sorted(self.ops.items(), key=lambda pair: (-pair[1], pair[0]))
        rest = ordered[OPS_SHOWN:]
        rows: list[tuple[object, ...]] = list(ordered[:OPS_SHOWN])
        rows += [(f"{len(rest)} other ops", sum(count for _, count in rest))] if rest else []
        rows += [("functions", len(self.functions))] if self.functions else []
        return [*rows, ("all", self.ops.total())]

    def data(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {
            **signature_data(self.item),
            "variables": [variable.data() for variable in self.variables],
            **({"devices": [list(own) for own in self.devices]} if self.devices else {}),
            **({"placements": dict(self.placements)} if self.placements else {}),
            "nodes": self.ops.total(),
            "ops": dict(sorted(self.ops.items())),
            "functions": list(self.functions),
            "warnings": list(self.warnings),
        }


def summarise(source: Source) -> Summary:
    """Return the summary of a graph."""
    item = as_item(source)
    flat = flattened(item)
    graph = flat.graph
    names = [*flat.targets, *(info.tensor.partition(":")[0] for info in flat.outputs.values())]
    roots = [graph.nodes[name] for name in names if name in graph.nodes]
    step = ancestors(roots) if roots else set(graph)
    variables = _variable_lines(flat, step)
    return Summary(
        item,
        variables,
        Counter(node.op for node in item.graph),
        tuple(Library(item.graph.library)),
        tuple(_warnings(item, flat, step, variables)),
    )


def flattened(item: TrainingGraph) -> TrainingGraph:
    """Return the normal form of an item, in which updates inside calls, branches and loops are found."""
    try:
        return normalise(item)
    except GraphError:  # a graph that cannot be normalised can still be shown
        return item


def _variable_lines(item: TrainingGraph, step: set[Node]) -> tuple[VariableLine, ...]:
    uses = _uses(item, step)
    devices = _handle_devices(item)
    return tuple(
        VariableLine(
            variable.name,
            variable.dtype,
            variable.shape,
            variable.trainable,
            variable.captured,
            tuple(update.op for update in use.updates) if use is not None else (),
            use.slots if use is not None else (),
            use.owner if use is not None else None,
            devices.get(variable.name, ()),
            variable.shards.sizes if variable.shards is not None and devices.get(variable.name) else (),
        )
        for variable, use in ((one, uses.get(one.name)) for one in item.variables.values())
    )


def _handle_devices(item: TrainingGraph) -> dict[str, tuple[str, ...]]:
    """Return the devices of the handles of each variable, shards and copies included."""
    owners: dict[str, str] = {}
    for variable in item.variables.values():
        names = variable.shards.handles if variable.shards is not None else (variable.handle,)
        owners |= dict.fromkeys(names, variable.name)
    found: dict[str, dict[str, None]] = {}
    for node in item.graph:
        owner = owners.get(bare(node.name))
        if owner is not None and node.device:
            found.setdefault(owner, {})[node.device] = None
    return {name: tuple(devices) for name, devices in found.items()}


def _lives_on(variable: VariableLine) -> str:
    places = few([device_specs.short(device) for device in variable.devices])
    return f"{places}, in shards of {few([str(size) for size in variable.shards])}" if variable.shards else places


def _uses(item: TrainingGraph, step: set[Node]) -> dict[str, VariableUse]:
    try:
        return variable_uses(propagate(item.graph, {}, Semantics()), item.variables, step=step)
    except GraphError:  # with unknown or malformed ops, updates can still be found
        return plain_uses([node for node in item.graph if node in step], item.variables, item.graph)


def _warnings(
    item: TrainingGraph, flat: TrainingGraph, step: set[Node], variables: Sequence[VariableLine]
) -> Iterator[str]:
    if not any(info.batch_axis is not None for info in item.inputs.values()):
        yield "no input has a batch axis: name one with --batch-input NAME=AXIS"
    if not item.targets:
        yield "no train op is known: name it with --train-op"
    elif not any(variable.updates for variable in variables):
        yield "the step updates no variable"
    for info in item.inputs.values():
        if info.shape is None:
            yield f"the rank of input '{info.name}' is unknown"
    idle = [variable.name for variable in variables if variable.trainable and not variable.updates]
    if idle:
        yield f"trainable, but not updated by the step: {_few(idle)}"
    unset = [v.name for v in item.variables.values() if not v.captured and v.initializer is None]
    if unset:
        yield f"no initializer found for {_few(unset)}"
    graph = item.graph
    functions = set(Library(graph.library))
    unknown = sorted({node.op for node in graph if find_op(node.op) is None} - functions)
    if unknown:
        yield f"unknown ops: {_few(unknown)}"
    unseeded = [
        n.name for n in flat.graph if n in step and has(n.op, "op_seeds") and not n.attr("seed") and not n.attr("seed2")
    ]
    if unseeded:
        yield f"random ops without a seed, different in each run: {_few(unseeded)}"
    if any(is_collective(op) for op in {node.op for node in graph}):
        yield "the graph already has collectives: it seems to be distributed"
    malformed = [
        node.name for node in graph if not _typed(node) and node.op not in functions and node.op not in unknown
    ]
    if malformed:
        yield f"malformed attributes at {_few(malformed)}"


def _typed(node: Node) -> bool:
    try:
        return bool(node.output_dtypes) or True
    except GraphError:
        return False


def _few(names: Sequence[str]) -> str:
    return few([f"'{name}'" for name in names], 5)


def _tensor_rows(infos: Iterable[TensorInfo]) -> Iterator[tuple[object, ...]]:
    for info in infos:
        axis = "" if info.batch_axis is None else info.batch_axis
        yield info.name, info.tensor, info.dtype + shape_text(info.shape), axis


def _variable_row(variable: VariableLine) -> tuple[object, ...]:
    counts = Counter(variable.updates)
    updates = ", ".join(f"{count} x {op}" if count > 1 else op for op, count in counts.items())
    trained = {True: "yes", False: "no", None: "?"}[variable.trainable]
    kind = f"{variable.dtype}{shape_text(variable.shape)}"
    slots = f"slot of {variable.slot_of}" if variable.slot_of is not None else ", ".join(variable.slots)
    return variable.name, kind, variable.bytes, trained, updates or "-", slots
