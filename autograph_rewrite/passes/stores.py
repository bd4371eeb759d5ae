"""Exchange what processes hold through stores on a server: accumulators for sums, queues for everything else.

    accumulator     part on each process ──► ApplyGradient ──► TakeGradient(of all)
    server_reduce   part on each process ──► a queue of its own ──► dequeued, and folded
    server_gather   part on each process ──► a queue of its own ──► dequeued, and joined in the order of the workers

Worker 0 takes for all (see `hand_over`). An accumulator adds in the order of arrival, so sums are equal but for
rounding. It would merge the rows of sparse gradients: a queue keeps them as they are, whatever reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.context import Context
from autograph_rewrite.plan.parts import EdgePlan

NEVER_STALE = np.int64(2**63 - 1)
"""The step of every contribution: an accumulator silently drops those of steps before its own (R-PS-3)."""
FOLDS = {"max": "Max", "min": "Min", "prod": "Prod", "all": "Min", "any": "Max"}


class Home:
    """Adds nodes on the device of a server.

    Args:
        context: the rewrite.
        device: the server's.
        origin: the original node that they serve.
        name: prefix of their names.
    """

    def __init__(self, context: Context, device: str, origin: Node, name: str) -> None:
        self._context, self._device, self._origin, self._name = context, device, origin, name

    def add(
        self,
        op: str,
        inputs: Sequence[Value],
        what: str,
        *,
        served: bool = False,
        controls: Iterable[Node] = (),
        **attrs: Any,
    ) -> Node:
        """Add a node; a served one is run by worker 0 alone."""
        context, name = self._context, f"{self._name}/{what}"
        node = context.add(
            op, inputs, name=name, span=Span.ONCE, origin=self._origin, attrs=attrs or None, controls=controls
        )
        context.served.devices[node] = self._device
        if served:
            context.served.nodes.add(node)
        return node

    def const(self, content: Any, dtype: int, what: str, *, served: bool = False) -> Value:
        """Add a constant."""
        array = np.asarray(content, dtypes.numpy_dtype(dtype))
        return self.add("Const", (), what, served=served, value=array, dtype=dtype).output()

    def store(self, op: str, what: str, **attrs: Any) -> Value:
        """Add an accumulator or a queue, which all processes know by its name."""
        handle = self.add(op, (), what, container="", **attrs)
        handle.set_attr("shared_name", handle.name)
        return handle.output()

    def queue(self, dtype: int, what: str) -> Value:
        """Add a queue of single values, of any shape."""
        return self.store("FIFOQueueV2", what, component_types=[dtype], shapes=[], capacity=1)


def reduce_at_server(context: Context, part: Value, op: str, edge: EdgePlan) -> Value:
    """Return the processes' parts, combined; each is made once per process."""
    home = _meeting(context, part, edge)
    if edge.lowering == "accumulator":
        return _accumulate(context, part, edge, home)
    parts = _parts(context, part, edge, home)
    if op == "sum":
        return home.add("AddN", parts, "total", served=True, N=len(parts)).output()
    stack = home.add("Pack", parts, "stack", served=True, N=len(parts), axis=0).output()
    axis = home.const(0, dtypes.INT32, "axis", served=True)
    return home.add(FOLDS[op], (stack, axis), "total", served=True).output()


def gather_at_server(context: Context, part: Value, dim: int, edge: EdgePlan) -> Value:
    """Return the processes' parts behind each other, in the order of the workers."""
    home = _meeting(context, part, edge)
    parts = _parts(context, part, edge, home)
    axis = home.const(dim, dtypes.INT32, "axis", served=True)
    return home.add("ConcatV2", (*parts, axis), "joined", served=True, N=len(parts)).output()


def _meeting(context: Context, part: Value, edge: EdgePlan) -> Home:
    """Return where parts meet: beside the owner; what has none is spread over all servers."""
    homes = sorted(set(context.plan.homes.values()))
    spread = homes[zlib.crc32(f"{edge.value} {edge.to}".encode()) % len(homes)]
    name = f"{edge.value.replace(':', '/')}/{edge.lowering}"  # the same in all processes
    return Home(context, context.served.homes.get(edge.owner, spread), part.node, name)


def _accumulate(context: Context, part: Value, edge: EdgePlan, home: Home) -> Value:
    dtype = part.dtype
    handle = home.store("ResourceConditionalAccumulator", "sum", dtype=dtype, shape=None, reduction_type=b"SUM")
    step = home.const(NEVER_STALE, dtypes.INT64, "step")
    push = home.add("ResourceAccumulatorApplyGradient", (handle, step, part), "push")
    context.served.pushes.setdefault(edge.owner, []).append(push)
    required = home.const(context.processes, dtypes.INT32, "required", served=True)
    take = home.add(
        "ResourceAccumulatorTakeGradient", (handle, required), "take", served=True, controls=[push], dtype=dtype
    )
    return take.output()


def _parts(context: Context, part: Value, edge: EdgePlan, home: Home) -> list[Value]:
    """Return the parts of all processes."""
    dtype = part.dtype
    queues = [home.queue(dtype, f"part_{task}") for task in range(context.processes)]
    push = home.add("QueueEnqueueV2", (queues[context.task], part), "push", timeout_ms=-1)
    context.served.pushes.setdefault(edge.owner, []).append(push)

    def take(task: int) -> Value:
        attrs: dict[str, Any] = {"component_types": [dtype], "timeout_ms": -1}
        return home.add(
            "QueueDequeueV2", (queues[task],), f"take_{task}", served=True, controls=[push], **attrs
        ).output()

    return [take(task) for task in range(context.processes)]
