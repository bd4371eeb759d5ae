"""Drain server-side stores after a failed step: contributions of that step must not enter the next.

    step 7   worker 0 pushes its gradients ──► accumulators = 1      worker 1 fails before it pushes
    after    worker 0 takes what is left                             all go on with empty stores

Otherwise the next step would add what the failed one left to its own gradients. What counts a worker's runs
(`passes.parameter_server.turns`) it empties itself: each may have come to another number.
"""

from __future__ import annotations

from typing import Any

from autograph_rewrite.ir.graph import PASS_ATTR
from autograph_rewrite.requires import tensorflow

_QUEUE, _ACCUMULATOR, _COUNTS = "FIFOQueueV2", "ResourceConditionalAccumulator", "ResourceAccumulatorNumAccumulated"


class StoreDrain:
    """What the stores of one session's graph hold between two steps.

    Args:
        session: a tf.compat.v1.Session that reaches the servers.
        own: only what counts the runs of this worker.
    """

    def __init__(self, session: Any, *, own: bool = False) -> None:
        self._session = session
        self._counts: list[Any] = []
        self._takes: list[Any] = []
        raw = tensorflow().raw_ops
        graph = session.graph
        operations = [op for op in graph.get_operations() if op.type in (_QUEUE, _ACCUMULATOR) and _is_ours(op)]
        operations = [op for op in operations if _counts_runs(op) or not own]
        with graph.as_default():
            for op in operations:
                handle = op.outputs[0]
                with graph.device(handle.device):
                    if op.type == _QUEUE:
                        self._counts.append(raw.QueueSizeV2(handle=handle))
                        types = op.get_attr("component_types")
                        taken = raw.QueueDequeueV2(handle=handle, component_types=types)
                        self._takes.append(taken[0].op)  # not fetched: NumPy has no variants
                    else:
                        self._counts.append(raw.ResourceAccumulatorNumAccumulated(handle=handle))
                        dtype = op.get_attr("dtype")
                        taken = raw.ResourceAccumulatorTakeGradient(handle=handle, num_required=1, dtype=dtype)
                        self._takes.append(taken.op)

    def counts(self) -> dict[str, int]:
        """Return how much each store that is not empty holds."""
        found = zip(self._counts, self._session.run(self._counts), strict=True)
        return {count.op.inputs[0].op.name: int(held) for count, held in found if held}

    def remove(self) -> None:
        """Take out all that there is."""
        while True:
            held = self._session.run(self._counts)
            takes = [take for take, count in zip(self._takes, held, strict=True) if count]
            if not takes:
                return
            self._session.run(takes)


def _counts_runs(operation: Any) -> bool:
    """Return whether a store is there to be counted: how much is in it is read, and nothing is taken out."""
    return any(user.type == _COUNTS and _is_ours(user) for user in operation.outputs[0].consumers())


def _is_ours(operation: Any) -> bool:
    return PASS_ATTR in operation.node_def.attr
