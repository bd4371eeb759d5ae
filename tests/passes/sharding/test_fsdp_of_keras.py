"""FSDP of Keras models: optimizers that update under conditions train as on one device, and bytes are divided."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.passes.base.builder import FoldedBuilder
from tests.support.covering import covering
from tests.support.keras_floats import keras_floats
from tests.support.sharded_models import MODELS, OPTIMIZERS, batches, compiled, on_one_device, over_data, trained, worst
from tests.support.training import v1

STAGES = (1, 2, 3, "FSDP")
REPLICAS = (2, 3, 4)
TRAINED = (
    *(("cnn", name) for name in ("factored", "averaged", "scaled")),
    *(("embedding", name) for name in ("averaged", "scaled", "accumulated")),
    ("transformer", "scaled and accumulated"),
    ("embedding", "factored"),
)
OVER = tuple((STAGES[i % 4], REPLICAS[i % 3]) for i in range(len(TRAINED)))


@pytest.mark.parametrize(("of", "over"), covering(TRAINED, OVER), ids=str)
def test_every_weight_and_slot_is_that_of_one_device(of: tuple[str, str], over: tuple[int | str, int]) -> None:
    found, where = worst(trained(*of, over_data(*over)), on_one_device(*of))
    assert found < 1e-9, where


def test_the_optimizers_do_under_a_condition_what_they_are_here_for() -> None:
    scaled = on_one_device("embedding", "scaled")
    assert [np.isfinite(loss) for loss in scaled["loss"]] == [True, False, True, True]
    assert int(scaled["optimizer/sgd/iteration"]) == 3, "the step that overflowed was skipped"
    accumulated = on_one_device("embedding", "accumulated")
    assert any(name.endswith("gradient_accumulator") for name in accumulated)
    averages = on_one_device("embedding", "averaged")
    names = [name for name in averages if name.endswith("average")]
    assert len(names) == 5


def test_half_precision_under_fsdp_is_near_that_of_one_device() -> None:
    runs = []
    for config in (None, over_data("FSDP", 3)):
        made = compiled("transformer", "scaled", "mixed_float16")
        many = made if config is None else ar.distribute(made, config)
        losses = [many.train_on_batch(x, y) for x, y in batches("transformer", overflow=True, dtype="float32")]
        assert int(many.optimizer.iterations) == 3, "the step that overflowed was skipped"
        runs.append((np.array(losses), [np.asarray(weight) for weight in many.weights]))
    (expected, weights), (losses, got) = runs
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    for a, b in zip(got, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)


def graph_of(model: str) -> GraphItem:
    """Return a graph that trains with Adam what a Session then holds, and nothing besides."""
    rng, graph = np.random.default_rng(0), tf.Graph()

    def weight(name: str, *shape: int) -> Any:
        return v1.get_variable(name, initializer=rng.normal(size=shape, scale=0.3), use_resource=True)

    with graph.as_default():
        if model == "embedding":
            ids = v1.placeholder(tf.int32, [None, 6], "x")
            h = tf.reduce_mean(tf.gather(weight("table", 48, 24), ids), 1)
        elif model == "cnn":
            x = v1.placeholder(tf.float64, [None, 6, 6, 1], "x")
            h = tf.nn.relu(tf.nn.conv2d(x, weight("conv_1", 3, 3, 1, 24), 1, "VALID"))
            h = tf.reduce_mean(tf.nn.conv2d(h, weight("conv_2", 3, 3, 24, 24), 1, "VALID"), [1, 2])
        else:
            x = v1.placeholder(tf.float64, [None, 6, 24], "x")
            q, k, v = (tf.tensordot(x, weight(name, 24, 24), 1) for name in ("query", "key", "value"))
            h = tf.reduce_mean(x + tf.nn.softmax(tf.matmul(q, k, transpose_b=True)) @ v, 1)
        h = tf.tanh(h @ weight("up", 24, 48)) @ weight("down", 48, 24)
        loss = tf.reduce_mean(tf.square(h), name="loss")
        tf.group(v1.train.AdamOptimizer(0.01).minimize(loss), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def held(item: GraphItem) -> dict[str, int]:
    """Return the bytes of what TensorFlow has behind the handles of each device after a step."""
    with item.session() as session:
        session.run("init")
        shape = [2 if size is None else size for size in item.graph.nodes["x"].attr("shape")]
        session.run("train", {"x": np.zeros(shape)})
        graph, found = session.tf_session.graph, defaultdict[str, int](int)
        handles = [node for node in graph.get_operations() if node.type == "VarHandleOp"]
        with graph.as_default():
            reads = []
            for node in handles:
                with tf.device(node.device):
                    reads.append(tf.raw_ops.ReadVariableOp(resource=node.outputs[0], dtype=node.get_attr("dtype")))
        for node, value in zip(handles, session.tf_session.run(reads), strict=True):
            found[tf.DeviceSpec.from_string(node.device).device_index] += np.asarray(value).nbytes
    return dict(found)


@pytest.mark.parametrize(("model", "stage", "replicas"), covering(list(MODELS), STAGES, REPLICAS))
def test_tensorflow_holds_a_share_of_variables_and_slots_on_each_device(
    model: str, stage: int | str, replicas: int
) -> None:
    item = graph_of(model)
    (whole,) = held(item).values()
    new = ar.rewrite(item, over_data(stage, replicas))
    found = held(new)
    assert sorted(found) == list(range(replicas))
    assert max(found.values()) < 1.05 * whole / replicas
    assert new.report.held == {f"/device:CPU:{device}": size for device, size in found.items()}


def test_what_is_not_divided_is_held_by_every_device() -> None:
    item = graph_of("cnn")
    (whole,) = held(item).values()
    assert set(held(ar.rewrite(item, over_data("FSDP", 2) | {"strategy": {"variables": "mirrored"}})).values()) == {
        whole
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_slots_of_every_keras_optimizer_are_divided(optimizer: str) -> None:
    with keras_floats("float64"):
        layers = [keras.layers.Dense(96, "tanh"), keras.layers.Dense(96)]
        model = keras.Sequential([keras.Input((96,)), *layers])
        model.compile(OPTIMIZERS[optimizer](), keras.losses.MeanSquaredError(), jit_compile=False)
    spec = tf.TensorSpec([None, 96], tf.float64)
    item = GraphItem.from_keras(model, spec, spec)
    whole = sum(variable.nbytes for variable in item.variables.values())
    for replicas in (2, 4):
        shares = ar.rewrite(item, over_data(3, replicas)).report.held.values()
        assert len(shares) == replicas
        assert whole <= sum(shares)
        assert max(shares) < 1.05 * whole / replicas


def test_a_gradient_that_is_cut_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FoldedBuilder.of_replicas

    def the_first_only(self: Any, contents: Any, *how: Any) -> Any:
        return made(self, [contents[0]] * len(contents), *how)

    monkeypatch.setattr(FoldedBuilder, "of_replicas", the_first_only)
    wrong = trained("embedding", "accumulated", over_data(3, 2))
    assert worst(wrong, on_one_device("embedding", "accumulated"))[0] > 1e-3
