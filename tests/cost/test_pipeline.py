"""A pipeline is predicted as its formulae say: makespan, bubble, what crosses, and the memory of each stage."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.cost.hardware.machine import Machine, network_link
from autograph_rewrite.cost.hardware.topology import Topology
from autograph_rewrite.cost.pipeline.liveness import footprint
from autograph_rewrite.cost.pipeline.parts import divided
from autograph_rewrite.cost.pipeline.tasks import StagedStep, lives_of, schedule_of
from autograph_rewrite.cost.tasks.step import count, fold
from autograph_rewrite.cost.tasks.task import simulate_events
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.plan.parts import pipeline_schedule
from autograph_rewrite.plan.parts.pipeline_schedule import ideal_in_flight
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.wire_types import sizes_of
from autograph_rewrite.tools import cli
from benchmarks.cost import allocated, traced
from tests.support.paper_schedule import simulate
from tests.support.recomputed import transformer
from tests.support.staged import MODELS, inputs, staged_item, values, variable
from tests.support.training import make_item

WIDTH = 6 * 8
"""Bytes of one example's row in the perceptron."""


@lru_cache(maxsize=4)
def model(name: str) -> tuple[GraphItem, list[str]]:
    return staged_item(MODELS[name])


def planned(name: str, stages: int, micro: int, given: str, kind: str = "CPU", **more: Any) -> tuple[GraphItem, Plan]:
    item, cuts = model(name)
    devices = [f"{kind}:{i}" for i in range(stages)]
    pipeline = {"stages": stages, "microbatches": micro, "schedule": given, "devices": devices, **more}
    boundaries = {1: [], 2: cuts[1:2], 4: cuts}[stages * more.get("circular_repeat", 1)]
    config = {"devices": [f"{kind}:0"], "pipeline": {**pipeline, "boundaries": boundaries}}
    return item, ar.build_plan(item, config)


def played(item: GraphItem, plan: Plan, batch: int, *, copies: bool = True) -> StagedStep:
    """Return the tasks of a step, played on links that take no time."""
    folded = fold(normalise(item), plan)
    sizes = sizes_of(plan, folded.state, batch)
    staged = divided(folded, folded.resolve(plan), count(folded, sizes, Machine()))
    assert plan.pipeline is not None
    held = footprint(staged, sizes, interleaved=plan.interleaved, copies=copies)
    step = StagedStep(staged, held, plan.pipeline, plan.microbatches, Topology(plan, Machine(), network_link(None)))
    step.run()
    return step


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("given", ["gpipe", "1f1b"])
def test_activations_are_those_of_as_many_micro_batches_as_are_in_flight(given: str, stages: int, micro: int) -> None:
    """Each layer keeps its output, and each stage but the first, whose batch is there already, its input."""
    item, plan = planned("mlp", stages, micro, given)
    found = ar.simulate(item, plan, batch=8 * micro)
    layers, output = 4 // stages, 8 * WIDTH
    for number, device in enumerate(found.devices):
        in_flight = ideal_in_flight(given, number, stages, micro)
        assert device.in_flight == in_flight
        assert device.activation_bytes % in_flight == 0
        if number < stages - 1:  # the last also makes the loss
            assert device.activation_bytes == in_flight * (layers + (number > 0)) * output


def held_at_most(item: GraphItem, device: str) -> int:
    """Return how many layers' outputs a device of a rewritten graph holds at a time, if its nodes run in their order.

    From where it makes or first reads one for as long as it reads it; edges leave no other order of its tasks.
    """
    order = [node for node in topological_order(item.graph) if node.device.endswith(device)]
    places = {node: at for at, node in enumerate(order)}
    change = [0] * (len(order) + 1)
    for node in item.graph:
        if re.fullmatch(r"replica_0/micro_\d+/h\d", node.name):
            touching = [places[one] for one in (node, *(use.node for use in node.output().uses)) if one in places]
            if touching:
                change[min(touching)] += 1
                change[max(touching) + 1] -= 1
    return max(accumulate(change))


@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (2, 8), (4, 4), (4, 8)])
@pytest.mark.parametrize("given", ["gpipe", "1f1b"])
def test_the_rewritten_graph_holds_what_is_predicted(given: str, stages: int, micro: int) -> None:
    item, plan = planned("mlp", stages, micro, given)
    new = ar.rewrite(item, plan)
    for device in ar.simulate(item, plan, batch=8 * micro).devices[:-1]:  # the last one also makes the loss
        assert held_at_most(new, device.name) * 8 * WIDTH == device.activation_bytes


def contrastive() -> tuple[Any, list[str]]:
    """Compare every example with every other."""
    h = tf.tanh(inputs(6) @ variable("w0", values(6, 6)), name="h0")
    return tf.reduce_mean(tf.nn.log_softmax(h @ tf.transpose(h))), ["h0"]


def counted() -> tuple[Any, list[str]]:
    """Run a loop in the first stage, which each micro-batch has for itself."""
    w = variable("w0", values(6, 6))
    h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, inputs(6)])[1]
    return tf.reduce_mean((tf.identity(h, name="h0") @ variable("w1", values(6, 6))) ** 2), ["h0"]


def test_a_loop_of_each_micro_batch_is_simulated_in_its_stage() -> None:
    item, cuts = staged_item(counted)
    uses = {}
    for given in ("gpipe", "1f1b"):
        pipeline = {"stages": 2, "microbatches": 4, "schedule": given, "boundaries": cuts}
        plan = ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"], "pipeline": pipeline})
        uses[given] = ar.simulate(item, plan, batch=4096)
    assert uses["1f1b"].peak_bytes <= uses["gpipe"].peak_bytes
    assert all(device.busy_seconds > 0 for device in uses["gpipe"].devices)


def looped() -> tuple[Any, list[str]]:
    """Run a loop in the first stage, which real numbers decide: one for all micro-batches."""
    w = variable("w0", values(6, 6))
    h = tf.while_loop(lambda i, _: i < 2.5, lambda i, h: (i + 1, tf.tanh(h @ w)), [0.0, inputs(6)])[1]
    h = tf.identity(h, name="h0")
    return tf.reduce_mean((h @ variable("w1", values(6, 6))) ** 2), ["h0"]


@pytest.mark.parametrize(("forward", "why"), [(contrastive, "of the whole batch"), (looped, "is in a loop")])
def test_what_no_pipeline_can_wait_for_is_refused(forward: Any, why: str) -> None:
    item, cuts = staged_item(forward)
    plan = ar.build_plan(item, {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 2, "boundaries": cuts}})
    with pytest.raises(PlanError, match=why):
        ar.simulate(item, plan)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 4), (4, 8)])
def test_1f1b_needs_less_memory_than_gpipe_where_less_is_in_flight(name: str, stages: int, micro: int) -> None:
    uses = {given: ar.simulate(*planned(name, stages, micro, given), batch=8 * micro) for given in ("gpipe", "1f1b")}
    for gpipe, other in zip(uses["gpipe"].devices, uses["1f1b"].devices, strict=True):
        assert Fraction(gpipe.activation_bytes, gpipe.in_flight) == Fraction(other.activation_bytes, other.in_flight)
        if other.in_flight < gpipe.in_flight:
            assert other.activation_bytes < gpipe.activation_bytes
            assert other.peak_bytes < gpipe.peak_bytes
        else:
            assert other.peak_bytes <= gpipe.peak_bytes


@pytest.mark.parametrize(
    ("given", "devices", "micro", "more"),
    [
        ("gpipe", 4, 8, {}),
        ("1f1b", 4, 8, {}),
        ("1f1b", 2, 3, {}),
        ("interleaved", 2, 4, {"circular_repeat": 2}),
        ("circular", 2, 4, {"circular_repeat": 2}),
    ],
)
def test_the_tasks_end_when_the_schedule_says(given: str, devices: int, micro: int, more: dict[str, Any]) -> None:
    item, plan = planned("mlp", devices, micro, given, "GPU", **more)
    step = played(item, plan, 8 * micro)
    for task in step.moves.values():
        assert task.seconds > 0
    costs = {key: task.seconds for key, task in step.tasks.items()}
    stages = step.staged.stages
    orders = pipeline_schedule.orders(*schedule_of(step.pipeline, step.staged, micro))
    forward, backward = ([Fraction(costs[kind, 0, s, 0]) for s in range(stages)] for kind in "FB")
    expected = simulate(orders, forward, backward)
    free = played_without_links(item, plan, 8 * micro)
    ends = [task.end for (kind, *_), task in free.tasks.items() if kind in "FB"]
    begins = [task.start for (kind, *_), task in free.tasks.items() if kind in "FB"]
    assert max(ends) - min(begins) == pytest.approx(float(expected.makespan))
    assert max(task.end for (kind, *_), task in step.tasks.items() if kind in "FB") > max(ends)


def played_without_links(item: GraphItem, plan: Plan, batch: int) -> StagedStep:
    """Return the tasks of a step whose devices are so close that nothing is on its way."""
    step = played(item, plan, batch)
    for task in step.moves.values():
        task.seconds, task.holds = 0.0, {}
    simulate_events(step.all_tasks, {})
    return step


def two_processes(gigabits: float) -> ar.Simulation:
    """Return one step of two stages that are in a process each."""
    item, cuts = model("mlp")
    devices = [f"/job:worker/task:{task}/device:CPU:0" for task in range(2)]
    pipeline = {"stages": 2, "microbatches": 4, "boundaries": cuts[1:2], "devices": devices}
    plan = ar.build_plan(item, {"devices": ["CPU:0"], "pipeline": pipeline})
    return ar.simulate(item, plan, {"bandwidth_gbps": gigabits, "latency_us": 1.0}, batch=32)


def test_links_carry_what_is_cut_once_for_each_micro_batch() -> None:
    found = two_processes(10.0)
    first, second = (f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2))
    output = 8 * WIDTH
    assert {link.name: link.bytes for link in found.links} == {
        f"{first} to {second}": 4 * output,
        f"{second} to {first}": 4 * output,
    }
    assert found.moved_bytes == 8 * output
    assert two_processes(0.001).step_seconds > 2 * found.step_seconds
    assert two_processes(0.001).bubble > found.bubble > 0


def test_replicas_of_a_pipeline_send_their_gradients_once() -> None:
    item, cuts = model("mlp")
    pipeline = {"stages": 2, "microbatches": 4, "boundaries": cuts[1:2]}
    plan = ar.build_plan(item, {"devices": [f"GPU:{i}" for i in range(4)], "pipeline": pipeline})
    found = ar.simulate(item, plan, batch=64)
    assert [device.variable_bytes > 0 for device in found.devices] == [True, True, False, False]
    carried = {link.name: link.bytes for link in found.links}
    gradients = {device.name: device.gradient_bytes for device in found.devices}
    assert carried["GPU:2 to GPU:0"] == gradients["GPU:2"] > 2 * 6 * 6 * 8
    assert carried["GPU:0 to GPU:1"] == carried["GPU:2 to GPU:3"] == 4 * 8 * WIDTH


def test_two_stages_can_share_a_device() -> None:
    item, cuts = model("mlp")
    pipeline = {"stages": 2, "microbatches": 4, "boundaries": cuts[1:2], "devices": ["CPU:0", "CPU:0"]}
    plan = ar.build_plan(item, {"devices": ["CPU:0"], "pipeline": pipeline})
    (device,) = ar.simulate(item, plan, batch=32).devices
    assert device.in_flight == 2 + 1
    apart = ar.simulate(*planned("mlp", 2, 4, "1f1b"), batch=32)
    received = 8 * WIDTH  # what the second stage has from the first is there already
    assert device.variable_bytes == sum(one.variable_bytes for one in apart.devices)
    assert device.activation_bytes <= sum(one.activation_bytes for one in apart.devices) - received
    assert not ar.simulate(item, plan, batch=32).links


def test_the_bytes_are_those_that_tensorflow_allocates() -> None:
    """All stages but the last agree to the byte; the last one's loss is simplified by TensorFlow before it runs."""
    rows, micro, width = 512, 4, 64

    def wide() -> tuple[Any, list[str]]:
        h, cuts = inputs(width, dtype=tf.float32), []
        for i in range(4):
            h = tf.tanh(h @ variable(f"w{i}", values(width, width, seed=i).astype(np.float32)), name=f"h{i}")
            cuts.append(h.op.name)
        return tf.reduce_mean((h - 1) ** 2), cuts[:3]

    item, cuts = staged_item(wide)
    x = np.random.default_rng(0).normal(size=(rows * micro, width)).astype(np.float32)
    pipeline = {"stages": 2, "microbatches": micro, "schedule": "gpipe", "boundaries": cuts[1:2]}
    new = ar.rewrite(item, {"devices": ["CPU:0"], "pipeline": pipeline})
    # Threads race: in some steps a buffer is given back before another is made, or after it.
    usual = median_low(allocated(stats, new) for stats in traced(new, _Built, {"x": x}, steps=15))
    step = played(item, new.report.plan, rows * micro, copies=False)  # CPU devices of one process share its memory
    predicted = lives_of(one for one in step.alive if one.device.endswith("CPU:0")).peak
    assert predicted > micro * 2 * rows * width * 4  # the outputs of two layers, for each micro-batch
    assert predicted == pytest.approx(usual, rel=0.05)


class _Built:
    """What `traced` asks of a graph."""

    init_op, train_op, outputs = "init", "train", ("loss",)


def test_a_stage_that_adds_only_keeps_nothing() -> None:
    """The byte model can tell: an addition's gradient needs none of its values."""
    graph = tf.Graph()
    with graph.as_default():
        h = tf.add(inputs(6), variable("b", values(6)), name="h")
        loss = tf.reduce_mean((h @ variable("w", values(6, 6))) ** 2)
        tf.identity(loss, name="loss")
        tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["loss"])
    plan = ar.build_plan(
        item, {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 4, "boundaries": ["h"]}}
    )
    found = ar.simulate(item, plan, batch=32).devices
    assert found[0].activation_bytes < WIDTH  # shapes at most
    assert found[1].activation_bytes > 8 * WIDTH


def test_the_verb_prints_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item, cuts = model("mlp")
    item.save(tmp_path / "g.ar")
    lines = ["devices: [CPU:0]", f"pipeline: {{stages: 2, microbatches: 4, boundaries: [{cuts[1]}]}}"]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    options = [str(tmp_path / "g.ar"), "--config", str(tmp_path / "c.yaml"), "--batch", "64"]
    assert cli.main(["simulate", *options, "--trace", str(tmp_path / "t.json")]) == 0
    printed = capsys.readouterr().out
    assert "2 in flight" in printed
    assert "bubble" in printed
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"F0@0", "B3@1"} <= {event["name"] for event in events if event["ph"] == "X"}
    found = ar.simulate(item, ar.build_plan(item, str(tmp_path / "c.yaml")), batch=64)
    lanes = {event.name: event.lane for event in found.events}
    assert (lanes["F0@0"], lanes["F0@1"]) == tuple(device.name for device in found.devices)  # which share the cores
    assert cli.main(["simulate", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [device["in_flight"] for device in found["devices"]] == [2, 1]
    assert found["bubble"] > 0


def test_sizes_that_only_some_value_of_a_micro_batch_has_do_not_let_the_reads_wait_for_it() -> None:
    item = make_item(transformer())
    pipeline = {"stages": 2, "microbatches": 4, "boundaries": ["block_1/add_1"]}
    plan = ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"], "pipeline": pipeline})
    assert ar.simulate(item, plan, batch=64).step_seconds > 0
