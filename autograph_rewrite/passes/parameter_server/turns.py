"""Send from worker 0 to all others through two alternating queues, whatever the number of workers.

    run 6   worker 0: enqueue W - 1 tokens ──► token/even ──► dequeue one: each other worker
    run 7   worker 0: enqueue W - 1 tokens ──► token/odd  ──► dequeue one: each other worker

With one queue, a worker in run 7 could take the element of a worker that is still in run 6, and go on too early. A
worker can be one run ahead of another, but not two: in every run, worker 0 sends nothing until all have told it that
they have begun. So a worker that takes an element in run 8 took one in run 7; before that, all had begun run 7, and had
taken all elements of run 6. Each process counts its runs in an accumulator, which needs no initialiser;
`runtime.engine.staleness_clock` counts anew after a failed run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.collectives.server_stores import NEVER_STALE, ServerBuilder

PREFIX = "autograph_runs"


class Turns:
    """Chooses the queue of a run; its nodes exist once in a process that sends or receives anything.

    Args:
        origin: the node for which they are added.
    """

    def __init__(self, rewrite: Rewrite, origin: Node) -> None:
        home = ServerBuilder(rewrite, min(rewrite.plan.homes.values()), origin, PREFIX)
        kept = home.store(
            "ResourceConditionalAccumulator",
            f"worker_{rewrite.rank}",
            dtype=dtypes.FLOAT,
            shape=(),
            reduction_type=b"SUM",
        )
        count = home.add("ResourceAccumulatorNumAccumulated", (kept,), "count")
        never, one = home.const(NEVER_STALE, dtypes.INT64, "step"), home.const(1.0, dtypes.FLOAT, "one")
        begun = home.add("ResourceAccumulatorApplyGradient", (kept, never, one), "begun", controls=[count])
        mask = home.const(1, dtypes.INT32, "mask")
        self.others = rewrite.workers - 1
        self.number = home.add("BitwiseAnd", (count.output(), mask), "turn").output()
        ready = home.queue([dtypes.BOOL], self.others, "ready")
        if rewrite.rank:
            true = home.const(True, dtypes.BOOL, "true")
            self.all_began = home.add("QueueEnqueueV2", (ready, true), "say", controls=[begun], timeout_ms=-1)
        else:
            needed = home.const(self.others, dtypes.INT32, "others")
            attrs: dict[str, Any] = {"component_types": [dtypes.BOOL], "timeout_ms": -1}
            self.all_began = home.add("QueueDequeueManyV2", (ready, needed), "wait", controls=[begun], **attrs)

    def _queue(self, home: ServerBuilder, dtype: int) -> Value:
        """Return the queue of this run."""
        both = [home.queue([dtype], self.others, which) for which in ("even", "odd")]
        pair = home.add("Pack", both, "queues", N=2, axis=0).output()
        axis = home.const(0, dtypes.INT32, "queues_axis")
        return home.add("GatherV2", (pair, self.number, axis), "queue", batch_dims=0).output()

    def send(self, home: ServerBuilder, element: Value, done: Sequence[Node]) -> Node:
        """Send an element to every other worker.

        Args:
            home: adds the nodes.
            element: a scalar.
            done: nodes that run before.
        """
        count = home.const([self.others], dtypes.INT32, "others")
        every = home.add("Fill", (count, element), "every").output()
        queue = self._queue(home, element.dtype)
        controls = [*done, self.all_began]
        return home.add("QueueEnqueueManyV2", (queue, every), "send", controls=controls, timeout_ms=-1)

    def receive(self, home: ServerBuilder, dtype: int, needed: Iterable[Node]) -> Node:
        """Receive this worker's element.

        Args:
            home: adds the nodes.
            dtype: number of its type.
            needed: nodes that worker 0 waits for before it sends.
        """
        queue, controls = self._queue(home, dtype), [*needed, self.all_began]
        attrs: dict[str, Any] = {"component_types": [dtype], "timeout_ms": -1}
        return home.add("QueueDequeueV2", (queue,), "receive", controls=controls, **attrs)
