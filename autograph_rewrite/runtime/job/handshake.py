"""Handshake: all processes have identified themselves before TensorFlow first blocks on one of them.

    nobody there            connection refused      the process has not come yet, or has ended
    there, and silent       no answer in time       it is stopped, cut off, or another program
    there, somebody else    answers wrongly         another program, or a process of another job

TensorFlow itself waits without end: for the worker that numbers the steps of all, and for all whom a session needs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.failures import liveness

_TELL = 0.5
"""Share of the time to wait that is left when that is said."""
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
        deadline, is_told = time.monotonic() + seconds, False
        absent, gone = dict(others), set[str]()
        while absent:
            left = deadline - time.monotonic()
            statuses = liveness.ask(absent, min(liveness.PATIENCE, max(left, _ASK)), as_themselves=True)
            absent = {name: address for name, address in absent.items() if statuses[name] != "OK"}
            before, gone = gone, {n for n in absent if n in self._met and statuses[n] == "UNAVAILABLE"}
            if absent and (time.monotonic() >= deadline or gone & before):  # a connection may break once
                self._met -= gone
                names = listed(absent, statuses)
                found = ClusterError(f"{self._member.name} waited for {names} to {what}: no answer", hint=hint)
                found.lost = liveness.workers_in(sorted(absent))
                raise found
            if absent:
                if deadline - time.monotonic() < seconds * _TELL and not is_told:
                    is_told = True
                    self._tell(listed(absent, statuses), what, seconds)
                time.sleep(_ASK)
        self._met |= others.keys()

    def _tell(self, names: str, what: str, seconds: float) -> None:
        """Say for whom this process waits."""
        waited = f"{self._member.name} has waited {seconds * (1 - _TELL):.0f} s for {names} to {what}"
        print(
            f"autograph_rewrite: {waited}; after {seconds:g} s (timeout_seconds) it ends",
            file=sys.stderr,
            flush=True,
        )


def listed(absent: Iterable[str], statuses: Mapping[str, str]) -> str:
    """Return who is not there, with what is known of each.

    Args:
        absent: their names.
        statuses: gRPC's name of what became of asking, by name.
    """
    return liveness.listed(f"{name}{_SAID.get(statuses[name], _STRANGER)}" for name in sorted(absent))


def homes_of(member: Membership, plan: Plan) -> dict[str, str]:
    """Return the addresses of the other processes whose devices hold variables, by name."""
    wanted = {process_of(home) for home in plan.homes.values()}
    return {
        liveness.name_of(job, task, address): address
        for job, addresses in member.cluster.items()
        for task, address in enumerate(addresses)
        if address != member.address and f"/job:{job}/replica:0/task:{task}" in wanted
    }
