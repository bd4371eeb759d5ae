"""`fit` of a model whose process may be asked to end: a loop of its own, which is kept where BackupAndRestore says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.load.signature.keras_library import wraps
from autograph_rewrite.runtime.preemption.stop import Stop, is_wanted


def make_preemptible(model: Any, member: Membership | None, seconds: float) -> None:
    """Let a model's `fit` end between two steps, and go on there in the next run.

    Args:
        model: a distributed Keras model.
        member: this process; None: there is no other.
        seconds: how long to wait for the others.
    """
    if is_wanted():
        object.__setattr__(model, "fit", _fitting(model.fit, member, seconds))


@contextmanager
def saved_at_the_end(save: Callable[[], str | None]) -> Iterator[None]:
    """Give a context in which a `fit` is saved if its process is asked to end.

    Args:
        save: saves it, and returns what was saved.
    """
    stop = Stop.here()
    stop.begin_loop()
    stop.add(save)
    try:
        yield
    finally:
        with suppress(ValueError):
            stop.remove(save)


def _fitting(fit: Callable[..., Any], member: Membership | None, seconds: float) -> Callable[..., Any]:
    numbers, stop = count(1), Stop.here()

    @wraps(fit)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        from autograph_rewrite.runtime.preemption.fit_snapshot import kept

        call, position = kept(fit, args, kwargs, next(numbers), member, seconds)
        if position is None:
            stop.begin_loop()
            return fit(*call.args, **call.kwargs)
        with saved_at_the_end(position.save):
            return fit(*call.args, **call.kwargs)

    return fitted
