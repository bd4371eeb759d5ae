"""Tables written between two steps: what a step is fed, so that rows are looked up once worker 0 has written them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from autograph_rewrite.passes.parameter_server.await_writes import FLAG, PREFIX
from autograph_rewrite.runtime.session.session import DistributedSession


class TablesWritten:
    """The tables of a session whose rows are looked up on servers.

    Args:
        session: of a step.
    """

    def __init__(self, session: DistributedSession) -> None:
        before, behind = f"{PREFIX}/", f"/{FLAG}"
        self._flags = {
            op.name[len(before) : -len(behind)]: op.outputs[0]
            for op in session.graph.get_operations()
            if op.name.startswith(before) and op.name.endswith(behind)
        }

    def feeds(self, written: Collection[str]) -> dict[Any, bool]:
        """Return what the next step is fed besides.

        Args:
            written: the names of the handles of variables that the program has written since the last step.
        """
        return {flag: handle in written for handle, flag in self._flags.items()}
