"""Declare and check the options of elastic jobs; those for the meeting of hosts have torchrun's names."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from autograph_rewrite.errors import ConfigError

if TYPE_CHECKING:
    from autograph_rewrite.config.config import Config


TOKEN = "AUTOGRAPH_TOKEN"
"""The variable with the secret that the agents of a job share."""
_LEAST_TOKEN = 16


def add_elastic_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--elastic", metavar="MIN:MAX", type=_range, help="go on without workers that are lost")
    add(
        "--heartbeat",
        metavar="S",
        type=seconds,
        default=1.0,
        help="seconds from one sign of life of a worker to the next (default 1)",
    )
    add(
        "--snapshot-dir",
        metavar="D",
        type=Path,
        help="an elastic job that is ended early keeps its last snapshot in D, and the next one goes on from there",
    )
    add(
        "--rdzv-endpoint",
        metavar="HOST:PORT,...",
        type=_endpoints,
        default=(),
        help="where the hosts of an elastic job meet: one command per host; the first that is listed begins",
    )
    add("--nproc-per-node", metavar="K", type=_count, help="how many workers this host can run (0: it only votes)")
    add("--address", metavar="HOST", help="where the other hosts reach this one (default: as it reaches them)")
    add(
        "--rdzv-wait",
        metavar="S",
        type=seconds,
        default=10.0,
        help="seconds to wait for MAX workers once MIN are there (default 10)",
    )
    add(
        "--rdzv-timeout",
        metavar="S",
        type=seconds,
        default=300.0,
        help="seconds to wait for enough hosts before ending (default 300)",
    )


def check_elastic(args: argparse.Namespace, config: Config | None) -> None:
    """Refuse options that contradict each other or the configuration.

    Raises:
        ConfigError: the number of workers is set elsewhere, or an option is missing or has no use.
    """
    if config is not None and config.cluster is not None:
        raise ConfigError(
            "an elastic job has no fixed addresses, and the configuration names some",
            where=config.where("cluster"),
            hint="leave `cluster` out of it",
        )
    if args.elastic is None:
        raise ConfigError(
            "how many workers may the job have?", hint="say --elastic MIN:MAX together with --rdzv-endpoint"
        )
    least, most = args.elastic
    if args.workers not in (None, most):
        raise ConfigError(f"-n is {args.workers}, but --elastic {least}:{most} begins with {most}", hint="leave -n out")
    if not args.rdzv_endpoint:
        if args.nproc_per_node is not None or args.address is not None:
            raise ConfigError("where do the hosts meet?", hint="say --rdzv-endpoint HOST:PORT, the same on all hosts")
        return
    if args.snapshot_dir is not None:
        raise ConfigError(
            "--snapshot-dir is for the jobs of one host: of several, each would keep what it happens to have",
            hint="leave it out, and let the program save by itself (ar.CheckpointManager, BackupAndRestore)",
        )
    if args.nproc_per_node is None:
        raise ConfigError("how many workers does this host run?", hint="say --nproc-per-node K")
    if len(os.environ.get(TOKEN, "")) < _LEAST_TOKEN:
        raise ConfigError(
            f"hosts that meet need a secret in {TOKEN}, of at least {_LEAST_TOKEN} characters",
            hint=f"the same on all hosts, another for each job: export {TOKEN}=$(openssl rand -hex 16)",
        )


def seconds(text: str) -> float:
    """Read a number of seconds.

    Raises:
        argparse.ArgumentTypeError: the text is no positive, finite number.
    """
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds")
    return found


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not most.isdecimal() or not 0 < int(least) <= int(most):
        raise argparse.ArgumentTypeError(f"'{text}' is no range of numbers of workers, such as 2:4")
    return int(least), int(most)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no number of workers")
    return int(text)


def _endpoints(text: str) -> tuple[str, ...]:
    for endpoint in text.split(","):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise argparse.ArgumentTypeError(f"'{endpoint}' is no address such as 10.0.0.1:29400")
    return tuple(text.split(","))
