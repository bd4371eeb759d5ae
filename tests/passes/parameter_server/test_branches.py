"""In branches that update what is on servers, every worker runs what it has of them, and nothing of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import Guards, frames_of, guards_of, opened
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ops.traits import MERGES
from autograph_rewrite.passes.parameter_server import delegate_to_chief
from tests.jobs.programs.served import PROXIES, item_of
from tests.jobs.programs.served_graphs import Names, in_a_branch, kept_in_a_branch, named, predicted
from tests.passes.parameter_server.test_sums_between_workers import rank_1
from tests.support.rank_jobs import item_of as zoo_item


def alive_together(graph: Graph) -> Iterator[Node]:
    """Yield what brings branches together of which more than one may be taken at once."""
    order = topological_order(graph)
    frames = frames_of(order)
    guards = guards_of(order, frames)
    for node in order:
        if node.op in MERGES and not any(value.node.op == "NextIteration" for value in node.inputs):
            first, second = (opened(value, frames, guards.get(value.node, Guards())) for value in node.inputs)
            if not any(guard._replace(taken=not guard.taken) in second for guard in first):
                yield node


def decided_there() -> Names:
    """Let a variable on the server decide about an update, and fetch which branch was taken."""
    loss = tf.reduce_mean(tf.square(predicted() - 1))
    (w,) = tf.compat.v1.trainable_variables()
    (slope,) = tf.gradients(loss, [w])
    taken = tf.reduce_sum(w) < 100

    def update() -> tf.Tensor:
        with tf.control_dependencies([w.assign_sub(0.1 * slope)]):
            return tf.constant(1.0, tf.float64)

    done = tf.cond(taken, update, lambda: tf.constant(0.0, tf.float64))
    with tf.control_dependencies([done]):
        tf.no_op(name="train")
    return ["train"], named(loss=loss, done=done)


def test_what_a_worker_reads_in_a_branch_is_handed_over_in_front_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    item = item_of(kept_in_a_branch, 2)
    order = topological_order(rank_1(item, "PS").graph)
    guards, inputs = guards_of(order, frames_of(order)), {}
    for node in order:
        if node.op == "QueueDequeueV2":
            inputs |= {user.name: user for value in node.outputs for user, _ in value.uses}
    assert inputs
    assert not [name for name, node in inputs.items() if guards.get(node)]
    monkeypatch.setattr(delegate_to_chief, "_switch_in_every_process", lambda _: None)
    with pytest.raises(PassError, match=r"every worker reads '.*switch.*', which a parameter server computes in a"):
        rank_1(item, "PS")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("more", [pytest.param({}, id="there"), pytest.param(PROXIES, id="copies")])
def test_a_worker_without_the_updates_of_a_branch_is_in_that_branch_all_the_same(
    version: int, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    item = item_of(in_a_branch, version)
    assert list(alive_together(rank_1(item, "PS", **more).graph)) == []
    monkeypatch.setattr(delegate_to_chief.Branches, "_find_lost", lambda _: {})
    assert [node.op for node in alive_together(rank_1(item, "PS", **more).graph)] == ["Merge"]


@pytest.mark.parametrize("model", ["cond_v1", "loss_scaling"])
def test_of_branches_that_meet_on_a_worker_one_is_taken(model: str) -> None:
    graph = rank_1(zoo_item(model), "PS").graph
    assert list(alive_together(graph)) == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_branch_that_only_the_server_decides_about_is_told_to_the_workers(version: int) -> None:
    graph = rank_1(item_of(decided_there, version), "PS").graph
    assert list(alive_together(graph)) == []
    merges = [node for node in graph if node.op in MERGES]
    assert {node.device for node in merges} == {"/job:worker/replica:0/task:1/device:CPU:0"}
