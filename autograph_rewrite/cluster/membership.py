"""Find the membership of this process, its task and its peers, in the configuration and the environment.

    TF_CONFIG={"cluster": {"chief": [a], "worker": [b]}, "task": {"type": "worker", "index": 0}}
        ->  Membership(workers=(a, b), ps=(), job="worker", task=1)
    torchrun, MPI, SLURM        the rank from their variables; the addresses from `cluster`, or derived (`launchers`)
    nothing                     one process: None

TF_CONFIG has precedence, as every orchestrator can set it. Membership is found without starting TensorFlow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autograph_rewrite.cluster.launchers import TF_CONFIG, addresses_of, rank_of
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.fields import read_address
from autograph_rewrite.config.sections import Cluster
from autograph_rewrite.diagnostics.faults import either
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.types.device_names import repeated
from autograph_rewrite.requires import tensorflow

Job = Literal["worker", "ps"]

_CHIEFS = ("chief", "master")  # TensorFlow's two names for worker 0
_JOBS = (*_CHIEFS, "worker", "ps", "evaluator")
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'


@dataclass(frozen=True)
class Membership:
    """The processes of a job, and which of them this one is.

    Raises:
        ConfigError: an address is malformed or appears twice, or the cluster has no such process.
    """

    workers: tuple[str, ...]
    """The addresses (host:port) of the workers, in the order of their parts of the global batch."""
    ps: tuple[str, ...]
    """The addresses of the parameter servers."""
    job: Job
    task: int
    source: str = field(default="the cluster", compare=False)
    """The origin of this information, for messages."""

    def __post_init__(self) -> None:
        for address in self.addresses:
            try:
                read_address(address)
            except ValueError as error:
                raise ConfigError(f"{self.source}: {error}") from None
        for address in repeated(self.addresses):
            problem = f"{self.source}: the address {address} stands twice: two processes cannot listen at one"
            raise ConfigError(problem, hint="give each its own port")
        if not self.workers:
            raise ConfigError(f"{self.source}: the cluster has no worker", hint="there must be one, or a chief")
        if not 0 <= self.task < len(self._peers):
            count = f"are {len(self._peers)} of them" if self._peers else "is none"
            raise ConfigError(f"{self.source}: this is {self.name}, but there {count}", hint="tasks count from 0")

    @property
    def _peers(self) -> tuple[str, ...]:
        return self.workers if self.job == "worker" else self.ps

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all processes: workers, then parameter servers."""
        return (*self.workers, *self.ps)

    @property
    def address(self) -> str:
        """The address of this process."""
        return self._peers[self.task]

    @property
    def index(self) -> int:
        """The index of this process in `addresses`."""
        return self.task + (0 if self.job == "worker" else len(self.workers))

    @property
    def is_worker(self) -> bool:
        """Whether this process trains."""
        return self.job == "worker"

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which writes checkpoints and messages for all."""
        return self.is_worker and self.task == 0

    @property
    def name(self) -> str:
        """`worker 1`, for messages."""
        return f"{self.job} {self.task}"

    @property
    def cluster(self) -> dict[str, list[str]]:
        """The cluster in TensorFlow's form."""
        return {job: list(addresses) for job, addresses in (("worker", self.workers), ("ps", self.ps)) if addresses}

    @property
    def tf_config(self) -> str:
        """The value of TF_CONFIG for this process."""
        return json.dumps({"cluster": self.cluster, "task": {"type": self.job, "index": self.task}})

    def applied_to(self, config: Config) -> Config:
        """Return `config` with the processes of this job as its cluster."""
        network = config.cluster.network if config.cluster else None
        return config.model_copy(update={"cluster": Cluster(workers=self.workers, ps=self.ps, network=network)})


def all_members(addresses: Sequence[str], workers: int) -> tuple[Membership, ...]:
    """Return the memberships of all processes of a job: its workers, then its parameter servers.

    Args:
        workers: how many of them are workers.
    """
    cluster = tuple(addresses[:workers]), tuple(addresses[workers:])
    jobs: tuple[Job, ...] = ("worker", "ps")
    return tuple(Membership(*cluster, job, i) for job, own in zip(jobs, cluster, strict=True) for i in range(len(own)))


def membership_of(config: Config, environ: Mapping[str, str] = os.environ) -> Membership | None:
    """Return the membership of this process; None where it is the only one.

    Raises:
        ConfigError: the environment's variables are malformed, or do not fit the configuration; or the configuration
            names several processes and nothing says which of them this is.
    """
    member = _of_tf_config(config, environ) if environ.get(TF_CONFIG, "").strip() else _of_rank(config, environ)
    if member is None and process_count(config) > 1:
        assert config.cluster is not None
        raise ConfigError(
            f"the configuration names {process_count(config)} processes, and nothing says which of them this is",
            where=config.where("cluster"),
            hint="start it with `autograph-rewrite launch`, or set TF_CONFIG in each process",
        )
    if member is None:
        return None
    _require_the_same_size(member, config)
    return member if len(member.addresses) > 1 else None


def in_job(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[Config, Membership | None]:
    """Return the configuration with the processes of this process's job, and the membership of this process.

    Raises:
        ConfigError: as `membership_of`.
    """
    member = membership_of(config, environ)
    return (member.applied_to(config), member) if member is not None else (config, None)


def process_count(config: Config) -> int:
    """Return how many processes a configuration names: workers and parameter servers."""
    return len((*config.cluster.workers, *config.cluster.ps)) if config.cluster else 1


def _require_the_same_size(member: Membership, config: Config) -> None:
    """Refuse a configuration with another number of processes, on which the plan depends; addresses may differ."""
    if config.cluster is None:
        return
    for key, here, there in (
        ("workers", config.cluster.workers, member.workers),
        ("ps", config.cluster.ps, member.ps),
    ):
        if len(here) != len(there):
            problem = f"cluster.{key} has {len(here)} in the configuration, but {len(there)} by {member.source}"
            raise ConfigError(problem, where=config.where("cluster"), hint="make them equal, or leave `cluster` out")


def _of_rank(config: Config, environ: Mapping[str, str]) -> Membership | None:
    """Return the membership by torchrun, MPI or SLURM; ranks after the last worker are parameter servers."""
    rank = rank_of(environ)
    if rank is None or rank.size == 1:
        return None
    if config.cluster is None:
        return Membership(addresses_of(rank, environ), (), "worker", rank.rank, rank.source)
    workers, servers = config.cluster.workers, config.cluster.ps
    if rank.size != len(workers) + len(servers):
        named = f"{len(workers)} workers and {len(servers)} parameter servers" if servers else f"{len(workers)} workers"
        problem = f"there are {rank.size} processes by {rank.size_variable}, but the configuration names {named}"
        raise ConfigError(problem, where=config.where("cluster"), hint="make them equal, or leave `cluster` out")
    if rank.rank < len(workers):
        return Membership(workers, servers, "worker", rank.rank, rank.source)
    return Membership(workers, servers, "ps", rank.rank - len(workers), rank.source)


def _of_tf_config(config: Config, environ: Mapping[str, str]) -> Membership | None:
    """Return the membership by TF_CONFIG; None if it has no cluster, and no task or no configured cluster either."""
    said = _parsed(environ[TF_CONFIG])
    task = _mapping(said, "task")
    if task.get("type") == "evaluator":
        problem = "TF_CONFIG makes this process an evaluator, which takes no part in training"
        raise ConfigError(problem, hint="start evaluators without TF_CONFIG, as a program of its own")
    cluster = {job: _addresses(job, tasks) for job, tasks in _mapping(said, "cluster").items()}
    unknown = [job for job in cluster if job not in _JOBS]
    if unknown:
        raise _malformed(f"it has the job '{unknown[0]}', which is not {either(_JOBS)}")
    chiefs = [address for job in _CHIEFS for address in cluster.get(job, ())]
    if len(chiefs) > 1:
        raise _malformed(f"it has {len(chiefs)} chiefs ({', '.join(chiefs)}); there can be one")
    workers, servers = (*chiefs, *cluster.get("worker", ())), cluster.get("ps", ())
    if not workers and not servers:
        if config.cluster is None or not task:
            return None
        workers, servers = config.cluster.workers, config.cluster.ps
    if len(workers) == 1 and not servers and not task:
        return Membership(workers, (), "worker", 0, TF_CONFIG)
    job, index = _task(task, has_chief=bool(chiefs))
    return Membership(workers, servers, job, index, TF_CONFIG)


def _task(task: Mapping[str, Any], *, has_chief: bool) -> tuple[Job, int]:
    """Return job and index of this process; a chief is worker 0, and the other workers follow it."""
    if not task:
        raise _malformed('it has a cluster, but no "task" that says which process this is')
    kind, index = task.get("type"), task.get("index", 0)
    if isinstance(index, str) and index.isdecimal() and len(index) < 10:
        index = int(index)  # some templates can only write strings
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise _malformed(f"task.index is {index!r}, which is no number")
    if kind in _CHIEFS:
        if index or not has_chief:
            raise _malformed(f"this is {kind} {index}, but the cluster has {'one' if has_chief else 'none'}")
        return "worker", 0
    if kind == "worker":
        return "worker", index + has_chief
    if kind == "ps":
        return "ps", index
    raise _malformed(f"task.type is {kind!r}, which is not {either(_JOBS)}")


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except ValueError as error:
        raise _malformed(f"it is no JSON: {error}") from None
    except RecursionError:
        raise _malformed("it is no JSON: it is nested too deeply") from None
    if not isinstance(said, dict):
        raise _malformed(f"it is no JSON object, but {type(said).__name__}")
    return said


def _mapping(said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = said.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _malformed(f'"{key}" is no JSON object, but {value!r}')
    return value


def _addresses(job: str, tasks: object) -> tuple[str, ...]:
    """Read the addresses of a job: a list, or an object from task to address."""
    if isinstance(tasks, dict):
        numbers = [str(i) for i in range(len(tasks))]
        if sorted(tasks) != sorted(numbers):
            known = ", ".join(map(str, tasks))
            raise _malformed(f'"{job}" gives the addresses of the tasks {known} only: all processes must be known')
        tasks = [tasks[number] for number in numbers]
    if not isinstance(tasks, list) or not all(isinstance(address, str) for address in tasks):
        raise _malformed(f'"{job}" is no list of addresses, but {tasks!r}')
    return tuple(tasks)


def _malformed(problem: str) -> ConfigError:
    return ConfigError(f"TF_CONFIG is wrong: {problem}", hint=f"for example {_EXAMPLE}")


# The devices of this process, for a configuration that leaves `devices` out.


def with_local_devices(config: Config) -> Config:
    """Return the configuration with a replica on each accelerator of this process, if it names no devices.

    In a job the physical devices are counted: to list the logical ones would start TensorFlow before the process has
    joined.

    Raises:
        ConfigError: there is no accelerator, and no cluster whose workers could train on their CPUs.
    """
    if config.devices is not None:
        return config
    known = tensorflow().config
    if process_count(config) == 1:
        return config.with_devices([device.name for device in known.list_logical_devices()])
    physical = known.list_physical_devices()
    return config.with_devices([device.name.replace("physical_device:", "device:") for device in physical])
