"""Handshake: all processes have identified themselves before TensorFlow first blocks on one of them.

    nobody there            connection refused      the process has not come yet, or has ended
    there, and silent       no answer in time       it is stopped, cut off, or another program
    there, somebody else    answers wrongly         another program, or a process of another job

TensorFlow itself waits without end: for the worker that numbers the steps of all, and for all whom a session needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.failures import liveness

_ASK = 0.2
"""Seconds between two looks for somebody who is still starting."""
_SAID = {
    "UNAVAILABLE": "",
    "DEADLINE_EXCEEDED": ", where somebody listens but does not answer,",
    liveness.OTHER: ", where a process of another job listens,",
}
_STRANGER = ", where another program listens,"
_HINT = "start all processes of the job, each at its own address; look at what it printed last"


class Meetings:
    """Which processes this one has met.

    Args:
        member: this process.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._met: set[str] = set()

    def meet(self, others: Mapping[str, str], seconds: float, what: str, hint: str = _HINT) -> None:
        """Wait until some processes answer; who had answered before may not be gone.

        Args:
            others: their addresses, by name.
            seconds: how long to wait.
            what: what they are to do, for messages.
            hint: what to do if one is missing.

        Raises:
            ClusterError: somebody is not there in time.
        """
        deadline = time.monotonic() + seconds
        absent, gone = dict(others), set[str]()
        while absent:
            left = deadline - time.monotonic()
            statuses = liveness.ask(absent, min(liveness.PATIENCE, max(left, _ASK)), as_themselves=True)
            absent = {name: address for name, address in absent.items() if statuses[name] != "OK"}
            before, gone = gone, {n for n in absent if n in self._met and statuses[n] == "UNAVAILABLE"}
            if absent and (time.monotonic() >= deadline or gone & before):  # a connection may break once
                self._met -= gone
                names = liveness.listed(f"{name}{_SAID.get(statuses[name], _STRANGER)}" for name in sorted(absent))
                raise ClusterError(f"{self._member.name} waited for {names} to {what}: no answer", hint=hint)
            if absent:
                time.sleep(_ASK)
        self._met |= others.keys()


def homes_of(member: Membership, plan: Plan) -> dict[str, str]:
    """Return the addresses of the other processes whose devices hold variables, by name."""
    wanted = {process_of(home) for home in plan.homes.values()}
    return {
        liveness.name_of(job, task, address): address
        for job, addresses in member.cluster.items()
        for task, address in enumerate(addresses)
        if address != member.address and f"/job:{job}/replica:0/task:{task}" in wanted
    }
