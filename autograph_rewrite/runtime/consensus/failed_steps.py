"""Failed steps: a worker whose step has failed says so on its own device, where others look while theirs stands still.

    worker 0   step 3 fails ──► puts 1 into the queue on its device ──► waits for all, to carry on
    worker 1   step 3 stands still ──► the queue of worker 0 has 1, its own none ──► ends the step, carries on, too

TensorFlow can lose what ends a step: its cancellation is not heard by a request that is just being sent, and a request
that reaches a process after its step has failed waits there for the next one. Then nothing but the connection's end
ends the step (seen once in twenty steps that fail on all workers, a second apart).
"""

from __future__ import annotations

from contextlib import suppress

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus import flags
from autograph_rewrite.runtime.failures.liveness import name_of
from autograph_rewrite.runtime.job import tf_server

_NAME = "failed.steps"


def tell(member: Membership) -> None:
    """Say that one more step of this worker has failed, and that it waits for the others to carry on.

    Args:
        member: this process; all workers of the job carry on equally often.
    """
    tf_server.count_failure()
    with suppress(tensorflow().errors.OpError):  # the others then wait as long as they are patient
        flags.put(member, _NAME, [member.task])


def ahead(member: Membership) -> list[str]:
    """Return the other workers of whom more steps have failed than of this one: they wait for it to carry on.

    Args:
        member: this process.

    Raises:
        tf.errors.OpError: somebody does not answer.
    """
    others = [task for task in range(len(member.workers)) if task != member.task]
    mine = tf_server.failures()
    counts = flags.counts(member, _NAME, others)
    return [name_of("worker", task, member.workers[task]) for task, n in zip(others, counts, strict=True) if n > mine]
