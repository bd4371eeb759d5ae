"""Start an elastic job, or this host's part of one that several hosts run."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autograph_rewrite.cluster.membership import Membership, all_members
from autograph_rewrite.runtime.elastic.job_memory import RANK, JobMemory, OwnedMemory
from autograph_rewrite.runtime.elastic.kept_snapshots import KeptSnapshots
from autograph_rewrite.tools.launcher.agents.alone import Alone
from autograph_rewrite.tools.launcher.agents.arguments import TOKEN
from autograph_rewrite.tools.launcher.agents.part import Group, Part, Ports
from autograph_rewrite.tools.launcher.agents.state import State, Way
from autograph_rewrite.tools.launcher.agents.view import Bounds, Seat
from autograph_rewrite.tools.launcher.elastic import Elastic
from autograph_rewrite.tools.launcher.forked import import_once, run_script
from autograph_rewrite.tools.launcher.job import Options, say
from autograph_rewrite.tools.launcher.process import Task
from autograph_rewrite.tools.launcher.script import environment

Made = Callable[[Sequence[Membership], Mapping[str, str], tuple[str, ...]], list[Task]]


def run_elastic(args: argparse.Namespace, made: Made, ports: Ports, options: Options) -> dict[str, Any]:
    """Run a job that goes on without workers that are lost; return the summary.

    Args:
        args: the options.
        made: makes processes, given who they are, what they find in their environment, and what they run.
        ports: finds free ones.
        options: how to run them.
    """
    least, most = args.elastic
    bounds = Bounds(least, most, args.heartbeat)

    def tasks(part: Part, memory: JobMemory) -> list[Task]:
        given = {**environment(args, memory.generation - 1, args.grace), **memory.environment}
        everybody = all_members(part.workers, part.servers)
        mine = [m for m in everybody if (m.task in part.ranks if m.is_worker else part.serves)]
        processes = made(mine, given, (args.script, *args.args))
        return [
            replace(task, environment={**task.environment, RANK: str(member.index)})
            for member, task in zip(mine, processes, strict=True)
        ]

    kept = KeptSnapshots(args.snapshot_dir) if args.snapshot_dir is not None else None
    import_once()
    with OwnedMemory() as owned:
        if kept is not None and kept.restore(owned.folder):
            say(options, f"goes on from the snapshot in {args.snapshot_dir}")
        group = _group(args, bounds, ports, owned, options)
        body = functools.partial(run_script, heartbeat=args.heartbeat, module=args.module)
        job = Elastic(tasks, body, options, bounds)
        summary = job.run(group, owned)
        if kept is not None and not summary.exit_code:
            kept.clear()
        elif kept is not None and kept.keep(owned.folder):
            say(options, f"the last snapshot is in {args.snapshot_dir}: the same command goes on from there")
    return {**summary.data(), "generations": [generation.data() for generation in job.generations]}


def _group(args: argparse.Namespace, bounds: Bounds, ports: Ports, owned: OwnedMemory, options: Options) -> Group:
    """Return who decides."""
    if not args.rdzv_endpoint:
        return Alone(bounds, args.restart, args.ps or 0, ports)
    from autograph_rewrite.tools.launcher.agents.meeting import Meeting  # a network, for those who have one

    token = os.environ.pop(TOKEN).encode()  # scripts have no use for it
    way = Way(args.rdzv_endpoint, token, args.address, args.rdzv_wait, args.rdzv_timeout)
    state = State(way, bounds, Seat("", "", args.nproc_per_node), owned, ports)
    state.restarts, state.servers = args.restart, args.ps or 0
    return Meeting(state, functools.partial(say, options))
