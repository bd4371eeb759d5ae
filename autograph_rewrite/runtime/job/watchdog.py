"""Watchdog: ends a hung step, in which no thread of TensorFlow uses processor time.

TensorFlow's timeouts on collectives start a sleeping thread for every execution, and a call that hangs does not even
see Ctrl-C. So one thread looks at the running step every second or more often. It cancels the step when no thread of
TensorFlow has computed for too long, or when a worker that the step needs is gone. A call that survives the
cancellation is abandoned (`Runner`). A step that computes is never cancelled, however long it takes.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from autograph_rewrite.ir.graph import PASS_ATTR, Graph
from autograph_rewrite.ops.traits import has, ops_with
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.background_thread import repeat
from autograph_rewrite.runtime.job.liveness import PeerMonitor
from autograph_rewrite.runtime.job.say import say
from autograph_rewrite.tf_private import cancellation_manager

_ASK = 1.0
"""Seconds of a step between two questions whether the other workers are still there."""
_BUSY = 0.05
"""Share of one processor below which a process counts as idle."""

_TELL = 0.5
"""Share of the time that a step may stand still, after which a message says so."""

_FAILS, _GLANCE = 1.0, 0.02
"""Seconds within which a step must end after its connections break or it is cancelled, and between two looks."""


def may_wait(definition: bytes) -> bool:
    """Return whether a serialized graph or function has an op that may wait for something other than replicas."""
    return any(op.encode() in definition for op in ops_with("waits"))


def users_may_wait(graph: Graph) -> bool:
    """Return whether an op of the user may wait for something other than workers; queues of passes wait for these."""
    return any(has(node.op, "waits") and node.attr(PASS_ATTR, b"expand") == b"expand" for node in graph)


class Canceller(Protocol):
    """Ends a step, from another thread."""

    def start_cancel(self) -> None:
        """End the step."""


class Closing:
    """Ends the run of a session by closing the session, from another thread; TensorFlow has no gentler way."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def start_cancel(self) -> None:
        """Close the session."""
        self._session.close()


class Watchdog:
    """Watches one kind of step.

    Args:
        seconds: how long the process may be idle in a step.
        lookout: makes the monitor of the other workers for one step; None where there are no others.
        canceller: makes a canceller; a step after a failed one gets a new one.
        may_idle: whether the step may wait for something other than replicas, such as input.
        ahead: returns the workers that wait for this one to carry on after a failed step; None: none ever does.
        exchanges: names the values that a step exchanges with others, for messages.

    Attributes:
        doing: the step, as messages call it.
        tells: whether to print that the step stands still; at first False if the step may idle.
        expired: whether the last step was cancelled.
        lost: the workers that no longer answered.
        left: the workers whose part of the step has failed while the step stood still here.
    """

    def __init__(
        self,
        seconds: float,
        lookout: Callable[[], PeerMonitor] | None = None,
        canceller: Callable[[], Canceller | None] = cancellation_manager,
        *,
        may_idle: bool = False,
        ahead: Callable[[], list[str]] | None = None,
        exchanges: Callable[[], str] | None = None,
    ) -> None:
        self.seconds = seconds
        self.doing, self.tells = "a step", not may_idle
        self._exchanges = exchanges
        self.expired = False
        self.lost: list[str] = []
        self.left: list[str] = []
        self._ahead = ahead
        self._asks_ahead: Question[list[str]] | None = None
        self._make_lookout = lookout
        self._make_canceller = canceller
        self._may_idle = may_idle
        self._failed = False
        self._canceller = canceller()
        self._running = 0  # the number of the step that runs; 0 between steps
        self._steps = 0
        self._caller = 0
        self._seen = 0
        self._lookout: PeerMonitor | None = None
        self._waited = self._asked = 0.0
        self._idle = 0.0
        self._told = False
        self._cpu: dict[int, float] = {}
        self._thread: threading.Thread | None = None
        self._runner = Runner()
        self._numbered: set[Hashable] = set()

    def run(self, call: Callable[[], Result], what: Hashable = None) -> Result:
        """Run one step of a session by `call`, and return its result.

        Args:
            what: equal for steps that run the same operations. Before the first of these, and after an error,
                TensorFlow asks worker 0 for a number and may wait for ever; only that step runs in a separate thread,
                which takes 0.2 to 0.5 ms.

        Raises:
            tf.errors.OpError: the step failed; or nothing could end it, so that it was abandoned (`expired`): its
                session can be neither used nor closed any more.
        """

        def step() -> Result:
            self.start()
            try:
                return call()
            finally:
                self.stop()

        try:
            result = step() if what in self._numbered else self._runner.run(step)
        except BaseException:
            self._numbered.clear()
            raise
        self._numbered.add(what)
        return result

    def start(self) -> Any:
        """Begin a step; return its canceller."""
        if self._failed:
            self._canceller, self.expired, self._failed = self._make_canceller(), False, False
            self.lost = []
        self.left = []
        self._steps += 1
        self._caller = threading.get_native_id()
        self._running = self._steps
        if self._thread is None or not self._thread.is_alive():
            self._thread = repeat(_looking(weakref.ref(self)), self._period())
        return self._canceller

    def stop(self, *, failed: bool = False) -> None:
        """End a step; the next one after a failure gets a new canceller, as TensorFlow has cancelled the old one."""
        self._running = 0
        self._failed = failed

    def _period(self) -> float:
        return min(1.0, self.seconds / 8)

    def look(self, elapsed: float) -> None:
        """Cancel the running step if it waits in vain (called by the thread)."""
        step = self._running
        if not step or step != self._seen:
            self._begin(step)
            return
        before, self._cpu = self._cpu, _processor_time(self._caller)
        used = sum(seconds - before.get(thread, 0.0) for thread, seconds in self._cpu.items())
        is_busy = used > _BUSY * elapsed
        self._idle = 0.0 if is_busy else self._idle + elapsed
        self._waited += elapsed
        lost: list[str] = []
        if self._lookout is not None and self._waited - self._asked >= _ASK:
            self._asked = self._waited
            lost = self._lookout.lost()
        if not lost and self._idle and not self.left:
            self._look_ahead(step)
        stood = self._waited if self._may_idle else self._idle
        if stood >= self.seconds * _TELL and self.tells and not self._told:
            self._told = True
            self._tell(stood)
        stands_still = self._idle >= self.seconds and not self._may_idle
        if (lost or stands_still) and self._running == step and not self.expired and self._canceller is not None:
            self.lost, self.expired = lost, True
            self._end(step, self._canceller)

    def _begin(self, step: int) -> None:
        """Begin to watch a step, or none (0): earlier processor time does not count."""
        self._seen, self._idle, self._waited, self._asked = step, 0.0, 0.0, 0.0
        self._told = False
        self._cpu = _processor_time(self._caller) if step else {}
        self._lookout = self._make_lookout() if self._make_lookout is not None and step else None
        self._asks_ahead = Question(self._ahead) if self._ahead is not None and step else None

    def _look_ahead(self, step: int) -> None:
        """Let an idle step fail if its part on other workers has failed: their values never arrive.

        The connections to servers are broken first. TensorFlow refuses all later collectives of a process once the
        connection of a collective has broken, unless its step has failed before for another reason.
        """
        if self._lookout is None or self._asks_ahead is None:
            return
        left = self._asks_ahead.answer()
        if left and self._idle >= _ASK and self._running == step:
            self.left = left
            if not (self._lookout.break_off_servers() and self._has_ended(step)):
                self._lookout.break_off(left)

    def _tell(self, stood: float) -> None:
        """Print for how long a step has stood still, and what is known of the workers that it may wait for."""
        others = self._lookout.account() if self._lookout is not None else "a replica waits for another"
        named = self._exchanges() if self._exchanges is not None else ""
        where = f"; it exchanges {named}" if named else ""
        ends = f"after {self.seconds:g} s (timeout_seconds) it is ended"
        say(f"{self.doing} has stood still for {stood:.0f} s: {others}{where}; {ends}")

    def _end(self, step: int, canceller: Canceller) -> None:
        """End a step; break its connections first, for a cancelled step may wait for a silent process."""
        if self._lookout is not None and self._lookout.break_off(self.lost) and self._has_ended(step):
            return
        if self._running == step:  # in a thread: closing a session may block for ever
            threading.Thread(target=canceller.start_cancel, daemon=True).start()
        if not self._has_ended(step):
            self._runner.leave(tensorflow().errors.CancelledError(None, None, "a call of TensorFlow's does not end"))

    def _has_ended(self, step: int) -> bool:
        """Wait up to `_FAILS` seconds; return whether a step has ended."""
        end = time.monotonic() + _FAILS
        while self._running == step and time.monotonic() < end:
            time.sleep(_GLANCE)
        return self._running != step


def _processor_time(caller: int) -> dict[int, float]:
    """Return the processor time of each thread in seconds; of Python's threads only that of `caller`.

    `caller` runs the step. A thread that loads data, or draws a progress bar, says nothing about the step.
    """
    own = {thread.native_id for thread in threading.enumerate()} - {caller}
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/task"):
            if int(name) not in own:
                with suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                    found[int(name)] = (int(fields[11]) + int(fields[12])) / ticks
    return found or {0: time.process_time()}  # not Linux: all threads together


def _looking(watched: weakref.ref[Watchdog]) -> Callable[[], bool]:
    """Return a function that calls the `look` of a watchdog, and returns whether the watchdog still exists."""
    before = time.monotonic()

    def look() -> bool:
        nonlocal before
        watchdog = watched()
        if watchdog is not None:
            now = time.monotonic()
            watchdog.look(now - before)
            before = now
        return watchdog is not None

    return look


# A thread for calls into TensorFlow that may block for ever, so that the caller can abandon them.
#
#     the program   run(call) ─────────── waits ──► the result, or the error of who left the call behind
#     a thread             └─► call() ──► TensorFlow, perhaps for ever
#
# A session asks worker 0 for the number of a step with collectives, and waits for the answer without a limit: no
# timeout, cancellation or close ends that call. Ctrl-C waits for the call to end; a second Ctrl-C does not.

Result = TypeVar("Result")


class Runner:
    """Makes one call at a time, each in a thread of its own, which an abandoned call keeps."""

    def __init__(self) -> None:
        self._pending: Future[Any] | None = None

    def run(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns, or raise what it raises.

        Raises:
            Exception: the error that another thread has given to `leave`.
        """
        self._pending = pending = Future[Result]()
        # A daemon: Python can end while the thread waits in TensorFlow.
        threading.Thread(target=_make, args=(call, pending), name="autograph_runner", daemon=True).start()
        try:
            return pending.result()
        except KeyboardInterrupt:
            with suppress(Exception):
                pending.exception()
            raise

    def leave(self, error: Exception) -> None:
        """Let `run` raise an error now, and abandon its call; called from another thread."""
        if self._pending is not None:
            with suppress(InvalidStateError):  # it has ended after all
                self._pending.set_exception(error)


class Question(Generic[Result]):
    """Asks a question without waiting for the answer, which a later call of `answer` returns.

    Args:
        ask: returns the answer, after any time; an exception means that there is no answer.
    """

    def __init__(self, ask: Callable[[], Result]) -> None:
        self._ask = ask
        self._answers: SimpleQueue[Result] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def answer(self) -> Result | None:
        """Return the newest answer since the last call, None if there is none, and ask again."""
        found = None
        while not self._answers.empty():
            found = self._answers.get()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._wait, name="autograph_question", daemon=True)
            self._thread.start()
        return found

    def _wait(self) -> None:
        with suppress(Exception):
            self._answers.put(self._ask())


def _make(call: Callable[[], Any], pending: Future[Any]) -> None:
    with suppress(InvalidStateError):  # it was abandoned
        try:
            result = call()
        except BaseException as error:
            pending.set_exception(error)
        else:
            pending.set_result(result)
