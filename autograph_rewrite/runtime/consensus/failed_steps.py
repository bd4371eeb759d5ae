"""Failed steps: a worker whose step has failed says so on its own device, with its error, where others look.

    worker 0   step 3 fails ──► puts its error into the list on its device ──► waits for all, to carry on
    worker 1   step 3 stands still, or is ended by worker 0's ──► raises the error of worker 0, carries on, too

What one device would have raised is raised by all. A step that another has left does not always end by itself:
TensorFlow's cancellation is not heard by a request that is just being sent, and a request that reaches a process after
its step has failed waits there for the next one. Then nothing but the connection's end ends the step (seen once in
twenty steps that fail on all workers, a second apart).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.flags import Flags
from autograph_rewrite.runtime.failures.call_thread import Question
from autograph_rewrite.runtime.failures.failure_messages import is_of_the_job
from autograph_rewrite.runtime.failures.liveness import name_of, silent
from autograph_rewrite.runtime.job import tf_server

_NAME = "failed.steps"
_TELLS, _GLANCE = 3.0, 0.05
"""Seconds within which a worker whose step has failed says so, and between two looks."""
_SAID = 4_000
"""Characters of an error that are kept for the others."""


class FailedSteps:
    """What the workers of a job have told of steps that failed; all of them carry on equally often.

    Args:
        member: this process.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._others = [task for task in range(len(member.workers)) if task != member.task]

    def tell(self, error: Exception | None = None) -> None:
        """Say that one more step of this worker has failed, and that it waits for the others to carry on.

        Args:
            error: of TensorFlow's, by which it has failed; None: not by one.
        """
        code = getattr(error, "error_code", None)
        is_own = error is not None and code is not None and not is_of_the_job(error)
        text = json.dumps([code, str(getattr(error, "message", error))[:_SAID]]) if is_own else ""
        tf_server.count_failure()
        with suppress(tensorflow().errors.OpError):  # the others then wait as long as they are patient
            flags = Flags(self._member, _NAME, [self._member.task])
            flags.put(text)
            flags.close()

    def ahead(self) -> list[str]:
        """Return the other workers of whom more steps have failed than of this one: they wait for it to carry on.

        Raises:
            tf.errors.OpError: somebody does not answer.
        """
        flags = Flags(self._member, _NAME, self._others)
        mine, counts = tf_server.failures(), flags.counts()
        flags.close()
        return [self._name(task) for task, count in zip(self._others, counts, strict=True) if count > mine]

    def awaited(self) -> list[str]:
        """Return who is ahead once somebody is; nobody if that takes too long, or somebody does not answer."""
        return self._answer(self.ahead)

    def error(self, ahead: Sequence[str]) -> Exception | None:
        """Return what the program has raised on one of those who are ahead; None where it was nothing of its own."""
        name, text = self._answer(functools.partial(self._told, ahead)) or ("", "")
        if not text:
            return None
        code, message = json.loads(text)
        kind = tensorflow().compat.v1.errors.exception_type_from_error_code(code)
        made: Exception = kind(None, None, f"on {name}: {message}")
        return made

    def _told(self, ahead: Sequence[str]) -> list[str]:
        """Return who of those that are ahead has told of an error, and what; "": nobody."""
        at = tf_server.failures()
        for task in self._others:
            if self._name(task) in ahead:
                flags = Flags(self._member, _NAME, [task])
                text = flags.texts(at)[0]
                flags.close()
                if text:
                    return [self._name(task), text]
        return ["", ""]

    def _answer(self, ask: Callable[[], list[str]]) -> list[str]:
        """Return the first answer that is not empty; a new session waits without end for who has just gone."""
        question, ends = Question(ask), time.monotonic() + _TELLS
        while time.monotonic() < ends and not silent(self._member):
            if found := question.answer():
                return found
            time.sleep(_GLANCE)
        return []

    def _name(self, task: int) -> str:
        return name_of("worker", task, self._member.workers[task])
