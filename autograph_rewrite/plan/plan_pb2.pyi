from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Plan(_message.Message):
    __slots__ = ("version", "id", "strategy", "graph_digest", "mesh", "devices", "mode", "semantics", "timeout_seconds", "batch_inputs", "default", "variables", "edges", "notes", "micro", "pipeline", "remat", "passes", "model", "model_edges", "batch", "policies", "local_sgd", "steps_per_run", "bucket_order", "padding")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        unset: _ClassVar[Plan.Mode]
        shared: _ClassVar[Plan.Mode]
        mirrored: _ClassVar[Plan.Mode]
    unset: Plan.Mode
    shared: Plan.Mode
    mirrored: Plan.Mode
    class Padding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        longest: _ClassVar[Plan.Padding]
        power_of_two: _ClassVar[Plan.Padding]
        equal: _ClassVar[Plan.Padding]
    longest: Plan.Padding
    power_of_two: Plan.Padding
    equal: Plan.Padding
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    GRAPH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SEMANTICS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INPUTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    MICRO_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    REMAT_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_EDGES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SGD_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_RUN_FIELD_NUMBER: _ClassVar[int]
    BUCKET_ORDER_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    version: int
    id: str
    strategy: str
    graph_digest: str
    mesh: _containers.RepeatedCompositeFieldContainer[Axis]
    devices: _containers.RepeatedScalarFieldContainer[str]
    mode: Plan.Mode
    semantics: Semantics
    timeout_seconds: float
    batch_inputs: _containers.RepeatedCompositeFieldContainer[BatchInput]
    default: Options
    variables: _containers.RepeatedCompositeFieldContainer[VariableRequest]
    edges: _containers.RepeatedCompositeFieldContainer[Edge]
    notes: _containers.RepeatedScalarFieldContainer[str]
    micro: Micro
    pipeline: Pipeline
    remat: Remat
    passes: _containers.RepeatedCompositeFieldContainer[OwnPass]
    model: Model
    model_edges: _containers.RepeatedCompositeFieldContainer[Edge]
    batch: int
    policies: _containers.RepeatedCompositeFieldContainer[Policy]
    local_sgd: LocalSgd
    steps_per_run: int
    bucket_order: _containers.RepeatedScalarFieldContainer[str]
    padding: Plan.Padding
    def __init__(self, version: _Optional[int] = ..., id: _Optional[str] = ..., strategy: _Optional[str] = ..., graph_digest: _Optional[str] = ..., mesh: _Optional[_Iterable[_Union[Axis, _Mapping]]] = ..., devices: _Optional[_Iterable[str]] = ..., mode: _Optional[_Union[Plan.Mode, str]] = ..., semantics: _Optional[_Union[Semantics, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., batch_inputs: _Optional[_Iterable[_Union[BatchInput, _Mapping]]] = ..., default: _Optional[_Union[Options, _Mapping]] = ..., variables: _Optional[_Iterable[_Union[VariableRequest, _Mapping]]] = ..., edges: _Optional[_Iterable[_Union[Edge, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., micro: _Optional[_Union[Micro, _Mapping]] = ..., pipeline: _Optional[_Union[Pipeline, _Mapping]] = ..., remat: _Optional[_Union[Remat, _Mapping]] = ..., passes: _Optional[_Iterable[_Union[OwnPass, _Mapping]]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., model_edges: _Optional[_Iterable[_Union[Edge, _Mapping]]] = ..., batch: _Optional[int] = ..., policies: _Optional[_Iterable[_Union[Policy, _Mapping]]] = ..., local_sgd: _Optional[_Union[LocalSgd, _Mapping]] = ..., steps_per_run: _Optional[int] = ..., bucket_order: _Optional[_Iterable[str]] = ..., padding: _Optional[_Union[Plan.Padding, str]] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("variable", "synchronization", "aggregation", "declared")
    class Synchronization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        single: _ClassVar[Policy.Synchronization]
        on_write: _ClassVar[Policy.Synchronization]
        on_read: _ClassVar[Policy.Synchronization]
    single: Policy.Synchronization
    on_write: Policy.Synchronization
    on_read: Policy.Synchronization
    class Aggregation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        none: _ClassVar[Policy.Aggregation]
        sum: _ClassVar[Policy.Aggregation]
        mean: _ClassVar[Policy.Aggregation]
        only_first_replica: _ClassVar[Policy.Aggregation]
    none: Policy.Aggregation
    sum: Policy.Aggregation
    mean: Policy.Aggregation
    only_first_replica: Policy.Aggregation
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SYNCHRONIZATION_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    variable: str
    synchronization: Policy.Synchronization
    aggregation: Policy.Aggregation
    declared: bool
    def __init__(self, variable: _Optional[str] = ..., synchronization: _Optional[_Union[Policy.Synchronization, str]] = ..., aggregation: _Optional[_Union[Policy.Aggregation, str]] = ..., declared: bool = ...) -> None: ...

class LocalSgd(_message.Message):
    __slots__ = ("period", "warmup_steps", "average_slots")
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    period: int
    warmup_steps: int
    average_slots: bool
    def __init__(self, period: _Optional[int] = ..., warmup_steps: _Optional[int] = ..., average_slots: bool = ...) -> None: ...

class OwnPass(_message.Message):
    __slots__ = ("name", "after", "code")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    after: str
    code: str
    def __init__(self, name: _Optional[str] = ..., after: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class Remat(_message.Message):
    __slots__ = ("policy", "names", "scopes", "stages", "offload")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    policy: str
    names: _containers.RepeatedScalarFieldContainer[str]
    scopes: _containers.RepeatedScalarFieldContainer[str]
    stages: _containers.RepeatedScalarFieldContainer[int]
    offload: str
    def __init__(self, policy: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., scopes: _Optional[_Iterable[str]] = ..., stages: _Optional[_Iterable[int]] = ..., offload: _Optional[str] = ...) -> None: ...

class Pipeline(_message.Message):
    __slots__ = ("stages", "devices", "schedule", "boundaries", "names", "assign")
    class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        gpipe: _ClassVar[Pipeline.Schedule]
        one_f_one_b: _ClassVar[Pipeline.Schedule]
        interleaved: _ClassVar[Pipeline.Schedule]
        circular: _ClassVar[Pipeline.Schedule]
    gpipe: Pipeline.Schedule
    one_f_one_b: Pipeline.Schedule
    interleaved: Pipeline.Schedule
    circular: Pipeline.Schedule
    class Assign(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        auto: _ClassVar[Pipeline.Assign]
        device: _ClassVar[Pipeline.Assign]
    auto: Pipeline.Assign
    device: Pipeline.Assign
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    stages: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    schedule: Pipeline.Schedule
    boundaries: _containers.RepeatedScalarFieldContainer[str]
    names: _containers.RepeatedScalarFieldContainer[str]
    assign: Pipeline.Assign
    def __init__(self, stages: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., schedule: _Optional[_Union[Pipeline.Schedule, str]] = ..., boundaries: _Optional[_Iterable[str]] = ..., names: _Optional[_Iterable[str]] = ..., assign: _Optional[_Union[Pipeline.Assign, str]] = ...) -> None: ...

class Micro(_message.Message):
    __slots__ = ("count", "layout", "uneven", "loop")
    class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        contiguous: _ClassVar[Micro.Layout]
        interleaved: _ClassVar[Micro.Layout]
    contiguous: Micro.Layout
    interleaved: Micro.Layout
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_FIELD_NUMBER: _ClassVar[int]
    LOOP_FIELD_NUMBER: _ClassVar[int]
    count: int
    layout: Micro.Layout
    uneven: bool
    loop: bool
    def __init__(self, count: _Optional[int] = ..., layout: _Optional[_Union[Micro.Layout, str]] = ..., uneven: bool = ..., loop: bool = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("axes", "devices", "shardings")
    AXES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SHARDINGS_FIELD_NUMBER: _ClassVar[int]
    axes: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedScalarFieldContainer[str]
    shardings: _containers.RepeatedCompositeFieldContainer[TensorSharding]
    def __init__(self, axes: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[str]] = ..., shardings: _Optional[_Iterable[_Union[TensorSharding, _Mapping]]] = ...) -> None: ...

class TensorSharding(_message.Message):
    __slots__ = ("name", "split", "device", "axes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    name: str
    split: _containers.RepeatedScalarFieldContainer[int]
    device: int
    axes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., split: _Optional[_Iterable[int]] = ..., device: _Optional[int] = ..., axes: _Optional[_Iterable[int]] = ...) -> None: ...

class Axis(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class Semantics(_message.Message):
    __slots__ = ("batch_norm", "random", "strict", "min_coverage")
    class BatchNorm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        sync: _ClassVar[Semantics.BatchNorm]
        local: _ClassVar[Semantics.BatchNorm]
    sync: Semantics.BatchNorm
    local: Semantics.BatchNorm
    class Random(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        exact: _ClassVar[Semantics.Random]
        independent: _ClassVar[Semantics.Random]
    exact: Semantics.Random
    independent: Semantics.Random
    BATCH_NORM_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    MIN_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    batch_norm: Semantics.BatchNorm
    random: Semantics.Random
    strict: bool
    min_coverage: float
    def __init__(self, batch_norm: _Optional[_Union[Semantics.BatchNorm, str]] = ..., random: _Optional[_Union[Semantics.Random, str]] = ..., strict: bool = ..., min_coverage: _Optional[float] = ...) -> None: ...

class BatchInput(_message.Message):
    __slots__ = ("name", "axis", "whole", "ragged")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    RAGGED_FIELD_NUMBER: _ClassVar[int]
    name: str
    axis: int
    whole: bool
    ragged: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., axis: _Optional[int] = ..., whole: bool = ..., ragged: _Optional[_Iterable[int]] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("synchronizer", "hint", "compressor", "bucket_bytes", "own_compressor")
    class Synchronizer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        all_reduce: _ClassVar[Options.Synchronizer]
        ps: _ClassVar[Options.Synchronizer]
    all_reduce: Options.Synchronizer
    ps: Options.Synchronizer
    class Hint(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        auto: _ClassVar[Options.Hint]
        ring: _ClassVar[Options.Hint]
        nccl: _ClassVar[Options.Hint]
    auto: Options.Hint
    ring: Options.Hint
    nccl: Options.Hint
    class Compressor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        none: _ClassVar[Options.Compressor]
        fp16: _ClassVar[Options.Compressor]
        bf16: _ClassVar[Options.Compressor]
        fp16_ef: _ClassVar[Options.Compressor]
        bf16_ef: _ClassVar[Options.Compressor]
        topk: _ClassVar[Options.Compressor]
        powersgd: _ClassVar[Options.Compressor]
        int8_ef: _ClassVar[Options.Compressor]
        own: _ClassVar[Options.Compressor]
    none: Options.Compressor
    fp16: Options.Compressor
    bf16: Options.Compressor
    fp16_ef: Options.Compressor
    bf16_ef: Options.Compressor
    topk: Options.Compressor
    powersgd: Options.Compressor
    int8_ef: Options.Compressor
    own: Options.Compressor
    SYNCHRONIZER_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWN_COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    synchronizer: Options.Synchronizer
    hint: Options.Hint
    compressor: Options.Compressor
    bucket_bytes: int
    own_compressor: str
    def __init__(self, synchronizer: _Optional[_Union[Options.Synchronizer, str]] = ..., hint: _Optional[_Union[Options.Hint, str]] = ..., compressor: _Optional[_Union[Options.Compressor, str]] = ..., bucket_bytes: _Optional[int] = ..., own_compressor: _Optional[str] = ...) -> None: ...

class Server(_message.Message):
    __slots__ = ("sync", "staleness", "proxy", "lookups")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    sync: bool
    staleness: int
    proxy: bool
    lookups: bool
    def __init__(self, sync: bool = ..., staleness: _Optional[int] = ..., proxy: bool = ..., lookups: bool = ...) -> None: ...

class VariableRequest(_message.Message):
    __slots__ = ("name", "placement", "options", "servers", "sizes", "server", "stage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    placement: str
    options: Options
    servers: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    server: Server
    stage: int
    def __init__(self, name: _Optional[str] = ..., placement: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., servers: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[int]] = ..., server: _Optional[_Union[Server, _Mapping]] = ..., stage: _Optional[int] = ...) -> None: ...

class Edge(_message.Message):
    __slots__ = ("value", "to", "owner", "role", "lowering", "dtype", "bytes", "group_key", "instance_key", "order", "bucket", "reason", "compressor", "own_compressor", "logical", "padded", "axis")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LOWERING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_KEY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_KEY_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    OWN_COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_FIELD_NUMBER: _ClassVar[int]
    PADDED_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    value: str
    to: str
    owner: str
    role: str
    lowering: str
    dtype: str
    bytes: int
    group_key: int
    instance_key: int
    order: int
    bucket: int
    reason: str
    compressor: Options.Compressor
    own_compressor: str
    logical: int
    padded: _containers.RepeatedScalarFieldContainer[int]
    axis: int
    def __init__(self, value: _Optional[str] = ..., to: _Optional[str] = ..., owner: _Optional[str] = ..., role: _Optional[str] = ..., lowering: _Optional[str] = ..., dtype: _Optional[str] = ..., bytes: _Optional[int] = ..., group_key: _Optional[int] = ..., instance_key: _Optional[int] = ..., order: _Optional[int] = ..., bucket: _Optional[int] = ..., reason: _Optional[str] = ..., compressor: _Optional[_Union[Options.Compressor, str]] = ..., own_compressor: _Optional[str] = ..., logical: _Optional[int] = ..., padded: _Optional[_Iterable[int]] = ..., axis: _Optional[int] = ..., **kwargs) -> None: ...
