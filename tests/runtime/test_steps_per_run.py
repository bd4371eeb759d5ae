"""`steps_per_run`: several steps in one loop inside the graph do what as many runs do, and lose no element."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import GraphError, PlanError
from autograph_rewrite.runtime.keras_model import stacked

v1 = tf.compat.v1
EACH, STEPS, ROWS = 3, 7, 6
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(STEPS, ROWS, 4)), RNG.normal(size=(STEPS, ROWS, 3))
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "mirrored": {"strategy": {"variables": "mirrored"}},
    "micro-batches": {"microbatches": 2},
    "micro-batches in a loop": {"microbatches": 2, "accumulation": {"form": "loop"}},
    "stages": {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 2}, "strategy": {"name": "Pipeline"}},
    "shards": {"strategy": {"name": "FSDP"}},
}


def config(way: str, steps: int = EACH) -> dict[str, Any]:
    return {"devices": ["CPU:0", "CPU:1"], **WAYS[way], "steps_per_run": steps}


def item(*, fed: bool = True, looped: bool = False) -> GraphItem:
    """Return a graph with Adam, a counter that waits for nothing, and a loss; `looped`: it counts in a loop."""
    graph = tf.Graph()
    with graph.as_default():
        if fed:
            x, y = (v1.placeholder(tf.float64, [None, size], name) for name, size in (("x", 4), ("y", 3)))
        else:
            data = tf.data.Dataset.from_tensor_slices((X.reshape(-1, 4), Y.reshape(-1, 3))).batch(ROWS)
            x, y = v1.data.make_one_shot_iterator(data).get_next(name="next")
        w = v1.get_variable("w", initializer=np.ones((4, 5)), use_resource=True)
        head = v1.get_variable("head", initializer=np.ones((5, 3)), use_resource=True)
        count = v1.get_variable("count", initializer=np.int64(0), use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ w) @ head - y), name="loss")
        train = v1.train.AdamOptimizer(0.1).minimize(loss)
        if looped:
            add = tf.while_loop(lambda i: i < 2, lambda i: (i + tf.cast(count.assign_add(1) * 0, tf.int32) + 1,), [0])
        else:
            add = count.assign_add(1)
        tf.group(train, add, name="train")
        v1.variables_initializer(v1.global_variables(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def fed(at: int, end: int | None = None) -> dict[str, Any]:
    return {"x": X[at] if end is None else X[at:end], "y": Y[at] if end is None else Y[at:end]}


def one_by_one() -> tuple[dict[str, Any], list[float]]:
    """Return the variables after seven single steps of the original, and their losses."""
    with item().session() as session:
        session.run("init")
        losses = [session.run(["loss", "train"], fed(at))[0] for at in range(STEPS)]
        return session.read_variables(), losses


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_session_s_runs_of_several_steps_are_as_many_single_steps(way: str) -> None:
    variables, losses = one_by_one()
    with ar.rewrite(item(), config(way)).session() as session:
        session.run("init")
        for begin in range(0, STEPS, EACH):
            end = min(begin + EACH, STEPS)
            np.testing.assert_allclose(session.run("loss", fed(begin)), losses[begin], rtol=1e-12)  # trains nothing
            got, _ = session.run(["loss", "train"], fed(begin, end))
            np.testing.assert_allclose(got, losses[end - 1], rtol=1e-12)
        assert_same(session.read_variables(), variables)
        assert session.read_variable("count") == STEPS


@pytest.mark.parametrize("way", WAYS)
def test_where_the_data_end_in_the_middle_of_a_run_every_element_is_trained_on_once(way: str) -> None:
    variables, losses = one_by_one()
    with ar.rewrite(item(fed=False), config(way)).session() as session:
        session.run("init")
        for end in (EACH, 2 * EACH):
            np.testing.assert_allclose(session.run(["loss", "train"])[0], losses[end - 1], rtol=1e-12)
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(["loss", "train"])
        assert_same(session.read_variables(), variables)
        assert session.read_variable("count") == STEPS, "an update that needs nothing of the element is made as often"


def test_a_target_that_trains_nothing_runs_once() -> None:
    graph = tf.Graph()
    with graph.as_default():
        source = v1.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(np.arange(8.0)).batch(2))
        x = source.get_next(name="next")
        w = v1.get_variable("w", initializer=np.float64(0), use_resource=True)
        tf.group(w.assign_add(tf.reduce_sum(x)), name="train")
        tf.group(source.initializer, name="begin")
        tf.group(v1.variables_initializer([w]), name="init")
    both = GraphItem.from_graph(graph, train_op=["train", "begin"], outputs=[], init_op="init")
    with ar.rewrite(both, config("shared")).session() as session:
        session.run("init")
        for _ in range(2):
            session.run("begin")
            session.run("train")
        assert session.read_variable("w") == 2 * sum(range(6))
        assert session._loops is not None
        assert len(session._loops._loops) == 1, "one loop: that of the train op"


def test_updates_in_a_loop_wait_for_the_element_too() -> None:
    with ar.rewrite(item(fed=False, looped=True), config("shared")).session() as session:
        session.run("init")
        for _ in range(STEPS // EACH):
            session.run("train")
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run("train")
        assert session.read_variable("count") == 2 * STEPS


def test_rows_are_counted_and_batches_are_stacked_all_or_none() -> None:
    with ar.rewrite(item(), config("shared")).session() as session:
        session.run("init")
        with pytest.raises(GraphError, match="different numbers: 'x:0' 3, 'y:0' 2"):
            session.run("train", {"x": X[:3], "y": Y[:2]})
        with pytest.raises(GraphError, match="rows for 4 steps, and steps_per_run is 3"):
            session.run("train", fed(0, 4))
        with pytest.raises(GraphError, match="'y:0' is fed one batch, and a run does up to 3 steps"):
            session.run("train", {"x": X[:3], "y": Y[0]})


class Model:
    """Linear regression by hand, and a counter that waits for nothing."""

    def __init__(self) -> None:
        self.w = tf.Variable(np.ones((4, 3)), name="w")
        self.count = tf.Variable(0, dtype=tf.int64, name="count")

    def step(self, x: Any, y: Any, rate: Any = 0.1) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ self.w - y))
        self.w.assign_sub(tf.cast(rate, tf.float64) * tape.gradient(loss, self.w))
        self.count.assign_add(1)
        return {"loss": loss}


@pytest.mark.parametrize("way", ["shared", "mirrored", "micro-batches"])
@pytest.mark.parametrize("specs", [(), (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 3], tf.float64))])
def test_a_call_does_a_step_for_each_row(way: str, specs: tuple[Any, ...]) -> None:
    one, many = Model(), Model()
    several = ar.distribute(many.step, config(way), *specs)
    for begin in range(0, STEPS, EACH):
        end = min(begin + EACH, STEPS)
        losses = [one.step(X[at], Y[at])["loss"] for at in range(begin, end)]
        np.testing.assert_allclose(several(X[begin:end], Y[begin:end])["loss"], losses[-1], rtol=1e-12)
    np.testing.assert_allclose(many.w, one.w, rtol=1e-12)
    assert many.count.numpy() == STEPS
    assert len(several.items) == 1, "one trace, for whatever number of steps"


def test_what_has_no_rows_is_the_same_in_every_step() -> None:
    one, many = Model(), Model()
    several = ar.distribute(many.step, config("mirrored"))
    for at in range(EACH):
        one.step(X[at], Y[at], 0.3)
    several(X[:EACH], Y[:EACH], tf.constant(0.3))
    np.testing.assert_allclose(many.w, one.w, rtol=1e-6)
    many.w.assign(np.ones((4, 3)))  # reaches the copies before the next run
    several(X[:EACH], Y[:EACH], tf.constant(0.3))
    np.testing.assert_allclose(many.w, one.w, rtol=1e-6)


@pytest.mark.parametrize("way", ["shared", "mirrored"])
def test_a_call_draws_an_element_for_each_step(way: str) -> None:
    one, many = Model(), Model()
    data = tf.data.Dataset.from_tensor_slices((X.reshape(-1, 4), Y.reshape(-1, 3))).batch(ROWS)

    @tf.function
    def step(iterator: Any) -> Any:
        return many.step(*next(iterator))

    several, iterator = ar.distribute(step, config(way)), iter(data)
    for x, y in data:
        one.step(x, y)
    for _ in range(STEPS // EACH):
        several(iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        several(iterator)
    np.testing.assert_allclose(many.w, one.w, rtol=1e-12)
    assert many.count.numpy() == STEPS


def test_devices_that_were_cancelled_at_the_end_of_the_data_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(*_: Any) -> Any:
        raise tf.errors.CancelledError(None, None, "RecvAsync is cancelled.")

    model = Model()
    several = ar.distribute(tf.function(lambda iterator: model.step(*next(iterator))), config("shared"))
    iterator = iter(tf.data.Dataset.from_tensor_slices((X.reshape(-1, 4), Y.reshape(-1, 3))).batch(ROWS))
    several(iterator)
    monkeypatch.setattr(several, "_observed", cancelled)
    with pytest.raises(tf.errors.CancelledError):
        several(iterator)
    for _ in iterator:
        pass
    with pytest.raises(tf.errors.OutOfRangeError):
        several(iterator)


def test_a_call_says_what_is_wrong_with_its_rows() -> None:
    several = ar.distribute(Model().step, config("shared"))
    with pytest.raises(GraphError, match="different numbers: 'x' 3, 'y' 2"):
        several(X[:3], Y[:2])
    with pytest.raises(GraphError, match="'x' has rows for 4 steps, and steps_per_run is 3"):
        several(X[:4], Y[:4])


def built(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", metrics=["mae"], **options)
    return model


@pytest.mark.parametrize("options", [{"steps_per_execution": EACH}, {}])
def test_keras_runs_as_many_steps_as_either_says(options: dict[str, int]) -> None:
    rows = 4 * STEPS + 1  # the last batch has one example
    x, y = X.reshape(-1, 4)[:rows], Y.reshape(-1, 3)[:rows]
    one, many = built(), built(**options)
    given = config("mirrored", 1 if options else EACH)
    assert ar.distribute(many, given) is many
    assert many.steps_per_execution == EACH
    histories = [model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False).history for model in (one, many)]
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5, err_msg=name)
    for a, b in zip(one.get_weights(), many.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    assert many.optimizer.iterations.numpy() == 2 * 8


def uneven() -> Any:
    """Return a generator whose last batch is smaller."""

    def batches() -> Any:
        for begin, end in ((0, 4), (4, 8), (8, 12), (12, 13)):
            yield X.reshape(-1, 4)[begin:end], Y.reshape(-1, 3)[begin:end]

    return batches()


def generated() -> Any:
    specs = tuple(tf.TensorSpec([None, size], tf.float64) for size in (4, 3))
    return tf.data.Dataset.from_generator(uneven, output_signature=specs)


@pytest.mark.parametrize("data", [uneven, generated])
def test_keras_loses_no_batch_of_a_generator(data: Any) -> None:
    one, many = built(), ar.distribute(built(), config("shared"))
    for model in (one, many):
        model.fit(data(), verbose=0)
    for a, b in zip(one.get_weights(), many.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    assert many.optimizer.iterations.numpy() == 4


def test_batches_that_follow_each_other_with_one_shape_are_stacked() -> None:
    batches = [(tf.zeros([size, 2]), None) for size in (4, 4, 1)]
    groups = [(rows[0].shape.as_list(), rows[1], several) for rows, several in stacked(batches)]
    assert groups == [([2, 4, 2], None, True), ([1, 1, 2], None, True)]
    sparse = tf.sparse.from_dense(tf.ones([2, 2]))
    assert [(rows is sparse, several) for rows, several in stacked([sparse, sparse])] == [(True, False)] * 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"strategy": {"name": "PS"}}, "variables are on parameter servers"),
        ({"strategy": {"name": "PartitionedPS"}}, "variables are on single workers"),
        ({"pipeline": {"stages": 2, "microbatches": 2}}, "the stages are in several processes"),
        ({"mesh": {"model": 2}, "sharding": [{"match": "w", "split": [1, 2]}]}, "the model axis goes through"),
    ],
)
def test_a_plan_whose_steps_are_led_from_outside_is_refused(given: dict[str, Any], why: str) -> None:
    cluster = {"workers": ["a:1", "b:1"]} | ({"ps": ["c:1"]} if "parameter" in why else {})
    with pytest.raises(PlanError, match=f"steps_per_run is 3, but {why}"):
        ar.build_plan(item(), {"devices": ["CPU:0"], "cluster": cluster, "steps_per_run": EACH, **given})


def test_ar_verify_compares_single_steps() -> None:
    assert ar.verify(item(), config("mirrored")).ok
