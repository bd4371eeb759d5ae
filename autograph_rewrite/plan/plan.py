"""The plan: a frozen value that all workers agree on, with two file forms (.yaml and .pb).

A builder makes the *request*: devices, placements, options. Propagation adds the *edges* that follow from it.
A plan is data only, so it can be reviewed, edited, shipped and compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from autograph_rewrite.diagnostics.faults import either, failure
from autograph_rewrite.diagnostics.files import read_whole, write_whole
from autograph_rewrite.diagnostics.limits import in_time
from autograph_rewrite.diagnostics.located_yaml import Located, Source, load_yaml, parse_yaml
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.types.device_names import parse, process_of
from autograph_rewrite.ir.types.replica_marks import AVERAGES
from autograph_rewrite.notebook import NotebookView, table, text
from autograph_rewrite.plan import file_forms
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.parts.residence import OnServer, Residence, Sharded, residence_of, shard_name

VERSION = 2
"""Of plan files; in version 1 each shard of a variable that is split over the replicas had edges of its own."""
READ = (1, VERSION)

_TEXT = (".yaml", ".yml", ".json")
_BINARY = (".pb", ".binpb")


@dataclass(frozen=True, repr=False)
class Plan(NotebookView):
    """How a graph is distributed; plan.proto defines each field.

    Attributes:
        devices: one per replica, canonical, in order; those of one process are adjacent.
        mode: "shared" (one copy of each variable per process) or "mirrored" (one per device).
        default: options of edges of the step, and of variables not listed.
        micro: how each replica's part is cut in time; None: not at all.
        pipeline: how the model is cut into stages; None: not at all.
        remat: the activations that are recomputed for the gradients; None: none.
        passes: passes of the user.
        ops: custom ops of the graph that the user has registered.
        model: the devices of a replica that share its tensors; None: one each.
        batch: the examples of all replicas together that `bytes` of the edges count; 0: not known.
        steps_per_run: how many steps one run does in a loop inside the graph; 0: one, without a loop.
        padding: the length of outputs of workers whose sequences differ in length: "longest", "power_of_two"; "equal":
            lengths may not differ.
        policies: of variables whose updates may differ between replicas; any other update is that of one device.
        local_sgd: how the variables of replicas that train by themselves are averaged; None: every step has the
            gradient of the whole batch.
        bucket_order: values in the order in which they were ready, where that was measured; buckets are filled in it.
        model_edges: conversions on the model axis, within each replica; found with `edges`.
        edges: empty in a request; resolved by propagation.
        source: the file that it came from, for error messages; not compared.
    """

    devices: tuple[str, ...]
    mode: str = "shared"
    version: int = VERSION
    id: str = ""
    strategy: str = ""
    graph_digest: str = ""
    mesh: tuple[messages.Axis, ...] = ()
    semantics: messages.Semantics = field(default_factory=messages.Semantics)
    timeout_seconds: float = 60.0
    batch_inputs: tuple[messages.BatchInput, ...] = ()
    default: messages.Options = field(default_factory=messages.Options)
    variables: tuple[messages.VariableRequest, ...] = ()
    edges: tuple[messages.EdgePlan, ...] = ()
    notes: tuple[str, ...] = ()
    micro: messages.Micro | None = None
    pipeline: messages.Pipeline | None = None
    remat: messages.Remat | None = None
    passes: tuple[messages.OwnPass, ...] = ()
    batch: int = 0
    steps_per_run: int = 0
    padding: str = "longest"
    model: messages.Model | None = None
    model_edges: tuple[messages.EdgePlan, ...] = ()
    policies: tuple[messages.Policy, ...] = ()
    local_sgd: messages.LocalSgd | None = None
    bucket_order: tuple[str, ...] = ()
    ops: tuple[messages.OwnOp, ...] = ()
    source: Source = field(default_factory=lambda: Source("plan"), compare=False, repr=False)

    def __str__(self) -> str:
        edges = f"{len(self.edges)} reshards" if self.edges else "reshards follow from the graph"
        return f"{self.strategy or 'plan'} for {self.replicas} replicas ({self.mode}): {edges}"

    def _html_parts(self) -> Iterator[str]:
        rows = ((one.value, one.lowering, one.bytes, one.owner, one.reason) for one in self.edges)
        yield table(("value", "by", "#bytes", "for", "reason"), rows)
        yield text("\n".join(self.notes))

    @property
    def replicas(self) -> int:
        """How many replicas all processes together run."""
        return len(self.devices)

    @cached_property
    def processes(self) -> tuple[str, ...]:
        """The processes that train, in the order of their parts of the batch; a single one may have no name.

        Processes that hold stages have no parts of the batch: one drives them all.
        """
        if self.pipeline is not None or self.stage_hosts:
            return tuple(process_of(device) for device in self.devices[:1])
        return tuple(dict.fromkeys(process_of(device) for device in self.devices))

    @cached_property
    def stage_hosts(self) -> tuple[str, ...]:
        """The processes that hold stages or logical devices of replicas, which the first drives; else empty."""
        parts = self.part_devices
        if not parts or not any(map(process_of, self.devices)):
            return ()
        hosts = {process_of(device): parse(device).task for device in parts}
        each = len(parts) // max(1, len(self.devices))
        whole = all(
            len({process_of(device) for device in parts[i : i + each]}) == 1 for i in range(0, len(parts), each)
        )
        if len(hosts) == 1 or (whole and self.pipeline is None):
            return ()
        return tuple(sorted(hosts, key=hosts.__getitem__))

    @property
    def is_driven(self) -> bool:
        """Whether workers hold stages or logical devices of replicas, which worker 0 drives, instead of whole ones."""
        return bool(self.stage_hosts)

    @property
    def part_devices(self) -> tuple[str, ...]:
        """The devices of all replicas' stages and logical devices, replica by replica; empty if each has one device."""
        if self.model is not None:
            return self.model.devices
        return self.pipeline.devices if self.pipeline is not None else ()

    @property
    def workers(self) -> int:
        """How many processes take part: each has a part of the batch, or stages."""
        return len(self.stage_hosts or self.processes)

    @property
    def replicas_each(self) -> int:
        """How many replicas each process runs."""
        return len(self.devices) // max(1, len(self.processes))

    @property
    def microbatches(self) -> int:
        """How many micro-batches each replica runs one after another."""
        return self.micro.count if self.micro is not None else 1

    @property
    def interleaved(self) -> bool:
        """Whether each of M micro-batches has every M-th example."""
        return self.micro is not None and self.micro.layout == "interleaved"

    @property
    def gathers_for_each(self) -> bool:
        """Whether each micro-batch gathers the shards of replicas by itself, instead of once for all of them."""
        return self.microbatches > 1 and not self.looped and len(self.processes) == 1 and self.mode == "mirrored"

    @cached_property
    def has_shards_of_replicas(self) -> bool:
        """Whether variables, or their slots or updates, are split over the replicas, which update their shards.

        In a job with servers all values cross between workers by way of servers, so each shard is on a server.
        """
        by_servers = len(self.processes) > 1 and bool(self.server_homes)
        return any(request.over_replicas for request in self.variables) and not by_servers

    @property
    def looped(self) -> bool:
        """Whether one loop in the graph runs the micro-batches."""
        if self.micro is None or not self.micro.loop:
            return False
        return self.micro.count > 1 or (self.pipeline is not None and self.pipeline.stages > 1)

    @property
    def instances(self) -> int:
        """How many instances of a node all processes together run, if every replica runs it for every micro-batch."""
        return self.replicas * self.microbatches

    @property
    def instances_each(self) -> int:
        """How many instances each process runs: the micro-batches of its first replica, then of its second, ..."""
        return self.replicas_each * self.microbatches

    def devices_of(self, task: int) -> tuple[str, ...]:
        """The devices of one process's replicas."""
        return self.devices[task * self.replicas_each : (task + 1) * self.replicas_each]

    @property
    def all_devices(self) -> tuple[str, ...]:
        """The devices of all replicas, of their stages, and of variables that live on a single device."""
        return tuple(dict.fromkeys((*self.devices, *self.part_devices, *self.homes.values())))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The first device of each process, which exchanges the results of all its replicas with other processes."""
        return self.devices[:: max(1, self.replicas_each)]

    def members(self, crosses: bool, logical: int = 0) -> tuple[str, ...]:
        """The devices that a collective joins.

        Args:
            crosses: one device of each process, instead of one of each replica.
            logical: which of a replica's devices.
        """
        if not self.part_devices:
            return self.hosts if crosses else self.devices
        each = self.replicas_each if crosses else 1
        return self.part_devices[logical :: self.devices_each * each]

    @property
    def devices_each(self) -> int:
        """How many devices each replica has."""
        return max(1, len(self.part_devices) // max(1, len(self.devices)))

    def place(self, stage: int) -> int:
        """Return which of a replica's devices is the first of a stage; stages take a replica's devices cyclically."""
        return stage * (self.model.size if self.model is not None else 1) % self.devices_each

    def options_of(self, owner: str) -> messages.Options:
        """The options of an edge's owner: a variable, or `messages.STEP`."""
        return self._options.get(owner, self.default)

    @cached_property
    def residences(self) -> dict[str, Residence]:
        """Where each variable of a request lives, by name."""
        return {request.name: residence_of(request) for request in self.variables}

    @cached_property
    def homes(self) -> dict[str, str]:
        """The device of each variable or shard that lives on a single device, by name."""
        homes = {name: one.device for name, one in self.residences.items() if isinstance(one, OnServer)}
        for name, one in self.residences.items():
            if isinstance(one, Sharded):
                homes |= {shard_name(name, k): server for k, server in enumerate(one.servers)}
        return homes

    @cached_property
    def server_homes(self) -> dict[str, str]:
        """The homes without those of variables that are split over the replicas."""
        return replace(self, variables=tuple(one for one in self.variables if not one.over_replicas)).homes

    @property
    def is_asynchronous(self) -> bool:
        """Whether each worker updates variables by itself, with the gradients of its part of the batch."""
        servers = [request.server for request in self.variables if request.server is not None]
        return any(not server.sync or server.staleness for server in servers)

    @property
    def staleness(self) -> int | None:
        """By how many steps one worker may be ahead of another; None where nothing bounds it."""
        servers = [request.server for request in self.variables if request.server is not None]
        bounds = [server.staleness for server in servers if server.sync]
        return max(bounds) if bounds else None

    def alone(self, task: int) -> Plan:
        """The plan of one worker's replicas, where workers do not wait for each other.

        Its replicas exchange values by ordinary ops: collectives of one name would meet those of the other workers.
        """
        own = self.devices_of(task)
        return replace(self, devices=own, mode="shared", mesh=(messages.Axis("data", len(own)),))

    def of_step(self, *, training: bool) -> Plan:
        """The plan for a step that trains, or that only computes."""
        return self if training else self.without_stages()

    def without_stages(self) -> Plan:
        """The plan for a step that trains nothing: no micro-batches, and each process that had stages is a replica."""
        whole = replace(self, micro=None, pipeline=None, remat=None, local_sgd=None)
        if self.pipeline is not None and self.model is not None:
            whole = replace(whole, model=None, mesh=(messages.Axis("data", len(self.devices)),))
        if not self.stage_hosts:
            return whole
        firsts = (next(d for d in self.part_devices if process_of(d) == host) for host in self.stage_hosts)
        mesh = (messages.Axis("data", len(self.stage_hosts)),)
        return replace(whole, devices=tuple(firsts), mode="mirrored", mesh=mesh, model=None, edges=())

    def period_of(self, edge: messages.EdgePlan) -> int:
        """The number of steps from one exchange of an edge to the next."""
        if self.local_sgd is None or not edge.node.startswith(f"{AVERAGES}/"):
            return 1
        return self.local_sgd.period

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed; then each replica has to make its contribution."""
        return any(o.compressor != "none" for o in (self.default, *self._options.values()))

    @cached_property
    def _options(self) -> dict[str, messages.Options]:
        return {request.name: request.options for request in self.variables}

    def with_edges(
        self, edges: Iterable[messages.EdgePlan], *, graph_digest: str | None = None, notes: Iterable[str] = ()
    ) -> Plan:
        """This request, resolved: with its edges on one graph.

        Args:
            edges: in the order of the plan.
            graph_digest: of the graph of the edges; None: unchanged.
            notes: added to the notes of the request.
        """
        digest = self.graph_digest if graph_digest is None else graph_digest
        return replace(self, edges=tuple(edges), graph_digest=digest, notes=(*self.notes, *notes))

    def digest(self) -> str:
        """A hash of all fields that workers must agree on: not the id, the notes, and the numbers of bytes."""
        edges = tuple(replace(edge, bytes=0) for edge in self.edges)
        common = replace(self, id="", notes=(), edges=edges, model_edges=(), batch=0)
        return hashlib.sha256(common.to_bytes()).hexdigest()

    def named(self) -> Plan:
        """This plan under an id made of its strategy and digest."""
        return replace(self, id=f"{self.strategy}-{self.digest()[:12]}")

    def where(self, *path: str | int) -> str:
        """The place of a field in the file that it came from, as `file:line`; "plan" where there is none."""
        return self.source.at(path)

    def to_proto(self) -> Message:
        """The message of plan.proto."""
        message: Message = file_forms.new("Plan")
        file_forms.fill(message, self)
        return message

    @classmethod
    def from_proto(cls, message: Any, *, source: Source | None = None) -> Plan:
        """Read a message.

        Raises:
            PlanError: when a later version wrote it.
        """
        source = source or Source("plan")
        if message.version not in READ:
            written = f"version {message.version}" if message.version else "no version"
            fault = source.fault(("version",), f"this plan has {written}; only {READ[0]} to {READ[-1]} can be read")
            raise failure([replace(fault, hint="build it anew with build_plan")], error=PlanError)
        known = file_forms.new("Plan")
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        if known.ByteSize() != message.ByteSize():
            problem = f"{source.name}: this plan has fields that are not known here"
            raise PlanError(problem, hint="build it anew with build_plan")
        for request in known.variables:  # options that it leaves out are those of `default`
            said = file_forms.new("Options")
            said.CopyFrom(known.default)
            said.MergeFrom(request.options)
            request.options.CopyFrom(said)
        return replace(file_forms.read(cls, known), source=source)

    def to_bytes(self) -> bytes:
        """The binary form."""
        return self.to_proto().SerializeToString(deterministic=True)

    def to_yaml(self) -> str:
        """The YAML form."""
        return file_forms.dump(self.to_proto())

    @classmethod
    def from_yaml(cls, text: str, *, name: str = "plan") -> Plan:
        """Read the YAML form; error messages call it `name`."""
        return cls._parse(parse_yaml(text, file=name, error=PlanError))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file, .yaml or .pb.

        Raises:
            PlanError: with all mistakes in the file, each at its line.
        """
        if _suffix(path) in _TEXT:
            return cls._parse(load_yaml(path, error=PlanError))
        try:
            data = read_whole(path)
        except OSError as error:
            raise PlanError(f"cannot read '{os.fspath(path)}': {error.strerror}", hint="check the path") from None
        return in_time(lambda: cls.from_bytes(data, name=os.fspath(path)), name=os.fspath(path), error=PlanError)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "plan") -> Plan:
        """Read the binary form; error messages call it `name`."""
        message = file_forms.new("Plan")
        try:
            message.ParseFromString(data)
        except DecodeError:
            raise PlanError(f"'{name}' is no plan, or is cut short", hint="save it anew") from None
        return cls.from_proto(message, source=Source(name))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file, .yaml or .pb: whole, or not at all.

        Raises:
            PlanError: when the file cannot be written, or its suffix is not known.
        """
        data = self.to_yaml().encode("utf-8") if _suffix(path) in _TEXT else self.to_bytes()
        try:
            write_whole(path, data)
        except OSError as error:
            raise PlanError(f"cannot write '{os.fspath(path)}': {error.strerror}", hint="check the path") from None

    @classmethod
    def _parse(cls, located: Located) -> Plan:
        message = file_forms.new("Plan")
        file_forms.parse(located, message)
        return cls.from_proto(message, source=located.source)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (*_TEXT, *_BINARY):
        known = either((*_TEXT, *_BINARY))
        raise PlanError(f"'{os.fspath(path)}' does not say which form the plan has", hint=f"name it {known}")
    return suffix
