"""Bring what processes hold of a value together where its owner lives; worker 0 takes it there for all.

    sums   %dw on each process ──► AccumulatorApplyGradient ─┐
                        AccumulatorTakeGradient(all of them) ◄┘   the sum, on the owner's device, once per job
    rows   %rows on each process ──► QueueEnqueue ──► QueueDequeue of each, joined in the order of the workers

An accumulator adds in the order of arrival, so sums are equal but for rounding. Accumulators know floating types only,
and merge the rows of sparse gradients: queues keep them as they are, whatever reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.gather import join_local
from autograph_rewrite.plan.parts import EdgePlan

NEVER_STALE = np.int64(2**63 - 1)
"""The step of every contribution: an accumulator silently drops those of steps before its own (R-PS-3)."""


class Home:
    """Adds nodes on the device of one variable.

    Args:
        context: the rewrite.
        device: the variable's.
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


def accumulate(context: Context, value: Value, fact: Fact, edge: EdgePlan) -> Value:
    """Return the sum of all processes, on the device of the edge's owner."""
    name, count = value.node.name, context.processes
    home = Home(context, context.served.homes[edge.owner], value.node, name)
    wide = combine.cast(context, value, combine.wire_type(fact.dtype, "sum"), f"{name}/widen")
    part = combine.reduce_local(context, wide, "sum", name)
    shape = tuple(dim if isinstance(dim, int) else None for dim in fact.shape) if fact.shape is not None else None
    attrs: Mapping[str, Any] = {"dtype": wide.dtype, "shape": shape, "reduction_type": b"SUM"}
    handle = home.store("ResourceConditionalAccumulator", "accumulator", **attrs)
    step = home.const(NEVER_STALE, dtypes.INT64, "step")
    push = home.add("ResourceAccumulatorApplyGradient", (handle, step, part), "push")
    context.served.pushes.setdefault(edge.owner, []).append(push)
    required = home.const(count, dtypes.INT32, "required", served=True)
    inputs = (handle, required)
    take = home.add(
        "ResourceAccumulatorTakeGradient", inputs, "take", served=True, controls=[push], dtype=wide.dtype
    ).output()
    if take.dtype == fact.dtype:
        return take
    return home.add("Cast", (take,), "narrow", served=True, DstT=fact.dtype).output()


def gather(context: Context, value: Value, fact: Fact, edge: EdgePlan) -> Value:
    """Return the parts of all processes behind each other, on the device of the edge's owner."""
    name = value.node.name
    home = Home(context, context.served.homes[edge.owner], value.node, name)
    part = join_local(context, value, fact)
    queues = [home.queue(part.dtype, f"part_{task}") for task in range(context.processes)]
    push = home.add("QueueEnqueueV2", (queues[context.task], part), "push", timeout_ms=-1)
    context.served.pushes.setdefault(edge.owner, []).append(push)
    parts = [
        home.add(
            "QueueDequeueV2",
            (queue,),
            f"take_{task}",
            served=True,
            controls=[push],
            component_types=[part.dtype],
            timeout_ms=-1,
        ).output()
        for task, queue in enumerate(queues)
    ]
    axis = home.const(fact.placement.dim, dtypes.INT32, "joined_axis", served=True)
    return home.add("ConcatV2", (*parts, axis), "joined", served=True, N=len(parts)).output()
