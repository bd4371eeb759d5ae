"""A model that is cut into stages trains to the same values, whatever the cuts, the schedule and the micro-batches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.plan.parts.pipeline_schedule import ideal_in_flight, orders
from tests.support.covering import covering
from tests.support.staged import MODELS, assert_alike, convolutions, feed, inputs, staged_item, train, values, variable

GOLDEN = 0.268087


@lru_cache(maxsize=16)
def model(name: str) -> tuple[GraphItem, list[str], Any]:
    """Return a model, its boundaries, and what three steps on one device give."""
    item, cuts = staged_item(MODELS[name])
    return item, cuts, train(item, feeds_of(item))


def feeds_of(item: GraphItem) -> list[dict[str, Any]]:
    return [feed(item, step) for step in range(3)]


def piped(item: GraphItem, **pipeline: Any) -> GraphItem:
    return ar.rewrite(item, {"devices": ["CPU:0"], "pipeline": pipeline})


def boundaries(cuts: list[str], stages: int) -> list[str]:
    return {1: [], 2: cuts[1:2], 4: cuts}[stages]


STAGES, MICRO = (1, 2, 4), (1, 2, 4, 8)
LAYOUTS, SCHEDULES = ("contiguous", "interleaved"), ("gpipe", "1f1b")


@pytest.mark.parametrize(
    ("name", "stages", "micro", "schedule", "layout"), covering(list(MODELS), STAGES, MICRO, SCHEDULES, LAYOUTS)
)
def test_stages_compute_what_one_device_computes(
    name: str, stages: int, micro: int, schedule: str, layout: str
) -> None:
    item, cuts, expected = model(name)
    where = {"boundaries": boundaries(cuts, stages)} if layout == "contiguous" else {}
    new = piped(item, stages=stages, microbatches=micro, schedule=schedule, layout=layout, **where)
    assert_alike(train(new, feeds_of(item)), expected)


@pytest.mark.parametrize("schedule", ["interleaved", "circular"])
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_several_stages_can_share_a_device_in_turn(name: str, schedule: str) -> None:
    item, cuts, expected = model(name)
    new = piped(item, stages=2, circular_repeat=2, microbatches=4, schedule=schedule, boundaries=cuts)
    assert_alike(train(new, feeds_of(item)), expected)
    assert {node.device for node in new.graph} == {"/device:CPU:0", "/device:CPU:1"}


@pytest.mark.parametrize(("stages", "micro"), covering(STAGES, (1, 4, 8, 2)))
def test_the_gradient_norm_of_sixteen_convolutions_is_the_published_one(stages: int, micro: int) -> None:
    item, cuts = convolved()
    new = piped(item, stages=stages, microbatches=micro, boundaries=boundaries(cuts, stages))
    outputs, _ = train(new, [{"x": published_examples()}])
    slopes = [value for name, value in outputs[0].items() if name.startswith("slope")]
    assert np.sqrt(sum(np.sum(np.square(slope)) for slope in slopes)) == pytest.approx(GOLDEN, abs=1e-6)


@lru_cache(maxsize=1)
def convolved() -> tuple[GraphItem, list[str]]:
    return staged_item(convolutions)


@lru_cache(maxsize=1)
def published_examples() -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(1245)
        return session.run(tf.compat.v1.random_uniform([16, 8, 8, 1], seed=12345))


def test_replicas_of_a_pipeline_are_summed_once_per_step() -> None:
    item, cuts, expected = model("mlp")
    config = {
        "devices": [f"CPU:{i}" for i in range(4)],
        "pipeline": {"stages": 2, "microbatches": 2, "boundaries": cuts[1:2]},
    }
    new = ar.rewrite(item, config)
    assert_alike(train(new, feeds_of(item)), expected)
    matrices = {node.device for node in new.graph if node.op == "MatMul"}
    assert matrices == {f"/device:CPU:{i}" for i in range(4)}


@pytest.mark.parametrize(
    ("how", "strategy"),
    covering(
        [{"microbatches": 4}, {"pipeline": {"stages": 2, "microbatches": 4}}],
        ["PartitionedAR", "PS", "PartitionedPS", "FSDP"],
    ),
)
def test_variables_in_shards_and_on_servers_go_together_with_them(how: Any, strategy: str) -> None:
    item, _, expected = model("mlp")
    devices = ["CPU:0"] if "pipeline" in how else ["CPU:0", "CPU:1"]
    config = {"devices": devices, "strategy": {"name": strategy}, **how}
    assert_alike(train(ar.rewrite(item, config), feeds_of(item)), expected)


def test_a_batch_that_cannot_be_divided_makes_uneven_micro_batches() -> None:
    item, cuts, _ = model("mlp")
    feeds = [feed(item, step, batch=11) for step in range(2)]
    assert_alike(train(piped(item, stages=4, microbatches=4, boundaries=cuts), feeds), train(item, feeds))


def test_a_lost_micro_batch_would_be_noticed() -> None:
    item, _, expected = model("mlp")
    short = train(item, [{"x": given["x"][:6]} for given in feeds_of(item)])
    assert np.abs(short[1]["w0"] - expected[1]["w0"]).max() > 1e-3


def of_task(item: GraphItem, kind: str, stage: int, micro: int) -> list[Node]:
    """Return the matrix products of one layer's forward or backward part, of one micro-batch."""
    name = "matmul" if stage == 0 else f"matmul_{stage}"
    start = f"replica_0/micro_{micro}/" + (name if kind == "F" else f"gradients/{name}_grad/MatMul")
    names = (start,) if kind == "F" else (start, f"{start}_1")
    return [node for node in item.graph if node.name in names and node.op == "MatMul"]


@pytest.mark.parametrize(
    ("schedule", "devices", "chunks"), [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("circular", 2, 2)]
)
def test_each_device_runs_its_tasks_in_the_order_of_the_schedule(schedule: str, devices: int, chunks: int) -> None:
    """Whatever begins later on a device waits, by some path, for all that came before."""
    item, cuts, _ = model("mlp")
    new = piped(item, stages=devices, circular_repeat=chunks, microbatches=4, schedule=schedule, boundaries=cuts)
    for device, tasks in enumerate(orders(schedule, devices, 4, chunks)):
        before: list[Node] = []
        for task in tasks:
            own = of_task(new, task.kind, task.stage, task.micro)
            assert own, task
            assert {node.device for node in own} == {f"/device:CPU:{device}"}
            for node in own:
                assert set(before) <= ancestors([node]), f"{node.name} does not wait for all of {task}'s predecessors"
            before = own


@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 4), ("1f1b", 4), ("gpipe", 2), ("1f1b", 2)])
def test_activations_are_held_for_as_many_micro_batches_as_the_formula_says(schedule: str, devices: int) -> None:
    """Those that have begun before one begins, by some path in the graph, and need not have ended."""
    item, cuts, _ = model("mlp")
    micro = 4
    new = piped(item, stages=devices, microbatches=micro, schedule=schedule, boundaries=boundaries(cuts, devices))
    layers = 4 // devices
    for stage in range(devices):
        forward = [set(of_task(new, "F", stage * layers, m)) for m in range(micro)]
        backward = [set(of_task(new, "B", stage * layers, m)) for m in range(micro)]
        before = [ancestors(nodes) for nodes in forward]
        held = [sum(f <= seen and not b <= seen for f, b in zip(forward, backward, strict=True)) for seen in before]
        assert max(held) == ideal_in_flight(schedule, stage, devices, micro)


def test_without_the_order_micro_batches_are_independent() -> None:
    """The test above can fail: data alone does not order the forward parts of two micro-batches."""
    item, cuts, _ = model("mlp")
    new = piped(item, stages=4, microbatches=4, schedule="gpipe", boundaries=cuts)
    (first,), (second,) = of_task(new, "F", 0, 0), of_task(new, "F", 0, 1)
    assert first in ancestors([second])
    assert first not in ancestors([second], controls=False)


def test_a_shared_table_lives_in_its_first_stage_and_is_updated_once() -> None:
    item, cuts, _ = model("tied")
    graph = piped(item, stages=4, microbatches=2, boundaries=cuts).graph
    assert graph.nodes["table"].device == "/device:CPU:0"
    assert len([node for node in graph if "Apply" in node.op and "table" in node.name]) == 1


def test_patterns_of_names_say_which_stage_a_node_is_in() -> None:
    item, _, expected = model("mlp")
    new = piped(item, stages=2, microbatches=2, names=["h0|matmul|add", "(matmul|add|h)_?[1-3]"])
    assert new.graph.nodes["w0"].device == "/device:CPU:0"
    assert {new.graph.nodes[f"w{i}"].device for i in (1, 2, 3)} == {"/device:CPU:1"}
    assert_alike(train(new, feeds_of(item)), expected)


def by_device(*devices: str | None) -> tuple[Any, list[str]]:
    """Two layers that the user has put on devices."""
    with tf.device(devices[0]):
        h = tf.tanh(inputs(6) @ variable("w0", values(6, 6)))
    with tf.device(devices[1]):
        return tf.reduce_mean((h @ variable("w1", values(6, 6, seed=1))) ** 2), []


def test_the_devices_of_the_graph_can_say_where_stages_begin() -> None:
    item, _ = staged_item(lambda: by_device("/cpu:5", "/cpu:2"))
    single, _ = staged_item(lambda: by_device(None, None))
    new = piped(item, stages=2, microbatches=2, assign="device")
    assert [new.graph.nodes[name].device for name in ("w0", "w1")] == ["/device:CPU:0", "/device:CPU:1"]
    assert_alike(train(new, feeds_of(item)), train(single, feeds_of(item)))
    with pytest.raises(PlanError, match="names 2 devices on the way to the loss"):
        piped(item, stages=3, microbatches=2, assign="device")


def test_costs_are_balanced_where_nothing_says_where_stages_begin() -> None:
    item, _ = convolved()
    graph = piped(item, stages=4, microbatches=2).graph
    devices = [graph.nodes[f"w{i}"].device for i in range(16)]
    assert devices == sorted(devices)
    assert [devices.count(f"/device:CPU:{stage}") for stage in range(4)] == [4, 4, 4, 4]


def logarithms() -> tuple[Any, list[str]]:
    """Take the logarithm in each stage: finite for what examples give, and not a number on zeros."""
    h, cuts = inputs(6), []
    for i in range(4):
        h = tf.math.log(tf.exp(h * variable(f"w{i}", 1 + values(6, seed=i, scale=0.1))) + tf.abs(h), name=f"h{i}")
        h = tf.identity(tf.math.log(h**2), name=f"cut{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean(h), cuts[:3]


@pytest.mark.parametrize("batch", [8, 7, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_compute_on_nothing_but_examples(schedule: str, batch: int) -> None:
    """The bubble of a pipeline does no work, so a body that is not a number on zeros stays finite, and exact."""
    item, cuts = staged_item(logarithms)
    feeds = [feed(item, step, batch) for step in range(3)]
    expected = train(item, feeds)
    assert all(np.isfinite(value).all() for values_ in expected[0] for value in values_.values())
    assert_alike(train(piped(item, stages=4, microbatches=4, schedule=schedule, boundaries=cuts), feeds), expected)


def test_the_body_of_logarithms_would_show_a_stage_that_computes_on_zeros() -> None:
    item, _ = staged_item(logarithms)
    (outputs,), _ = train(item, [{"x": np.zeros((8, 6))}])
    assert not np.isfinite(outputs["loss"])


def test_a_plan_with_stages_is_read_as_it_was_written(tmp_path: Any) -> None:
    item, cuts, expected = model("mlp")
    plan = ar.build_plan(item, {"devices": ["CPU:0"], "pipeline": {"stages": 4, "microbatches": 4, "boundaries": cuts}})
    plan.save(tmp_path / "plan.yaml")
    read = ar.Plan.load(tmp_path / "plan.yaml")
    assert read == plan
    assert_alike(train(ar.rewrite(item, read), feeds_of(item)), expected)
