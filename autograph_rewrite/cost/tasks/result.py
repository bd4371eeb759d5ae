"""Define the result of a simulation: step time, memory and links, as text, as plain data and as a trace.

str(result)    result.data()    result.trace()       # Chrome's and Perfetto's trace format
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.cost.tasks.layers import COLUMNS, Layer, NodeUse, cells, dearest, tree
from autograph_rewrite.diagnostics.amounts import duration, percent, several, size
from autograph_rewrite.notebook import NotebookView, table, text


@dataclass(frozen=True)
class DeviceUse:
    """Devices that do the same work; the figures are those of one of them.

    Attributes:
        name: "cpu", "first device", "other devices", or a server.
        count: how many there are.
        busy_seconds: time that it computes.
        peak_bytes: the most memory that it needs at a time.
        variable_bytes: bytes of variables, part of the peak.
        activation_bytes: bytes that the forward pass keeps for the backward pass at the peak, 0 without events; in a
            pipeline, the most that it keeps at a time.
        gradient_bytes: in a pipeline, bytes of summed gradients.
        in_flight: in a pipeline, the most micro-batches whose activations are kept.
        slot_bytes: bytes of slots, part of those of variables.
        flops: operations that it computes.
        accessed_bytes: bytes of memory that its ops read and write.
        memory: seconds since the start of the step, and the bytes that are alive from then on; empty without events.
        holders: the producers of the bytes at the peak, the largest first; empty without events.
    """

    name: str
    count: int
    busy_seconds: float
    peak_bytes: int
    variable_bytes: int
    activation_bytes: int = 0
    gradient_bytes: int = 0
    in_flight: int = 0
    slot_bytes: int = 0
    flops: float = 0.0
    accessed_bytes: float = 0.0
    memory: tuple[tuple[float, int], ...] = ()
    holders: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class LinkUse:
    """Links that carry the same traffic.

    Attributes:
        name: "network out", "network in", "local link", or a server's.
        count: how many there are.
        bytes: over one of them, in a step.
        busy_seconds: time that one of them is occupied.
    """

    name: str
    count: int
    bytes: int
    busy_seconds: float


@dataclass(frozen=True)
class ExchangeUse:
    """One exchange, or bucket of them.

    Attributes:
        value: the exchanged value, the first of a bucket.
        kind: the lowering, or push, reduce_scatter.
        owners: the variables whose updates read it, or `step`.
        bytes: that one member hands over.
    """

    value: str
    kind: str
    owners: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Event:
    """A task on a lane; `start` is in seconds since the start of the step."""

    name: str
    lane: str
    start: float
    seconds: float
    kind: str


@dataclass(frozen=True, repr=False)
class Simulation(NotebookView):
    """One step, predicted.

    Attributes:
        step_seconds: from its start to its end.
        exposed_seconds: time in which something is exchanged and nothing is computed.
        bubble: the part of the step in which stages of a pipeline wait for each other.
        devices: with their memory.
        links: with their bytes.
        exchanges: all transfers of values.
        batch: the examples of all replicas that were assumed.
        events: in the order of their start.
        notes: assumptions.
        exchanged_bytes: bytes that one member hands over, summed over all exchanges of the plan; plan, comm, explain
            and report show the same number (`plan.parts.names.exchanged_bytes`).
        nodes: the cost of each; empty without events. `layers()` sums it up.
    """

    step_seconds: float
    exposed_seconds: float
    bubble: float
    devices: tuple[DeviceUse, ...]
    links: tuple[LinkUse, ...]
    exchanges: tuple[ExchangeUse, ...]
    replicas: int
    batch: int
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    exchanged_bytes: int = 0
    nodes: tuple[NodeUse, ...] = ()

    def layers(self) -> tuple[Layer, ...]:
        """Return the cost of the model's layers (name scopes), the most expensive first."""
        return dearest(tree(self.nodes))

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the fullest device."""
        return max((device.peak_bytes for device in self.devices), default=0)

    @property
    def moved_bytes(self) -> int:
        """All bytes moved: by exchanges, between stages and logical devices, and by handing results on."""
        return sum(exchange.bytes for exchange in self.exchanges)

    def data(self) -> dict[str, Any]:
        """Return it as plain data, without the events and memory over time."""
        devices = [vars(device).copy() for device in self.devices]
        for device in devices:
            del device["memory"], device["holders"]
        return {
            "step_seconds": self.step_seconds,
            "exposed_seconds": self.exposed_seconds,
            "bubble": self.bubble,
            "replicas": self.replicas,
            "batch": self.batch,
            "peak_bytes": self.peak_bytes,
            "exchanged_bytes": self.exchanged_bytes,
            "moved_bytes": self.moved_bytes,
            "devices": devices,
            "links": [vars(link).copy() for link in self.links],
            "exchanges": [{**vars(one), "owners": list(one.owners)} for one in self.exchanges],
            "layers": [vars(one) for one in self.layers()],
            "notes": list(self.notes),
        }

    def trace(self) -> dict[str, Any]:
        """Return the events in the trace format of Chrome and Perfetto."""
        lanes = list(dict.fromkeys(event.lane for event in self.events))
        return {"displayTimeUnit": "ms", "traceEvents": list(_trace(self.events, lanes))}

    def _html_parts(self) -> Iterator[str]:
        rows = (
            (d.count, d.name, duration(d.busy_seconds), size(d.peak_bytes), size(d.variable_bytes))
            for d in self.devices
        )
        yield table(("#count", "device", "#busy", "#peak", "#variables"), rows)
        yield table(COLUMNS, map(cells, self.layers()))
        links = ((x.count, x.name, duration(x.busy_seconds), size(x.bytes)) for x in self.links)
        yield table(("#count", "link", "#busy", "#carried"), links)
        exchanges = ((x.value, x.kind, ", ".join(x.owners), size(x.bytes)) for x in self.exchanges)
        yield table(("exchange", "by", "for", "#bytes"), exchanges)
        yield text("\n".join(self.notes))

    def __str__(self) -> str:
        lines = [
            f"step {duration(self.step_seconds)} for {several(self.batch, 'example')} on "
            f"{several(self.replicas, 'replica')}; {duration(self.exposed_seconds)} of it only communicate"
            + (f"; bubble {percent(self.bubble)}" if self.bubble else "")
        ]
        for device in self.devices:
            lines.append(
                f"  {device.count:>4} x {device.name:<18} busy {duration(device.busy_seconds):>8}"
                f"  peak {size(device.peak_bytes):>8}  variables {size(device.variable_bytes):>8}"
            )
            if device.in_flight:
                lines.append(
                    f"{'':7}activations {size(device.activation_bytes)}, {device.in_flight} in flight;"
                    f" gradients {size(device.gradient_bytes)}"
                )
        for link in self.links:
            lines.append(
                f"  {link.count:>4} x {link.name:<18} busy {duration(link.busy_seconds):>8}  {size(link.bytes)} carried"
            )
        more = self.moved_bytes - self.exchanged_bytes
        lines.append(
            f"  {size(self.exchanged_bytes)} handed over by each member of the plan's exchanges"
            + (f"; {size(self.moved_bytes)} moved, with what passes between stages and devices" if more > 0 else "")
        )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def rows_of(times: Iterable[tuple[str, float, float]]) -> Iterator[tuple[str, int]]:
    """Yield lane and row for each of (lane, start, end), sorted by start; times that overlap get different rows."""
    free: dict[str, list[float]] = {}
    for lane, start, end in times:
        rows = free.setdefault(lane, [])
        row = next((number for number, busy in enumerate(rows) if busy <= start + 1e-12), len(rows))
        rows[row : row + 1] = [end]
        yield lane, row


def _trace(events: tuple[Event, ...], lanes: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the metadata and the events; events that overlap on one lane get separate rows."""
    known: dict[tuple[str, int], int] = {}
    rows = rows_of((event.lane, event.start, event.start + event.seconds) for event in events)
    for event, place in zip(events, rows, strict=True):
        thread = known.setdefault(place, len(known) + 1)
        yield {
            "name": event.name,
            "cat": event.kind,
            "ph": "X",
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
            "pid": lanes.index(event.lane) + 1,
            "tid": thread,
        }
    for number, lane in enumerate(lanes, start=1):
        yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": lane}}
