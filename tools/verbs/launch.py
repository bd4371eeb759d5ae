"""`launch -n W [--ps P] SCRIPT`: run a script in several processes on this machine, as one job.

TF_CONFIG gives each process its number and the addresses of all: loopback, at free ports.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from autograph_rewrite.cluster.launchers import LOOPBACK
from autograph_rewrite.errors import ClusterError, ConfigError
from autograph_rewrite.tools.launcher import script
from autograph_rewrite.tools.launcher.agent_arguments import add_elastic_arguments, check_elastic, seconds
from autograph_rewrite.tools.launcher.job import LaunchOptions, supervise
from autograph_rewrite.tools.launcher.output import Form
from autograph_rewrite.tools.launcher.process import Task
from autograph_rewrite.tools.launcher.status import ShowStatus, StatusFolder, watched

if TYPE_CHECKING:
    from autograph_rewrite.cluster.membership import Membership
    from autograph_rewrite.config.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--status",
        action=ShowStatus,
        nargs="?",
        choices=("table", "json"),
        help="print how far the jobs on this machine have come, and start none",
    )
    parser.add_argument("--metrics", metavar="PORT", type=_port, help="answer Prometheus on loopback at this port")
    add_elastic_arguments(parser)
    add_process_arguments(parser)
    script.add_script(parser)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the number of processes and how they are started."""
    add = parser.add_argument
    count = script.at_least(1)
    add("-n", "--workers", metavar="W", type=count, help="how many processes train; see cluster.workers")
    add("--ps", metavar="P", type=script.at_least(0), help="how many parameter servers run with them")
    add("--port", metavar="BASE", type=_port, help="use BASE, BASE + 1, ... (default: any free ports)")
    add("--timeout", metavar="S", type=seconds, help="give up after S seconds (exit code 124)")
    add("--grace", metavar="S", type=seconds, default=5.0, help="seconds from SIGTERM to SIGKILL (default 5)")
    add("--log-dir", metavar="D", type=Path, help="write the output of each process to a file, too")
    add("--log-format", choices=("text", "json"), default="text", help="json: each line with process, time and steps")
    add("--pin", action="store_true", help="give each process its own core")


def run(args: argparse.Namespace) -> int:
    """Run the job; exit with 0, or with the code of the process that failed first."""
    config = script.require_script(args)
    if args.elastic is not None or args.rdzv_endpoint:
        return _run_elastic(args, config)
    if args.snapshot_dir is not None:
        raise ConfigError(
            "only an elastic job has snapshots", hint="say --elastic MIN:MAX together with --snapshot-dir"
        )
    return run_job(args, config, args.metrics)


def run_job(args: argparse.Namespace, config: Config | None, metrics: int | None = None) -> int:
    """Run a job with a fixed number of processes; return the exit code as `run` does.

    Args:
        args: the options of `add_process_arguments` and `add_script`.
        metrics: the port that answers Prometheus; None: there is none.
    """
    from autograph_rewrite.cluster.membership import all_members  # imported here so that --help stays fast

    counts = _counts(args, config)
    with watched(args.script, metrics) as status:

        def tasks(restarts: int) -> list[Task]:
            addresses = [f"{LOOPBACK}:{port}" for port in _ports(sum(counts), args.port)]
            members = all_members(addresses, counts[0])
            return _tasks(args, status, members, script.environment(args, restarts, args.grace), script.command(args))

        summary = supervise(tasks, _options(args, status))
    if args.json:
        print(json.dumps({**script.described(args), **summary.data()}))
    return summary.exit_code


def _run_elastic(args: argparse.Namespace, config: Config | None) -> int:
    """Run a job, or this host's part of it, that continues after workers are lost."""
    check_elastic(args, config)
    from autograph_rewrite.tools.launcher.launch_elastic import run_elastic  # it imports NumPy and TensorFlow

    with watched(args.script, args.metrics) as status:
        made = functools.partial(_tasks, args, status)
        ports = functools.partial(_ports, base=args.port)
        summary = run_elastic(args, made, ports, _options(args, status))
    if args.json:
        print(json.dumps({**script.described(args), **summary}))
    return int(summary["exit_code"])


def _tasks(
    args: argparse.Namespace,
    status: StatusFolder,
    members: Sequence[Membership],
    given: Mapping[str, str],
    line: tuple[str, ...],
) -> list[Task]:
    """Return the processes of one start, from their memberships, environment variables and command."""
    from autograph_rewrite.cluster.launchers import TF_CONFIG  # imported here so that --help stays fast

    status.keep_only(member.name for member in members)
    cores = sorted(os.sched_getaffinity(0)) if args.pin else []
    return [
        Task(
            member.name,
            line,
            {**given, **status.environment(member.name), TF_CONFIG: member.tf_config},
            auxiliary=not member.is_worker,
            core=cores[member.index % len(cores)] if cores else None,
        )
        for member in members
    ]


def _options(args: argparse.Namespace, status: StatusFolder) -> LaunchOptions:
    return LaunchOptions(
        restarts=args.restart,
        timeout=args.timeout,
        grace=args.grace,
        log_dir=args.log_dir,
        forms=json_lines(status) if args.log_format == "json" else None,
        fresh_ports=args.port is None,
    )


def _counts(args: argparse.Namespace, config: Config | None) -> tuple[int, int]:
    """Return the numbers of workers and parameter servers, on which options and configuration must agree."""
    cluster = config.cluster if config is not None else None
    if cluster is None:
        if args.workers is None:
            raise ConfigError("how many processes?", hint="say -n W, or name cluster.workers in the configuration")
        return args.workers, args.ps or 0
    assert config is not None
    counts = []
    for option, asked, named, key in (
        ("-n", args.workers, cluster.workers, "workers"),
        ("--ps", args.ps, cluster.ps, "ps"),
    ):
        if asked not in (None, len(named)):
            problem = f"{option} is {asked}, but the configuration names {len(named)} in cluster.{key}"
            hint = "make them equal, or leave one of them out"
            raise ConfigError(problem, where=config.where("cluster"), hint=hint)
        counts.append(len(named))
    return counts[0], counts[1]


def _ports(count: int, base: int | None) -> list[int]:
    """Return free ports; all are held until the last is found, so that they differ.

    Raises:
        ClusterError: a port of `base` and the following ones is taken.
    """
    wanted: Sequence[int] = [0] * count if base is None else range(base, base + count)
    with ExitStack() as held:
        return [held.enter_context(_bound(port)).getsockname()[1] for port in wanted]


def _bound(port: int) -> socket.socket:
    """Return a socket bound on all interfaces, because TensorFlow's server needs its port on all of them."""
    has_six = socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if has_six else socket.AF_INET)
    if has_six:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last job's connections may linger
    try:
        made.bind(("", port))
    except OSError as error:
        made.close()
        raise ClusterError(
            f"cannot use port {port}: {error.strerror}", hint="leave --port out, or give another"
        ) from None
    return made


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        raise argparse.ArgumentTypeError(f"'{text}' is no port")
    return int(text)


# `launch --log-format json`: each line of a process as an object, with its process, time and steps.
#
# {"time": "2026-11-23T22:15:04.120Z", "process": "worker 1", "stream": "stderr", "steps": 118, "text": "loss 0.3"}


_FRESH = 1.0
"""Seconds between two lookups of the number of steps; processes write it as often."""


def json_lines(status: StatusFolder) -> Callable[[str, str], Form]:
    """Return a function that makes the line formatter for a process and stream."""

    def of(process: str, stream: str) -> Form:
        steps, looked = None, float("-inf")

        def form(line: bytes) -> bytes:
            nonlocal steps, looked
            if time.monotonic() - looked > _FRESH:
                steps, looked = status.steps(process), time.monotonic()
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            text = line.decode("utf-8", errors="replace")
            entry = {"time": now, "process": process, "stream": stream, "steps": steps, "text": text}
            return json.dumps(entry, ensure_ascii=False).encode()

        return form

    return of
