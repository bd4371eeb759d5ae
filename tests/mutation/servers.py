"""The ways to break what ranks hand each other through servers: each changes one thing, and says in a sentence what."""

from __future__ import annotations

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes
from tests.mutation.bench import Bench, Kind, Mutant, rewire

PUSHES = ("ResourceAccumulatorApplyGradient", "QueueEnqueueV2")
TOKENS = "QueueEnqueueManyV2"
TAKES = ("ResourceAccumulatorTakeGradient", "QueueDequeueV2", "QueueDequeueManyV2")
STORES = ("ResourceConditionalAccumulator", "FIFOQueueV2")


def pick(bench: Bench, *ops: str, within: str = "") -> Node:
    """Choose a node of this rank; raises IndexError where there is none."""
    return bench.rng.choice([node for node in bench.graph if node.op in ops and within in node.name])


def pick_shared(bench: Bench) -> Node:
    """Choose a node that uses a store of several ranks: what counts the runs of one may have any name."""
    nodes = [node for node in bench.graph if node.op in (*PUSHES, *TAKES) and node.name != "autograph_runs/begun"]
    return bench.rng.choice(nodes)


def broken(bench: Bench, kind: str, store: str, did: str) -> Mutant:
    """Return the mutant; a fault has to name the store."""
    return bench.broken(kind, [], did, named=[store])


def store_of(node: Node) -> str:
    """Return the name by which all ranks know the store that a node uses; of two, the first."""
    return str(handle_of(node).attr("shared_name").decode())


def handle_of(node: Node) -> Node:
    """Return the store that a node uses; of two that take turns, the first."""
    handle = node.inputs[0].node
    return handle if handle.op in STORES else handle.inputs[0].node.inputs[0].node


def left_out(bench: Bench, kind: str, node: Node) -> Mutant:
    """Let nothing wait for a node any more."""
    store, name = store_of(node), node.name
    for user in node.control_users:
        user.remove_control(node)
    bench.graph.erase(node)
    return broken(bench, kind, store, f"'{name}' is gone")


def one_more_required(bench: Bench) -> Mutant:
    node = pick(bench, TAKES[0], TAKES[2])
    required = int(node.inputs[1].node.attr("value"))
    rewire(node, 1, required + bench.rng.choice((-1, 1)))
    return broken(bench, "wrong num_required", store_of(node), f"'{node.name}' does not wait for {required}")


def missing_push(bench: Bench) -> Mutant:
    return left_out(bench, "missing push", pick(bench, PUSHES[0]))


def missing_part(bench: Bench) -> Mutant:
    return left_out(bench, "missing push", pick(bench, PUSHES[1], within="/push"))


def missing_token(bench: Bench) -> Mutant:
    return left_out(bench, "missing token", pick(bench, TOKENS, within="/token/"))


def ignored_token(bench: Bench) -> Mutant:
    return left_out(bench, "missing token", pick(bench, TAKES[1], within="/token/"))


def counted_twice(bench: Bench) -> Mutant:
    return again(bench, "double push", pick(bench, PUSHES[0], within="autograph_runs/"))


def again(bench: Bench, kind: str, node: Node) -> Mutant:
    """Do what a node does twice."""
    attrs = {key: node.attr(key) for key in node.attrs if key[0] != "_"}
    second = bench.graph.add(node.op, node.inputs, name=f"{node.name}/again", attrs=attrs, device=node.device)
    for user in node.control_users or [use.node for value in node.outputs for use in value.uses]:
        user.add_control(second)
    return broken(bench, kind, store_of(node), f"'{node.name}' is there twice")


def double_push(bench: Bench) -> Mutant:
    return again(bench, "double push", pick(bench, PUSHES[0]))


def double_token(bench: Bench) -> Mutant:
    return again(bench, "double token", pick(bench, TOKENS, within="/token/"))


def double_take(bench: Bench) -> Mutant:
    return again(bench, "double take", pick(bench, *TAKES))


def other_name(bench: Bench) -> Mutant:
    node = pick_shared(bench)
    store = store_of(node)
    handle_of(node).set_attr("shared_name", f"{store}/other".encode())
    return broken(bench, "other shared_name", store, f"'{node.name}' uses another store than '{store}'")


def other_device(bench: Bench) -> Mutant:
    node = pick_shared(bench)
    handle = handle_of(node)
    handle.set_device(handle.device.replace("CPU:0", "CPU:1"))
    return broken(bench, "other device", store_of(node), f"'{handle.name}' is somewhere else")


def other_dtype(bench: Bench) -> Mutant:
    node = pick(bench, STORES[0], within="/sum")
    node.set_attr("dtype", dtypes.HALF)
    name = node.attr("shared_name").decode()
    return broken(bench, "other dtype", name, f"'{node.name}' holds another type")


def other_capacity(bench: Bench) -> Mutant:
    node = pick(bench, STORES[1])
    node.set_attr("capacity", 7)
    name = node.attr("shared_name").decode()
    return broken(bench, "other capacity", name, f"'{node.name}' holds more")


KINDS: tuple[Kind, ...] = (
    one_more_required,
    missing_push,
    missing_part,
    counted_twice,
    missing_token,
    ignored_token,
    double_push,
    double_token,
    double_take,
    other_name,
    other_device,
    other_dtype,
    other_capacity,
)
