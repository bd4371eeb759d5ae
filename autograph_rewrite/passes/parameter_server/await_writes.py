"""Await writes: who looks rows up on a server waits for what worker 0 has written there since the last step.

    worker 0    written (0, or one for each other) ──► queue        ResourceGather(w @ ps)
    others      queue ──► take (0, or 1) ──^──► ResourceGather(w @ ps)

What a program writes between two steps each worker knows (`runtime.function.session_variables`), but it is
worker 0 that writes it on the server. If nothing was written before a step, nobody puts anything in or takes it out.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.context import Context
from autograph_rewrite.passes.collectives.server_stores import ServerBuilder

PREFIX = "autograph_written"
COUNT = "count"
"""Name, behind the prefix and the variable, of what is fed: a vector with an element for each other worker, or 1."""


def await_writes(context: Context, variable: str, device: str, lookups: list[Node]) -> None:
    """Let lookups wait for writes between two steps.

    Args:
        context: the rewrite, of one of several workers.
        variable: the name of its handle.
        device: of the server that holds it.
        lookups: of its rows, outside of loops and branches.
    """
    home = ServerBuilder(context, device, lookups[0], f"{PREFIX}/{variable}")
    queue = home.queue([dtypes.BOOL], context.workers - 1, "queue")
    if context.rank == 0:
        none = home.add("Const", (), "nothing", value=np.zeros([0], np.bool_), dtype=dtypes.BOOL).output()
        tokens = home.add("PlaceholderWithDefault", (none,), COUNT, shape=(None,)).output()
        done = home.add("QueueEnqueueManyV2", (queue, tokens), "say", timeout_ms=-1)
    else:
        zero = home.const(0, dtypes.INT32, "nothing")
        count = home.add("PlaceholderWithDefault", (zero,), COUNT, shape=()).output()
        done = home.add("QueueDequeueManyV2", (queue, count), "take", component_types=[dtypes.BOOL], timeout_ms=-1)
    for node in lookups:
        node.add_control(done)
