"""The traces of all ranks of a job: meet to compare clocks, trace the same steps, hand everybody all traces."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.inspect.profile.rank_trace import RankTrace
from autograph_rewrite.runtime.consensus.rendezvous import Rendezvous
from autograph_rewrite.training_graph import TrainingGraph

ROUNDS = 8
"""How often ranks meet before the steps: the quickest round says most about their clocks."""
WHAT = "profile steps"


class Ranks:
    """All ranks of the job that something runs in; one process alone is the only one.

    Args:
        items: rewritten, that are profiled.
    """

    def __init__(self, items: Sequence[TrainingGraph]) -> None:
        reports = [item.report for item in items if item.report is not None and item.report.member is not None]
        self._job: tuple[Membership, float] | None = None
        if reports and len(reports[0].member.workers) > 1:
            self._job = reports[0].member, reports[0].plan.timeout_seconds

    @property
    def is_chief(self) -> bool:
        """Whether this is the first rank."""
        return self._job is None or self._job[0].is_chief

    def cut_among(self, item: TrainingGraph) -> int:
        """Return how many ranks give examples of their own to a step."""
        if self._job is None or (item.report is not None and item.report.plan.stage_hosts):
            return 1
        return len(self._job[0].workers)

    def meet(self) -> list[tuple[int, int]]:
        """Wait for all ranks; return when exchanges with them began and ended.

        Raises:
            ClusterError: somebody is missing.
        """
        return [] if self._job is None else Rendezvous(*self._job).rounds(ROUNDS, WHAT)

    def gather(self, trace: RankTrace, extra: str) -> tuple[list[RankTrace], str]:
        """Return the traces of all ranks, and what the first one says beside its own.

        Args:
            trace: of this rank.
            extra: what this rank says.

        Raises:
            ClusterError: somebody is missing.
        """
        if self._job is None:
            return [trace], extra
        mine = zlib.compress(json.dumps([trace.data(), extra]).encode())
        said = [json.loads(zlib.decompress(data)) for data in Rendezvous(*self._job).contents(mine, WHAT)]
        return [RankTrace.of(data) for data, _ in said], said[0][1]
