"""The loop of an elastic job that is asked to end as a whole: its last snapshot is of the step behind which it ends."""

from __future__ import annotations

import functools

from autograph_rewrite.runtime.elastic.own_loop import OwnLoop
from autograph_rewrite.runtime.preemption.stop import Stop, is_wanted


def kept_loop() -> OwnLoop | None:
    """Return the loop of this process, kept when the process is asked to end; None where its job is not elastic."""
    loop = OwnLoop.here()
    if loop is not None and is_wanted():
        _keep_at_the_end(loop)
    return loop


@functools.cache
def _keep_at_the_end(loop: OwnLoop) -> None:
    Stop.here().add(loop.save)
