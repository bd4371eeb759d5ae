"""Keras' preprocessing and augmentation layers in a step: the numbers of one device, and every replica its share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.rules.marked import make_whole
from autograph_rewrite.passes import propagate, resolve_plan
from tests.support.models.preprocessing_layers import IMAGE, LAYERS, Layer

TWO = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
OFTEN = (
    "Resizing and crop", "RandomCrop", "RandomRotation", "RandomPerspective", "Equalization", "MixUp",
    "MelSpectrogram", "StringLookup multi_hot", "Hashing with salt", "TextVectorization",
    "HashedCrossing",
)  # fmt: skip
"""One layer of each kind, in every run."""
EVERY = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in LAYERS]
FIXED = [
    name if name == "RandomRotation" else pytest.param(name, marks=pytest.mark.full)
    for name in LAYERS
    if LAYERS[name].shape == IMAGE and name != "RandomElasticTransform"
]
"""Layers whose batches may be of one size; the other one then cuts each image out in Python."""
Step = Callable[..., Any]


@pytest.fixture
def propagated(monkeypatch: pytest.MonkeyPatch) -> list[Propagation]:
    """Return the placements of each graph that is rewritten from now on."""
    found: list[Propagation] = []
    plain = resolve_plan.reshard_edges.resolve_edges

    def resolve(plan: Any, state: Propagation, *args: Any) -> Any:
        found.append(state)
        return plain(plan, state, *args)

    monkeypatch.setattr(resolve_plan.reshard_edges, "resolve_edges", resolve)
    return found


def read_whole(state: Propagation) -> set[str]:
    """Return the op types that want the whole of something that is cut into blocks."""
    return {
        node.op
        for node, transferred in state.transfers.items()
        for index, reshard in transferred.operand_reshards.items()
        if reshard == REPLICATED and transferred.inputs[index].placement.is_split
    }


def numbers_of(value: Any) -> tf.Tensor:
    """Return a row of numbers per example of whatever a layer makes."""
    value = value[0] if isinstance(value, list | tuple) else value
    value = tf.cast(value, tf.float32)
    return tf.reduce_mean(value, list(range(1, value.shape.rank - 1))) if value.shape.rank > 2 else value


def make_step(layer: Layer, batch: int | None = None) -> tuple[Step, tf.TensorSpec, list[tf.Variable]]:
    """Return a training step with a layer in front of a small network, its input, and what it trains."""
    keras.utils.set_random_seed(3)
    made = layer.make()
    options = {"training": True} if "training" in inspect.signature(getattr(made, "call", made)).parameters else {}
    head = keras.layers.Dense(2)
    head(numbers_of(made(tf.constant(layer.draw(4, 0)), **options)))
    weights = [weight.value for weight in head.trainable_weights]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(head(numbers_of(made(x, **options))) - 1.0))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    return step, tf.TensorSpec([batch, *layer.shape], layer.dtype, name="x"), weights


def trained(name: str, config: dict[str, Any] | None, sizes: tuple[int, ...] = (6, 5, 1)) -> list[np.ndarray]:
    layer = LAYERS[name]
    step, spec, weights = make_step(layer)
    function = tf.function(step, input_signature=[spec])
    run = ar.distribute(function, config) if config else function
    losses = [run(tf.constant(layer.draw(size, 10 + i))) for i, size in enumerate(sizes)]
    return [np.asarray(value) for value in (*losses, *weights)]


@pytest.mark.parametrize("name", EVERY)
def test_a_layer_inside_the_step_is_divided_and_gives_the_same_numbers(
    name: str, propagated: list[Propagation]
) -> None:
    for one, two in zip(trained(name, None), trained(name, TWO), strict=True):
        np.testing.assert_allclose(two, one, rtol=2e-5, atol=1e-5)
    assert read_whole(propagated[-1]) == set(LAYERS[name].mixes)


@pytest.mark.parametrize("name", FIXED)
def test_a_layer_on_batches_of_one_size_is_divided(name: str, propagated: list[Propagation]) -> None:
    layer = LAYERS[name]
    step, spec, _ = make_step(layer, 6)
    item = ar.GraphItem.from_function(step, spec, batch_inputs={"x": 0})
    assert ar.verify(item, TWO, steps=2, feeds=[{"x": layer.draw(6, 0)}, {"x": layer.draw(6, 1)}]).ok
    assert read_whole(propagated[-1]) == set(layer.mixes)


@pytest.mark.parametrize("name", ["RandomRotation", "RandomErasing", "MixUp", "GaussianNoise"])
def test_independent_randomness_is_drawn_by_each_replica_for_its_own_examples(
    name: str, propagated: list[Propagation]
) -> None:
    layer = LAYERS[name]
    step, spec, _ = make_step(layer)
    item = ar.GraphItem.from_function(step, spec)
    new = ar.rewrite(item, {**TWO, "semantics": {"random": "independent"}})
    drawn = [n for n in new.graph_def.node if n.op.startswith("StatelessRandom") and "GetKey" not in n.op]
    own = [n for n in drawn if n.name.startswith("replica_1/")]
    assert own
    keys = {n.name: n.input[1] for n in own}
    assert all("replica_1/" in key for key in keys.values()), keys


def test_words_that_are_handled_whole_are_put_into_rows_whole(
    propagated: list[Propagation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of rows of a block must not meet words of the batch."""
    plain = propagate.mark_dynamic_partitions

    def mark(graph: Graph) -> None:
        plain(graph)
        for node in graph:
            if node.op == "LookupTableFindV2":
                make_whole(node)

    one = trained("TextVectorization", None)
    monkeypatch.setattr(propagate, "mark_dynamic_partitions", mark)
    for found, expected in zip(trained("TextVectorization", TWO), one, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    assert "StringSplitV2" in read_whole(propagated[-1])


def test_numbers_of_rows_that_somebody_else_reads_are_those_of_the_whole_batch(propagated: list[Propagation]) -> None:
    w = tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        words = tf.strings.split(x)
        lengths = tf.strings.length(words.to_tensor(shape=[None, 4]))
        with tf.GradientTape() as tape:
            loss = w * tf.cast(tf.reduce_sum(lengths), tf.float32) + tf.cast(
                tf.reduce_max(words.value_rowids()), tf.float32
            )
        w.assign_sub(1e-3 * tape.gradient(loss, w))
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None], tf.string, name="x"))
    texts = np.array(["a bb", "c", "", "a b c", "dd"], object)
    assert ar.verify(item, TWO, steps=2, feeds={"x": texts}).ok
    assert "StringSplitV2" in read_whole(propagated[-1])


def test_texts_in_a_loop_are_left_as_they_are() -> None:
    w = tf.Variable(1.0)

    def longest(x: tf.Tensor) -> tf.Tensor:
        words = tf.strings.split(x).to_tensor(shape=[None, 4])
        return tf.reduce_sum(tf.strings.length(words))

    def step(x: tf.Tensor) -> tf.Tensor:
        total = tf.while_loop(lambda i, _: i < 2, lambda i, n: (i + 1, n + longest(x)), (0, 0))[1]
        w.assign_sub(1e-3 * tf.cast(total, tf.float32))
        return w * tf.cast(total, tf.float32)

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None], tf.string, name="x"))
    texts = np.array(["a bb", "c", "", "a b c", "dd"], object)
    assert ar.verify(item, TWO, steps=2, feeds={"x": texts}).ok
