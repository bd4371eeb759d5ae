"""What goes into the loops of a pipeline, and what comes out of them: rows in their order, branches, plans, texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import PassError, PlanError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, STAGE, Axis, Mesh, PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.verify.folded import check_folded
from autograph_rewrite.passes.emit.expand import expand
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout
from autograph_rewrite.passes.micro_batches.loop import roll_micro_batches
from autograph_rewrite.passes.pipeline_parallel.loop import roll_stages
from autograph_rewrite.plan.parts.messages import Micro, Pipeline
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.stages.assignment import Stages, repeated_layers
from tests.support.staged import MODELS, assert_alike, feed, inputs, staged_item, train, values, variable

v1 = tf.compat.v1
CUTS = ["h0", "h1", "h2"]


def looped(item: GraphItem, **pipeline: Any) -> GraphItem:
    return ar.rewrite(item, {"devices": ["CPU:0"], "pipeline": {"form": "loop", "stages": 4, **pipeline}})


def predicting() -> GraphItem:
    """Return four layers whose outputs are the loss, results by rows and by columns, and gradients of examples."""
    graph = tf.Graph()
    with graph.as_default():
        x, y = inputs(6), v1.placeholder(tf.float64, (None, 6), name="y")
        h = x
        for i in range(4):
            h = tf.tanh(h @ variable(f"w{i}", values(6, 6, seed=i)), name=f"h{i}")
        loss = tf.reduce_mean((h - y) ** 2, name="loss")
        tf.identity(v1.gradients(loss, x)[0], name="slope_x")
        tf.identity(h, name="prediction")
        tf.transpose(h, name="columns")
        v1.train.AdamOptimizer(0.05).minimize(loss, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    outputs = ["loss", "prediction", "slope_x", "columns"]
    return GraphItem.from_graph(graph, train_op="train", outputs=outputs, init_op="init")


def examples(batch: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(batch)
    return [{"x": rng.normal(size=(batch, 6)), "y": rng.normal(size=(batch, 6))} for _ in range(2)]


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
@pytest.mark.parametrize(("micro", "batch"), [(4, 8), (4, 11), (2, 8)])
def test_outputs_and_gradients_of_inputs_come_back_in_the_order_of_the_rows(
    micro: int, batch: int, layout: str
) -> None:
    item, feeds = predicting(), examples(batch)
    assert_alike(train(looped(item, microbatches=micro, layout=layout, boundaries=CUTS), feeds), train(item, feeds))


def test_a_prediction_is_fetched_from_the_forward_loop_without_labels() -> None:
    item, given = predicting(), {"x": examples(8)[0]["x"]}
    with looped(item, microbatches=4, boundaries=CUTS).session() as session, item.session() as single:
        for each in (session, single):
            each.run(item.init_op)
        got, expected = (each.run("prediction", given) for each in (session, single))
    np.testing.assert_allclose(got, expected, 1e-12)


def branching() -> tuple[Any, list[str]]:
    """Layers with a branch that reads a variable."""
    h, cuts = inputs(6), []
    flag = v1.placeholder_with_default(True, (), name="flag")
    for i in range(4):
        w = variable(f"w{i}", values(6, 6, seed=i))
        h = tf.identity(tf.cond(flag, lambda h=h, w=w: tf.tanh(h @ w), lambda h=h, w=w: h @ w), name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean((h - 1) ** 2), cuts[:3]


def test_a_branch_that_has_something_of_its_own_is_refused_by_name() -> None:
    item, cuts = staged_item(branching)
    with pytest.raises(PassError, match=r"is in a branch or a loop, and needs .*ReadVariableOp. of it from outside"):
        looped(item, microbatches=4, boundaries=cuts)


def one_variable() -> tuple[Any, list[str]]:
    """Layers whose weights are slices of one variable."""
    h, cuts, w = inputs(6), [], variable("w", values(4, 6, 6))
    for i in range(4):
        h = tf.tanh(h @ tf.gather(w, i), name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean((h - 1) ** 2), cuts[:3]


def test_the_weights_of_all_stages_can_be_one_variable() -> None:
    item, cuts = staged_item(one_variable)
    feeds = [feed(item, step) for step in range(3)]
    assert_alike(train(looped(item, microbatches=4, boundaries=cuts), feeds), train(item, feeds))


@pytest.mark.parametrize("name", ["mlp", "skipping", "dropout", "masked"])
def test_layers_are_found_where_nothing_says_where_stages_begin(name: str) -> None:
    item, _ = staged_item(MODELS[name])
    new = looped(item, microbatches=4)
    assert [new.graph.nodes[f"w{i}"].device for i in range(4)] == [f"/device:CPU:{i}" for i in range(4)]
    feeds = [feed(item, step) for step in range(2)]
    assert_alike(train(new, feeds), train(item, feeds))


@pytest.mark.parametrize(
    ("ops", "stages", "expected"),
    [
        ("gmtmtmtmts", 2, [5]),
        ("gmtmtmtmts", 4, [3, 5, 7]),
        ("mmmm", 2, [2]),
        ("abcabcabc", 2, [3]),
        ("abcd", 2, None),
        ("mtmt", 4, None),
    ],
)
def test_what_is_repeated_is_divided(ops: str, stages: int, expected: list[int] | None) -> None:
    heavy = [9.0 if op in "tb" else 1.0 for op in ops]
    assert repeated_layers(ops, [*heavy, 0.0], stages) == expected


def test_a_plan_whose_schedule_is_not_that_of_a_loop_is_refused() -> None:
    item, cuts = staged_item(MODELS["mlp"])
    pipeline = {"stages": 4, "microbatches": 2, "boundaries": cuts, "form": "loop"}
    plan = ar.build_plan(item, {"devices": ["CPU:0"], "pipeline": pipeline})
    assert plan.pipeline is not None
    edited = replace(plan, pipeline=replace(plan.pipeline, schedule="one_f_one_b"))
    with pytest.raises(PlanError, match="has the schedule gpipe, and the plan says one_f_one_b"):
        ar.rewrite(item, edited)


def test_seeds_that_differ_between_micro_batches_are_refused_by_name() -> None:
    item, cuts = staged_item(MODELS["dropout"])
    config = {
        "devices": ["CPU:0"],
        "pipeline": {"stages": 4, "microbatches": 2, "boundaries": cuts, "form": "loop"},
        "semantics": {"random": "independent"},
    }
    with pytest.raises(PassError, match="differs between micro-batches"):
        ar.rewrite(item, config)


def first_of_three() -> tuple[Graph, Node]:
    """Return a folded graph with a number that differs between micro-batches, of which somebody reads the first."""
    graph = Graph()
    raws = PerInstance(tuple(encode("tensor", np.asarray(number, np.int32)) for number in (10, 20, 30)))
    attrs = {"value": raws, "dtype": dtypes.INT32}
    number = graph.add("Const", name="number", attrs=attrs, span=EACH).output()
    twice = graph.add("AddV2", [number, number], name="twice", span=EACH).output()
    return graph, graph.add("Identity", [twice], name="read", selects={0: Select.FIRST})


@pytest.mark.parametrize("stage", [None, 0, 1])
def test_who_reads_one_micro_batch_reads_the_first(stage: int | None) -> None:
    """The last ones of a small batch are empty."""
    graph, read = first_of_three()
    devices = ("/device:CPU:0", "/device:CPU:1")
    if stage is None:
        roll_micro_batches(graph, Mesh.of(1, 3), {}, [read])
    else:
        for node in [node for node in graph if node.span == EACH]:
            node.put(STAGE, stage)
        plan = Plan(devices=devices[:1], micro=Micro(3, loop=True), pipeline=Pipeline(2, devices, "gpipe"))
        roll_stages(graph, Stages(set()), plan, {}, [read])
    places = (Axis(STAGE, 2),)
    check_folded(graph, Mesh.of(1, places=places))
    written = tf.Graph()
    with written.as_default():
        data = expand(graph, ReplicaLayout(replace(Mesh.of(1, 1, places), devices=devices[:1] * 2)), set())
        tf.import_graph_def(v1.GraphDef.FromString(data), name="")
    with v1.Session(graph=written) as session:
        assert session.run("read:0") == 20
