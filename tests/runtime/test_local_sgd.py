"""Local SGD: replicas train by themselves, and are averaged; compared with models that are trained apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.runtime.function import mirrored_variables

v1 = tf.compat.v1
Trained = tuple[list[tf.Variable], Callable[[Any, Any], Any]]
SPECS = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 3], tf.float64))


def config(period: int = 3, devices: int = 2, **more: Any) -> dict[str, Any]:
    return {"devices": [f"CPU:{i}" for i in range(devices)], "local_sgd": {"period": period, **more}}


def momentum() -> Trained:
    """A small network, trained with momentum by hand, in float64."""
    rng = np.random.default_rng(0)
    w, b = tf.Variable(rng.normal(size=(4, 3)), name="w"), tf.Variable(np.zeros(3), name="b")
    slots = [tf.Variable(np.zeros(v.shape), trainable=False, name=f"{n}/slot") for v, n in ((w, "w"), (b, "b"))]

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            prediction = tf.tanh(x @ w) + b
            loss = tf.reduce_mean((prediction - y) ** 2)
        for variable, slot, gradient in zip((w, b), slots, tape.gradient(loss, (w, b)), strict=True):
            slot.assign(0.9 * slot + gradient)
            variable.assign_sub(0.1 * slot)
        return {"loss": loss, "prediction": prediction, "sum": tf.reduce_sum(prediction), "max": tf.reduce_max(x)}

    return [w, b, *slots], step


def batches(steps: int, size: int, seed: int = 1) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(size, 4)), rng.normal(size=(size, 3))) for _ in range(steps)]


class Apart:
    """Models that are trained one by one, each on its part of each batch, and averaged."""

    def __init__(self, make: Callable[[], Trained], replicas: int, averaged: Callable[[int], bool], slots: bool = True):
        self._models = [make() for _ in range(replicas)]
        self._averaged, self._slots, self._steps = averaged, slots, 0

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        n = len(self._models)
        parts = zip(np.split(x, n), np.split(y, n), strict=True)
        found = [run(*part) for (_, run), part in zip(self._models, parts, strict=True)]
        self._steps += 1
        if self._averaged(self._steps):
            self.average()
        how = {"loss": np.mean, "prediction": np.concatenate, "sum": np.sum, "max": np.max}
        return {name: how[name]([one[name].numpy() for one in found]) for name in found[0]}

    def average(self) -> None:
        for copies in zip(*(variables for variables, _ in self._models), strict=True):
            if self._slots or "slot" not in copies[0].name:
                mean = np.mean([copy.numpy() for copy in copies], 0)
                for copy in copies:
                    copy.assign(mean)

    def variables(self, replica: int = 0) -> list[Any]:
        return [variable.numpy() for variable in self._models[replica][0]]


def assert_alike(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("how", "replicas", "averaged"),
    [
        ({"period": 3}, 2, lambda n: n % 3 == 0),
        ({"period": 3}, 4, lambda n: n % 3 == 0),
        ({"period": 4, "warmup_steps": 2}, 2, lambda n: n % 4 == 0 or n <= 2),
        ({"period": 2, "average_slots": False}, 2, lambda n: n % 2 == 0),
    ],
    ids=["2", "4", "warmup", "own slots"],
)
def test_replicas_do_what_models_do_that_are_trained_apart_and_averaged(
    how: dict[str, Any], replicas: int, averaged: Callable[[int], bool]
) -> None:
    variables, step = momentum()
    apart = Apart(momentum, replicas, averaged, how.get("average_slots", True))
    distributed = ar.distribute(step, config(devices=replicas, **how), *SPECS)
    for x, y in batches(7, 12):
        outputs, expected = distributed(x, y), apart.step(x, y)
        assert_alike([outputs[name] for name in expected], list(expected.values()))
        assert_alike([v.numpy() for v in variables], apart.variables())
    other = Apart(momentum, replicas, lambda n: n % 5 == 0)
    for x, y in batches(7, 12):
        other.step(x, y)
    assert np.abs(variables[0].numpy() - other.variables()[0]).max() > 1e-4  # another period is another result


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_replicas_train_on_where_they_were_when_the_data_had_ended(
    steps: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch ends between two averages, so the replicas differ; a step without data does not count."""
    if not small:
        monkeypatch.setattr(mirrored_variables, "SMALL", -1)
    variables, step = momentum()
    apart = Apart(momentum, 2, lambda n: n % 3 == 0)
    distributed = ar.distribute(lambda iterator: step(*next(iterator)), {**config(3), "steps_per_run": steps})
    given = batches(5, 12)
    data = tf.data.Dataset.from_tensor_slices(tuple(np.concatenate(part) for part in zip(*given, strict=True)))
    for _ in range(2):
        iterator = iter(data.batch(12))
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                distributed(iterator)
        for x, y in given:
            apart.step(x, y)
    assert_alike([v.numpy() for v in variables], apart.variables())
    distributed.average_variables()
    apart.average()
    assert_alike([v.numpy() for v in variables], apart.variables())


def test_rows_of_outputs_come_in_the_order_of_one_device() -> None:
    """Also where a replica's rows are in several segments, of several rows for each example."""
    w = tf.Variable(np.ones((4, 3)))

    def step(x: Any, y: Any) -> dict[str, Any]:
        w.assign_sub(0.0 * (tf.transpose(x) @ y))
        h = x @ w
        return {"segments": tf.concat([h, tf.repeat(y, 2, axis=0)], 0), "columns": tf.transpose(h)}

    distributed = ar.distribute(step, config(), *SPECS)
    x, y = batches(1, 5)[0]
    outputs, expected = distributed(x, y), step(x, y)
    assert_alike(list(outputs.values()), [expected[name] for name in outputs])


def test_with_sgd_and_a_period_of_1_it_is_what_one_device_does() -> None:
    variables, step = momentum()
    alone, one = momentum()
    distributed = ar.distribute(step, config(1, 4), *SPECS)
    for x, y in batches(5, 12):
        assert_alike([distributed(x, y)["loss"]], [one(x, y)["loss"]])
    assert_alike([v.numpy() for v in variables], [v.numpy() for v in alone])


def graph_of(optimizer: Callable[[], Any], *, direct: bool = False) -> tuple[Any, dict[str, Any]]:
    """A graph of TensorFlow 1 with an embedding, a loop, dropout-free, and its names."""
    graph = tf.Graph()
    with graph.as_default():
        ids = v1.placeholder(tf.int32, [None, 5], "ids")
        y = v1.placeholder(tf.float64, [None, 1], "y")
        rng = np.random.default_rng(3)
        with v1.variable_scope("", use_resource=True):
            table = v1.get_variable("table", initializer=rng.normal(size=(11, 4)), dtype=tf.float64)
            w = v1.get_variable("w", initializer=rng.normal(size=(4, 4)), dtype=tf.float64)
        rows = tf.nn.embedding_lookup(table, ids)
        _, state = v1.while_loop(
            lambda i, _: i < 5, lambda i, s: (i + 1, tf.tanh(s @ w + rows[:, i])), [0, tf.zeros_like(rows[:, 0])]
        )
        loss = tf.reduce_mean((tf.reduce_sum(state, 1, keepdims=True) - y) ** 2, name="loss")
        step = v1.train.get_or_create_global_step()
        train = optimizer().minimize(loss, global_step=None if direct else step, name="train")
        init = v1.global_variables_initializer()
    return graph, {"train": train, "loss": loss, "init": init}


def small_graph() -> tuple[Any, dict[str, str]]:
    """A linear model of TensorFlow 1 and its names."""
    graph = tf.Graph()
    with graph.as_default():
        x, y = v1.placeholder(tf.float64, [None, 4], "x"), v1.placeholder(tf.float64, [None, 3], "y")
        with v1.variable_scope("", use_resource=True):
            w = v1.get_variable("w", initializer=np.ones([4, 3]))
        loss = tf.reduce_mean((x @ w - y) ** 2, name="loss")
        train = v1.train.GradientDescentOptimizer(0.125).minimize(loss, name="train")
        init = v1.global_variables_initializer()
    return graph, {"train": train.name, "init": init.name}


def small_model() -> Trained:
    """What `small_graph` is, as a function."""
    w = tf.Variable(np.ones([4, 3]), name="w")

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - y) ** 2)
        w.assign_sub(0.125 * tape.gradient(loss, w))
        return {"loss": loss}

    return [w], step


def run_session(session: Any, names: dict[str, Any], feeds: Sequence[dict[str, Any]]) -> list[float]:
    return [session.run([names["loss"].name, names["train"].name], feed)[0] for feed in feeds]


@pytest.mark.parametrize("direct", [False, True], ids=["counted", "direct"])
def test_a_session_trains_loops_and_embeddings_apart(direct: bool) -> None:
    def adam() -> Any:
        return v1.train.AdamOptimizer(0.05)

    rng, period = np.random.default_rng(5), 2
    feeds = [{"ids:0": rng.integers(0, 11, (6, 5)), "y:0": rng.normal(size=(6, 1))} for _ in range(5)]
    graph, names = graph_of(adam, direct=direct)
    item = ar.GraphItem.from_graph(graph, train_op=names["train"].name, outputs=["loss:0"], init_op=names["init"].name)
    new = ar.rewrite(item, config(period))
    apart = [v1.Session(graph=graph_of(adam, direct=direct)[0]) for _ in range(2)]
    for one in apart:
        one.run(names["init"].name)
    with new.session() as session:
        session.run(names["init"].name)
        for n, feed in enumerate(feeds, start=1):
            losses = []
            for r, one in enumerate(apart):
                part = {name: np.split(value, 2)[r] for name, value in feed.items()}
                losses += run_session(one, names, [part])
            (found,) = run_session(session, names, [feed])
            np.testing.assert_allclose(found, np.mean(losses), rtol=1e-9)
            if n % period == 0:
                _average(apart)
            for name in ("table", "w", "table/Adam", "w/Adam_1"):
                expected = apart[0].run(f"{name}/Read/ReadVariableOp:0")
                np.testing.assert_allclose(session.read_variable(name), expected, rtol=1e-9, atol=1e-12)


def _average(sessions: Sequence[Any]) -> None:
    for handle in [node.name for node in sessions[0].graph.get_operations() if node.type == "VarHandleOp"]:
        reads = [one.run(f"{handle}/Read/ReadVariableOp:0") for one in sessions]
        if reads[0].dtype == np.float64:
            for one in sessions:
                with one.graph.as_default():
                    resource = one.graph.get_tensor_by_name(f"{handle}:0")
                    one.run(tf.raw_ops.AssignVariableOp(resource=resource, value=np.mean(reads, 0)))


def network(rate: float = 0.05) -> Any:
    import keras

    keras.utils.set_random_seed(7)
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(5, "tanh", dtype="float64", name="hidden")(inputs)
    hidden = keras.layers.BatchNormalization(dtype="float64", name="norm")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3, dtype="float64", name="last")(hidden))
    model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
    return model


def test_a_model_trains_apart_and_meets_where_an_epoch_ends() -> None:
    import keras

    x, y = (np.concatenate(parts) for parts in zip(*batches(3, 8), strict=True))
    model = ar.distribute(network(), config(2))
    apart, seen, seen_of = [network(), network()], [], []
    evaluated = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(model.get_weights()))
    logs = model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0, callbacks=[evaluated]).history
    losses = train_models(apart[:], x, y, 6, lambda n: seen_of.append(apart[0].get_weights()))
    for one, other in zip(seen, seen_of, strict=True):
        assert_alike(one, other)
    np.testing.assert_allclose(logs["loss"], [np.mean(losses[:3]), np.mean(losses[3:])], rtol=1e-6)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), apart[0].evaluate(x, y, verbose=0), rtol=1e-6)


def train_models(
    models: Sequence[Any], x: Any, y: Any, steps: int, ended: Callable[[int], None] = lambda n: None
) -> list[float]:
    """Train models apart on parts of batches of 8, in epochs of three steps; average behind each second, each epoch."""
    each, losses = 8 // len(models), []
    for n in range(steps):
        begins = [8 * (n % 3) + each * r for r in range(len(models))]
        found = [one.train_on_batch(x[i : i + each], y[i : i + each])[0] for one, i in zip(models, begins, strict=True)]
        losses.append(float(np.mean(found)))
        if n % 2 or n % 3 == 2:
            _average_models(models)
        if n % 3 == 2:
            ended(n)
            for one in models:
                one.reset_metrics()
    return losses


def _average_models(models: Sequence[Any]) -> None:
    for copies in zip(*((*model.variables, *model.optimizer.variables) for model in models), strict=True):
        if copies[0].dtype.startswith("float"):
            mean = np.mean([copy.numpy() for copy in copies], 0)
            for copy in copies:
                copy.assign(mean)


def test_variables_are_averaged_when_asked_and_before_they_are_saved(tmp_path: Any) -> None:
    variables, step = momentum()
    apart = Apart(momentum, 2, lambda n: n == 2)
    distributed = ar.distribute(step, config(100), *SPECS)
    for x, y in batches(2, 6):
        distributed(x, y)
        apart.step(x, y)
    assert np.abs(variables[0].numpy() - apart.variables()[0]).max() > 1e-4
    root = tf.train.Checkpoint(step=distributed, w=variables[0])
    with ar.CheckpointManager(root, tmp_path) as manager:
        manager.save(2)
    assert_alike([v.numpy() for v in variables], apart.variables())


def test_what_a_replica_writes_is_there_for_all() -> None:
    variables, step = momentum()
    apart = Apart(momentum, 2, lambda n: n == 3)
    distributed = ar.distribute(step, config(3), *SPECS)
    for n, (x, y) in enumerate(batches(3, 6)):
        if n == 1:
            variables[0].assign(np.ones([4, 3]))
            for replica in range(2):
                apart._models[replica][0][0].assign(np.ones([4, 3]))
        distributed(x, y)
        apart.step(x, y)
    assert_alike([v.numpy() for v in variables], apart.variables())


def test_each_variable_is_named_as_inexact_and_is_not_compared() -> None:
    _, step = momentum()
    given = config(4, warmup_steps=2)
    item = ar.GraphItem.from_function(step, *SPECS)
    report = ar.rewrite(item, given).report
    assert [note.node for note in report.inexact] == ["w", "b", "w/slot", "b/slot"]
    assert {note.text for note in report.inexact} == {
        "each replica updates its own with its part of the batch; averaged every 4 steps, and after each of the first 2"
    }
    found = ar.verify(item, given)
    assert found.ok
    assert any("not compared" in note for note in found.notes), found.notes


def test_a_batch_without_an_example_for_each_replica_is_refused() -> None:
    variables, step = momentum()
    distributed = ar.distribute(step, config(), *SPECS)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer examples than replicas"):
        distributed(np.ones([1, 4]), np.ones([1, 3]))
    assert np.isfinite(variables[0].numpy()).all()


def test_rows_that_are_not_divided_are_refused() -> None:
    table = tf.Variable(np.ones((5, 4)))

    def step(x: Any, bags: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.reduce_sum(tf.gather(table, bags), axis=1) + x) ** 2)
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    with pytest.raises(GraphError, match="the input 'bags' has an open size and is not divided"):
        ar.distribute(step, config(), SPECS[0], tf.RaggedTensorSpec([None, None], tf.int64))


def test_what_cannot_be_each_replicas_own_is_refused() -> None:
    _, step = momentum()
    static = (tf.TensorSpec([6, 4], tf.float64), tf.TensorSpec([6, 3], tf.float64))
    with pytest.raises(GraphError, match="batches of 6"):
        ar.distribute(step, config(), *static, batch_inputs={"x": 0, "y": 0})

    def counting(x: Any, y: Any) -> Any:
        return {**step(x, y), "column": tf.argmax(tf.reduce_mean(x, 0))}

    with pytest.raises(GraphError, match="of type int64"):
        ar.distribute(counting, config(), *SPECS)

    def routed(x: Any, y: Any) -> Any:
        chosen = tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2)[1]
        return {**step(x, y), "chosen": chosen}

    with pytest.raises(GraphError, match="a size that follows from the examples of a replica"):
        ar.distribute(routed, config(), *SPECS)

    def deciding(x: Any, y: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: step(x, y)["loss"], lambda: tf.constant(0.0, tf.float64))

    with pytest.raises(GraphError, match="one decision for all"):
        ar.distribute(deciding, config(), *SPECS)

    distributed = ar.distribute(step, config(), *SPECS)
    with pytest.raises(Exception, match="call it from Python"):
        tf.function(distributed)(np.ones([4, 4]), np.ones([4, 3]))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"strategy": {"name": "PS"}}, "the strategy PS"),
        ({"strategy": {"variables": "shared"}}, "replicas share"),
        ({"strategy": {"compressor": "fp16"}}, "compressor"),
        ({"microbatches": 2}, "micro-batches"),
        ({"variables": [{"match": "w", "partition": {"over": "data"}}]}, "in parts"),
    ],
)
def test_what_local_sgd_does_not_go_with_is_told_at_its_line(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ar.Config.of({**config(), **more})


def test_bytes_and_seconds_are_those_of_a_step_on_the_average_and_averages_share_a_bucket() -> None:
    found = {}
    for period in (1, 8):
        item = ar.GraphItem.from_function(momentum()[1], *SPECS)
        edges = [e for e in ar.rewrite(item, config(period)).report.plan.edges if e.owner != "step"]
        spent = [one for one in ar.simulate(item, config(period)).exchanges if "step" not in one.owners]
        assert [edge.bucket for edge in edges] == [1] * 4
        found[period] = sum(edge.bytes for edge in edges), sum(one.bytes for one in spent)
    assert found[1] == (2 * 8 * 15,) * 2
    assert found[8] == (2 * 15,) * 2  # of 15 numbers of 8 bytes, and their slots


def test_an_elastic_job_does_not_train_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from autograph_rewrite.runtime.job.job_memory import JobMemory

    for name, value in JobMemory(tmp_path, 0, 0).environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="a lost one"):
        ar.distribute(momentum()[1], config(), *SPECS)
