"""Open a session: as one device has it, in an elastic job, or, in the process of a parameter server, not at all."""

from __future__ import annotations

from typing import Any

from autograph_rewrite.runtime.servers.serve import serve_if_server
from autograph_rewrite.runtime.session.elastic_session import elastic_session
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
