"""Who answers: asks the processes of a job, by TensorFlow's own worker service, whether they are alive.

A process that was killed refuses the connection, one that was stopped or cut off does not answer; both are named in the
error that the survivors raise. Nobody is asked before something has gone wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from autograph_rewrite.plan.membership import Membership

STATUS = "/tensorflow.WorkerService/GetStatus"
PATIENCE = 3.0
"""Seconds for an answer: a living process gives one within milliseconds, however busy it is."""


def silent(member: Membership, patience: float = PATIENCE) -> list[str]:
    """Return the other processes that do not answer, as `worker 1 (10.0.0.2:2222)`."""
    others = [(job, task, a) for job, tasks in member.cluster.items() for task, a in enumerate(tasks)]
    others = [(job, task, a) for job, task, a in others if a != member.address]
    if not others:
        return []
    with ThreadPoolExecutor(len(others)) as pool:
        answers = pool.map(lambda other: answers_at(other[2], patience), others)
        return [f"{job} {task} ({a})" for (job, task, a), ok in zip(others, answers, strict=True) if not ok]


def gone(member: Membership, patience: float = PATIENCE) -> bool:
    """Return whether a worker has certainly ended: nobody listens at its address any more."""
    others = [address for address in member.workers if address != member.address]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        return any(pool.map(lambda address: _status(address, patience) == "UNAVAILABLE", others))


def answers_at(address: str, patience: float = PATIENCE) -> bool:
    """Return whether a process of TensorFlow answers at an address."""
    return _status(address, patience) == "OK"


def _status(address: str, patience: float) -> str:
    """Return what becomes of asking: gRPC's name of the status."""
    import grpc

    with contextlib.closing(grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])) as channel:
        ask = channel.unary_unary(STATUS, request_serializer=None, response_deserializer=None)
        try:
            ask(b"", timeout=patience)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def listed(names: Iterable[str]) -> str:
    """Return names for a message."""
    return ", ".join(names)
