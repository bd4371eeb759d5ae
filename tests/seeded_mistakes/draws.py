"""What mistakes are seeded into: programs of the zoo and of `programs`, each under a configuration.

draw = Draw("mlp", "momentum", "mirrored2")     the normalised item, its plan, what one device computes
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from autograph_rewrite import GraphItem
from autograph_rewrite.config.config import Config
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies import builder_for
from tests.seeded_mistakes.programs import PROGRAMS
from tests.support.staged import MODELS as STAGED
from tests.support.staged import feed as staged_feed
from tests.support.staged import staged_item
from tests.zoo import GRAPHS, ZOO, Built, Options

SIZES = (7, 5)  # rows in each of two steps: uneven over 2 and 3 replicas
STAGED_SIZES = (11, 9)
TIMEOUT_SECONDS = 6


def _all_reduce(replicas: int, variables: str, **more: Any) -> dict[str, Any]:
    return _strategy("AllReduce", replicas, variables, **more)


def _strategy(name: str, replicas: int, variables: str, **more: Any) -> dict[str, Any]:
    devices = [f"CPU:{i}" for i in range(replicas)]
    return {"devices": devices, "strategy": {"name": name, "variables": variables}, **more}


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "shared2": _all_reduce(2, "shared"),
    "shared3": _all_reduce(3, "shared"),
    "mirrored2": _all_reduce(2, "mirrored"),
    "mirrored3": _all_reduce(3, "mirrored"),
    "micro_shared": _all_reduce(2, "shared", microbatches=2),
    "micro_interleaved": _all_reduce(2, "shared", microbatches=2, accumulation={"layout": "interleaved"}),
    "micro_one": _all_reduce(1, "shared", microbatches=3),
    "loop_shared": _all_reduce(2, "shared", microbatches=2, accumulation={"form": "loop"}),
    "loop_one": _all_reduce(1, "shared", microbatches=3, accumulation={"form": "loop"}),
    "fsdp2": _strategy("FSDP", 2, "mirrored"),
    "partitioned_ps3": _strategy("PartitionedPS", 3, "shared"),
    "partitioned_ar2": _strategy("PartitionedAR", 2, "mirrored"),
    "ps2": _strategy("PS", 2, "shared"),
    "balanced3": _strategy("PSLoadBalancing", 3, "mirrored"),
    "parallax3": _strategy("Parallax", 3, "mirrored"),
}


def _over_data(stage: int) -> dict[str, Any]:
    return {"variables": [{"match": ".*", "partition": {"over": "data", "stage": stage}}]}


SHARD_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "shards_zero1": _all_reduce(3, "mirrored") | _over_data(1),
    "shards_zero2_micro": _all_reduce(2, "mirrored", microbatches=2) | _over_data(2),
    "shards_fsdp3": _strategy("FSDP", 3, "shared"),
    "shards_fsdp_loop": _strategy("FSDP", 2, "mirrored", microbatches=2, accumulation={"form": "loop"}),
}
"""Of variables that are split over the replicas."""


def _along(data: int, model: tuple[int, ...] = (2,), **more: Any) -> dict[str, Any]:
    """Return a mesh with a model axis whose devices run one program; several axes cut the same dimensions."""
    columns, rows = r"(hidden|hidden_0|layer_\d/inner)/w|words", r"(hidden_1|layer_\d/outer)/w"
    count = math.prod(model)
    sharding = [{"match": columns, "split": [1, count]}, {"match": rows, "split": [count, 1], "optional": True}]
    return _all_reduce(count * data, "mirrored", mesh={"data": data, "model": list(model)}, sharding=sharding, **more)


ALONG_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "along_one": _along(1),
    "along_two": _along(2),
    "along_micro": _along(2, microbatches=2),
    "along_micro_one": _along(1, microbatches=3),
    "along_axes": _along(1, (2, 2)),
    "along_shards": {**_along(2), "strategy": {"name": "FSDP", "variables": "mirrored"}},
    "along_shards_micro": {**_along(2, microbatches=2), "strategy": {"name": "FSDP", "variables": "mirrored"}},
}
"""Of a model axis whose devices run one program, each of its blocks, which may be in shards over the replicas."""
ALONG = (("mlp", "adam"), ("language_model", "adagrad"), ("transformer", "momentum"))
SHARDED = (("mlp", "adam"), ("language_model", "adagrad"), ("transformer", "momentum"), ("masked", "rmsprop"))
STAGED_CONFIG = {"devices": ["CPU:0"]}
HEAVY = ("lstm_v1", "lstm_v2", "gru_v1", "gru_v2")  # graphs that take long; few configurations of them are enough


@dataclass(frozen=True)
class Draw:
    """A program under a configuration.

    Attributes:
        program: of the zoo, of `programs`, or `staged/` and a name of `tests.support.staged`.
        optimizer: what it is trained with, where that is a choice.
        config: a name of `CONFIGS`, `SHARD_CONFIGS` or `ALONG_CONFIGS`, or `pipeline` and the number of stages.
    """

    program: str
    optimizer: str
    config: str

    def __str__(self) -> str:
        """Return the draw's name."""
        return f"{self.program}/{self.optimizer}/{self.config}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of examples of each step."""
        return STAGED_SIZES if self.is_staged else SIZES

    @property
    def is_staged(self) -> bool:
        """Whether the program comes with boundaries of stages."""
        return self.program.startswith("staged/")

    @cached_property
    def item(self) -> GraphItem:
        """The program as its user gives it."""
        return _staged(self.program)[0] if self.is_staged else built(self.program, self.optimizer).item()

    @cached_property
    def flat(self) -> GraphItem:
        """The normalised program."""
        return normalise(self.item)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration as its user gives it."""
        if not self.is_staged:
            return {**CONFIGS, **SHARD_CONFIGS, **ALONG_CONFIGS}[self.config] | {"timeout_seconds": TIMEOUT_SECONDS}
        form = {"form": "loop"} if self.config == "pipeline_loop" else {}
        pipeline = {"stages": 2, "microbatches": 4, "boundaries": _staged(self.program)[1][1:2], **form}
        return {**STAGED_CONFIG, "pipeline": pipeline, "timeout_seconds": TIMEOUT_SECONDS}

    def feeds(self) -> list[dict[str, Any]]:
        """What each step is fed."""
        if self.is_staged:
            return [staged_feed(self.item, step, size) for step, size in enumerate(self.sizes)]
        return [built(self.program, self.optimizer).feeds(step, size) for step, size in enumerate(self.sizes)]

    @cached_property
    def plan(self) -> Plan:
        """The plan of the configuration."""
        config = Config.of(self.settings)
        return builder_for(config).build(self.flat, config)


@lru_cache(maxsize=8)
def built(program: str, optimizer: str) -> Built:
    """Build a program; it is the same every time."""
    options = Options(optimizer="sgd" if optimizer == "own" else optimizer)
    return PROGRAMS[program](options) if program in PROGRAMS else ZOO[program].build(options)


@lru_cache(maxsize=4)
def _staged(program: str) -> tuple[GraphItem, list[str]]:
    return staged_item(STAGED[program.partition("/")[2]])


def draws() -> Iterator[Draw]:
    """Yield programs and configurations; each program meets every kind of configuration that it can."""
    optimizers = ("momentum", "adam", "sgd", "adagrad", "rmsprop")
    names = [case.name for case in GRAPHS if "float64" in case.dtypes]  # in float32 rounding looks like a small mistake
    at = 0
    for program in names:
        for number, config in enumerate(CONFIGS):
            if program in HEAVY and number % 4 != names.index(program) % 4:
                continue
            yield Draw(program, optimizers[at % len(optimizers)], config)
            at += 1
    for program, optimizer in SHARDED:
        for config in SHARD_CONFIGS:
            yield Draw(program, optimizer, config)
    for program, optimizer in ALONG:
        for config in ALONG_CONFIGS:
            yield Draw(program, optimizer, config)
    for program in PROGRAMS:
        for config in CONFIGS:
            yield Draw(program, "own", config)
    for name in STAGED:
        for config in ("pipeline", "pipeline_loop"):
            yield Draw(f"staged/{name}", "adam", config)
