"""Validate the batch sizes that are fed to one step: against the size that each input states, and with each other.

x [5, 2] of one process                   5 examples, or a GraphError
x [5, 2] of two workers, of the second    2 examples, or a GraphError
x [None, 2]                               any number, also none
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from autograph_rewrite.errors import GraphError
from autograph_rewrite.resolve import coverage
from autograph_rewrite.resolve.coverage import ENOUGH, Coverage
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph


def may_refuse(item: TrainingGraph) -> bool:
    """Return whether there are batch sizes that `check_batch_sizes` refuses."""
    infos = [info for info in item.inputs.values() if info.batch_axis is not None]
    return len(infos) > 1 or _wants_equal_parts(item) or any(_stated(info) is not None for info in infos)


def check_batch_sizes(sizes: Mapping[str, int | None], item: TrainingGraph) -> None:
    """Refuse batch sizes that differ from the stated ones or within a group, or that do not divide into micro-batches.

    Args:
        sizes: by input name; None where it is unknown, in a function that is being traced.
        item: the graph that runs; its inputs state the size of this process's part.

    Raises:
        GraphError: a size is not the stated one, sizes differ, or micro-batches would have different sizes.
    """
    for name, size in sizes.items():
        _require_stated(item, item.inputs[name], size)
    known = {name: size for name, size in sizes.items() if size is not None}
    groups = item.report.batches if item.report is not None else ()
    for group in groups or [known]:
        own = {name: size for name, size in known.items() if name in group}
        if len(set(own.values())) < 2:
            continue
        listed = ", ".join(f"{name}: {size}" for name, size in own.items())
        raise GraphError(
            f"the batch inputs of one step have different sizes ({listed})",
            hint="give None as the axis of the inputs that all replicas share: batch_inputs={'name': None}",
        )
    if not _wants_equal_parts(item):
        return
    plan = item.report.plan
    for name, size in known.items():
        if size % plan.instances_each:
            raise GraphError(
                f"the batch of {size} examples in '{name}' cannot be divided among "
                f"{plan.replicas_each} x {plan.microbatches} micro-batches",
                hint="feed another number of them, or set accumulation.uneven to allow",
            )


def _stated(info: TensorInfo) -> int | None:
    """Return how many examples an input states; None: any number."""
    return None if info.batch_axis is None or info.shape is None else info.shape[info.batch_axis]


def _wants_equal_parts(item: TrainingGraph) -> bool:
    micro = item.report.plan.micro if item.report is not None else None
    return micro is not None and not micro.uneven


def _require_stated(item: TrainingGraph, info: TensorInfo, size: int | None) -> None:
    """Refuse a number of examples other than the one that an input states."""
    stated = _stated(info)
    if stated is None or size == stated:
        return
    given = f"'{info.name}' is given a batch of {size if size is not None else 'unknown size'}"
    workers = len(item.report.plan.processes) if item.report is not None else 1
    if workers == 1:
        hint = "leave the size of the batch open (None) in all inputs, so that it may be any"
        raise GraphError(f"{given}, and the step is made for batches of {stated}", hint=hint)
    raise GraphError(
        f"{given}, and the part of worker {item.report.task} has {stated}: what the step states is the size of the "
        f"whole batch, of which each of {workers} workers gives its part",
        hint="give the worker's part, as ar.shard_dataset cuts it, or leave the size of the batch open (None)",
    )


# Report the coverage of a step at its first batch, when the number of examples is known.
#
#     autograph_rewrite: 99.31% of the step's 1.2 GFLOP outside of updates are divided over 2 devices (256 examples)
#
# The line is printed to stderr, unless AUTOGRAPH_REWRITE_QUIET=1 is in the environment. Below 90 % there is a warning.

QUIET = "AUTOGRAPH_REWRITE_QUIET"


class FirstBatch:
    """Reports the coverage of an item at its first batch.

    Args:
        warned: whether the user was already warned of a coverage that is too small.
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
        """Whether there is nothing left to report."""
        return self._covered is None

    def done(self) -> None:
        """Report nothing any more."""
        self._covered = None

    def of_run(self, sizes: Mapping[str, int], fetched: Iterable[str]) -> None:
        """Report it at a run of a session that is fed a batch, or fetches an output or target."""
        if self._covered is not None and (sizes or not self._names.isdisjoint(fetched)):
            self(max(sizes.values(), default=0))

    def __call__(self, examples: int | None) -> None:
        """Report the coverage.

        Args:
            examples: in this process's part of the batch; None or 0: unknown.

        Raises:
            PassError: it is less than the configuration accepts. In a job, `rewrite` has checked that already.
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
