"""Tables written between two steps: what a step is fed, so that rows are looked up once worker 0 has written them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from autograph_rewrite.passes.parameter_server.await_writes import COUNT, PREFIX
from autograph_rewrite.runtime.session.session import DistributedSession


class TablesWritten:
    """The tables of a session whose rows are looked up on servers.

    Args:
        session: of a step.
        others: how many other workers there are.
    """

    def __init__(self, session: DistributedSession, others: int) -> None:
        self._others = others
        self._counts = dict(_counts(session.graph))

    def feeds(self, written: Collection[str]) -> dict[Any, Any]:
        """Return what the next step is fed besides.

        Args:
            written: the names of the handles of variables that the program has written since the last step.
        """
        found = {handle: count for handle, count in self._counts.items() if handle in written}
        return {c: np.ones([self._others], np.bool_) if c.shape.rank else 1 for c in found.values()}


def _counts(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is fed for each variable, by the name of its handle."""
    for operation in graph.get_operations():
        name = operation.name
        if name.startswith(f"{PREFIX}/") and name.endswith(f"/{COUNT}"):
            yield name[len(PREFIX) + 1 : -len(COUNT) - 1], operation.outputs[0]
