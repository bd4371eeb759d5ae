"""Read rank, world size and addresses from the environment variables of torchrun, MPI and SLURM.

    RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=29500     ->  rank 1 of 127.0.0.1:29501, 127.0.0.1:29502
    SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2
      SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_ID=1                  ->  rank 1 of n1:10688, n2:10688

No launcher gives the addresses of the processes. They are derived where that is sound (all on one host, or a SLURM step
with its list of nodes), and must otherwise be configured.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from autograph_rewrite.errors import ConfigError

TF_CONFIG = "TF_CONFIG"
CONFIG = "AUTOGRAPH_REWRITE_CONFIG"
"""The variable with the configuration of `run --config` and `launch --config`; `plan.selected` reads it."""
PORT_VARIABLE = "AUTOGRAPH_PORT"
LOOPBACK = "127.0.0.1"

# Ports below those that the kernel gives to outgoing connections: 320 slots of 64 ports.
_FIRST_PORT, _SLOTS, _SLOT_PORTS = 10_240, 320, 64
_LAST_PORT = 65_535

_GIVE_ADDRESSES = (
    "list all processes in the configuration (cluster.workers, in the order of the ranks), or set TF_CONFIG"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Launcher:
    """A launcher: the environment variables with the rank of a process and the number of processes."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_sizes: tuple[str, ...] = ()
    """The variables with the number of processes on this host."""
    only_with: tuple[str, ...] = ()
    """Variables that must be set, too: a SLURM batch script has rank and size, but only srun steps have these."""


TORCHRUN = Launcher("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",))
OPEN_MPI = Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_SIZE",))
MPI = Launcher("MPI", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"))
SLURM = Launcher("SLURM", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), only_with=("SLURM_STEP_NODELIST",))

# The innermost launcher first: SLURM jobs start mpirun and torchrun, not the other way round.
LAUNCHERS = (TORCHRUN, OPEN_MPI, MPI, SLURM)


@dataclass(frozen=True)
class Rank:
    """The place of this process among `size`, and the variable that counts them."""

    launcher: Launcher
    rank: int
    size: int
    size_variable: str

    @property
    def source(self) -> str:
        """The launcher and its variables, for messages."""
        return f"{self.launcher.name} ({self.launcher.rank}, {self.size_variable})"


def is_told(environ: Mapping[str, str]) -> bool:
    """Return whether TF_CONFIG, a launcher's number of processes (even 1) or a configuration is set.

    It is cheap, because importing the package calls it.
    """
    return any(
        environ.get(name) for name in (TF_CONFIG, CONFIG, *(name for launcher in LAUNCHERS for name in launcher.sizes))
    )


def rank_of(environ: Mapping[str, str]) -> Rank | None:
    """Return the rank by the first launcher whose variables are set; None if there is none.

    Raises:
        ConfigError: a variable is malformed or missing, or the rank is out of range.
    """
    for launcher in LAUNCHERS:
        size_variable = next((name for name in launcher.sizes if environ.get(name)), None)
        if size_variable is None or not all(environ.get(name) for name in launcher.only_with):
            continue
        size = _number(environ, size_variable, least=1)
        if environ.get(launcher.rank):
            rank = _number(environ, launcher.rank)
            if rank >= size:
                problem = f"{launcher.rank} is {rank}, but there are {size} processes ({size_variable})"
                raise ConfigError(problem, hint="ranks count from 0")
            return Rank(launcher, rank, size, size_variable)
        if size > 1:  # a stray WORLD_SIZE=1 is no sign of a launcher
            raise ConfigError(
                f"{size_variable} is {size}, but {launcher.rank} is not set: which of the {size} processes is this?",
                hint=f"set {launcher.rank}, or unset {size_variable} to train in one process",
            )
    return None


def addresses_of(rank: Rank, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of all processes in the order of their ranks, derived from the environment.

    Raises:
        ConfigError: they cannot be derived, or a variable is malformed.
    """
    if _is_on_one_host(rank, environ):
        base = _base_port(rank, environ)
        return tuple(_address(LOOPBACK, base + i) for i in range(rank.size))
    if _is_slurm_step(rank, environ):
        return _on_nodes(rank, environ)
    problem = f"{rank.source} tells the rank of this process ({rank.rank} of {rank.size}), but not where the others are"
    raise ConfigError(problem, hint=_GIVE_ADDRESSES)


def _is_on_one_host(rank: Rank, environ: Mapping[str, str]) -> bool:
    # Only a loopback address proves it: MASTER_ADDR names this host also where other processes run elsewhere.
    master = environ.get("MASTER_ADDR", "") if rank.launcher is TORCHRUN else ""
    if master in ("localhost", "::1") or master.startswith("127."):
        return True
    return any(_number(environ, name) == rank.size for name in rank.launcher.local_sizes if environ.get(name))


def _is_slurm_step(rank: Rank, environ: Mapping[str, str]) -> bool:
    """Return whether the ranks are those of a SLURM step; mpirun and torchrun in a SLURM job may count otherwise."""
    step = {"SLURM_PROCID": rank.rank, "SLURM_STEP_NUM_TASKS": rank.size}
    agrees = rank.launcher is SLURM or all(environ.get(name) == str(value) for name, value in step.items())
    return agrees and bool(environ.get("SLURM_STEP_NODELIST"))


def _on_nodes(rank: Rank, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of the tasks of a SLURM step, which fills node after node."""
    nodes, counts = _nodes(rank, environ)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    for variable, expected in zip(("SLURM_NODEID", "SLURM_LOCALID"), places[rank.rank], strict=True):
        if environ.get(variable) and _number(environ, variable) != expected:
            problem = f"{variable} is {environ[variable]}, but where nodes are filled in turn it is {expected}"
            raise ConfigError(problem, hint=f"use srun --distribution=block; or {_GIVE_ADDRESSES}")
    hosts = nodes if len(nodes) > 1 else (LOOPBACK,)
    base = _base_port(rank, environ)
    return tuple(_address(hosts[node], base + local) for node, local in places)


def _nodes(rank: Rank, environ: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the nodes of a SLURM step, and how many tasks each of them runs."""
    nodes = _read(environ, "SLURM_STEP_NODELIST", expand_hosts)
    if environ.get("SLURM_STEP_TASKS_PER_NODE"):
        counts = _read(environ, "SLURM_STEP_TASKS_PER_NODE", expand_counts)
    else:
        counts = (rank.size // len(nodes),) * len(nodes)
    if len(counts) != len(nodes) or sum(counts) != rank.size:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE puts {sum(counts)} tasks on {len(counts)} nodes, but {rank.size} tasks "
            f"({rank.size_variable}) run on {len(nodes)} nodes (SLURM_STEP_NODELIST)",
            hint=_GIVE_ADDRESSES,
        )
    return nodes, counts


def _base_port(rank: Rank, environ: Mapping[str, str]) -> int:
    """Return the first port: the user's, else one that other jobs on the host are unlikely to have."""
    if environ.get(PORT_VARIABLE):
        return _number(environ, PORT_VARIABLE, least=1)
    if rank.launcher is TORCHRUN and environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT", least=1) + 1  # torchrun's store listens at MASTER_PORT
    if environ.get("SLURM_JOB_ID"):
        # Neighbouring jobs, and the first steps of one job, get different slots.
        step = environ.get("SLURM_STEP_ID", "")
        slot = 7 * _number(environ, "SLURM_JOB_ID") + (int(step) if step.isdecimal() else 0)
    else:
        slot = zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode())
    return _FIRST_PORT + slot % _SLOTS * _SLOT_PORTS


def _address(host: str, port: int) -> str:
    if port > _LAST_PORT:
        raise ConfigError(
            f"the port {port} of a process is above {_LAST_PORT}", hint=f"set {PORT_VARIABLE} to the first"
        )
    return f"{host}:{port}"


def _number(environ: Mapping[str, str], variable: str, *, least: int = 0) -> int:
    number = _read(environ, variable, int)
    if number < least:
        raise ConfigError(f"{variable} is {number}: it must be at least {least}")
    return number


def _read(environ: Mapping[str, str], variable: str, read: Callable[[str], _T]) -> _T:
    """Return the value of a variable, converted by `read`."""
    try:
        return read(environ[variable])
    except ValueError as error:
        reason = "it must be a whole number" if read is int else str(error)
        raise ConfigError(f"{variable} is '{environ[variable]}': {reason}") from None


# Expand SLURM's compressed host lists (`node[01-04]`).
#
#     node[01-03,07],other      ->  node01 node02 node03 node07 other
#     r[1-2]n[1-2]-ib           ->  r1n1-ib r1n2-ib r2n1-ib r2n2-ib
#     2(x3),1                   ->  2 2 2 1      (how many tasks each of them runs)
#
# Both raise ValueError with a sentence that says what is wrong; `_read` adds the name of the variable.


# More nodes than any cluster has: a typing error in a range must not fill the memory.
MOST_HOSTS = 100_000

_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\]){1,100000}")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a list of hosts, in its order."""
    hosts: list[str] = []
    for entry in _entries(text):
        pieces = [_alternatives(match[1], match[2]) for match in _PIECE.finditer(entry)]
        hosts += map("".join, itertools.islice(itertools.product(*pieces), MOST_HOSTS + 1))
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"'{text}' names more than {MOST_HOSTS:,} hosts")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand a list of task counts, in its order."""
    counts: list[int] = []
    for entry in text.split(","):
        match = _COUNT.fullmatch(entry)
        if match is None:
            raise ValueError(f"'{entry}' in '{text}' is no count like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > MOST_HOSTS:
            raise ValueError(f"'{text}' counts for more than {MOST_HOSTS:,} hosts")
    return tuple(counts)


def _entries(text: str) -> Iterator[str]:
    """Yield the parts between commas outside brackets."""
    place = 0
    while True:
        match = _ENTRY.match(text, place)
        if match is None:
            raise ValueError(f"'{text}' is no list of hosts: there is none at position {place + 1}")
        yield match[0]
        place = match.end()
        if place == len(text):
            return
        if text[place] != ",":
            raise ValueError(f"'{text}' is no list of hosts: a bracket at position {place + 1} has no partner")
        place += 1


def _alternatives(ranges: str | None, literal: str) -> list[str]:
    """Return the expansions of a piece of a name: itself, or the numbers of its ranges."""
    if ranges is None:
        return [literal]
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"'{part}' in '[{ranges}]' is no number or range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"the range '{part}' ends before it begins")
        if len(found) + int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"'[{ranges}]' names more than {MOST_HOSTS:,} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found
