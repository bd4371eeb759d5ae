"""Exchange what processes hold through stores on a server: accumulators for sums, queues for everything else.

    accumulator     part on each process ──► ApplyGradient ──► TakeGradient(of all)
    server_reduce   part on each process ──► a queue of its own ──► dequeued, and folded
    server_gather   part on each process ──► a queue of its own ──► dequeued, and joined in the order of the workers

Worker 0 takes for all (`passes.parameter_server.delegate_to_chief`). An accumulator adds in the order of arrival, so
sums are equal but for rounding. It would merge the rows of sparse gradients: a queue keeps them as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.context import Context, Site
from autograph_rewrite.passes.collectives.local_ops import FOLDS
from autograph_rewrite.plan.parts.messages import EdgePlan

NEVER_STALE = np.int64(2**63 - 1)
"""The step of every contribution: an accumulator silently drops those of steps before its own."""


class ServerBuilder:
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
        on_server: bool = False,
        controls: Iterable[Node] = (),
        **attrs: Any,
    ) -> Node:
        """Add a node; with `on_server` worker 0 alone runs it.

        Args:
            op: op type.
            inputs: its operands.
            what: told after the edge's name.
            on_server: whether worker 0 alone runs it, for all.
            controls: nodes that it runs after.
            **attrs: by name, decoded.
        """
        context, name = self._context, f"{self._name}/{what}"
        node = context.add(op, inputs, Site(name, Span.ONCE, self._origin), attrs=attrs or None, controls=controls)
        context.server_region.devices[node] = self._device
        if on_server:
            context.server_region.nodes.add(node)
        return node

    def const(self, content: Any, dtype: int, what: str, *, on_server: bool = False) -> Value:
        """Add a constant.

        Args:
            content: a number, or nested lists of them.
            dtype: number of TensorFlow's type.
            what: told after the edge's name.
            on_server: whether worker 0 alone runs it, for all.
        """
        array = np.asarray(content, dtypes.numpy_dtype(dtype))
        return self.add("Const", (), what, on_server=on_server, value=array, dtype=dtype).output()

    def store(self, op: str, what: str, **attrs: Any) -> Value:
        """Add an accumulator or a queue, which all processes know by its name.

        Args:
            op: op type of the accumulator or queue.
            what: told after the edge's name.
            **attrs: by name, decoded.
        """
        handle = self.add(op, (), what, container="", **attrs)
        handle.set_attr("shared_name", handle.name)
        return handle.output()

    def queue(self, dtype: int, what: str) -> Value:
        """Add a queue of single values, of any shape."""
        return self.store("FIFOQueueV2", what, component_types=[dtype], shapes=[], capacity=1)


def reduce_at_server(context: Context, part: Value, op: str, edge: EdgePlan) -> Value:
    """Return the processes' parts, combined; each is made once per process.

    Args:
        context: the rewrite.
        part: of this process, made once.
        op: sum, max, min, prod, all or any.
        edge: the plan's.
    """
    home = _meeting(context, part, edge)
    parts = _parts(context, part, edge, home)
    if op == "sum":
        return home.add("AddN", parts, "total", on_server=True, N=len(parts)).output()
    stack = home.add("Pack", parts, "stack", on_server=True, N=len(parts), axis=0).output()
    axis = home.const(0, dtypes.INT32, "axis", on_server=True)
    return home.add(FOLDS[op], (stack, axis), "total", on_server=True).output()


def gather_at_server(context: Context, part: Value, dim: int, edge: EdgePlan) -> Value:
    """Return the processes' parts behind each other, in the order of the workers.

    Args:
        context: the rewrite.
        part: this process's rows, made once.
        dim: along which they are joined.
        edge: the plan's.
    """
    home = _meeting(context, part, edge)
    parts = _parts(context, part, edge, home)
    axis = home.const(dim, dtypes.INT32, "axis", on_server=True)
    return home.add("ConcatV2", (*parts, axis), "joined", on_server=True, N=len(parts)).output()


def _meeting(context: Context, part: Value, edge: EdgePlan) -> ServerBuilder:
    """Return where parts meet: beside the owner; what has none is spread over all servers."""
    homes = sorted(set(context.plan.homes.values()))
    spread = homes[zlib.crc32(f"{edge.value} {edge.to}".encode()) % len(homes)]
    name = f"{edge.value.replace(':', '/')}/{edge.lowering}"  # the same in all processes
    return ServerBuilder(context, context.server_region.homes.get(edge.owner, spread), part.node, name)


def accumulate_at_server(context: Context, part: Value, edge: EdgePlan) -> Value:
    """Return the sum of the processes' parts; each is made once per process.

    Args:
        context: the rewrite.
        part: of this process, made once.
        edge: the plan's.
    """
    home, dtype = _meeting(context, part, edge), part.dtype
    handle = home.store("ResourceConditionalAccumulator", "sum", dtype=dtype, shape=None, reduction_type=b"SUM")
    step = home.const(NEVER_STALE, dtypes.INT64, "step")
    push = home.add("ResourceAccumulatorApplyGradient", (handle, step, part), "push")
    context.server_region.pushes.setdefault(edge.owner, []).append(push)
    required = home.const(context.processes, dtypes.INT32, "required", on_server=True)
    take = home.add(
        "ResourceAccumulatorTakeGradient", (handle, required), "take", on_server=True, controls=[push], dtype=dtype
    )
    return take.output()


def _parts(context: Context, part: Value, edge: EdgePlan, home: ServerBuilder) -> list[Value]:
    """Return the parts of all processes."""
    dtype = part.dtype
    queues = [home.queue(dtype, f"part_{task}") for task in range(context.processes)]
    push = home.add("QueueEnqueueV2", (queues[context.task], part), "push", timeout_ms=-1)
    context.server_region.pushes.setdefault(edge.owner, []).append(push)

    def take(task: int) -> Value:
        attrs: dict[str, Any] = {"component_types": [dtype], "timeout_ms": -1}
        return home.add(
            "QueueDequeueV2", (queues[task],), f"take_{task}", on_server=True, controls=[push], **attrs
        ).output()

    return [take(task) for task in range(context.processes)]
