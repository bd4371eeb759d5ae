"""Between stages in different processes one tensor goes forward and one back per micro-batch, as early as can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors
from benchmarks.dist import free_ports
from tests.support.staged import MODELS, assert_alike, feed, staged_item, train

SENT, TURN = "/sent", "autograph_stages/turn"


def device(task: int) -> str:
    return f"/job:worker/task:{task}/device:CPU:0"


def task_of(name: str) -> int:
    return int(name.partition("/task:")[2].partition("/")[0])


def staged(name: str, stages: int, micro: int, **more: Any) -> tuple[GraphItem, GraphItem]:
    """Return a model, and the same in stages of a process each."""
    item, cuts = staged_item(MODELS[name])
    boundaries = {2: cuts[1:2], 4: cuts}[stages]
    pipeline = {"stages": stages, "microbatches": micro, "boundaries": boundaries, **more}
    pipeline["devices"] = [device(task) for task in range(stages)]
    return item, ar.rewrite(item, {"devices": ["CPU:0"], "pipeline": pipeline})


def crossing(item: GraphItem) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return the tensors, and what is waited for, that go to another device: each with where it goes."""
    tensors = {(v.name, n.device) for n in item.graph for v in n.inputs if v.node.device != n.device}
    return tensors, {(c.name, n.device) for n in item.graph for c in n.controls if c.device != n.device}


def of_micro(names: set[tuple[str, str]], micro: int) -> set[tuple[str, str]]:
    return {(name, to) for name, to in names if f"/micro_{micro}/" in f"/{name}"}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (2, 8), (4, 4)])
def test_one_tensor_goes_forward_and_one_back_at_each_cut(stages: int, micro: int, schedule: str) -> None:
    _, new = staged("mlp", stages, micro, schedule=schedule)
    tensors, waits = crossing(new)
    for m in range(micro):
        assert sorted(task_of(to) for _, to in of_micro(tensors, m)) == sorted([*range(stages - 1), *range(1, stages)])
        assert not of_micro(waits, m)


def test_what_is_sent_once_does_not_grow_with_the_micro_batches() -> None:
    counts = []
    for micro in (2, 8):
        tensors, waits = crossing(staged("mlp", 2, micro)[1])
        own = set().union(*(of_micro(tensors, m) for m in range(micro)))
        counts.append((len(tensors - own), len(waits)))
    assert counts[0] == counts[1]


def products(item: GraphItem, stage: int, micro: int) -> tuple[Node, Node]:
    """Return the products behind one layer's loss: the gradient of its input, and of its weights."""
    name = f"replica_0/micro_{micro}/gradients/matmul{f'_{stage}' if stage else ''}_grad/MatMul"
    return item.graph.nodes[name], item.graph.nodes[f"{name}_1"]


def test_the_gradient_that_goes_back_is_made_and_sent_before_those_of_the_weights() -> None:
    _, new = staged("mlp", 2, 4)
    for micro in range(4):
        (sent,) = [n for n in new.graph if n.name.endswith(SENT) and f"/micro_{micro}/grad" in n.name]
        needed = ancestors([sent])
        for layer in (2, 3):
            inner, weights = products(new, layer, micro)
            assert inner in needed
            assert weights not in needed
            turns = [n for n in ancestors([weights]) if TURN in n.name and f"/micro_{micro}/" in n.name]
            assert any(sent not in ancestors([turn]) and turn.device == sent.device for turn in turns)


def test_a_stage_begins_once_the_next_one_has_asked() -> None:
    _, new = staged("mlp", 4, 4)
    for stage in range(3):
        (begin,) = [n for n in new.graph if n.name == f"replica_0/micro_0/matmul{f'_{stage}' if stage else ''}"]
        asked = {task_of(n.device) for n in ancestors([begin]) if f"answered_{stage}" in n.name}
        assert asked == {stage + 1}


@pytest.fixture(scope="module")
def servers() -> list[Any]:
    ports = free_ports(2)
    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    return [tf.distribute.Server(cluster, job_name="worker", task_index=task) for task in range(2)]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_in_two_processes_compute_what_one_device_computes(name: str, schedule: str, servers: list[Any]) -> None:
    item, new = staged(name, 2, 4, schedule=schedule)
    feeds = [feed(item, step) for step in range(3)]
    names = list(item.outputs)
    with new.session(servers[0].target) as session:
        session.run(item.init_op)
        outputs = []
        for given in feeds:
            got = session.run([*names, "train"], given, timeout_ms=60000)
            outputs.append(dict(zip(names, got[:-1], strict=True)))
        variables = session.read_variables()
        assert np.isfinite(session.run("loss", feeds[0], timeout_ms=60000))  # alone, without any gradient
    assert_alike((outputs, variables), train(item, feeds))
    assert np.isfinite(outputs[-1]["loss"])
