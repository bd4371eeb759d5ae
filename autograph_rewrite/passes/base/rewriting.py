"""Hold a rewrite under way: the current graph, item and plan, and the results of passes, one of each type.

    propagate         rewrite.put(state)                        a Propagation
    insert-reshards   rewrite.get(Propagation).transfers[node]  asked for by its type

Asking for a result that no pass has left yet is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from autograph_rewrite.analysis.barriers import late_nodes
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.control_flow import Frame, unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import (
    ANYWHERE,
    EACH,
    MICRO,
    MODEL,
    ONCE,
    PER_MODEL,
    PER_REPLICA,
    PROCESS,
    REPLICA,
    SERVER,
    STAGE,
    Axis,
    Mesh,
    PerInstance,
    Place,
    Select,
    Span,
    is_rarer,
)
from autograph_rewrite.ir.types import attrs as raw_attrs
from autograph_rewrite.ir.types.dtypes import from_numpy
from autograph_rewrite.ir.types.placement import Placement
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.passes.base.anchors import anchor_outputs, digest_nodes, outputs_of
from autograph_rewrite.passes.base.report import PassRecord
from autograph_rewrite.plan.parts.messages import EdgePlan, VariableRequest
from autograph_rewrite.plan.parts.residence import shard_name
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import devices_by_replica
from autograph_rewrite.resolve.model_axis import divided_of
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.passes.base.report import CompressedSum
    from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable


Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """The request for a rewrite; it never changes.

    Attributes:
        item: the normalised item.
        plan: of the whole job.
        task: the number of the process that the graph is for.
        training: whether a graph that updates nothing is refused.
        batch: examples of all replicas together, for the coverage; None: as the graph states.
        certificate: compares the rewrite with the original.
    """

    item: TrainingGraph
    plan: Plan
    task: int = 0
    training: bool = True
    batch: int | None = None
    certificate: Certifier | None = None


class Site(NamedTuple):
    """The name, span, origin and place of a new node.

    Attributes:
        name: the wanted name.
        span: how often it runs.
        origin: the node that it is added for; if a pass made that node, its origin counts.
        place: its coordinates; None: the default, which `Rewrite.at` sets for nodes that run once.
    """

    name: str
    span: Span
    origin: Node
    place: Place | None = None


@dataclass
class Homes:
    """The devices that all replicas share: hosts, and the devices of variables that live on one device.

    Attributes:
        of: by variable name, optimizer state included, the device of each variable that lives on one device.
        devices: all shared devices, in the order of their coordinates; passes append to them.
        pushes: by variable, the nodes that send this process's contribution.
    """

    of: Mapping[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    pushes: dict[str, list[Node]] = field(default_factory=dict)


@dataclass
class Rewrite:
    """The state that every pass reads and edits.

    Attributes:
        graph: the folded graph.
        job: the plan of the whole job.
        item: the current item: its variables in shards, with the state that passes added.
        plan: the current plan of this process's part of the job; passes complete it with edges.
        task: the number of this process among `plan.processes`.
        feeds: the placeholders of the original graph, also those that no step needs.
        asked: the plan's request for each variable.
        nodes_before: the number of nodes at the start.
        is_rolled: whether micro-batches have become iterations of a loop.
        along: how many devices of a replica run the same program on their blocks; 1: each node runs on one device.
        verified: `graph.edits` at the last verification; -1: never verified.
        began: start of the rewrite, by `time.perf_counter`.
    """

    request: Request
    graph: Graph
    job: Plan
    item: TrainingGraph
    plan: Plan
    task: int = 0
    feeds: frozenset[str] = frozenset()
    asked: tuple[VariableRequest, ...] = ()
    nodes_before: int = 0
    is_rolled: bool = False
    along: int = 1
    verified: int = -1
    records: list[PassRecord] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    future_splits: dict[Value, int] = field(default_factory=dict)  # empty lists that will hold blocks
    aliases: dict[Value, Value] = field(default_factory=dict)  # by original value, the value that replaced it
    converted: dict[Value, Placement] = field(default_factory=dict)  # by converted value, its placement
    slices: dict[Value, Value] = field(default_factory=dict)  # by block, the whole that it was cut out of
    open_sizes: dict[tuple[Value, int], Value] = field(default_factory=dict)  # measured sizes of whole dimensions
    added: list[AuxiliaryVariable] = field(default_factory=list)  # variables that passes added
    compressed: list[CompressedSum] = field(default_factory=list)  # compressed sums
    frames: dict[Node, Frame] = field(default_factory=dict)  # the loops around each node
    apart: frozenset[str] = frozenset()  # the outermost loops that each instance runs separately
    originals: dict[Value, Value] = field(default_factory=dict)  # the inverse of `aliases`
    _place: Place = field(default_factory=lambda: ANYWHERE)  # of nodes that run once
    _entered: dict[tuple[Value, Frame], Value] = field(default_factory=dict)
    _results: dict[type, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, graph: Graph) -> Rewrite:
        """Begin to rewrite a graph in place."""
        # without training there are no gradients to accumulate, and none by which to find stages
        job, task = request.plan.of_step(training=request.training), request.task
        plan = job
        if plan.is_asynchronous and len(plan.processes) > 1:  # workers do not wait for each other: each is a job
            plan, task = plan.alone(task), 0
        if plan.is_driven:  # every process has the whole graph, and worker 0 runs it
            task = 0
        anchor_outputs(graph, request.item)
        feeds = frozenset(node.name for node in graph if node.op.startswith("Placeholder"))
        return cls(request, graph, job, request.item, plan, task, feeds, plan.variables, len(graph))

    def put(self, result: object) -> None:
        """Keep the result of a pass; it replaces an earlier result of its type."""
        self._results[type(result)] = result

    def has(self, kind: type[Result]) -> bool:
        """Return whether a pass has left a result of this type."""
        return kind in self._results

    def get(self, kind: type[Result]) -> Result:
        """Return the result of this type.

        Raises:
            PassError: no pass has left one yet.
        """
        if kind not in self._results:
            raise PassError(f"nothing has found the {kind.__name__} of this graph yet", hint="run the passes before it")
        result: Result = self._results[kind]
        return result

    def replace(self, old: Value, new: Value) -> None:
        """Replace a value by another one for all readers, those outside the graph included.

        Raises:
            PassError: the values have different types.
        """
        if old.dtype != new.dtype:
            raise PassError(f"'{new.name}' cannot take the place of '{old.name}': its type is another", node=old.node)
        old.replace_all_uses_with(new, keep=[new.node])
        self.graph.move_anchors(old, new)

    @property
    def instances(self) -> int:
        """How many instances an EACH node has in this process; iterations of a loop over micro-batches do not count."""
        return self.plan.replicas_each if self.is_rolled else self.job.instances_each

    @property
    def outputs(self) -> list[Value]:
        """The current values of the declared outputs."""
        return outputs_of(self.graph, self.item)

    @property
    def targets(self) -> list[Node]:
        """The nodes that a step runs for their effects."""
        return [self.graph.nodes[name] for name in self.item.targets if name in self.graph.nodes]

    @property
    def roots(self) -> list[Node]:
        """The nodes that are used by name outside the graph."""
        graph, item = self.graph, self.item
        names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
        names += [item.init_op] if item.init_op else []
        names += [info.tensor.partition(":")[0] for info in item.inputs.values()]
        names += item.keep
        for variable in item.variables.values():
            names += [variable.handle, *([variable.initializer] if variable.initializer else [])]
            if self.plan.has_shards_of_replicas and self.processes > 1:  # sessions read the shards of other processes
                names += [shard_name(variable.handle, k) for k in range(self.plan.replicas)]
        return [*(graph.nodes[name] for name in dict.fromkeys(names) if name in graph.nodes), *digest_nodes(graph)]

    # ------------------------------------------------------------------------------- once every node has its span

    @property
    def state(self) -> Propagation:
        """The placements of the original nodes."""
        return self.get(Propagation)

    @property
    def homes(self) -> Homes:
        """The devices that all replicas share."""
        homes: Homes = self._results.setdefault(Homes, Homes())
        return homes

    def on(self, device: str) -> dict[str, int]:
        """Return the place of a node on a device that all replicas share."""
        devices = self.homes.devices
        if device not in devices:
            devices.append(device)
        return {SERVER: devices.index(device)}

    def settle(self, node: Node, device: str) -> None:
        """Put a node on a device that all replicas share."""
        node.put(SERVER, self.on(device)[SERVER])

    def home_of(self, node: Node) -> str | None:
        """Return the shared device of a node; None if the node runs on the device of its replica."""
        return self.homes.devices[node.at(SERVER)] if SERVER in node.place else None

    @property
    def places(self) -> tuple[Axis, ...]:
        """The axes on which nodes have coordinates."""
        stages = self.plan.pipeline.stages if self.plan.pipeline is not None else 1
        logical = self.plan.model.size if self.plan.model is not None else 1
        shared = len(self.homes.devices)
        return Axis(STAGE, stages), Axis(MODEL, logical), Axis(SERVER, shared), Axis(PROCESS, self.workers)

    @property
    def handles(self) -> frozenset[str]:
        """The names of the nodes that give variable handles."""
        return frozenset(variable.handle for variable in self.item.variables.values())

    @property
    def rank(self) -> int:
        """The number of this worker in the job; `task` is 0 if workers are asynchronous, or if worker 0 runs all."""
        return self.request.task

    @property
    def workers(self) -> int:
        """How many workers the job has."""
        return len(self.job.processes)

    @cached_property
    def edges(self) -> dict[tuple[str, str], EdgePlan]:
        """The edges of the resolved plan, by value and placement."""
        return {(edge.value, edge.to): edge for edge in self.plan.edges if not edge.role}

    @cached_property
    def early(self) -> set[Node]:
        """The original nodes that always run, outside of loops, and neither need a variable nor wait for one."""
        order = self.state.order
        return unconditional_nodes(order) - late_nodes(order)

    @property
    def replicas(self) -> int:
        """How many instances an EACH node has in all processes: replicas, times micro-batches."""
        return self.plan.instances

    @property
    def local(self) -> int:
        """How many instances an EACH node has in this process."""
        return self.plan.instances_each

    @property
    def micro(self) -> int:
        """How many micro-batches each replica has."""
        return self.plan.microbatches

    @property
    def processes(self) -> int:
        """How many processes share the batch."""
        return len(self.plan.processes)

    @property
    def mesh(self) -> Mesh:
        """The instances of this process; micro-batches that are iterations of a loop are no instances."""
        micro = 1 if self.is_rolled else self.micro
        return Mesh.of(self.plan.replicas_each, micro, model=self.along, divided=self.divided)

    @property
    def divided(self) -> tuple[Axis, ...]:
        """The axes of the devices of a replica that run one program, if there are several."""
        return divided_of(self.plan.model.axes) if self.plan.model is not None and self.along > 1 else ()

    def own(self, entries: Sequence[Any]) -> Sequence[Any]:
        """Return this process's entries of a list with one entry per instance of the job."""
        return entries[self.task * self.local : (self.task + 1) * self.local]

    def of_own_replicas(self, entries: Sequence[Any]) -> Sequence[Any]:
        """Return this process's entries of a list with one entry per replica of the job."""
        each = self.plan.replicas_each
        return entries[self.task * each : (self.task + 1) * each]

    def replica_at(self, at: Mapping[str, int]) -> int:
        """Return the number in the job of the replica at a coordinate; the process's first if it names none."""
        return self.task * self.plan.replicas_each + at.get(REPLICA, 0)

    @property
    def devices_along(self) -> tuple[str, ...]:
        """The devices that run the program: the first `along` of each replica of the job, replica by replica.

        With stages, they are the devices of the first stage.
        """
        return tuple(device for own in devices_by_replica(self.plan) for device in own[: self.along])

    @property
    def captures(self) -> bool:
        """Whether variables live outside the graph, which takes their handles as arguments."""
        return any(variable.captured for variable in self.item.variables.values())

    @property
    def mirrored(self) -> bool:
        """Whether each device has a copy of every variable."""
        return self.plan.mode == "mirrored"

    @property
    def common_span(self) -> Span:
        """How often a node with a replicated value runs."""
        if not self.mirrored:
            return ONCE
        in_time = self.micro > 1 or self.plan.pipeline is not None
        return PER_REPLICA if in_time else EACH

    @property
    def of_all(self) -> Span:
        """How often a node runs that combines all replicas by ordinary ops: once, or on each device of a model axis."""
        if self.along == 1:
            return ONCE
        return PER_MODEL if self.plan.replicas_each > 1 else self.common_span

    def current(self, value: Value) -> Value:
        """Return the value that now stands for an original one."""
        return self.aliases.get(value, value)

    def fact(self, value: Value) -> Fact:
        """Return the fact of an original value, or of its replacement, where it is produced."""
        return self.get(Propagation).source(self.originals.get(value, value))

    def take_place(self, value: Value, new: Value) -> None:
        """Record that a new value stands for an original one."""
        self.aliases[value] = new
        self.originals[new] = value

    def add(
        self,
        op: str,
        inputs: Sequence[Value],
        site: Site,
        *,
        gather: Collection[int] = (),
        selects: Mapping[int, Select] = MappingProxyType({}),
        attrs: Mapping[str, Any] | None = None,
        controls: Iterable[Node] = (),
    ) -> Node:
        """Add a folded node in the innermost loop of its inputs and controls; inputs from outside enter that loop.

        Args:
            op: op type.
            inputs: if the node runs less often than an input, it reads the first instance of that input.
            site: its name, span, origin and place.
            gather: input positions that read all instances instead of the first.
            selects: which instances other positions read, where that does not follow from the spans.
            attrs: decoded, by name.
            controls: nodes to wait for.
        """
        controls = list(controls)
        frame = max((self.frames.get(one, ()) for one in (*(v.node for v in inputs), *controls)), key=len, default=())
        inputs = [self._brought(value, frame) for value in inputs]
        found = {
            i: Select.ALL if i in gather else Select.FIRST
            for i, value in enumerate(inputs)
            if is_rarer(site.span, value.node.span)
        }
        place = site.place if site.place is not None else self._place if site.span == ONCE else ANYWHERE
        build = Builder(self.graph, site.name, site.origin, site.span, place=place)
        node = build.node(op, *inputs, controls=controls, selects={**found, **selects}, **(attrs or {}))
        if frame:
            self.frames[node] = frame
        return node

    @contextmanager
    def at(self, home: str | None) -> Iterator[None]:
        """Put nodes that run once on a device while the context is open; None: where they usually run."""
        before, self._place = self._place, ANYWHERE if home is None else self.on(home)
        try:
            yield
        finally:
            self._place = before

    def once(self, value: Value) -> Value:
        """Return the first replica's value as a value that runs once for all replicas."""
        if value.node.span in (ONCE, self.of_all):
            return value
        return self.add("Identity", [value], Site(f"{value.node.name}/once", self.of_all, value.node)).output()

    def of_replica(self, value: Value) -> Value:
        """Return a value that is equal in all instances as a value per replica: that of its first micro-batch."""
        if value.node.span != EACH or self.micro == 1:
            return value
        site = Site(f"{value.node.name}/of_replica", PER_REPLICA, value.node)
        return self.add("Identity", [value], site).output()

    def of_worker_0(self, value: Value) -> Value:
        """Return a value in worker 0 and zeros in the others, under one name: workers compare what they run."""
        op, name = "Identity" if self.task == 0 else "ZerosLike", f"{value.node.name}/of_worker_0"
        return self.add(op, [value], Site(name, value.node.span, value.node)).output()

    def const(self, content: Any, dtype: Any, *, name: str, near: Value) -> Value:
        """Add a constant in the loop of `near`.

        Args:
            content: a number, nested lists or an array.
            dtype: a numpy type.
            name: wanted name.
            near: the value that is read together with it.
        """
        array = np.asarray(content, dtype=dtype)
        span = near.node.span if self.frames.get(near.node) else self.common_span
        return self._const(array.dtype, array, name, near, span)

    def const_each(self, contents: Sequence[Any], dtype: Any, *, name: str, near: Value) -> Value:
        """Add a constant that differs between the instances of an EACH node.

        Args:
            contents: one for every instance in the job.
            dtype: a numpy type.
            name: wanted name.
            near: the value that is read together with it.
        """
        arrays = [np.asarray(content, dtype=dtype) for content in self.own(contents)]
        raws = self.each([raw_attrs.encode("tensor", array) for array in arrays])
        return self._const(arrays[0].dtype, raws, name, near, EACH)

    def each(self, raws: Sequence[bytes]) -> PerInstance:
        """Return an attribute of an EACH node by instance; all devices of a replica get the same.

        Args:
            raws: one for each micro-batch of each replica of this process.
        """
        mesh = self.mesh
        at = [mesh.coordinates(EACH, i) for i in range(mesh.count(EACH))]
        return PerInstance(tuple([raws[one[REPLICA] * mesh.size(MICRO) + one[MICRO]] for one in at]))

    def by_replica(self, raws: Sequence[bytes], span: Span) -> PerInstance:
        """Return an attribute of a node by instance: that of the instance's replica.

        Args:
            raws: one for each replica of this process.
            span: of the node.
        """
        mesh = self.mesh
        return PerInstance(tuple(raws[mesh.coordinates(span, i)[REPLICA]] for i in range(mesh.count(span))))

    def const_at(
        self,
        content: Callable[[Mapping[str, int]], Any],
        dtype: Any,
        *,
        name: str,
        near: Value,
        span: Span | None = None,
    ) -> Value:
        """Add a constant that differs between instances.

        Args:
            content: of an instance's coordinate.
            dtype: a numpy type.
            span: how often it runs; None: as often as `near`.
        """
        mesh, span = self.mesh, near.node.span if span is None else span
        at = [mesh.coordinates(span, i) for i in range(mesh.count(span))]
        arrays = [np.asarray(content(one), dtype=dtype) for one in at]
        if len(arrays) == 1:
            return self._const(arrays[0].dtype, arrays[0], name, near, span)
        raws = PerInstance(tuple(raw_attrs.encode("tensor", array) for array in arrays))
        return self._const(arrays[0].dtype, raws, name, near, span)

    def _const(self, dtype: np.dtype[Any], content: Any, name: str, near: Value, span: Span) -> Value:
        node = Builder(self.graph, name, near.node, span).node("Const", value=content, dtype=from_numpy(dtype))
        frame = self.frames.get(near.node, ())
        if frame:
            # A node without inputs would run outside of the loop.
            node.add_control(near.node)
            self.frames[node] = frame
        return node.output()

    def _brought(self, value: Value, frame: Frame) -> Value:
        """Return a value from outside of a loop as a loop constant: add an Enter for each loop around `frame`."""
        for depth in range(len(self.frames.get(value.node, ())), len(frame)):
            key = (value, frame[: depth + 1])
            if key not in self._entered:
                apart = frame[0] in self.apart
                node = Builder.at(value.node, "enter", span=EACH if apart else value.node.span).node(
                    "Enter",
                    value,
                    frame_name=self.frame_name(frame, depth),
                    is_constant=True,
                    parallel_iterations=self._parallel(key[1]),
                )
                self.frames[node] = key[1]
                self._entered[key] = node.output()
            value = self._entered[key]
        return value

    def is_apart(self, node: Node) -> bool:
        """Return whether a node is in a loop that each instance runs separately."""
        return self.frames.get(node, ("",))[0] in self.apart

    def frame_name(self, frame: Frame, depth: int = -1) -> str | PerInstance:
        """Return the frame name of a loop, or of the loop around it at `depth`, for an Enter."""
        if frame[0] not in self.apart:
            return frame[depth]
        numbers = list(range(self.mesh.count(EACH)))
        if self.plan.looped:  # each replica will have one loop over its micro-batches, with this loop inside
            numbers = [self.mesh.coordinates(EACH, i)[REPLICA] for i in numbers]
        return PerInstance(tuple(raw_attrs.encode("string", f"{frame[depth]}/{i}") for i in numbers))

    def _parallel(self, frame: Frame) -> int:
        enters = (n for n, f in self.frames.items() if f == frame and n.op == "Enter")
        return int(next((n.attr("parallel_iterations", 10) for n in enters), 10))
