"""This process in its job: TensorFlow's server, which the eager runtime starts, used by all modes.

    TF_CONFIG ──► join() ──► the eager runtime starts a gRPC server when the first op runs
                               ├─ functions and Keras: collectives over all workers
                               └─ sessions: target grpc://<this worker>, the same server

TensorFlow fixes its devices when the first op runs, and variables made before could not be read any more after a server
took over. So a worker joins when TensorFlow is imported (`join_on_import`), which only says how to start: no port is
opened, and nothing waits for anybody, before the program runs its first op.

TensorFlow's server is not authenticated, and it listens on all interfaces whatever address it is given; `bind_address`
confines it to the configured one, and guards the port until it has.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import warnings
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from autograph_rewrite import tf_private
from autograph_rewrite.cluster.membership import Membership, membership_of
from autograph_rewrite.errors import ClusterError, ConfigError
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.plan.selected import chosen_config
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.failures.background_thread import repeat
from autograph_rewrite.runtime.failures.liveness import PeerMonitor, listed, others, silent_at_exit
from autograph_rewrite.runtime.job.bind_address import Guard
from autograph_rewrite.runtime.job.handshake import Meetings

LEADER = "/job:worker/replica:0/task:0"
_ASK = 2.0
"""Seconds from one look at the other workers to the next."""


def join_early(environ: Mapping[str, str] = os.environ) -> None:
    """Join the job that environment and command line describe; what is wrong with it is told once it is needed."""
    try:
        member = membership_of(chosen_config(None), environ)
    except ConfigError:
        return
    if member is not None and member.is_worker:
        join(member, required=False)


def join(member: Membership, *, required: bool = True) -> None:
    """Make this process a worker of its job.

    Args:
        required: raise if that comes too late, because TensorFlow has started already.

    Raises:
        ClusterError: TensorFlow has started, without the server or with another one.
    """
    known = tf_private.collective_server()
    if isinstance(known, ServerDef):
        if known.member == member:
            return
        raise ClusterError(
            f"this process is {known.member.name} of {len(known.member.workers)} already, by {known.member.source}",
            hint="a process can be in one job only: start another one",
        )
    if not tf_private.has_started():
        tf_private.context().enable_collective_ops(ServerDef(member))
    elif required:
        raise ClusterError(
            f"TensorFlow has started already, so {member.name} cannot join the job any more",
            hint="start the program with `autograph-rewrite launch` or `run`, which join first; or import "
            "autograph_rewrite before the program's first TensorFlow operation; or add this line there:\n"
            "       ar.join(config)",
        )


def target(member: Membership) -> str:
    """Return what a session connects to; starts the server if it does not run yet."""
    tf_private.context().ensure_initialized()
    known: ServerDef = tf_private.collective_server()
    if not known.is_confined and not known.is_told:
        known.is_told = True
        warnings.warn(open_to_all(member), stacklevel=2)
    return f"grpc://{member.address}"


def configure(config: Any, member: Membership, servers: Iterable[str] = ()) -> None:
    """Tell a session, or the server, whom to meet.

    Args:
        config: a ConfigProto.
        member: this process.
        servers: devices of other processes that hold variables; a session waits for those processes when it starts.
    """
    config.experimental.collective_group_leader = LEADER
    if not config.device_filters:
        own = f"/job:{member.job}/replica:0/task:{member.task}"
        holders = (process_of(device) for device in servers)
        config.device_filters.extend(dict.fromkeys((own, *holders)))


def meet(member: Membership, seconds: float, what: str) -> None:
    """Wait until all other workers answer: TensorFlow would wait for them without end.

    Args:
        member: this process.
        seconds: how long to wait.
        what: what they are to do, for messages.

    Raises:
        ClusterError: somebody is not there in time.
    """
    target(member)  # this one has to answer, too
    meetings().meet(others(member, {"worker": member.workers}), seconds, what)


def meetings() -> Meetings:
    """Return whom this process has met."""
    known: ServerDef = tf_private.collective_server()
    return known.meetings


def next_exchange() -> int:
    """Return the number of the next exchange outside of a step; all workers count alike."""
    known: ServerDef = tf_private.collective_server()
    return next(known.exchanges)


def next_channel() -> int:
    """Return the number of the next series of exchanges that keeps its own time; all workers count alike."""
    known: ServerDef = tf_private.collective_server()
    return next(known.channels)


def next_account() -> int:
    """Return the number of the next exchange of accounts; workers that tell each other what they do count alike."""
    known: ServerDef = tf_private.collective_server()
    return next(known.accounts)


def be_patient(member: Membership, seconds: float) -> None:
    """Note how long the program's configuration lets this process wait for others, for what is not given one."""
    known = tf_private.collective_server()
    if isinstance(known, ServerDef) and known.member == member:
        known.patience = seconds


def patience(default: float) -> float:
    """Return how long the program's configuration lets this process wait for others.

    Args:
        default: in seconds, before the program has given one.
    """
    known = tf_private.collective_server()
    return known.patience if isinstance(known, ServerDef) and known.patience is not None else default


def count_failure() -> None:
    """Note that one more step of this process has failed, after which all workers carry on together."""
    known: ServerDef = tf_private.collective_server()
    known.failures += 1


def use_number() -> None:
    """Note that a run of this process with collectives is done, and has used a number up (`session.step_numbers`)."""
    known: ServerDef = tf_private.collective_server()
    known.numbers += 1


def numbers_used() -> int:
    """Return how many numbers runs of this process have used up."""
    known: ServerDef = tf_private.collective_server()
    return known.numbers


def failures() -> int:
    """Return how many steps of this process have failed; all workers count alike once they have carried on."""
    known: ServerDef = tf_private.collective_server()
    return known.failures


def abort_when_lost(member: Membership, seconds: float) -> None:
    """Let all collectives of functions fail, with the reason, once a worker is not there any more; from now on.

    For steps that another function runs, so that there is nothing to cancel, and no error of theirs to replace: a
    connection that breaks in the middle of an exchange ends the step with TensorFlow's words. Who is gone is printed.
    """
    known: ServerDef = tf_private.collective_server()
    if known.is_guarded:
        return
    known.is_guarded = True
    lookout = PeerMonitor(member, seconds)

    def guard() -> bool:
        lost = lookout.lost()
        if lost:
            atexit.unregister(at_exit)
            tf_private.context().abort_collective_ops(tensorflow().errors.UNAVAILABLE, _say(member, lost))
        return not lost

    def at_exit() -> None:
        if isinstance(getattr(sys, "last_value", None), tensorflow().errors.OpError):  # sooner than the next look
            lost = silent_at_exit(member)
            if lost:
                _say(member, lost)

    repeat(guard, _ASK)
    atexit.register(at_exit)


def _say(member: Membership, lost: list[str]) -> str:
    problem = f"{member.name} waited for {listed(lost)}: no answer"
    print(f"autograph_rewrite: {problem}", file=sys.stderr, flush=True)
    return problem


class ServerDef:
    """What TensorFlow starts its server from, made when it asks: by then the program may have asked for devices."""

    def __init__(self, member: Membership) -> None:
        self.member = member
        self.meetings = Meetings(member)
        self.exchanges = count(1)
        self.channels = count(1)
        self.accounts = count(1)
        self.failures = self.numbers = 0
        self.patience: float | None = None
        self.is_guarded = False
        self.is_confined = False
        self.is_told = False
        self._guard: Guard | None = None

    @property
    def job_name(self) -> str:
        """Return this process's part in the job, which TensorFlow asks for as soon as it has started the server."""
        if self._guard is not None:
            self.is_confined = self._guard.release()
            self._guard = None
        return self.member.job

    def __getattr__(self, name: str) -> Any:
        """Read a field of the message."""
        return getattr(self._message(), name)

    def SerializeToString(self) -> bytes:
        """Return the message, for TensorFlow to start its server.

        Raises:
            ClusterError: it could not.
        """
        if self._guard is not None:  # TensorFlow tries again
            self._guard.close()
        require_free(self.member)
        encoded: bytes = self._message().SerializeToString()
        self._guard = Guard(self.member.address)
        return encoded

    def _message(self) -> Any:
        tf = tensorflow()
        config = tf.compat.v1.ConfigProto()
        config.CopyFrom(tf_private.context().config)
        configure(config, self.member)
        cluster = tf.train.ClusterDef()
        for name, addresses in self.member.cluster.items():
            job = cluster.job.add(name=name)
            for task, address in enumerate(addresses):
                job.tasks[task] = address
        return tf.train.ServerDef(
            cluster=cluster,
            job_name=self.member.job,
            task_index=self.member.task,
            default_session_config=config,
            protocol="grpc",
        )


def require_free(member: Membership) -> None:
    """Raise if somebody listens at this process's port; TensorFlow says no more than that it could not."""
    port = int(member.address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last job may linger
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"{member.name} cannot listen at {member.address}: {error.strerror}",
                hint="is it running already, or another job? Each process needs a port of its own",
            ) from None


def open_to_all(member: Membership) -> str:
    """Return what to say of a server that could not be confined."""
    return (
        f"TensorFlow's server listens on all interfaces, not only at {member.address}: its port "
        "must be closed to everybody but the processes of this job"
    )
