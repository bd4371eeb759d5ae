"""Report the coverage of a step at its first batch, when the number of examples is known.

    autograph_rewrite: 99.31% of the step's 1.2 GFLOP outside of updates are divided over 2 devices (256 examples)

The line goes to stderr; AUTOGRAPH_REWRITE_QUIET=1 in the environment silences it. Below 90 % there is a warning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from autograph_rewrite.resolve import coverage
from autograph_rewrite.resolve.coverage import ENOUGH, Coverage
from autograph_rewrite.training_graph import TrainingGraph

QUIET = "AUTOGRAPH_REWRITE_QUIET"


class FirstBatch:
    """Tells the coverage of an item when its first batch is there.

    Args:
        item: an original or rewritten item.
        warned: there has been a warning if its coverage was too small.
    """

    def __init__(self, item: TrainingGraph, *, warned: bool = False) -> None:
        report = item.report
        self._covered: Coverage | None = report.covered if report is not None and report.covered.parts > 1 else None
        self._member = report.member if report is not None else None
        self._is_cut = bool(report is not None and not report.plan.is_driven)
        self._names = {*item.targets, *item.outputs}
        self._warned = warned

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to say, or no more."""
        return self._covered is None

    def done(self) -> None:
        """Say nothing any more."""
        self._covered = None

    def of_run(self, sizes: Mapping[str, int], fetched: Iterable[str]) -> None:
        """Tell it for a run of a session that is fed a batch, or fetches what a step makes of an iterator's."""
        if self._covered is not None and (sizes or not self._names.isdisjoint(fetched)):
            self(max(sizes.values(), default=0))

    def __call__(self, examples: int | None) -> None:
        """Tell it.

        Args:
            examples: of this process; nothing where nobody knows.

        Raises:
            PassError: it is less than the configuration accepts; of several processes, `rewrite` has compared it.
        """
        covered = self._covered
        if covered is None:
            return
        if self._member is None:
            coverage.require(covered.at(examples))
        self.done()
        was_enough = covered.share >= ENOUGH
        covered = covered.at((examples or 0) * (len(self._member.workers) if self._member and self._is_cut else 1))
        if self._member is not None and not self._member.is_chief:
            return
        if not os.environ.get(QUIET):
            print(f"autograph_rewrite: {covered}", file=sys.stderr, flush=True)
        if was_enough or not self._warned:
            coverage.warn_below(covered)
