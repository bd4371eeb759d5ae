"""The devices of parameter servers, and load balancing between them.

The servers are the parameter servers of the cluster, each with its CPU:0. Where it names none, every worker serves:
with those CPUs that its replicas run on, else with its CPU:0.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.config.config import Config
from autograph_rewrite.ir.types import device_names
from autograph_rewrite.plan.request import job_devices

HOST = "/device:CPU:0"


def servers(config: Config) -> tuple[str, ...]:
    """Return the devices that may hold variables, in order.

    Raises:
        ConfigError: the configuration names no devices.
    """
    if config.cluster is not None and config.cluster.ps:
        return tuple(device_names.on_task(HOST, "ps", task) for task in range(len(config.cluster.ps)))
    by_process: dict[str, list[str]] = {}
    for device in job_devices(config):
        by_process.setdefault(device_names.process_of(device), []).append(device)
    found: list[str] = []
    for process, own in by_process.items():
        found += [device for device in own if device_names.parse(device).kind == "CPU"] or [process + HOST]
    return tuple(dict.fromkeys(found))


def first_server(config: Config) -> tuple[str, ...]:
    """Return the one device that holds everything: the first parameter server, else the first worker's CPU:0.

    Raises:
        ConfigError: the configuration names no devices.
    """
    if config.cluster is not None and config.cluster.ps:
        return servers(config)[:1]
    return (device_names.process_of(job_devices(config)[0]) + HOST,)


class Load:
    """How many bytes each server holds, while a plan is made."""

    def __init__(self, names: Sequence[str]) -> None:
        self.bytes: dict[str, float] = dict.fromkeys(names, 0.0)

    def take(self, nbytes: float) -> str:
        """Return the server that holds least, the first of several, and give it as much more."""
        least = min(self.bytes, key=self.bytes.__getitem__)
        self.bytes[least] += nbytes
        return least

    def take_turns(self, count: int, nbytes: float) -> tuple[str, ...]:
        """Return the servers of `count` shards, `nbytes` together: in turns, beginning with the least loaded."""
        turns = sorted(self.bytes, key=self.bytes.__getitem__)
        chosen = tuple(turns[shard % len(turns)] for shard in range(count))
        for server in chosen:
            self.bytes[server] += nbytes / count
        return chosen
