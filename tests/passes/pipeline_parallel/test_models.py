"""Models as people wrote them can be cut into stages and micro-batches, and compute what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import PassError
from tests.support.models.bert_like import bert, bert_feed
from tests.support.models.language_models_like import gpt2, transformer_xl
from tests.support.models.residual_like import resnet

v1 = tf.compat.v1
BATCH = 8
Built = tuple[Any, list[str], Any]

MODELS: dict[str, Callable[[], Built]] = {
    "bert": lambda: bert(layers=2, length=None),
    "gpt2": lambda: gpt2(layers=2),
    "gpt2 of any length that leaves out padding": lambda: gpt2(layers=2, length=None, targets="padded"),
}
PIPED = {"stages": 2, "microbatches": 2}
STAGED: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": {**PIPED, "schedule": "gpipe"}},
    "1f1b": {"pipeline": {**PIPED, "schedule": "1f1b"}},
}
LOOPS: dict[str, dict[str, Any]] = {
    "a loop of stages": {"pipeline": {**PIPED, "form": "loop"}},
    "a loop of micro-batches": {"microbatches": 4, "accumulation": {"form": "loop"}},
}


def item_of(build: Callable[[], Built], batch_inputs: dict[str, int | None] | None = None) -> GraphItem:
    """Return the item of a model; its first output is the loss."""
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(1)
        loss, _, train = build()
        init = v1.global_variables_initializer()
    losses = loss[0] if isinstance(loss, tuple) else loss
    return GraphItem.from_graph(graph, train_op=train, outputs=[losses], init_op=init, batch_inputs=batch_inputs)


def tokens(step: int) -> dict[str, Any]:
    return {"model/ids": np.random.default_rng(step).integers(0, 29, (BATCH, 6))}


def feed(item: GraphItem, step: int) -> dict[str, Any]:
    return bert_feed(step, BATCH) if "input_ids" in item.graph.nodes else tokens(step)


def train(item: GraphItem) -> list[Any]:
    """Return the losses of two steps, and all variables after them."""
    with item.session() as session:
        session.run(item.init_op)
        runs = [[*item.outputs, item.targets[0]]] * 2
        losses = [session.run(names, feed(item, step), timeout_ms=60000)[0] for step, names in enumerate(runs)]
        return [*losses, *session.run([variable.handle for variable in item.variables.values()])]


@lru_cache(maxsize=4)
def model(name: str) -> tuple[GraphItem, list[Any]]:
    item = item_of(MODELS[name])
    return item, train(item)


def assert_trains_alike(name: str, config: dict[str, Any]) -> None:
    item, expected = model(name)
    for mine, other in zip(train(ar.rewrite(item, {"devices": ["CPU:0"], **config})), expected, strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)


def test_a_language_model_of_tensorflow_1_can_be_cut_into_stages_whatever_the_length_of_its_sentences() -> None:
    assert_trains_alike("gpt2 of any length that leaves out padding", STAGED["1f1b"])


@pytest.mark.parametrize("how", ["gpipe", *LOOPS])
def test_a_language_model_of_tensorflow_1_can_be_run_by_any_schedule(how: str) -> None:
    assert_trains_alike("gpt2", STAGED.get(how) or LOOPS[how])


@pytest.mark.parametrize("how", [pytest.param("gpipe", marks=pytest.mark.full), "1f1b"])
def test_bert_pre_training_of_tensorflow_1_can_be_cut_into_stages(how: str) -> None:
    assert_trains_alike("bert", STAGED[how])


def test_another_batch_would_be_noticed() -> None:
    item, expected = model("gpt2")
    with item.session() as session:
        session.run(item.init_op)
        (other,) = session.run(list(item.outputs), {"model/ids": tokens(0)["model/ids"][:6]})
    assert abs(other - expected[0]) > 1e-6


def open_sizes() -> Built:
    """A mean over sentences of any length, divided by how many tokens there are."""
    with v1.variable_scope("", use_resource=True):
        x = v1.placeholder(tf.float64, [None, None, 4], name="x")
        w = v1.get_variable("w", [4, 4], tf.float64)
        h = tf.tanh(tf.reshape(tf.reshape(x, [-1, 4]) @ w, tf.shape(x)))
        u = v1.get_variable("u", [4, 4], tf.float64)
        y = tf.tensordot(h, u, [[2], [0]])
        loss = tf.reduce_mean(tf.square(y)) + tf.reduce_sum(y) / tf.cast(tf.size(y), y.dtype)
    return loss, [], v1.train.GradientDescentOptimizer(0.1).minimize(loss)


@pytest.mark.parametrize("how", [*STAGED, "a loop of micro-batches"])
@pytest.mark.parametrize("batch", [8, 1])
def test_sizes_of_any_length_do_not_let_micro_batches_meet(how: str, batch: int) -> None:
    item = item_of(open_sizes)
    new = ar.rewrite(item, {"devices": ["CPU:0"], **(STAGED.get(how) or LOOPS[how])})
    results = []
    for one in (item, new):
        with one.session() as session:
            session.run(item.init_op)
            for step, length in enumerate((5, 3)):
                x = np.random.default_rng(step).normal(size=(batch, length, 4))
                session.run(item.targets[0], {"x": x}, timeout_ms=60000)
            results.append([session.read_variable(name) for name in item.variables])
    for mine, other in zip(*results, strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)


def grouped_heads() -> Built:
    """Keys that several heads share, repeated as tf.repeat does it."""
    with v1.variable_scope("", use_resource=True):
        x = v1.placeholder(tf.float64, [None, 5, 4], name="x")
        w, u = (v1.get_variable(name, [4, 4], tf.float64) for name in "wu")
        keys = tf.reshape(tf.tensordot(x, w, [[2], [0]]), [-1, 5, 2, 2])
        repeated = tf.reshape(tf.repeat(keys, 3, axis=2), [-1, 5, 6, 2])
        heads = tf.tile(tf.reshape(tf.tensordot(tf.tanh(x), u, [[2], [0]]), [-1, 5, 1, 4]), [1, 1, 6, 1])[..., :2]
        loss = tf.reduce_mean(tf.square(tf.nn.softmax(repeated) * heads))
    return loss, [], v1.train.AdamOptimizer(0.1).minimize(loss)


def skipping() -> Built:
    """An update that is left out where a gradient of it is not finite; rows of a table have gradients of their own."""
    with v1.variable_scope("", use_resource=True):
        x = v1.placeholder(tf.float64, [None, 5, 4], name="x")
        w, table = v1.get_variable("w", [4, 4], tf.float64), v1.get_variable("table", [7, 4], tf.float64)
        h = tf.tensordot(x, w, [[2], [0]])[:, 0] + tf.gather(table, tf.cast(tf.abs(x[:, 0, 0]) * 2, tf.int32))
        loss = tf.reduce_mean(tf.square(h))
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        slopes = optimizer.compute_gradients(loss)
        dense = [tf.convert_to_tensor(slope) for slope, _ in slopes]
        is_fine = tf.reduce_all([tf.reduce_all(tf.math.is_finite(slope)) for slope in dense])
    return loss, [], tf.cond(is_fine, lambda: optimizer.apply_gradients(slopes), tf.no_op)


@pytest.mark.parametrize("how", STAGED)
@pytest.mark.parametrize("build", [grouped_heads, skipping])
def test_what_models_do_besides_layers_keeps_micro_batches_apart(build: Callable[[], Built], how: str) -> None:
    item = item_of(build)
    results = []
    for one in (item, ar.rewrite(item, {"devices": ["CPU:0"], **STAGED[how]})):
        with one.session() as session:
            session.run(item.init_op)
            for step in range(2):
                x = np.random.default_rng(step).normal(size=(BATCH, 5, 4))
                session.run(item.targets[0], {"x": x}, timeout_ms=60000)
            results.append([session.read_variable(name) for name in item.variables])
    for mine, other in zip(*results, strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)


def watched(needed: bool = False) -> Built:
    """A standard deviation over the batch that is looked at, or that the loss needs, too."""
    with v1.variable_scope("", use_resource=True):
        x = v1.placeholder(tf.float64, [None, 5, 4], name="x")
        w, u = (v1.get_variable(name, [4, 4], tf.float64) for name in "wu")
        h = tf.tensordot(tf.tanh(tf.tensordot(x, w, [[2], [0]])), u, [[2], [0]])
        spread = tf.math.reduce_std(h, 0)
        loss = tf.reduce_mean(tf.square(h)) + (tf.reduce_sum(spread) if needed else 0.0)
    return loss, [spread], v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)


def watching() -> GraphItem:
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(1)
        loss, others, train = watched()
        init = v1.global_variables_initializer()
    return GraphItem.from_graph(graph, train_op=train, outputs=[loss, *others], init_op=init)


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
@pytest.mark.parametrize("how", [*STAGED, "a loop of micro-batches"])
def test_statistics_of_the_batch_that_are_only_looked_at_hinder_nobody(how: str, layout: str) -> None:
    item, config = watching(), STAGED.get(how) or LOOPS[how]
    config = {name: {**given, "layout": layout} if isinstance(given, dict) else given for name, given in config.items()}
    results = []
    for one in (item, ar.rewrite(item, {"devices": ["CPU:0"], **config})):
        with one.session() as session:
            session.run(item.init_op)
            for step in range(2):
                x = np.random.default_rng(step).normal(size=(BATCH, 5, 4))
                found = session.run([*item.outputs, item.targets[0]], {"x": x}, timeout_ms=60000)[:2]
            results.append([*found, *(session.read_variable(name) for name in item.variables)])
    for mine, other in zip(*results, strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)


def test_statistics_of_the_batch_that_a_loss_needs_are_refused_in_stages() -> None:
    with pytest.raises(PassError, match="of the whole batch"):
        ar.rewrite(item_of(lambda: watched(needed=True)), {"devices": ["CPU:0"], **STAGED["gpipe"]})


def images(step: int, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"resnet/images": rng.normal(size=(rows, 6, 6, 3)), "resnet/labels": rng.integers(0, 5, rows)}


def by_parts(microbatches: int, rows: int, rate: float, **how: Any) -> dict[str, Any]:
    """Train on parts of each batch, one after another: statistics and moving averages of each, one momentum step."""
    graph = tf.Graph()
    with graph.as_default(), v1.Session() as session:
        v1.set_random_seed(1)
        loss, _, _ = resnet(**how)
        trained = v1.trainable_variables()
        slopes, averages = v1.gradients(loss, trained), v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        session.run(v1.global_variables_initializer())
        speed = [np.zeros(v.shape) for v in trained]
        for step in range(2):
            feed = images(step, rows)
            cut = {f"{name}:0": np.array_split(x, microbatches) for name, x in feed.items()}
            parts = [{name: pieces[m] for name, pieces in cut.items()} for m in range(microbatches)]
            found = [session.run([slopes, averages], part)[0] for part in parts]
            speed = [
                np.float32(0.9).astype(np.float64) * v + np.mean(g, 0)
                for v, g in zip(speed, zip(*found, strict=True), strict=True)
            ]
            for variable, v in zip(trained, speed, strict=True):
                session.run(variable.assign_sub(np.float32(rate).astype(np.float64) * v))
        kept = [v for v in v1.global_variables() if "Momentum" not in v.name and "global_step" not in v.name]
        return {v.op.name: session.run(v) for v in kept}


@pytest.mark.parametrize("how", ["gpipe", pytest.param("1f1b", marks=pytest.mark.full)])
def test_a_residual_network_in_stages_computes_what_its_micro_batches_do_with_local_batch_norm(how: str) -> None:
    expected = by_parts(4, BATCH, 0.05, blocks=2)
    pipeline = {"pipeline": {"stages": 2, "microbatches": 4, "schedule": how}}
    item = item_of(lambda: resnet(blocks=2))
    new = ar.rewrite(item, {"devices": ["CPU:0"], "semantics": {"batch_norm": "local"}, **pipeline})
    with new.session() as session:
        session.run(new.init_op)
        for step in range(2):
            session.run(new.targets[0], images(step, BATCH), timeout_ms=60000)
        for name, value in expected.items():
            np.testing.assert_allclose(session.read_variable(name), value, 1e-9, 1e-9, err_msg=name)


XL = {f"transformer/{name}": axis for name, axis in (("inp", 0), ("tgt", 0), ("mems_0", 1), ("mems_1", 1))}
REFUSED: dict[str, tuple[Callable[[], Built], dict[str, int | None] | None, str]] = {
    "time before the batch in one row, as in Transformer-XL": (
        lambda: transformer_xl(layers=2),
        dict(XL),
        "Tensordot.*of the whole batch",
    ),
    "statistics of the whole batch": (lambda: resnet(blocks=2), None, "StopGradient' of the whole batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_batch_is_refused_in_stages_by_name(name: str) -> None:
    build, batch_inputs, why = REFUSED[name]
    with pytest.raises(PassError, match=why):
        ar.rewrite(item_of(build, batch_inputs), {"devices": ["CPU:0"], **STAGED["1f1b"]})
