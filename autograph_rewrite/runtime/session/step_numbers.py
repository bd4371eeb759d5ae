"""Step numbers: what numbers runs with collectives get, and that no number is used again after an error.

    run 3 fails     number 71     what it has asked another process for may wait there
    run 4           number 71     it takes a value of run 4, and the cleaning up after run 3 ends run 4
    with a new key  number 9250

TensorFlow numbers runs with collectives alike in all workers, one number after the other for each key, and a run that
fails does not use its number up (`RetireStepId`). Once all carry on, there is a new key. A run has a key by itself if
there is a collective in its graph; TensorFlow does not look for them in the functions of a loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

from autograph_rewrite.runtime.consensus.session_digest import ancestors, is_collective

_LOOPS = 0x5745
"""The key of loops before any error."""


class StepNumbers:
    """Chooses the keys of the runs of one session.

    Args:
        graph: the tf.Graph of the session.
        failures: tells how many steps have failed, alike in all workers that have carried on.
    """

    def __init__(self, graph: Any, failures: Callable[[], int]) -> None:
        self._graph, self._failures = graph, failures
        self._known: dict[tuple[str, ...], bool] = {}
        self._loops_meet = any(map(is_collective, graph.get_operations()))

    def choose(self, fetches: Iterable[Any], options: Any, *, in_loop: bool) -> None:
        """Set the key of a run, if it needs one.

        Args:
            fetches: tensors and operations, or names of them.
            options: the RunOptions of the run.
            in_loop: the steps are in a loop.
        """
        failures = self._failures()
        meets = self._loops_meet if in_loop else failures > 0 and self._meets(fetches)
        if meets:
            key = zlib.crc32(b"%d" % failures) if failures else 0
            options.experimental.collective_graph_key = key + _LOOPS

    def _meets(self, fetches: Iterable[Any]) -> bool:
        names = tuple(getattr(one, "name", one) for one in fetches)
        if names not in self._known:
            elements = [self._graph.as_graph_element(name) for name in names]
            step = ancestors(getattr(element, "op", element) for element in elements)
            self._known[names] = any(map(is_collective, step))
        return self._known[names]
