"""Diagnose divergence: when workers did not do the same in a step, they exchange records of what they did.

    worker 0   step 3: rate = 0.01   ─┐                ┌─►  ClusterError: not the same in step 3:
    worker 1   step 3: rate = 0.02   ─┴─ exchanged ────┴─►  'rate' is 0.01 on worker 0, 0.02 on worker 1

They are exchanged in a session of their own, which works whatever has become of the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError, RewriteError
from autograph_rewrite.runtime.consensus.all_reduce_session import Array, Exchange
from autograph_rewrite.runtime.failures.liveness import listed, name_of
from autograph_rewrite.runtime.job import tf_server

GROUP = 2**29 - 1
"""The group key of accounts."""
PATIENCE = 4.0
"""Seconds that a worker which has waited in vain takes for the others to tell."""
_SHOWN, _WIDTH = 8, 120
_SAME = "not do the same as worker 0"
HINT = (
    "what all replicas share has to be the same everywhere: feed equal values, write variables in every worker, make "
    "the same calls in the same order"
)


@dataclass(frozen=True)
class Account:
    """What one worker does in a step.

    Attributes:
        what: the step, for messages.
        given: what has to be equal in all workers, by name.
        shown: what messages show in place of something given that is only a number.
        hint: what to do if it differs.
    """

    what: str
    given: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    hint: str = HINT


Telling = Callable[[], Account | None]
"""Gives what a step has to tell besides what it is given itself."""


def nothing() -> None:
    """Tell nothing more."""


def difference(member: Membership, account: Account, seconds: float = PATIENCE) -> ClusterError | None:
    """Return what the workers do differently; None if that is nothing, or somebody does not tell.

    Args:
        member: this process.
        seconds: how long to wait for the others.
    """
    if len(member.workers) < 2:
        return None
    text = json.dumps([account.what, dict(account.given), dict(account.shown)])
    try:
        told = [Account(*json.loads(said)) for said in _texts(member, text, seconds)]
    except RewriteError:
        return None
    return _compared(member, told, account.hint)


def disagreement(member: Membership, account: Account, seconds: float, table: Array) -> ClusterError:
    """Return the error of a step in which workers did not do the same, as their digests have shown.

    Args:
        member: this process.
        seconds: how long others may still wait for each other in the step.
        table: the digests, one row for each worker.
    """
    found = difference(member, account, seconds + PATIENCE)
    if found is not None:
        return found
    odd = [task for task, row in enumerate(table) if (row != table[0]).any()]
    return ClusterError.of_difference(f"{_not_the_same(member, odd)} in {account.what}", hint=account.hint)


def is_told(error: BaseException) -> bool:
    """Return whether an error says what workers do differently."""
    return isinstance(error, ClusterError) and error.differs


def _not_the_same(member: Membership, odd: Sequence[int]) -> str:
    names = listed(name_of("worker", task, member.workers[task]) for task in odd)
    return f"{names} {'do' if len(odd) > 1 else 'does'} {_SAME}"


def _texts(member: Membership, text: str, seconds: float) -> list[str]:
    """Return the texts of all workers."""
    data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    longest = int(_rows(member, np.array([data.size], np.int32), seconds).max())
    padded = np.zeros(longest + 1, np.int32)
    padded[: data.size], padded[-1] = data, data.size
    return [bytes(row[: row[-1]].astype(np.uint8)).decode() for row in _rows(member, padded, seconds)]


def _rows(member: Membership, mine: Array, seconds: float) -> Array:
    table = np.zeros((len(member.workers), mine.size), np.int32)
    table[member.task] = mine
    with Exchange(member, seconds, table, GROUP, tf_server.next_account(), tells=False) as exchange:
        return exchange.add_up(table, "tell what they do")


def _compared(member: Membership, told: Sequence[Account], hint: str) -> ClusterError | None:
    """Return the error that says what differs."""
    parts = list(_differences(told))
    if not parts:
        return None
    odd = [task for task, one in enumerate(told) if (one.what, one.given) != (told[0].what, told[0].given)]
    lines = "".join(f"\n         {part}" for part in parts[:_SHOWN])
    more = f"\n         and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ClusterError.of_difference(f"{_not_the_same(member, odd)} in {told[0].what}:{lines}{more}", hint=hint)


def _differences(told: Sequence[Account]) -> Iterator[str]:
    """Yield a line for each thing that is not the same in all workers."""
    steps = [one.what for one in told]
    if len(set(steps)) > 1:
        yield listed(f"worker {task} is in {what}" for task, what in enumerate(steps))
        return
    for key in dict.fromkeys(key for one in told for key in one.given):
        values = [one.given.get(key) for one in told]
        if len(set(values)) > 1:
            shown = [str(one.shown.get(key, one.given.get(key, "as before")))[:_WIDTH] for one in told]
            yield f"{key}: {listed(f'{text} on worker {task}' for task, text in enumerate(shown))}"
