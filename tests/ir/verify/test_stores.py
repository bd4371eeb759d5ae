"""What a step of all ranks puts into accumulators and queues on a server is what it takes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.verify.ranks import verify_ranks
from autograph_rewrite.item import GraphItem
from autograph_rewrite.training_graph import TensorInfo

FLOAT = dtypes.FLOAT
PS = "/job:ps/replica:0/task:0/device:CPU:0"


@dataclass
class Rank:
    """One rank's graph of a job with a parameter server; its step is the target `train`."""

    task: int
    graph: Graph = field(default_factory=Graph)
    step: list[Node] = field(default_factory=list)

    def const(self, name: str, value: object, dtype: int = dtypes.INT32) -> Value:
        array = np.asarray(value, dtypes.numpy_dtype(dtype))
        return self.graph.add("Const", name=name, attrs={"value": array, "dtype": dtype}).output()

    def accumulator(self, shared: str = "w/sum", device: str = PS, **changes: object) -> Value:
        attrs = {"dtype": FLOAT, "shape": (3,), "shared_name": shared, "reduction_type": b"MEAN"} | changes
        return self.graph.add("ResourceConditionalAccumulator", name="sum", attrs=attrs, device=device).output()

    def apply(self, handle: Value, name: str = "apply") -> Node:
        step = self.const(f"{name}/step", 0, dtypes.INT64)
        gradient = self.const(f"{name}/gradient", [1.0, 2.0, 3.0], FLOAT)
        return self.run(self.graph.add("ResourceAccumulatorApplyGradient", [handle, step, gradient], name=name))

    def take(self, handle: Value, required: Value) -> Node:
        attrs = {"dtype": FLOAT}
        return self.run(self.graph.add("ResourceAccumulatorTakeGradient", [handle, required], name="take", attrs=attrs))

    def queue(self) -> Value:
        attrs = {"component_types": (dtypes.INT64,), "shared_name": "tokens"}
        return self.graph.add("FIFOQueueV2", name="tokens", attrs=attrs, device=PS).output()

    def enqueue(self, queue: Value, tokens: int) -> Node:
        values = self.const("token/values", np.zeros(tokens), dtypes.INT64)
        attrs = {"Tcomponents": (dtypes.INT64,)}
        return self.run(self.graph.add("QueueEnqueueManyV2", [queue, values], name="enqueue", attrs=attrs))

    def dequeue(self, queue: Value) -> Node:
        attrs = {"component_types": (dtypes.INT64,)}
        return self.run(self.graph.add("QueueDequeueV2", [queue], name="dequeue", attrs=attrs))

    def run(self, node: Node) -> Node:
        node.set_device(PS)
        self.step.append(node)
        return node


def problems(*ranks: Rank) -> list[str]:
    for rank in ranks:
        x = rank.graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}).output()
        place = f"/job:worker/replica:0/task:{rank.task}/device:CPU:0"
        rank.graph.add("Neg", [x], name="loss", device=place)
        rank.graph.add("NoOp", name="train", controls=rank.step)
    info = TensorInfo("loss", "loss:0", "float32", ())
    item = GraphItem(ranks[0].graph, {}, {"loss": info}, ("train",))
    return [fault.problem for fault in verify_ranks([rank.graph for rank in ranks], item)]


def job(applies: Sequence[int] = (1, 1), required: int = 2) -> list[Rank]:
    """Return ranks that apply so many gradients each, of which the first one takes the mean."""
    ranks = [Rank(task) for task in range(len(applies))]
    for rank, count in zip(ranks, applies, strict=True):
        handle = rank.accumulator()
        for i in range(count):
            rank.apply(handle, f"apply_{i}")
        if rank is ranks[0]:
            rank.take(handle, rank.const("required", required))
    return ranks


def test_an_accumulator_that_waits_for_one_gradient_of_each_rank_is_right() -> None:
    assert problems(*job()) == []
    assert problems(*job((2, 2, 2), required=6)) == []


@pytest.mark.parametrize(
    ("applies", "required", "told"),
    [
        ((1, 1), 3, "one step puts 2 into 'w/sum' on /job:ps/replica:0/task:0/device:CPU:0 and takes 3"),
        ((1, 0), 2, "puts 1 into"),
        ((1, 1, 0), 3, "rank 2 puts 0"),
        ((2, 1), 2, "rank 0 puts 2, takes 2; rank 1 puts 1"),
    ],
)
def test_an_accumulator_that_waits_for_another_number_of_gradients_is_refused(
    applies: Sequence[int], required: int, told: str
) -> None:
    (problem,) = problems(*job(applies, required))
    assert told in problem


def test_what_no_step_runs_is_not_counted() -> None:
    ranks = job()
    ranks[1].step.clear()
    (problem,) = problems(*ranks)
    assert "rank 1 puts 0" in problem


def test_the_number_that_is_waited_for_has_to_be_constant() -> None:
    rank = Rank(0)
    handle = rank.accumulator()
    rank.apply(handle)
    rank.take(handle, rank.graph.add("Placeholder", name="n", attrs={"dtype": dtypes.INT32}).output())
    (problem,) = problems(rank)
    assert problem.startswith("how much 'take' moves through 'w/sum'")


def test_ranks_have_to_declare_an_accumulator_alike() -> None:
    ranks = job((1,), required=2)
    other = Rank(1)
    other.apply(other.accumulator(shape=(4,)))
    (problem,) = problems(*ranks, other)
    assert problem.startswith("the ranks declare 'w/sum' on /job:ps")


def test_accumulators_of_a_rank_s_own_process_are_its_own() -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        handle = rank.accumulator(device="/device:CPU:0")
        rank.apply(handle)
        rank.take(handle, rank.const("required", 1))
    assert problems(*ranks) == []


def tokens(made: int, ranks: int = 2) -> list[Rank]:
    """Return ranks that take a token each, of which the first one hands out so many."""
    job = [Rank(task) for task in range(ranks)]
    for rank in job:
        rank.dequeue(rank.queue())
    job[0].enqueue(job[0].graph.value("tokens"), made)
    return job


def test_as_many_tokens_as_ranks_are_right() -> None:
    assert problems(*tokens(2)) == []
    assert problems(*tokens(3, ranks=3)) == []


def test_a_missing_token_is_found() -> None:
    (problem,) = problems(*tokens(1))
    assert problem.startswith("one step puts 1 into 'tokens' on")
    assert "takes 2" in problem


def test_a_queue_that_something_else_fills_is_left_alone_unless_a_pass_made_it() -> None:
    rank = Rank(0)
    rank.dequeue(rank.queue())
    assert problems(rank) == []
    rank = Rank(0)
    rank.dequeue(rank.queue()).set_raw_attr(PASS_ATTR, encode("string", "servers"))
    (problem,) = problems(rank)
    assert "one step puts 0 into 'tokens'" in problem
