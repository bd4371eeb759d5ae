"""Rows of sparse gradients are gathered once, raw, and then read by everything that an optimizer computes from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from tests.support.covering import covering
from tests.support.training import assert_trains_alike, make_item, placeholder, v1, variable
from tests.zoo import GRAPH_OPTIMIZERS, KERAS_OPTIMIZERS

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
RNG = np.random.default_rng(0)
WORDS, LENGTH, WIDTH = 7, 3, 4
TABLE = np.linspace(-1, 1, WORDS * WIDTH).reshape(WORDS, WIDTH)
IDS = RNG.integers(0, WORDS, (8, LENGTH)).astype(np.int32)


def exchanged(item: GraphItem) -> dict[str, list[EdgePlan]]:
    """Return what the replicas exchange, by owner; sizes left out."""
    found: dict[str, list[EdgePlan]] = {}
    for edge in ar.build_plan(item, CONFIG).edges:
        if edge.to == "replicated" and edge.lowering != "global_size":
            found.setdefault(edge.owner, []).append(edge)
    return found


def keras_item(optimizer: str, batch: int | None) -> GraphItem:
    """Train a table of words and a table of positions by a Keras optimizer."""
    sizes = {"words": (WORDS, WIDTH), "positions": (LENGTH, WIDTH), "kernel": (WIDTH, 1)}
    variables = [keras.Variable(RNG.normal(size=s), name=name, dtype="float64") for name, s in sizes.items()]
    words, positions, kernel = variables
    trainer = KERAS_OPTIMIZERS[optimizer]()
    trainer.build(variables)

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(words.value, ids) + positions.value
            loss = tf.reduce_mean(tf.tanh(tf.reshape(rows, [-1, WIDTH]) @ kernel.value) ** 2)
        trainer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return loss

    return GraphItem.from_function(step, tf.TensorSpec([batch, LENGTH], tf.int32), batch_inputs={"ids": 0})


def v1_item(optimizer: str, batch: int | None) -> tuple[GraphItem, set[str]]:
    """Train a table by a v1 optimizer; return the parts of its raw gradient, too."""
    graph = tf.Graph()
    with graph.as_default():
        ids, words = placeholder("ids", batch, LENGTH, dtype=tf.int32), variable("words", TABLE)
        rows = tf.nn.embedding_lookup(words, ids)
        kernel = variable("kernel", np.ones((WIDTH, 1)))
        loss = tf.reduce_mean(tf.tanh(tf.reshape(rows, [-1, WIDTH]) @ kernel) ** 2, name="loss")
        trainer = GRAPH_OPTIMIZERS[optimizer]()
        pairs = trainer.compute_gradients(loss)
        (raw,) = (gradient for gradient, _ in pairs if isinstance(gradient, tf.IndexedSlices))
        tf.group(trainer.apply_gradients(pairs), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init", batch_inputs={"ids": 0})
    return item, {raw.values.op.name, raw.indices.op.name}


@pytest.mark.parametrize(("optimizer", "batch"), covering(list(KERAS_OPTIMIZERS), [None, 8]))
def test_rows_of_a_table_are_gathered_once_and_raw_and_what_is_dense_is_summed_once(
    optimizer: str, batch: int | None
) -> None:
    edges = exchanged(keras_item(optimizer, batch))
    assert [edge.lowering for edge in edges["words"]] == ["collective_gather"] * 2
    if optimizer != "sgd":  # which reads the rows once, scaled: as many bytes, and less to do for each replica
        assert not any(edge.value.startswith("optimizer") for edge in edges["words"])
    for owner in ("positions", "kernel"):
        assert [edge.lowering for edge in edges[owner]] == ["collective_reduce"]
    assert len(edges[STEP]) == 1, "the loss only: norms of updates are computed of whole rows"


@pytest.mark.parametrize(("optimizer", "batch"), covering(list(GRAPH_OPTIMIZERS), [None, 8]))
def test_what_is_gathered_is_the_raw_gradient(optimizer: str, batch: int | None) -> None:
    item, raw = v1_item(optimizer, batch)
    edges = exchanged(item)
    assert [edge.lowering for edge in edges["words"]] == ["collective_gather"] * 2
    assert [edge.lowering for edge in edges["kernel"]] == ["collective_reduce"]
    if optimizer != "sgd":
        assert {edge.value for edge in edges["words"]} == raw


def analysed(item: GraphItem) -> Propagation:
    """Return the placements, with what is reduced or gathered for all readers."""
    flat = normalise(item)
    graph = flat.graph
    for name, info in flat.outputs.items():
        graph.anchors[f"output {name}"] = graph.value(info.tensor)
    state, _ = pass_pipeline.analyse(graph, flat, ar.build_plan(item, CONFIG))
    return state


def gathered(state: Propagation) -> list[str]:
    """Return the values that were chosen to be gathered for all their readers."""
    return [value.name for value in state.reduced if state.source(value).placement.is_split]


def forward(step: Callable[[Any, Any], Mapping[str, Any]], batch: int | None = 8) -> Callable[[], Mapping[str, Any]]:
    """Return a network that looks rows up; `step` makes of rows and indices what is fetched, or added to the loss."""

    def build() -> Mapping[str, Any]:
        ids, words = placeholder("ids", batch, dtype=tf.int32), variable("words", TABLE)
        other = tf.reduce_sum(tf.tanh(tf.gather(words, ids) @ variable("kernel", np.ones((WIDTH, 2)))))
        results = dict(step(tf.gather(words, ids), ids))
        return results | {"loss": other + results.get("loss", 0.0)}

    return build


def read_twice(rows: Any, ids: Any) -> Mapping[str, Any]:
    rows = tf.tanh(rows)
    return {"running": tf.cumsum(rows * 2, 0), "squares": tf.cumsum(rows * rows, 0)}


def summed_by_an_input(rows: Any, ids: Any) -> Mapping[str, Any]:
    """The sum could be that of the gathered rows, but nobody gathers the input that says where each belongs."""
    return {
        "running": tf.cumsum(rows, 0),
        "loss": tf.reduce_sum(tf.tanh(tf.math.unsorted_segment_sum(rows, ids, WORDS))),
    }


def fetched(rows: Any, ids: Any) -> Mapping[str, Any]:
    return {"rows": rows, **read_twice(rows, ids)}


def summed_twice(rows: Any, ids: Any) -> Mapping[str, Any]:
    rows = tf.tanh(rows)
    return {"sum": tf.reduce_sum(rows), "squares": tf.reduce_sum(rows * rows)}


def in_a_loop(rows: Any, ids: Any) -> Mapping[str, Any]:
    body = lambda t, y: (t + 1, tf.cumsum(tf.tanh(y) * 2, 0) + tf.cumsum(tf.tanh(y) ** 2, 0))  # noqa: E731
    return {"running": tf.while_loop(lambda t, _: t < 2, body, [0, rows])[1]}


@pytest.mark.parametrize("batch", [None, 8])
def test_rows_with_two_readers_are_gathered_once(batch: int | None) -> None:
    item = make_item(forward(read_twice, batch), batch_inputs={"ids": 0})
    state = analysed(item)
    assert len(gathered(state)) == 1
    assert len([edge for edge in exchanged(item)[STEP] if edge.lowering == "collective_gather"]) == 1


@pytest.mark.parametrize("step", [summed_by_an_input, summed_twice, in_a_loop])
@pytest.mark.parametrize("version", [1, 2])
def test_nothing_is_chosen_where_rows_would_have_to_come_from_elsewhere_or_sums_are_cheaper(
    step: Any, version: int
) -> None:
    assert not gathered(analysed(make_item(forward(step), batch_inputs={"ids": 0}, version=version)))


@pytest.mark.parametrize("step", [read_twice, summed_by_an_input, fetched, summed_twice, in_a_loop])
def test_wherever_rows_are_gathered_training_is_as_on_one_device(step: Any) -> None:
    feeds = [{"ids": IDS[:n, 0]} for n in (8, 5)]
    assert_trains_alike(make_item(forward(step, None)), feeds)
    assert_trains_alike(make_item(forward(step), batch_inputs={"ids": 0}), feeds[:1])


def contrastive() -> Mapping[str, Any]:
    x, w, b = placeholder("x", None, 3), variable("w", np.full((3, 4), 0.1)), variable("b", np.zeros(4))
    y = tf.tanh(x @ w + b)
    return {"loss": tf.reduce_mean(tf.nn.log_softmax(tf.matmul(y, y, transpose_b=True)))}


def test_activations_that_are_gathered_belong_to_no_variable() -> None:
    edges = exchanged(make_item(contrastive))
    assert [edge.lowering for edge in edges["w"]] == ["collective_reduce"]
    assert [edge.lowering for edge in edges["b"]] == ["collective_reduce"]
    assert any(edge.lowering == "collective_gather" for edge in edges[STEP])
