"""Open a session: as one device has it, in an elastic job, or, in the process of a parameter server, not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autograph_rewrite.runtime.elastic.job_memory import require_alike
from autograph_rewrite.runtime.elastic.own_loop import OwnLoop, keep_steps
from autograph_rewrite.runtime.preemption.elastic_loop import kept_loop
from autograph_rewrite.runtime.servers.serve import serve_if_server
from autograph_rewrite.runtime.session.session import DistributedSession
from autograph_rewrite.training_graph import TrainingGraph


def open_session(item: TrainingGraph, *, config: Any = None, target: str = "") -> DistributedSession:
    """Return a session that holds the item's graph.

    A parameter server has no session: there this serves the workers until they have ended, and ends the program.

    Args:
        item: an original or rewritten item.
        config: a tf.compat.v1.ConfigProto to start from.
        target: a server of the caller's own that has the devices.
    """
    if item.report is not None:
        serve_if_server(item.report.member, item.report.plan.timeout_seconds)
    return elastic_session(item, config, target) or DistributedSession(item, config, target)


# A session in an elastic job: its variables are kept between steps, and come back before the first one.


def elastic_session(item: TrainingGraph, config: Any, target: str) -> DistributedSession | None:
    """Return a session of an elastic job; None where the job is not.

    Args:
        item: rewritten, or an original.
        config: a `ConfigProto`, or None.
        target: address of a server; "": this process, or its job.

    Raises:
        ConfigError: its workers train by themselves (`local_sgd`).
    """
    loop = kept_loop() if item.report is not None else None
    if item.report is not None:
        keep_steps(item.report.snapshot_steps)
    require_alike(trains_alone=item.report is not None and bool(item.report.alone))
    return _ElasticSession(item, config, target, loop) if loop is not None else None


class _ElasticSession(DistributedSession):
    """A session whose steps are counted; see `DistributedSession`.

    Args:
        item: rewritten.
        config: a `ConfigProto`, or None.
        target: address of a server.
        loop: of this process.
    """

    def __init__(self, item: TrainingGraph, config: Any, target: str, loop: OwnLoop) -> None:
        super().__init__(item, config, target)
        self._loop, self._name, self._begins = loop, loop.unique("a session"), True

    def _run(self, wanted: list[Any], feeds: Mapping[str, Any], options: Any, changed: Mapping[str, str]) -> Any:
        """Run the step; before the first that updates give all variables the values that they had."""
        if self._targets.isdisjoint(wanted):
            return super()._run(wanted, feeds, options, changed)
        self._loop.before(self._name, self.read_variables)
        if self._begins:
            self._begins = False
            self.write_variables(self._loop.values(self._name, self.item.variables))
        got = super()._run(wanted, feeds, options, changed)
        self._loop.after(self._name)
        return got
