"""Exchange values between processes through stores on a server: accumulators for sums, queues for all others.

    accumulator     part on each process ──► ApplyGradient ──► TakeGradient(of all)
    server_reduce   (task, part) of each process ──► queue ──► all at once, in the order of the workers ──► folded
    server_gather   (task, part) of each process ──► queue ──► all at once, in the order of the workers ──► joined

Worker 0 takes from the stores for all (`passes.parameter_server.delegate_to_chief`). An accumulator adds in the order
of arrival, so sums may differ in rounding. It would merge the rows of sparse gradients; a queue keeps them unchanged.

Parts differ in shape, so each is wrapped into a variant: a scalar, of which a queue returns many at once. So an
exchange has as many nodes for two workers as for a thousand. One queue is enough for the parts of all: a worker that
has put its part in waits, in the same run, for a value that exists only after worker 0 has taken all parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import ONCE, PROCESS
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import REDUCED_BY
from autograph_rewrite.passes.base.rewriting import Rewrite, Site
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.plan.parts.lowerings import Hop

if TYPE_CHECKING:
    from autograph_rewrite.passes.collectives.all_gather import Blocked
    from autograph_rewrite.passes.collectives.all_reduce import ReduceSpec

NEVER_STALE = np.int64(2**63 - 1)
"""The step of every contribution: an accumulator silently drops those of earlier steps than its current one."""


class ServerBuilder:
    """Adds nodes on the device of a server.

    Args:
        device: the server's.
        origin: the original node that they are added for.
        name: prefix of their names.
    """

    def __init__(self, rewrite: Rewrite, device: str, origin: Node, name: str) -> None:
        self._rewrite, self._place, self._origin, self._name = rewrite, rewrite.on(device), origin, name

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
        """Add a node.

        Args:
            op: op type.
            what: its name, after the edge's.
            on_server: whether worker 0 runs it for all.
            controls: nodes to wait for.
            **attrs: by name, decoded.
        """
        place = {**self._place, PROCESS: 0} if on_server else self._place
        site = Site(f"{self._name}/{what}", ONCE, self._origin, place)
        return self._rewrite.add(op, inputs, site, attrs=attrs or None, controls=controls)

    def const(self, content: Any, dtype: int, what: str, *, on_server: bool = False) -> Value:
        """Add a constant.

        Args:
            content: a number, or nested lists of them.
            dtype: number of TensorFlow's type.
            what: its name, after the edge's.
            on_server: whether worker 0 runs it for all.
        """
        array = np.asarray(content, dtypes.numpy_dtype(dtype))
        return self.add("Const", (), what, on_server=on_server, value=array, dtype=dtype).output()

    def store(self, op: str, what: str, **attrs: Any) -> Value:
        """Add an accumulator or a queue, which all processes share by its name.

        Args:
            op: op type of the accumulator or queue.
            what: its name, after the edge's.
            **attrs: by name, decoded.
        """
        handle = self.add(op, (), what, container="", **attrs)
        handle.set_attr("shared_name", handle.name)
        return handle.output()

    def queue(self, dtypes_of_element: Sequence[int], capacity: int, what: str) -> Value:
        """Add a queue whose elements are scalars.

        Args:
            dtypes_of_element: number of TensorFlow's type of each scalar.
            capacity: elements that it holds at most.
            what: its name, after the edge's.
        """
        shapes = [()] * len(dtypes_of_element)
        return self.store(
            "FIFOQueueV2", what, component_types=list(dtypes_of_element), shapes=shapes, capacity=capacity
        )

    def wrapped(self, value: Value, what: str) -> Value:
        """Return a value, of one dimension or more, as a scalar variant."""
        attrs: dict[str, Any] = {
            "RAGGED_RANK": 0,
            "Tvalues": value.dtype,
            "Tsplits": dtypes.INT64,
            "batched_input": False,
        }
        return self.add("RaggedTensorToVariant", (value,), what, **attrs).output()

    def unwrapped(self, variants: Value, dtype: int, what: str, *, rank: int = 0, on_server: bool = False) -> Value:
        """Return the value of a variant, or the concatenated rows of a vector of variants.

        Args:
            dtype: number of TensorFlow's type of the result.
            what: its name, after the edge's.
            rank: 1 for a vector, else 0.
            on_server: whether worker 0 runs it for all.
        """
        ranks = {"input_ragged_rank": 0, "output_ragged_rank": rank}
        attrs: dict[str, Any] = {**ranks, "Tvalues": dtype, "Tsplits": dtypes.INT64}
        return self.add("RaggedTensorFromVariant", (variants,), what, on_server=on_server, **attrs).output(rank)


def reduce_at_server(exchange: Exchange, hop: Hop, part: Value, reduction: ReduceSpec) -> Value:
    """Return the combined parts of all processes; each part runs once in its process."""
    home = _meeting(exchange, part)
    axis = home.const(0, dtypes.INT32, "axis", on_server=True)
    row = home.add("ExpandDims", (part, home.const(0, dtypes.INT32, "row_axis")), "row").output()
    rows = _parts(exchange, row, home)
    return home.add(REDUCED_BY.get(reduction.op, "Sum"), (rows, axis), "total", on_server=True).output()


def gather_at_server(exchange: Exchange, hop: Hop, part: Value, blocked: Blocked) -> Value:
    """Return the concatenated parts of all processes, in the order of the workers.

    Raises:
        PassError: they are not joined along the first dimension, and their rank is not known.
    """
    home, dim, rank = _meeting(exchange, part), blocked.dim, blocked.fact.rank
    if not dim:
        return _parts(exchange, part, home)
    if rank is None:
        raise PassError(
            f"'{part.name}' has to be whole on a server, but its rank is not known",
            node=part.node,
            hint="set its shape with tf.ensure_shape, or do not use it across examples",
        )
    order = [dim, *(i for i in range(rank) if i != dim)]
    ahead = home.add("Transpose", (part, home.const(order, dtypes.INT32, "ahead_order")), "ahead").output()
    back = home.const(np.argsort(order), dtypes.INT32, "back_order", on_server=True)
    return home.add("Transpose", (_parts(exchange, ahead, home), back), "joined", on_server=True).output()


def _meeting(exchange: Exchange, part: Value) -> ServerBuilder:
    """Return a builder on the server where parts meet: that of the edge's owner; other edges are spread over all."""
    rewrite, edge = exchange.rewrite, exchange.planned
    homes = sorted(set(rewrite.plan.homes.values()))
    spread = homes[zlib.crc32(f"{edge.value} {edge.to}".encode()) % len(homes)]
    name = f"{edge.value.replace(':', '/')}/{edge.lowering}"  # the same in all processes
    return ServerBuilder(rewrite, rewrite.homes.of.get(edge.owner, spread), part.node, name)


def accumulate_at_server(exchange: Exchange, hop: Hop, part: Value, reduction: ReduceSpec) -> Value:
    """Return the sum of the parts of all processes; each part runs once in its process."""
    rewrite, home, dtype = exchange.rewrite, _meeting(exchange, part), part.dtype
    handle = home.store("ResourceConditionalAccumulator", "sum", dtype=dtype, shape=None, reduction_type=b"SUM")
    step = home.const(NEVER_STALE, dtypes.INT64, "step")
    push = home.add("ResourceAccumulatorApplyGradient", (handle, step, part), "push")
    rewrite.homes.pushes.setdefault(exchange.planned.owner, []).append(push)
    required = home.const(rewrite.processes, dtypes.INT32, "required", on_server=True)
    take = home.add(
        "ResourceAccumulatorTakeGradient", (handle, required), "take", on_server=True, controls=[push], dtype=dtype
    )
    return take.output()


def _parts(exchange: Exchange, part: Value, home: ServerBuilder) -> Value:
    """Return the rows of the parts of all processes, in the order of the workers."""
    rewrite, types, count = exchange.rewrite, [dtypes.INT32, dtypes.VARIANT], exchange.rewrite.processes
    queue = home.queue(types, count, "parts")
    task = home.const(rewrite.task, dtypes.INT32, "task")
    push = home.add("QueueEnqueueV2", (queue, task, home.wrapped(part, "part")), "push", timeout_ms=-1)
    rewrite.homes.pushes.setdefault(exchange.planned.owner, []).append(push)
    number = home.const(count, dtypes.INT32, "count", on_server=True)
    attrs: dict[str, Any] = {"component_types": types, "timeout_ms": -1}
    take = home.add("QueueDequeueManyV2", (queue, number), "take", on_server=True, controls=[push], **attrs)
    order = home.add("InvertPermutation", (take.output(0),), "order", on_server=True).output()
    axis = home.const(0, dtypes.INT32, "workers_axis", on_server=True)
    ordered = home.add("GatherV2", (take.output(1), order, axis), "ordered", on_server=True, batch_dims=0).output()
    return home.unwrapped(ordered, part.dtype, "rows", rank=1, on_server=True)
