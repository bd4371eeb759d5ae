"""The configurations that every program is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Configuration:
    """A configuration, how many examples the steps have, and whether its replicas are two processes of a job."""

    name: str
    config: Mapping[str, Any]
    sizes: tuple[int, ...] = (8,)
    is_job: bool = False


def _of(name: str, devices: int, sizes: tuple[int, ...] = (8,), **config: Any) -> Configuration:
    given = {"devices": [f"CPU:{i}" for i in range(devices)], "timeout_seconds": TIMEOUT_SECONDS, **config}
    return Configuration(name, given, sizes)


CONFIGURATIONS = (
    _of("all_reduce_2", 2, strategy={"name": "AllReduce", "variables": "shared"}),
    _of("mirrored_3", 3, (7, 5), strategy={"name": "AllReduce", "variables": "mirrored"}),
    _of("fsdp_2", 2, strategy={"name": "FSDP", "variables": "mirrored"}),
    _of("micro_2x2", 2, strategy={"name": "AllReduce"}, microbatches=2),
    _of("ps_2", 2, (7,), strategy={"name": "PSLoadBalancing"}),
    _of("stages_2", 2, pipeline={"stages": 2, "microbatches": 2}),
    Configuration("fit_2", {}, is_job=True),
)
BY_NAME = {one.name: one for one in CONFIGURATIONS}
DESCRIPTIONS = {
    "all_reduce_2": "AllReduce over 2 replicas, shared variables",
    "mirrored_3": "AllReduce over 3 replicas, a copy of the variables on each, uneven batches (7 and 5 examples)",
    "fsdp_2": "FSDP over 2 replicas",
    "micro_2x2": "2 micro-batches on each of 2 replicas",
    "ps_2": "PSLoadBalancing over 2 replicas, an uneven batch (7 examples)",
    "stages_2": "a pipeline of 2 stages and 2 micro-batches",
    "fit_2": "2 processes: `fit` of the model, or a call of the function for each batch (libraries on tf_keras)",
}
