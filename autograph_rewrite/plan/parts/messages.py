"""Define the parts of a plan: the messages of plan.proto as frozen dataclasses, field by field."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autograph_rewrite.plan.parts.lowerings import Lowering, lowering

# The owner of an edge that serves no single variable: losses, norms, metrics, forward gathers.
STEP = "step"

# The owner of exchanges between the logical devices of a replica.
MODEL_AXIS = "model axis"

# The reason of an edge whose value is read outside of the graph only.
OUTPUT = "it is an output"

# The target of an edge that tells all processes the size of each one's part of a value.
SIZES = "sizes"


@dataclass(frozen=True)
class Policy:
    """The meaning of a variable's update where each replica has a different value.

    Attributes:
        variable: in `item.variables`.
        synchronization: "single" (there is one copy), "on_write" or "on_read".
        aggregation: "none", "sum", "mean" or "only_first_replica".
        declared: by the program (`tf.Variable(aggregation=...)`), not the configuration: it applies only to values that
            differ by nature, and all others are exact.
    """

    variable: str
    synchronization: str = "single"
    aggregation: str = "none"
    declared: bool = False

    @property
    def has_components(self) -> bool:
        """Whether each replica has a separate component."""
        return self.synchronization == "on_read" or (self.synchronization, self.aggregation) == ("on_write", "none")

    @property
    def is_unreadable(self) -> bool:
        """Whether the components have no common value for readers outside of the graph."""
        return (self.synchronization, self.aggregation) == ("on_read", "none")


@dataclass(frozen=True)
class LocalSgd:
    """How the variables of replicas that train by themselves are averaged.

    Attributes:
        period: after how many steps.
        warmup_steps: how many steps in the beginning are averaged one by one.
        average_slots: whether slots are averaged, too.
    """

    period: int
    warmup_steps: int = 0
    average_slots: bool = True


@dataclass(frozen=True)
class Axis:
    """A device axis: `data` (replicas) or `model` (devices of a replica)."""

    name: str
    size: int


@dataclass(frozen=True)
class Semantics:
    """Which results must be exactly those of one device."""

    batch_norm: str = "sync"
    random: str = "exact"
    strict: bool = False
    min_coverage: float = 0.0


@dataclass(frozen=True)
class Micro:
    """How each replica's block is cut into micro-batches, which run one after another on its device.

    Attributes:
        layout: "contiguous" (a part of the rows each) or "interleaved" (every count-th row).
        uneven: whether they may differ in size, by one example.
        loop: whether one loop in the graph runs them, instead of a copy of each.
    """

    count: int = 1
    layout: str = "contiguous"
    uneven: bool = True
    loop: bool = False


@dataclass(frozen=True)
class Pipeline:
    """How the model is cut into stages, which work on different micro-batches at the same time.

    Attributes:
        stages: of the model; of D devices, device d has the stages d, d + D, d + 2D, ...
        devices: those of the first replica, then of the second, ...
        schedule: "gpipe", "one_f_one_b", "interleaved" or "circular".
        boundaries: tensors after which a new stage begins.
        names: patterns of the names of each stage's nodes.
        assign: without boundaries and names: "auto" (balanced by cost) or "device" (by the devices in the graph).
    """

    stages: int = 1
    devices: tuple[str, ...] = ()
    schedule: str = "one_f_one_b"
    boundaries: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    assign: str = "auto"


@dataclass(frozen=True)
class Remat:
    """The rematerialisation: activations that are recomputed for the gradients, instead of being kept.

    Attributes:
        policy: "none", "sqrt", "hierarchical", "every:N", "names", "collection", "scopes", "save_matmuls",
            "budget:BYTES", or "marked" (scopes that the graph marks: `ar.recompute_grad`).
        names: patterns of the tensors that are kept (names).
        scopes: patterns of name scopes, each of which is a segment (scopes).
        stages: the stages of a pipeline that recompute; empty: all.
        offload: the values that are in the host's memory until gradients need them: "names" (those that the names
            match), "auto" (those that are kept), or "" (none).
    """

    policy: str
    names: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    offload: str = ""

    @property
    def limit(self) -> int | None:
        """The bytes that a step may take on a device; None without a budget."""
        policy, _, number = self.policy.partition(":")
        return int(number) if policy == "budget" else None


@dataclass(frozen=True)
class TensorSharding:
    """How a variable or a tensor is sharded on the model axis; slots are sharded like their variable.

    Attributes:
        name: of a variable, else of a tensor: `node` or `node:1`.
        split: into how many parts each dimension is cut; empty: every device has the whole.
        device: the logical device that holds it, if only one does; -1: several.
        axes: the axis of the mesh that cuts each dimension, -1: none; empty: the first axes cut the first dimensions
            that `split` cuts.
    """

    name: str
    split: tuple[int, ...] = ()
    device: int = -1
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Model:
    """The model axis: each replica has several logical devices, which share its tensors.

    Attributes:
        axes: sizes; several for a mesh of more dimensions. Logical devices are numbered major first.
        devices: those of the first replica, then of the second, ...
        shardings: of the tensors that are placed by hand; all others follow from them.
    """

    axes: tuple[int, ...]
    devices: tuple[str, ...] = ()
    shardings: tuple[TensorSharding, ...] = ()

    @property
    def size(self) -> int:
        """How many logical devices a replica has."""
        return math.prod(self.axes)


@dataclass(frozen=True)
class OwnPass:
    """A pass of the user.

    Attributes:
        name: under which it is registered.
        after: the pass after which it runs.
        code: digest of its code.
    """

    name: str
    after: str
    code: str = ""


@dataclass(frozen=True)
class OwnOp:
    """A custom op of the user in the graph.

    Attributes:
        code: digest of its description.
    """

    name: str
    code: str = ""


@dataclass(frozen=True)
class BatchInput:
    """An input of the step and the axis of it that counts examples.

    Attributes:
        name: in `item.inputs`.
        axis: counted from the front.
        whole: every process makes the whole batch, and takes its part; else each is fed its part.
        ragged: dimensions whose lengths may differ between processes; found with the edges.
    """

    name: str
    axis: int = 0
    whole: bool = False
    ragged: tuple[int, ...] = ()


@dataclass(frozen=True)
class Options:
    """How a reduction is carried out."""

    synchronizer: str = "all_reduce"
    hint: str = "auto"
    compressor: str = "none"
    bucket_bytes: int = 4 * 1024**2


@dataclass(frozen=True)
class Server:
    """How workers share a variable that lives on one device.

    Attributes:
        sync: an update waits for the gradients of all workers.
        staleness: by how many steps one worker may be ahead of another.
        proxy: each worker reads a local copy, refreshed once per step.
        lookups: rows of a table that is only looked up are read on the server also with a proxy; without a proxy, all
            reads are there. Readers wait for writes of the program between two steps.
    """

    sync: bool = True
    staleness: int = 0
    proxy: bool = False
    lookups: bool = False


@dataclass(frozen=True)
class VariableRequest:
    """The request for one variable.

    Attributes:
        name: in `item.variables`.
        placement: "replicated", "single" or "split(axis)".
        options: of the reduction of its gradient.
        servers: the device that holds it (single), or those of its shards (split); empty: every replica's device.
        sizes: of the shards along the axis (split).
        server: how workers share it, if its synchronizer is ps.
        stage: of a variable that is split over the replicas (each holds a shard on its device): 1 splits the
            optimizer's state, 2 its gradient too, 3 the variable too. 0: it is not split over them.
    """

    name: str
    placement: str = "replicated"
    options: Options = field(default_factory=Options)
    servers: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    server: Server | None = None
    stage: int = 0

    @property
    def over_replicas(self) -> bool:
        """Whether each replica holds a shard on its device."""
        return self.stage > 0


@dataclass(frozen=True)
class EdgePlan:
    """An edge where producer and consumer disagree about a placement, with its conversion.

    Attributes:
        value: the converted value, `node` or `node:1`.
        from_: its placement, as in "partial(sum)".
        to: the placement that its readers need.
        owner: the variable whose update it serves, or `STEP`.
        role: tells edges of one value and target apart: "factor" is the second collective of powersgd.
        lowering: a name of `plan.parts.lowerings`.
        dtype: TensorFlow's name of the element type.
        bytes: that one replica sends per step, as far as shapes are known.
        group_key: of the collective; 0 where there is none.
        instance_key: of the collective; the edges of a bucket share one.
        order: place of the collective in the one total order; shared in a bucket.
        bucket: edges with one number are reduced together; 0: alone.
        reason: why the edge exists, for people.
        compressor: the codec that encodes the value, or "none".
        logical: which device of each replica has the value, counted over all its stages.
        padded: dimensions that are padded with zeros to the longest process's.
        axis: the model axis of the mesh whose devices exchange it (`model_edges`).
    """

    value: str
    from_: str
    to: str
    owner: str = STEP
    role: str = ""
    lowering: str = ""
    dtype: str = ""
    bytes: int = 0
    group_key: int = 0
    instance_key: int = 0
    order: int | None = None
    bucket: int = 0
    reason: str = ""
    compressor: str = "none"
    logical: int = 0
    padded: tuple[int, ...] = ()
    axis: int = 0

    @property
    def is_collective(self) -> bool:
        """Whether its members wait for each other."""
        return self.lowered.is_collective

    @property
    def lowered(self) -> Lowering:
        """How the edge is lowered: the hops that the value takes."""
        return lowering(self.lowering)

    @property
    def node(self) -> str:
        """The name of the node that makes the value."""
        return self.value.partition(":")[0]
