"""What a step may be called with: sparse and ragged tensors, Python numbers, arrays, several batches of other sizes."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError

TWO = {"devices": ["CPU:0", "CPU:1"]}


def test_sparse_and_ragged_specs_take_what_fits_their_open_dimensions() -> None:
    table = tf.Variable(np.arange(18.0).reshape(6, 3))

    def lookup(values: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            if isinstance(values, tf.SparseTensor):
                rows = tf.sparse.sparse_dense_matmul(values, table)
            else:
                rows = tf.reduce_sum(tf.ragged.map_flat_values(lambda ids: tf.gather(table, ids), values), 1)
            loss = tf.reduce_mean(tf.square(rows - y))
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    eye, twos = tf.sparse.from_dense(np.eye(6)), tf.sparse.from_dense(2 * np.eye(6)[:4])
    ids = tf.ragged.constant([[1], [], [2, 3], [0]], dtype=tf.int32)
    fixed = tf.RaggedTensor.from_uniform_row_length(tf.range(6), 2)
    y = tf.TensorSpec([None, 3], tf.float64)
    for spec, given in (
        (tf.SparseTensorSpec([None, 6], tf.float64), (eye, twos)),
        (tf.RaggedTensorSpec([None, None], tf.int32), (ids, ids[:2])),
        (tf.RaggedTensorSpec([None, 2], tf.int32, ragged_rank=1), (fixed,)),
    ):
        specified = ar.distribute(lookup, TWO, spec, y, batch_inputs={"y": 0})
        traced = ar.distribute(lookup, TWO, batch_inputs={"y": 0})
        one = tf.function(lookup, input_signature=[spec, y])
        for values in given:
            rows = values.dense_shape[0] if isinstance(values, tf.SparseTensor) else values.nrows()
            truth = tf.random.stateless_normal([rows, 3], [1, 2], dtype=tf.float64)
            seen = []
            for step in (one, specified, traced):
                table.assign(np.arange(18.0).reshape(6, 3))
                seen.append((float(step(values, truth)), table.numpy()))
            for loss, after in seen[1:]:
                assert abs(loss - seen[0][0]) < 1e-9
                np.testing.assert_allclose(after, seen[0][1], rtol=1e-12)
    with pytest.raises(GraphError, match="not for"):
        specified(ids, tf.zeros([4, 3], tf.float64))  # its rows are not of one length


def test_specs_take_python_numbers_lists_and_arrays_as_an_input_signature_does() -> None:
    w = tf.Variable(tf.ones([3], tf.float64))

    class Pair(NamedTuple):
        x: Any
        rate: Any

    def train(pair: Any, extra: Any, *, scale: Any = None) -> Any:
        w.assign_sub(pair.rate * tf.reduce_mean(pair.x * extra["z"], 0) * scale)
        return tf.reduce_sum(w)

    rows, number = tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([], tf.float64)
    step = ar.distribute(train, TWO, Pair(rows, number), {"z": rows}, scale=number)
    x = np.arange(12.0).reshape(4, 3)
    assert (
        abs(float(step(Pair(x.astype(np.float32), 0.5), {"z": x.tolist()}, scale=2)) - (3 - (x * x).mean(0).sum()))
        < 1e-9
    )
    with pytest.raises(GraphError, match="not for"):
        step(Pair(x[:, :2], 0.5), {"z": x}, scale=2)


def test_naming_what_is_no_batch_leaves_the_others_as_they_are() -> None:
    w = tf.Variable(tf.ones([3], tf.float64))

    def train(x: Any, table: Any) -> Any:
        w.assign_sub(tf.reduce_mean(x, 0) * tf.reduce_sum(table))
        return tf.reduce_sum(w)

    step = ar.distribute(train, TWO, batch_inputs={"table": None})
    for rows in (4, 6):
        step(np.ones((rows, 3)), np.ones((5, 2)))
    assert len(step.items) == 1
    assert {name: info.batch_axis for name, info in step.items[0].inputs.items()} == {"x": 0, "table": None}


def test_a_keras_item_made_with_arrays_takes_batches_of_any_size() -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    item = ar.GraphItem.from_keras(model, np.ones((8, 3), "f"), np.ones((8, 1), "f"))
    assert {info.shape[0] for info in item.inputs.values() if info.shape} == {None}
    assert ar.rewrite(item, TWO).report.plan.replicas == 2


def linear(rows: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(rows, 3))


SIZES = [(2, 6), (5, 3), (1, 7)]
CONFIGS = {
    "shared": TWO,
    "mirrored": {**TWO, "strategy": {"variables": "mirrored"}},
    "three replicas": {"devices": ["CPU:0", "CPU:1", "CPU:2"]},
    "micro-batches": {**TWO, "microbatches": 2},
    "interleaved": {**TWO, "microbatches": 2, "accumulation": {"layout": "interleaved"}},
    "loop": {**TWO, "microbatches": 2, "accumulation": {"form": "loop"}},
}


class TwoBatches:
    """A loss of labelled examples, and one of unlabelled ones of which there are more or fewer."""

    def __init__(self, coupled: bool) -> None:
        self.coupled = coupled  # each part of the loss needs the other: no loop over micro-batches can do that
        self.w = tf.Variable(np.linspace(-1.0, 1.0, 6).reshape(3, 2))

    def step(self, labelled: Any, y: Any, unlabelled: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden, other = labelled @ self.w, tf.nn.tanh(unlabelled @ self.w)
            error = tf.reduce_mean(tf.square(hidden - y))
            spread = tf.reduce_mean(tf.square(other))
            share = tf.cast(tf.shape(unlabelled)[0], tf.float64) / tf.cast(tf.shape(labelled)[0], tf.float64)
            both = error * spread + 0.1 * share * tf.reduce_sum(tf.abs(other)) if self.coupled else spread
            loss = error + both
        self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
        flat = tf.reshape(other, [tf.shape(unlabelled)[0] * 2])
        return {"loss": loss, "hidden": hidden, "other": other, "flat": flat}


@pytest.mark.parametrize("name", CONFIGS)
def test_batches_of_one_step_may_differ_in_size(name: str) -> None:
    one, many = (TwoBatches(coupled=name != "loop") for _ in range(2))
    step, single = ar.distribute(many.step, CONFIGS[name]), tf.function(one.step)
    for first, second in SIZES:
        given = linear(first, 1), linear(first, 2)[:, :2], linear(second, 3)
        expected, got = single(*map(tf.constant, given)), step(*given)
        for key in expected:
            np.testing.assert_allclose(got[key], expected[key], rtol=1e-9, err_msg=f"{key} {first} {second}")
        np.testing.assert_allclose(many.w, one.w, rtol=1e-9)
    (report,) = (item.report for item in step.items)
    assert report.batches == (("labelled", "y"), ("unlabelled",))
    with pytest.raises(GraphError, match=r"different sizes \(labelled: 4, y: 3\)"):
        step(linear(4, 1), linear(3, 2)[:, :2], linear(5, 3))


@pytest.mark.parametrize("mode", ["shared", "mirrored"])
def test_batches_of_a_graph_may_differ_in_size(mode: str) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x, u = (v1.placeholder(tf.float64, [None, 3], name) for name in "xu")
        w = v1.get_variable("w", initializer=np.linspace(-1.0, 1.0, 6).reshape(3, 2), use_resource=True)
        loss = tf.reduce_mean(tf.square(x @ w)) * tf.reduce_mean(tf.abs(u @ w), name="other")
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        v1.group(v1.global_variables_initializer(), name="init")
        v1.get_variable_scope().reuse_variables()
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=[loss], init_op="init")
    new = ar.rewrite(item, {**TWO, "strategy": {"variables": mode}})
    with v1.Session(graph=graph) as one, new.session() as many:
        one.run("init"), many.run("init")
        for first, second in SIZES:
            feeds = {"x:0": linear(first, 1), "u:0": linear(second, 2)}
            expected = one.run([loss, "train"], feeds)[0]
            assert abs(many.run([loss.name, "train"], feeds)[0] - expected) < 1e-9
            np.testing.assert_allclose(many.read_variable("w"), one.run(w), rtol=1e-9)
        np.testing.assert_allclose(  # fed alone
            many.run("other:0", {"u:0": linear(5, 2)}), one.run("other:0", {"u:0": linear(5, 2)}), rtol=1e-9
        )


MEETINGS = {
    "reshape": lambda x, u: tf.reduce_max(tf.reshape(u, [tf.shape(x)[0], -1]), 1),
    "fold": lambda x, u: tf.reduce_max(tf.reshape(u, [tf.shape(x)[0], tf.shape(u)[0] // tf.shape(x)[0], 3]), [1, 2]),
    "gather": lambda x, u: tf.reduce_sum(tf.gather(u, tf.range(tf.shape(x)[0])), 1),
    "segments": lambda x, u: tf.math.unsorted_segment_sum(u, tf.range(tf.shape(u)[0]) % tf.shape(x)[0], tf.shape(x)[0]),
    "product": lambda x, u: tf.linalg.matmul(x, u, transpose_b=True),
    "first rows": lambda x, u: u[: tf.shape(x)[0]] * x,
    "joined": lambda x, u: tf.tanh(tf.concat([x, u], 0)),
    "branch": lambda x, u: tf.cond(tf.shape(x)[0] < tf.shape(u)[0], lambda: x * 2.0, lambda: x),
    "padded": lambda x, u: tf.pad(x, [[0, tf.shape(u)[0]], [0, 0]]),
    "broadcast": lambda x, u: tf.reduce_sum(x[:, None] * u[None], [1, 2]),
    "sizes": lambda x, u: x * tf.cast(tf.shape(x)[0] + tf.shape(u)[0], tf.float64),
    "loop": lambda x, u: tf.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t + tf.reduce_mean(u)), (0, x))[1],
    "fill": lambda x, u: tf.fill([tf.shape(x)[0]], 2.0) * tf.cast(tf.shape(u)[0], tf.float32),
}


@pytest.mark.parametrize(("name", "mode"), [(name, ("shared", "mirrored")[i % 2]) for i, name in enumerate(MEETINGS)])
def test_sizes_that_meet_are_right_or_refused_and_never_taken_for_equal(name: str, mode: str) -> None:
    meet, start = MEETINGS[name], np.linspace(1.0, 2.0, 3)
    w = tf.Variable(start)

    def train(x: Any, u: Any) -> Any:
        with tf.GradientTape() as tape:
            met = tf.cast(meet(x * w, u * w), tf.float64)
            loss = tf.reduce_mean(tf.square(met)) + tf.reduce_mean(x * w) + tf.reduce_sum(tf.abs(u * w))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss, met

    single, step = tf.function(train), ar.distribute(train, {**TWO, "strategy": {"variables": mode}})
    for sizes in ((4, 4), (2, 6), (1, 3)):
        given = [tf.constant(linear(rows, rows)) for rows in sizes]
        w.assign(start)
        expected, after = single(*given), w.numpy()
        w.assign(start)
        got = None
        with contextlib.nullcontext() if sizes[0] == sizes[1] else contextlib.suppress(GraphError):
            got = step(*given)
        if got is None:
            continue
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-9)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-9)
        np.testing.assert_allclose(w, after, rtol=1e-9)


@pytest.mark.parametrize("name", ["shared", "mirrored", "micro-batches"])
def test_of_batches_of_static_sizes_the_largest_is_divided(name: str) -> None:
    one, many = TwoBatches(coupled=True), TwoBatches(coupled=True)
    given = linear(4, 1), linear(4, 2)[:, :2], linear(8, 3)
    specs = [tf.TensorSpec(rows.shape, tf.float64) for rows in given]
    batches = {"labelled": 0, "y": 0, "unlabelled": 0}
    step = ar.distribute(many.step, CONFIGS[name], *specs, batch_inputs=batches)
    single = tf.function(one.step)
    for _ in range(2):
        expected, got = single(*map(tf.constant, given)), step(*given)
        for key in expected:
            np.testing.assert_allclose(got[key], expected[key], rtol=1e-9, err_msg=key)
        np.testing.assert_allclose(many.w, one.w, rtol=1e-9)
    report = step.items[0].report
    assert [note.node for note in report.notes if "static size" in note.text] == ["labelled", "y"]
