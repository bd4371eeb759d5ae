"""Read the configuration that a user writes: one model, from a file or a dict, all mistakes reported together.

    Config.load("configs/all_reduce.yaml")          Config.of({"devices": ["CPU:0", "CPU:1"]})

A strategy builder makes a plan from a `Config` and a graph.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, PrivateAttr, ValidationError

from autograph_rewrite.config import presets
from autograph_rewrite.config.cross_field_checks import CHECKS, IN_JOB, one_thing_says_where_replicas_are, unavailable
from autograph_rewrite.config.device_assignment import mesh_of, of_process
from autograph_rewrite.config.fields import Count, DeviceName, Positive, Size
from autograph_rewrite.config.sections import (
    Accumulation,
    Cluster,
    DeviceAssignment,
    LocalSgd,
    Mesh,
    Mode,
    OpsSection,
    Override,
    PassSection,
    Pipeline,
    Remat,
    Section,
    Semantics,
    Sharding,
    Strategy,
    VariablePolicy,
)
from autograph_rewrite.diagnostics.faults import SHOWN, FileFault, did_you_mean, either, raise_if_any
from autograph_rewrite.diagnostics.located_yaml import KeyPath, Located, Source, dotted, load_yaml
from autograph_rewrite.errors import ConfigError, RewriteError
from autograph_rewrite.ir.types import device_names
from autograph_rewrite.notebook import text


class Config(Section):
    """How to distribute a training graph. Make one with `load` or `of`, which explain all mistakes."""

    devices: tuple[DeviceName, ...] | None = None
    """The devices of this process's replicas, in order; left out: its accelerators."""
    cluster: Cluster | None = None
    """The processes of the job; left out: this one."""
    strategy: Strategy = Strategy()
    """Which builder makes the plan."""
    variables: tuple[Override, ...] = ()
    """Different settings for some variables; the first match wins."""
    variable_policies: tuple[VariablePolicy, ...] = ()
    """How replicas' different values of a variable that no gradient trains become one (docs/replicas.md); left out:
    exact."""
    pipeline: Pipeline | None = None
    """Cut the model into stages."""
    microbatches: Count = 1
    """Gradient accumulation: into how many parts a replica's batch is cut."""
    accumulation: Accumulation = Accumulation()
    """How these parts are cut, and run."""
    local_sgd: LocalSgd | None = None
    """Let replicas train by themselves and average their variables every so many steps: not exact
    (docs/local_sgd.md); left out: each step has the gradient of the whole batch."""
    remat: Remat = Remat()
    """Recompute activations instead of keeping them."""
    memory_limit: Size | None = None
    """The memory of a device (4GiB, or a number), for the strategy Auto: its plan fits, or an error names the least
    memory that would do."""
    passes: tuple[PassSection, ...] = ()
    """Your passes, which edit the graph before it is distributed (docs/writing_passes.md)."""
    ops: tuple[OpsSection, ...] = ()
    """Files that tell how custom ops divide (docs/writing_rules.md)."""
    mesh: Mesh | None = None
    """The sizes of the device axes; left out: all devices are replicas."""
    device_assignment: DeviceAssignment | None = None
    """Another way to write `mesh`: where replicas are in a topology of the devices."""
    sharding: tuple[Sharding, ...] = ()
    """How tensors are sharded on the model axis."""
    steps_per_run: Count = 1
    """How many steps one run does, inside the graph."""
    semantics: Semantics = Semantics()
    """Which results must be exactly those of one device."""
    input: Literal["global", "per_worker"] = "global"
    """In a cluster, the data of a Keras model and of iterators inside a graph: every worker is given the whole batch,
    and takes its part (global), or is given its part only (per_worker)."""
    padding: Literal["auto", "power_of_two", "none"] = "auto"
    """In a cluster, outputs whose lengths differ between workers, as those of sequences do, are padded with zeros to
    the longest (auto) or to the next power of two; none: different lengths are an error."""
    timeout_seconds: Positive = 60.0
    """How long to wait for a device or process before an error names the missing one."""
    snapshot_steps: Count = 10
    """In an elastic job, the number of steps between snapshots in memory, which is the most that are repeated when a
    worker is lost (docs/elastic.md)."""

    _source: Source = PrivateAttr(default_factory=Source)
    _idle: tuple[str, ...] | None = PrivateAttr(default=None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Config:
        """Read a configuration file, or the shipped one of that name (`fsdp`).

        Raises:
            ConfigError: with all mistakes in the file, each at its line.
        """
        file = presets.found(path)
        if not os.path.exists(file) and not os.path.splitext(file)[1]:
            hint = did_you_mean(os.fspath(path), presets.names(), noun="shipped configurations")
            raise ConfigError(f"there is no file '{os.fspath(path)}', and no configuration of that name", hint=hint)
        return cls._read(load_yaml(file, error=ConfigError))

    @classmethod
    def of(cls, config: ConfigLike) -> Config:
        """The configuration that `config` is, holds, or is the path of.

        Raises:
            ConfigError: with all its mistakes.
        """
        if isinstance(config, Config):
            return config
        if isinstance(config, str | os.PathLike):
            return cls.load(config)
        if not isinstance(config, Mapping):  # untyped code comes here
            what = type(config).__name__  # type: ignore[unreachable]
            raise ConfigError(f"a configuration is a path, a dict or a Config, not {what}")
        return cls._read(Located(dict(config), Source()))

    def _repr_html_(self) -> str:
        """Show the settings that are no defaults in a notebook."""
        given = {"strategy": {"name": self.strategy.name}, **self.model_dump(mode="json", exclude_defaults=True)}
        return text(yaml.safe_dump(given, sort_keys=False))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of the file, for editors (it is published as docs/config.schema.json)."""
        return add_descriptions(cls.model_json_schema(), cls)

    @property
    def workers(self) -> int:
        """How many processes train."""
        return len(self.cluster.workers) if self.cluster else 1

    @property
    def is_driven(self) -> bool:
        """Whether workers hold stages or logical devices of replicas, which worker 0 drives, instead of whole ones."""
        return self.workers > 1 and (self.pipeline is not None or len(self.devices or ()) % self._model_size > 0)

    @property
    def has_stages_on_hosts(self) -> bool:
        """Whether the workers of a job hold the stages of one pipeline, instead of a replica each."""
        return self.workers > 1 and self.pipeline is not None

    @property
    def mode(self) -> Mode:
        """Where variables live: by `strategy.variables`, else by the number of processes.

        Micro-batches and stages share variables.
        """
        several = self.workers > 1 and self.microbatches == 1 and self.pipeline is None
        several = several or self.local_sgd is not None
        return self.strategy.variables or ("mirrored" if several else "shared")

    @property
    def replicas(self) -> tuple[str, ...]:
        """The first device of each of this process's replicas; with stages or a model axis, each has several in a row.

        Raises:
            ConfigError: the devices are not filled in yet.
        """
        devices = self.replica_devices()
        if len(devices) % self.model_size == 0:
            devices = devices[:: self.model_size]
        if self.pipeline is None or self.pipeline.devices is not None or len(devices) % self.pipeline.stages:
            return devices
        return devices[:: self.pipeline.stages]

    @property
    def model_size(self) -> int:
        """How many devices share the tensors of a replica; 1 where the number of devices is no multiple."""
        devices = len(self.devices or ()) * self.workers
        return self._model_size if devices % self._model_size == 0 else 1

    @property
    def _model_size(self) -> int:
        return self.mesh.model_size if self.mesh is not None else 1

    @property
    def is_assigned(self) -> bool:
        """Whether devices are in the order of `device_assignment`, and the mesh follows from it."""
        return self._idle is not None

    @property
    def idle_devices(self) -> tuple[str, ...]:
        """The devices that no replica of `device_assignment` has."""
        return self._idle or ()

    @property
    def stages_in_a_row(self) -> int:
        """How many of a replica's devices hold its stages, where `pipeline.devices` does not name these."""
        return self.pipeline.stages if self.pipeline is not None and self.pipeline.devices is None else 1

    @property
    def file(self) -> str:
        """The file that it was read from; "config" for a configuration from a dict."""
        return self._source.name

    def where(self, *path: str | int) -> str:
        """The place of a key, as `file:line`; "config" for a configuration from a dict."""
        return self._source.at(path)

    def fault(self, path: KeyPath, message: str, hint: str | None = None) -> FileFault:
        """A fault of the setting at `path`.

        Args:
            path: keys and indices from the top of the file.
            message: a sentence without its end.
            hint: a correction.
        """
        return self._source.fault(path, message, hint)

    def with_devices(self, logical: Sequence[str]) -> Config:
        """This configuration, with devices filled in from those of the process if it names none.

        Raises:
            ConfigError: when it names none, and the process has no accelerator.
        """
        if self.devices is not None:
            return self
        chosen = device_names.accelerators(logical)
        if not chosen and self.cluster is not None:
            chosen = (device_names.canonical("CPU:0"),)
        if not chosen:
            fault = self.fault((), "devices is missing, and this process has no accelerator", _NAME_DEVICES)
            raise_if_any([fault], error=ConfigError, title=self._source.name)
        filled = self.model_copy(update={"devices": chosen})
        faults = [filled.fault(*clash) for clash in one_thing_says_where_replicas_are(filled)]
        raise_if_any(faults, error=ConfigError, title=self._source.name)
        return filled._in_assigned_order()

    def _in_assigned_order(self) -> Config:
        """This configuration with the devices of its assignment, replica by replica, and the mesh that follows."""
        given, devices = self.device_assignment, self.devices
        if given is None or not devices or self.is_assigned:
            return self
        own = of_process(given, len(devices))
        mesh = mesh_of(given, self.stages_in_a_row)
        config = self.model_copy(update={"devices": tuple(devices[i] for i in own), "mesh": mesh})
        config._idle = tuple(device for i, device in enumerate(devices) if i not in own)
        config._source = self._source.also(("mesh",), ("device_assignment",))
        return config

    def replica_devices(self) -> tuple[str, ...]:
        """The canonical devices of the replicas.

        Raises:
            ConfigError: when they are not filled in; `with_devices` does that.
        """
        if self.devices is None:
            fault = self.fault((), "devices is missing", _NAME_DEVICES)
            raise_if_any([fault], error=ConfigError, title=self._source.name)
        return self.devices or ()

    def require_usable(self) -> None:
        """Refuse settings that this version does not support, and impossible combinations in the known job.

        Raises:
            ConfigError: with each of them, at its line.
        """
        faults = [*_clashes(self, broken=())]
        if not faults:
            faults += [self.fault(*clash) for check in IN_JOB for clash in check(self)]
        for path, feature in unavailable(self):
            faults.append(self.fault(path, f"{feature} is not available yet in this version", "leave it out"))
        raise_if_any(faults, error=ConfigError, title=self._source.name)

    @classmethod
    def _read(cls, located: Located) -> Config:
        config, faults = cls._validated(located.data, located.source)
        raise_if_any([*located.faults, *faults], error=ConfigError, title=located.source.name)
        assert config is not None  # without faults there is one
        config._source = located.source
        return config._in_assigned_order()

    @classmethod
    def _validated(cls, data: object, source: Source) -> tuple[Config | None, list[FileFault]]:
        """The configuration made of the valid keys, and the faults."""
        broken: set[str] = set()
        faults: list[FileFault] = []
        try:
            config = cls.model_validate(data)
        except ValidationError as error:
            faults = faults_of(error, cls, source)
            if not isinstance(data, dict):
                return None, faults
            broken = {str(finding["loc"][0]) for finding in error.errors()}
            config = cls.model_validate({key: value for key, value in data.items() if str(key) not in broken})
        config._source = source
        return config, [*faults, *_clashes(config, broken=broken)]


# What the public functions take for a configuration.
ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]

_NAME_DEVICES = "name one device per replica, as in devices: [CPU:0, CPU:1]"


def _clashes(config: Config, *, broken: Collection[str]) -> Iterator[FileFault]:
    """The impossible combinations of settings that are valid by themselves."""
    for keys, check in CHECKS:
        if keys.isdisjoint(broken):
            for clash in check(config):
                yield config.fault(*clash)


# Descriptions of the fields of sections: the strings after them, read from the source when a schema is made.
#
#     timeout_seconds: Positive = 300.0
#     "How long ..."                            ──►   schema["properties"]["timeout_seconds"]["description"]
#
# Pydantic could read them when a class is made, but searches all modules of the process for each: a third of a second.


def add_descriptions(schema: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return a JSON schema with the descriptions of all fields.

    Args:
        model: its sections are classes in modules of this package.
    """
    schemas = {model.__name__: schema, **schema.get("$defs", {})}
    for _, section in _named_sections(model):
        texts = _descriptions(section)
        for field, found in schemas[section.__name__].get("properties", {}).items():
            if field in texts:
                found["description"] = texts[field]
    return schema


def _descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return the strings after the fields of a section, by field."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, words in pairwise(definition.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant):
            found[field.target.id] = inspect.cleandoc(str(words.value.value))
    return found


# pydantic's findings in plain words: the key, its valid values, its value, the probable intention.


_MUST_BE = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list, as in [a, b]",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
}


def faults_of(error: ValidationError, model: type[BaseModel], source: Source) -> list[FileFault]:
    """One fault per finding of pydantic.

    Args:
        model: the section that was validated.
        source: the file, which knows the line of each key.
    """
    known: dict[tuple[str, ...], str] = {}

    def meant(path: KeyPath) -> str | None:
        keys = tuple(key for key in path if isinstance(key, str))  # all items of a list have the same keys
        if keys not in known and len(known) > SHOWN:
            return None  # it would not be shown, and the search takes time
        if keys not in known:
            known[keys] = _meant(path, model)
        return known[keys]

    return [_fault(dict(finding), meant, source) for finding in error.errors()]


def _fault(finding: dict[str, Any], meant: Callable[[KeyPath], str | None], source: Source) -> FileFault:
    """Translate a finding of pydantic, a dict of many possible shapes."""
    path: KeyPath = tuple(finding["loc"])
    kind, context, given = finding["type"], finding.get("ctx", {}), _quoted(finding["input"])
    name = dotted(path) or "the configuration"
    match kind:
        case "extra_forbidden":
            return source.fault(path, f"unknown key '{path[-1]}'{_inside(path)}", meant(path))
        case "missing":
            return source.fault(path[:-1], f"the key '{path[-1]}' is missing{_inside(path)}")
        case "literal_error":
            known = re.findall(r"'([^']*)'", context["expected"])
            hint = did_you_mean(str(finding["input"]), known) if isinstance(finding["input"], str) else None
            close = hint if hint and hint.startswith("did you mean") else None
            return source.fault(path, f"{name} must be {either(known)}, not {given}", close)
        case "greater_than_equal":
            return source.fault(path, f"{name} must be at least {context['ge']:g}, not {given}")
        case "less_than_equal":
            return source.fault(path, f"{name} must be at most {context['le']:g}, not {given}")
        case "invalid_key":
            return source.fault(path[:-1], f"a key must be a text, not {path[-1]!r}{_inside(path)}")
        case "greater_than":
            return source.fault(path, f"{name} must be more than {context['gt']:g}, not {given}")
        case "value_error" if isinstance(context["error"], RewriteError):
            return source.fault(path, f"{name}: {context['error'].problem}", context["error"].hint)
        case "value_error":
            return source.fault(path, f"{name} {context['error']}")
        case _ if kind in _MUST_BE:
            return source.fault(path, f"{name} {_MUST_BE[kind]}, not {given}")
    return source.fault(path, f"{name}: {finding['msg']}")


def _inside(path: KeyPath) -> str:
    return f" in {dotted(path[:-1])}" if path[:-1] else ""


def _quoted(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meant(path: KeyPath, model: type[BaseModel]) -> str:
    """The closest valid key, or the section that has the key."""
    word = str(path[-1])
    here = _section(path[:-1], model)
    known = list(here.model_fields) if here else []
    hint = did_you_mean(word, known)
    if hint.startswith("did you mean"):
        return hint
    homes = [home for home, section in _named_sections(model) if word in section.model_fields]
    if not homes:
        return hint
    if not homes[0]:
        return f"'{word}' belongs at the top, outside of {dotted(path[:-1])}"
    return f"did you mean '{homes[0]}.{word}'?"


def _section(path: KeyPath, model: type[BaseModel]) -> type[BaseModel] | None:
    """The class of the section at `path`."""
    for key in path:
        if isinstance(key, int):
            continue  # the items of a list have the list's class
        field = model.model_fields.get(key)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return None
        model = inner
    return model


def _named_sections(model: type[BaseModel], home: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the path of its keys, the outer ones first."""
    yield home, model
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from _named_sections(inner, f"{home}.{name}" if home else name)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model class in `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model is not None), None)
