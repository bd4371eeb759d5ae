"""Mistakes about what ranks hand each other through servers: pushes, tokens, takes, and the stores that hold them."""

from __future__ import annotations

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes
from tests.seeded_mistakes.bench import let_go
from tests.seeded_mistakes.job_bench import JobBench, JobKind

PUSHES = ("ResourceAccumulatorApplyGradient", "QueueEnqueueV2")
TOKENS = "QueueEnqueueManyV2"
TAKES = ("ResourceAccumulatorTakeGradient", "QueueDequeueV2", "QueueDequeueManyV2")
STORES = ("ResourceConditionalAccumulator", "FIFOQueueV2")


def _one(bench: JobBench, *ops: str, within: str = "") -> Node:
    """Choose a node of this rank."""
    return bench.one(lambda node: node.op in ops and within in node.name)


def _one_shared(bench: JobBench) -> Node:
    """Choose a node that uses a store of several ranks: what counts the runs of one may have any name."""
    return bench.one(lambda node: node.op in (*PUSHES, *TAKES) and node.name != "autograph_runs/begun")


def _store(node: Node) -> str:
    """Return the name by which all ranks know the store that a node uses; of two, the first."""
    return str(_handle(node).attr("shared_name").decode())


def _handle(node: Node) -> Node:
    """Return the store that a node uses; of two that take turns, the first."""
    handle = node.inputs[0].node
    return handle if handle.op in STORES else handle.inputs[0].node.inputs[0].node


def _left_out(bench: JobBench, node: Node) -> str:
    """Let nothing wait for a node any more."""
    store, name = _store(node), node.name
    let_go(node)
    bench.graph.erase(node)
    return bench.said(f"'{name}' is gone", named=[store])


def one_more_required(bench: JobBench) -> str:
    node = _one(bench, TAKES[0], TAKES[2])
    required = int(node.inputs[1].node.attr("value"))
    bench.rewire(node, 1, required + bench.pick((-1, 1)))
    return bench.said(f"'{node.name}' does not wait for {required}", named=[_store(node)])


def missing_push(bench: JobBench) -> str:
    return _left_out(bench, _one(bench, PUSHES[0]))


def missing_part(bench: JobBench) -> str:
    return _left_out(bench, _one(bench, PUSHES[1], within="/push"))


def missing_token(bench: JobBench) -> str:
    return _left_out(bench, _one(bench, TOKENS, within="/token/"))


def ignored_token(bench: JobBench) -> str:
    return _left_out(bench, _one(bench, TAKES[1], within="/token/"))


def counted_twice(bench: JobBench) -> str:
    return _doubled(bench, _one(bench, PUSHES[0], within="autograph_runs/"))


def _doubled(bench: JobBench, node: Node) -> str:
    """Do what a node does twice."""
    second = bench.again(node, node.inputs)
    for user in node.control_users or [use.node for value in node.outputs for use in value.uses]:
        user.add_control(second)
    return bench.said(f"'{node.name}' is there twice", named=[_store(node)])


def double_push(bench: JobBench) -> str:
    return _doubled(bench, _one(bench, PUSHES[0]))


def double_token(bench: JobBench) -> str:
    return _doubled(bench, _one(bench, TOKENS, within="/token/"))


def double_take(bench: JobBench) -> str:
    return _doubled(bench, _one(bench, *TAKES))


def other_name(bench: JobBench) -> str:
    node = _one_shared(bench)
    store = _store(node)
    _handle(node).set_attr("shared_name", f"{store}/other".encode())
    return bench.said(f"'{node.name}' uses another store than '{store}'", named=[store])


def other_device(bench: JobBench) -> str:
    node = _one_shared(bench)
    handle = _handle(node)
    handle.set_device(handle.device.replace("CPU:0", "CPU:1"))
    return bench.said(f"'{handle.name}' is somewhere else", named=[_store(node)])


def other_dtype(bench: JobBench) -> str:
    node = _one(bench, STORES[0], within="/sum")
    node.set_attr("dtype", dtypes.HALF)
    name = node.attr("shared_name").decode()
    return bench.said(f"'{node.name}' holds another type", named=[name])


def other_capacity(bench: JobBench) -> str:
    node = _one(bench, STORES[1])
    node.set_attr("capacity", 7)
    name = node.attr("shared_name").decode()
    return bench.said(f"'{node.name}' holds more", named=[name])


KINDS: tuple[JobKind, ...] = (
    one_more_required, missing_push, missing_part, counted_twice, missing_token, ignored_token, double_push,
    double_token, double_take, other_name, other_device, other_dtype, other_capacity,
)  # fmt: skip
