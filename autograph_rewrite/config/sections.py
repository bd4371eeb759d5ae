"""Define the sections of a configuration file, one class each; the string after a field is its documentation."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from autograph_rewrite.config import fields
from autograph_rewrite.config.compressor_names import CompressorName
from autograph_rewrite.config.strategy_names import BuilderName

Mode = Literal["shared", "mirrored"]
Hint = Literal["auto", "ring", "nccl"]


class Section(BaseModel):
    """A frozen mapping of known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _has_an_order(cls, value: object) -> object:
        """Refuse a set: its order changes from process to process, and with it the rewritten graph."""
        if isinstance(value, set | frozenset):
            raise ValueError("must be a list: a set has no order")
        return value


class Network(Section):
    """The links between the machines, for the cost model and the size of buckets."""

    bandwidth_gbps: fields.Positive = 10.0
    """Gigabits per second of one link."""
    latency_us: fields.NotNegative = 50.0
    """Microseconds that a message takes."""


class Cluster(Section):
    """The processes of a job; TF_CONFIG, when it is set, overrides the addresses."""

    workers: tuple[fields.Address, ...]
    """Addresses (host:port) of the workers, in the order of their parts of the global batch."""
    ps: tuple[fields.Address, ...] = ()
    """Addresses of the parameter servers."""
    network: Network | None = None
    """The links between them."""


class Strategy(Section):
    """Which builder makes the plan, and how it synchronises by default."""

    name: BuilderName = "AllReduce"
    """The builder: one of these, or your class, as in path/to/file.py:Class."""
    variables: Mode | None = None
    """One copy of each variable per process (shared) or per device (mirrored); left out: shared in one
    process and with micro-batches, mirrored across processes."""
    bucket_bytes: fields.Size = 4 * 1024**2
    """Gradients of one type are reduced together up to this size (4MiB, or a number); 0: each alone. Left out, where
    `cluster.network` is given: at most what a link carries in a millisecond."""
    compressor: CompressorName = "none"
    """Compresses dense gradients, so not exact (docs/compression.md): 16-bit types (fp16, bf16), the same and bytes
    with error feedback (fp16_ef, bf16_ef, int8_ef), the largest hundredth (topk) or two thin factors (powersgd); or
    your codec, registered or as in path/to/file.py:Class."""
    hint: Hint = "auto"
    """Which implementation TensorFlow's collectives use."""


class Partition(Section):
    """Split a variable into nearly equal parts along one axis."""

    axis: fields.Natural | None = None
    """The axis that is split; left out: the first one, over `data` the first that the replicas divide evenly."""
    shards: Annotated[int, Field(strict=True, ge=2)] | None = None
    """How many parts; at least 2. Over `data` there is one for each replica."""
    over: Literal["shard", "data"] = "shard"
    """Separate parts (shard), or one for each replica, which gathers the whole where it is used (data)."""
    stage: Annotated[int, Field(strict=True, ge=1, le=3)] | None = None
    """Over `data`, split the optimizer state (1), gradients too (2), the variable too (3); left out: 3."""


class Override(Section):
    """Different settings for some variables; of several that match, the first counts."""

    match: fields.Pattern
    """Regular expression; it must match the whole name of a variable."""
    synchronizer: Literal["all_reduce", "ps"] | None = None
    """How its gradients are summed; left out: by the strategy."""
    partition: Partition | None = None
    """Split the variable."""
    sync: fields.Flag = True
    """Whether a parameter server waits for all replicas."""
    staleness: fields.Natural = 0
    """By how many steps a replica may be ahead."""
    proxy: fields.Flag = False
    """Whether each worker reads a local copy that is refreshed once per step."""
    bucket_bytes: fields.Size | None = None
    """As in strategy."""
    compressor: CompressorName | None = None
    """As in strategy."""
    hint: Hint | None = None
    """As in strategy."""

    @property
    def server_settings(self) -> tuple[str, ...]:
        """The settings of a parameter server that are no defaults."""
        asked = {"sync": not self.sync, "staleness": self.staleness > 0, "proxy": self.proxy}
        return tuple(key for key, is_asked in asked.items() if is_asked)


class Pipeline(Section):
    """Cut the model into stages that work on micro-batches one after another."""

    stages: fields.Count
    """How many stages."""
    microbatches: fields.Count | None = None
    """Into how many parts the batch is cut."""
    microbatch_size: fields.Count | None = None
    """Instead of `microbatches`: examples in one micro-batch."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "circular"] = "1f1b"
    """In which order a device runs forwards and backwards: all forwards first (gpipe, circular), or alternating."""
    form: Literal["unrolled", "loop"] = "unrolled"
    """A copy of each stage for each micro-batch (unrolled), or a loop with all stages in each iteration."""
    circular_repeat: fields.Count = 1
    """How many stages each device holds, in rounds (interleaved, circular): the model has `stages` times as many."""
    boundaries: tuple[fields.Text, ...] | None = None
    """Tensors after which a new stage begins; left out: balanced by cost."""
    names: tuple[fields.Pattern, ...] | None = None
    """Instead of `boundaries`: one regular expression per stage, which the whole names of its nodes match."""
    assign: Literal["auto", "device"] = "auto"
    """Without `boundaries` and `names`: balanced by cost (auto), or by the devices that the graph names (device)."""
    devices: tuple[fields.DeviceName, ...] | None = None
    """The device of each stage; left out: those of the configuration if they are a multiple of the stages, else CPU:0,
    CPU:1, ..."""
    layout: Literal["contiguous", "interleaved"] = "contiguous"
    """Which rows of the batch make up a micro-batch."""

    @property
    def chunks(self) -> int:
        """How many stages the model has in all."""
        return self.stages * self.circular_repeat


class Accumulation(Section):
    """How micro-batches without stages are cut, and run."""

    form: Literal["unrolled", "loop"] = "unrolled"
    """A copy of the graph for each micro-batch (unrolled), or one loop over them."""
    layout: Literal["contiguous", "interleaved"] = "contiguous"
    """Which rows make up micro-batch m of M: the m-th part of them, or rows m, m + M, m + 2M, ..."""
    uneven: Literal["allow", "error"] = "allow"
    """If M does not divide the batch: let sizes differ by one, or refuse."""


class Remat(Section):
    """Recompute activations in the backward part instead of keeping them."""

    policy: fields.RematPolicy = "none"
    """none, sqrt (cut where least is kept), hierarchical (segments within segments), every:N (keep every N-th of the
    single values between layers), save_matmuls (keep products and convolutions), names, scopes, collection (keep the
    graph's collection of checkpoints), or budget:SIZE (recompute as little as lets a step fit a device)."""
    names: tuple[fields.Pattern, ...] = ()
    """Patterns of the tensors that are kept, for the policy `names`."""
    scopes: tuple[fields.Pattern, ...] = ()
    """Patterns of the name scopes that are recomputed, each by itself, for the policy `scopes`."""
    stages: tuple[fields.Natural, ...] = ()
    """With `pipeline`: the stages that recompute; left out: all."""
    offload: Literal["none", "names", "auto"] = "none"
    """Values that are in the host's memory, not an accelerator's, until gradients need them: none, those that `names`
    match, or those that are kept for recomputation (auto; with the policy none, those that gradients read)."""


After = Literal["eliminate-dead-code", "propagate", "split-draws", "decompose", "place-reductions"]
AFTER: tuple[str, ...] = get_args(After)
"""Passes after which a user's pass can run: until the plan is resolved, nothing is converted yet."""


class PassSection(Section):
    """A pass of the user."""

    file: fields.FunctionName
    """`path/to/file.py:function`; it runs only where that is allowed (--allow-code, or ar.allow_code)."""
    after: After
    """The pass that it follows."""


class OpsSection(Section):
    """Custom ops of the user."""

    file: fields.Text
    """A Python file that loads their library and calls `ar.register_op` for each; it runs only where that is allowed
    (--allow-code, or ar.allow_code)."""


class Mesh(Section):
    """The sizes of the device axes; devices are numbered data-major, then stage, then model."""

    data: fields.Count | None = None
    """How many replicas; left out: as many as `devices` allows."""
    model: fields.Count | tuple[fields.Count, ...] = 1
    """How many devices share the tensors of a replica, or of a stage of one; [2, 2] for a mesh of two dimensions."""
    stage: fields.Count | None = None
    """How many devices hold the stages of a replica; left out: pipeline.stages."""

    @property
    def model_axes(self) -> tuple[int, ...]:
        """The sizes of the model axis, one for each dimension of it."""
        return (self.model,) if isinstance(self.model, int) else self.model

    @property
    def model_size(self) -> int:
        """How many devices share the tensors of a replica."""
        return math.prod(self.model_axes)


Whole = Annotated[int, Field(strict=True)]


class DeviceAssignment(Section):
    """Another way to write `mesh`: where replicas are in a topology of the devices, as on TPUs.

    Devices are numbered as on TPUs: the last dimension (the cores of a chip) counts fastest, then the first, the second
    and so on. In a job these are the devices of all workers, one worker after another.
    """

    topology: tuple[Whole, ...]
    """How many devices there are along each dimension."""
    computation_shape: tuple[Whole, ...] | None = None
    """How many devices along each dimension a replica has; left out: one."""
    stride: tuple[Whole, ...] | None = None
    """How far apart they are along each dimension; left out: neighbours."""
    num_replicas: fields.Count | None = None
    """How many replicas; left out: as many as fit."""
    core_assignment: tuple[tuple[tuple[Whole, ...], ...], ...] | None = None
    """The coordinates of each replica's logical devices, instead of the three settings above."""


class Sharding(Section):
    """How the tensors of one name are sharded on the model axis."""

    match: fields.Pattern
    """Regular expression; it must match the whole name of a tensor or variable."""
    split: tuple[fields.Parts, ...] | None = None
    """Into how many parts each dimension is cut; `model`: as many as the model axis has devices. A `?` leaves a
    dimension open: it is cut or not, as follows from other tensors (Shardy's open dimensions). Of several axes of
    mesh.model, the first ones cut the first dimensions that are cut."""
    axes: tuple[fields.MeshAxis, ...] | None = None
    """Which axis of mesh.model cuts each dimension, counted from 0; -1: none."""
    replicate: fields.Flag = False
    """Every device holds the whole."""
    device: fields.Natural | None = None
    """The one logical device of each replica that makes it."""
    assign: fields.Natural | None = None
    """The same, by `xla_sharding`'s name."""
    strict: fields.Flag = False
    """Refuse a dimension that cannot be divided into equal parts, as `semantics.strict` does everywhere."""
    optional: fields.Flag = False
    """Allow that nothing has a matching name, with a note."""

    @property
    def home(self) -> int | None:
        """The one logical device that makes it."""
        return self.assign if self.device is None else self.device


class VariablePolicy(Section):
    """The meaning of a variable's update where each replica has a different value; the first match counts."""

    match: fields.Pattern
    """Regular expression; it must match the whole name of a variable."""
    synchronization: fields.Synchronization = "auto"
    """When replicas' values become one: at each write (on_write; auto, where an aggregation is given), or when the
    variable is read from outside, so that each replica has a component (on_read); none: there is one copy."""
    aggregation: fields.Aggregation = "none"
    """How they become one: their sum, their mean, or that of replica 0; none: not at all."""


class LocalSgd(Section):
    """Every replica trains by itself, on its part of the batch; every so many steps their variables are averaged."""

    period: fields.Count
    """After how many steps variables are averaged; 1: after each."""
    warmup_steps: fields.Natural = 0
    """How many steps in the beginning are averaged one by one (post-local SGD)."""
    average_slots: fields.Flag = True
    """Whether optimizer state (momentum, moments) is averaged, too; else it differs between replicas."""


class Semantics(Section):
    """Which results must be exactly those of one device."""

    batch_norm: Literal["sync", "local"] = "sync"
    """Statistics over the whole batch (sync, exact), or those of batch normalisations over each replica's or
    micro-batch's part (local)."""
    random: Literal["exact", "independent"] = "exact"
    """One random mask for the whole batch (exact), or one per replica with different seeds (independent)."""
    strict: fields.Flag = False
    """Refuse a graph with an op that no rule covers, which otherwise runs once on the whole batch."""
    min_coverage: fields.Share = 0.0
    """Refuse a rewrite that divides a smaller share of the step's floating-point work outside of updates over the
    devices."""
