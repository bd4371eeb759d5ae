"""Replicas' own values: numbers of replicas, sums and gathers over them, and variables with policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, GraphError

MODES = ("shared", "mirrored")
ROWS = np.array([[1.0], [2.0], [4.0]], np.float32)  # replica 0 has two of them
Own = Callable[[Any], Any]


def config(mode: str = "shared", devices: int = 2, **more: Any) -> dict[str, Any]:
    return {"devices": [f"CPU:{i}" for i in range(devices)], "strategy": {"variables": mode}, **more}


def policy(synchronization: str, aggregation: str, match: str = "v") -> dict[str, Any]:
    return {
        "variable_policies": [{"match": match, "synchronization": synchronization, "aggregation": aggregation}],
    }


def trained(w: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss


def step_with(own: Own, given: dict[str, Any]) -> Any:
    """A distributed training step that returns what `own` makes of the batch."""
    w = tf.Variable([[1.0]], name="w")

    def step(x: Any) -> Any:
        trained(w, x)
        return own(x)

    return ar.distribute(step, given, tf.TensorSpec([None, 1]))


def with_variable(update: Callable[[Any, Any], Any], given: dict[str, Any], **variable: Any) -> tuple[Any, Any]:
    """A step that updates `v`, and returns what each example sees of it behind that; and `v`."""
    v = tf.Variable(**({"initial_value": 0.0, "trainable": False, "name": "v"} | variable))

    def rows(x: Any) -> Any:
        update(v, x)
        return tf.fill([tf.shape(x)[0]], v)

    return step_with(rows, given), v


def number() -> Any:
    return tf.cast(ar.replica_id() + 1, tf.float32)


def test_on_one_device_there_is_replica_0() -> None:
    assert int(ar.replica_id()) == 0
    assert int(ar.num_replicas()) == 1
    assert float(ar.all_reduce(3.0, "mean")) == 3
    assert ar.all_gather([[1, 2]], -1).numpy().tolist() == [[1, 2]]


@pytest.mark.parametrize("more", [{}, {"microbatches": 2}], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("mode", MODES)
def test_each_replica_sees_its_own_number(mode: str, more: dict[str, Any]) -> None:
    def own(x: Any) -> Any:
        scalar = tf.reshape(ar.replica_id(), [1, 1])
        return {
            "ids": tf.fill([tf.shape(x)[0]], ar.replica_id()),
            "sum": ar.all_reduce(number()),
            "mean": ar.all_reduce(number(), tf.distribute.ReduceOp.MEAN),
            "table": ar.all_gather(scalar + 5, -1),
            "flags": ar.all_gather(scalar > 0),
            "count": ar.num_replicas(),
            "batch": ar.all_reduce(tf.reduce_sum(x)),
        }

    found = step_with(own, config(mode, 3, **more))(np.ones([7, 1], np.float32))
    assert found["ids"].numpy().tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert [float(found[name]) for name in ("sum", "mean", "count", "batch")] == [6, 2, 3, 7]
    assert found["table"].numpy().tolist() == [[5, 6, 7]]
    assert found["flags"].numpy().tolist() == [[False], [True], [True]]


def test_replicas_on_one_device_have_numbers_too() -> None:
    given = config() | {"devices": ["CPU:0", "CPU:0"]}
    found = step_with(lambda x: x[:, 0] * number(), given)(ROWS)
    assert found.numpy().tolist() == [1, 2, 8]


@pytest.mark.parametrize("mode", MODES)
def test_examples_are_not_gathered_and_what_is_computed_of_all_is(mode: str) -> None:
    with pytest.raises(GraphError, match="given examples"):
        step_with(ar.all_gather, config(mode))(ROWS)
    step = step_with(lambda x: ar.all_gather(tf.reduce_max(x, 0) * number()), config(mode))
    assert step(ROWS).numpy().tolist() == [4, 8]


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("more", [{}, {"microbatches": 2}, {"remat": {"policy": "every:1"}}], ids=str)
def test_parts_of_a_sum_meet_numbers_before_they_are_added_up(more: dict[str, Any], how: str) -> None:
    rows = np.array([[1.0], [2.0], [4.0], [8.0]], np.float32)
    step = step_with(lambda x: ar.all_reduce(tf.reduce_sum(x) * number(), how), config(**more))
    assert float(step(rows)) == 3 * 1 + 12 * 2


@pytest.mark.parametrize("form", ["unrolled", "loop"])
def test_what_all_micro_batches_have_alike_counts_once_for_each_replica(form: str) -> None:
    given = config(microbatches=2, accumulation={"form": form})
    step = step_with(lambda x: (ar.all_gather(tf.reduce_max(x, 0)), ar.all_reduce(tf.reduce_max(x) * number())), given)
    rows, total = step(np.array([[1.0], [2.0], [4.0], [8.0]], np.float32))
    assert rows.numpy().tolist() == [8, 8]
    assert float(total) == 24


@pytest.mark.parametrize(("mean", "expected"), [(False, 7.0), (True, 5.5)], ids=["sum", "mean"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_as_a_sum_is_what_replicas_have(mode: str, mean: bool, expected: float) -> None:
    own = tf.reduce_mean if mean else tf.reduce_sum  # of rows 1 and 2, and of row 4
    step, v = with_variable(lambda v, x: v.assign_add(own(x)), config(mode) | policy("on_write", "sum"))
    step(ROWS)
    assert float(v) == expected


def test_a_number_goes_through_loops_and_into_seeds() -> None:
    def own(x: Any) -> Any:
        _, total = tf.while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, a + number()), (0, 0.0))
        drawn = tf.random.stateless_uniform([1], [1, ar.replica_id()])
        return ar.all_reduce(total), ar.all_gather(drawn)

    total, drawn = step_with(own, config())(ROWS)
    assert float(total) == 9
    expected = [tf.random.stateless_uniform([1], [1, replica]).numpy()[0] for replica in range(2)]
    assert drawn.numpy().tolist() == expected


def test_stages_have_the_number_of_their_replica() -> None:
    given = config(devices=4) | {"pipeline": {"stages": 2, "microbatches": 2}, "mesh": {"data": 2, "stage": 2}}
    found = step_with(lambda x: x[:, 0] * 0 + number(), given)(np.ones([8, 1], np.float32))
    assert found.numpy().tolist() == [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (lambda x: ar.replica_id(), "one value is to be returned"),
        (lambda x: tf.cond(ar.replica_id() == 0, lambda: x, lambda: -x), "a condition is one decision"),
        (lambda x: tf.Variable.assign(VARIABLE, number()), "would be written with what differs"),
    ],
    ids=["output", "condition", "variable"],
)
def test_what_counts_for_all_cannot_differ(own: Own, text: str) -> None:
    with pytest.raises(GraphError, match=text):
        step_with(own, config())


VARIABLE = tf.Variable(0.0, name="kept", trainable=False)


def test_what_differs_is_listed_and_not_compared() -> None:
    w = tf.Variable([[1.0]], name="w")

    def step(x: Any) -> Any:
        return {"loss": trained(w, x), "noisy": ar.all_reduce(number())}

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 1]))
    assert any("ar.replica_id" in note.text for note in ar.rewrite(item, config()).report.inexact)
    report = ar.verify(item, config())
    assert report.ok
    assert {row.name for row in report.rows} == {"loss", "w"}
    assert any("output noisy" in note for note in report.notes)


@pytest.mark.parametrize(("operation", "dtype"), [("max", tf.float32), ("mean", tf.int32), ("sum", tf.string)])
def test_replicas_are_added_up_or_averaged(operation: str, dtype: tf.DType) -> None:
    with pytest.raises(GraphError):
        ar.all_reduce(tf.constant("1" if dtype == tf.string else 1, dtype), operation)


def test_what_runs_on_the_host_runs_once_for_all_replicas() -> None:
    calls: list[int] = []
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["1.0", "4.0"], [10, 40]), -1)

    def own(x: Any) -> Any:
        counted = tf.numpy_function(lambda rows: calls.append(len(rows)) or np.float32(len(rows)), [x], tf.float32)
        found = table.lookup(tf.strings.as_string(x[:, 0], precision=1))
        return counted, found, ar.replica_id() + tf.zeros_like(found)

    counted, found, replicas = step_with(own, config(devices=4))(ROWS)
    assert calls == [3]
    assert float(counted) == 3
    assert found.numpy().tolist() == [10, -1, 40]
    assert replicas.numpy().tolist() == [0, 1, 2]


# REQUIREMENTS, R-TPU-6: replica 0 adds 1, replica 1 adds 2
ON_WRITE = [("sum", 3, [3, 3, 3]), ("MEAN", 1.5, [1.5] * 3), ("only_first_replica", 1, [1, 1, 1])]
ON_READ = [("SUM", 3, [1, 1, 2]), ("mean", 1.5, [1, 1, 2]), ("Only_First_Replica", 1, [1, 1, 2])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("aggregation", "total", "seen"), ON_WRITE)
def test_a_write_merges_what_replicas_write(mode: str, aggregation: str, total: float, seen: Sequence[float]) -> None:
    step, v = with_variable(lambda v, x: v.assign_add(number()), config(mode, **policy("ON_WRITE", aggregation)))
    assert step(ROWS).numpy().tolist() == seen
    assert float(v) == total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("aggregation", "total", "seen"), ON_READ)
def test_a_read_merges_what_replicas_have(mode: str, aggregation: str, total: float, seen: Sequence[float]) -> None:
    step, v = with_variable(lambda v, x: v.assign_add(number()), config(mode, **policy("on_read", aggregation)))
    assert step(ROWS).numpy().tolist() == seen
    assert float(v) == total
    step(ROWS)
    assert float(v) == 2 * total


@pytest.mark.parametrize("mode", MODES)
def test_without_aggregation_replicas_are_independent(mode: str) -> None:
    step, v = with_variable(lambda v, x: v.assign_add(number()), config(mode, **policy("on_write", "none")))
    step(ROWS)
    assert step(ROWS).numpy().tolist() == [2, 2, 4]
    assert float(v) == 2  # the first replica's, as the checkpoint has it


@pytest.mark.parametrize(
    ("aggregation", "dtype", "shares", "total"),
    [("sum", tf.float32, [5, 5, 5], 10), ("mean", tf.float32, [10] * 3, 10), ("sum", tf.int32, [5] * 3, 10)],
)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_from_outside_is_shared_out(
    mode: str, aggregation: str, dtype: tf.DType, shares: Sequence[float], total: float
) -> None:
    given = config(mode, **policy("on_read", aggregation))
    one = lambda v, x: v.assign_add(tf.cast(ar.replica_id(), dtype) * tf.cast(tf.reduce_sum(x) * 0, dtype))  # noqa: E731
    step, v = with_variable(one, given, initial_value=tf.zeros([], dtype))
    step(ROWS)
    v.assign(10)
    assert step(ROWS).numpy().tolist() == shares
    assert float(v) == total


def test_an_integer_loses_what_replicas_cannot_share() -> None:
    given = config(devices=3, **policy("on_read", "sum"))
    step, v = with_variable(lambda v, x: v.assign_add(ar.replica_id() * 0), given, initial_value=tf.constant(-10))
    assert step(ROWS).numpy().tolist() == [-3, -3, -3]
    assert int(v) == -9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("aggregation", "outside"),
    [
        ("mean", np.mean),
        ("sum", np.sum),
        ("only_first_replica", lambda rows, _: rows[0]),
        ("none", lambda rows, _: rows[0]),
    ],
)
def test_moving_averages_follow_the_parts(mode: str, aggregation: str, outside: Callable[[Any, int], Any]) -> None:
    w, v = tf.Variable([[1.0]], name="w"), tf.Variable(tf.zeros([2]), name="v", trainable=False)

    def train_step(x: Any) -> Any:
        mean, variance = tf.nn.moments(x, [0, 1])
        v.assign(0.5 * v + 0.5 * tf.stack([mean, variance]))
        return trained(w, x)

    step = ar.distribute(train_step, config(mode, **policy("on_read", aggregation)), tf.TensorSpec([None, 1]))
    components = np.zeros([2, 2])
    for _ in range(3):
        step(ROWS)
        parts = [ROWS[:2], ROWS[2:]]
        components = 0.5 * components + 0.5 * np.array([[part.mean(), part.var()] for part in parts])
    np.testing.assert_allclose(v.numpy(), outside(components, 0), rtol=1e-6)
    assert not np.allclose(v.numpy()[1], 0.875 * ROWS.var())  # what one device has


@pytest.mark.parametrize("mode", MODES)
def test_a_replica_without_examples_keeps_its_component(mode: str) -> None:
    given = config(mode, 2, **policy("on_read", "mean"))
    step, v = with_variable(lambda v, x: v.assign(tf.reduce_mean(x)), given)
    step(ROWS)
    assert float(v) == 2.75
    assert step(ROWS[:1]).numpy().tolist() == [1]
    assert float(v) == 2.5  # 1 and, still, 4


@pytest.mark.parametrize(("aggregation", "expected"), [("sum", 7.0), ("mean", 3.5), ("only_first_replica", 3.0)])
def test_a_written_sum_is_that_of_parts(aggregation: str, expected: float) -> None:
    step, v = with_variable(lambda v, x: v.assign(tf.reduce_sum(x)), config(**policy("on_write", aggregation)))
    step(ROWS)
    assert float(v) == expected


def test_a_mean_of_micro_batches_is_written_once() -> None:
    given = config(microbatches=2, **policy("on_write", "mean"))
    step, v = with_variable(lambda v, x: v.assign_add(tf.reduce_mean(x) * number()), given)
    step(ROWS)
    np.testing.assert_allclose(v.numpy(), (1 + 2 + 2 * 4) / 3, rtol=1e-6)  # replica 1 has one micro-batch with examples


def test_what_the_program_declares_counts_where_replicas_differ() -> None:
    declared = {"aggregation": tf.VariableAggregation.SUM}
    step, v = with_variable(lambda v, x: v.assign_add(number()), config(), **declared)
    step(ROWS)
    assert float(v) == 3
    on_read = {"synchronization": tf.VariableSynchronization.ON_READ} | declared
    step, v = with_variable(lambda v, x: v.assign_add(number()), config(), **on_read)
    assert step(ROWS).numpy().tolist() == [1, 1, 2]
    assert float(v) == 3
    given = config(**policy("on_write", "mean"))
    step, v = with_variable(lambda v, x: v.assign_add(1.0 + 0 * number()), given, **declared)
    step(ROWS)
    assert float(v) == 1  # the configuration counts


@pytest.mark.parametrize(
    ("given", "variable", "text"),
    [
        (policy("on_read", "mean"), {"trainable": True}, "is trained"),
        (policy("on_write", "mean"), {"initial_value": 0}, "has no mean"),
        (policy("on_read", "sum", "u"), {}, "no variable's whole name matches 'u'"),
        (policy("on_read", "sum") | {"microbatches": 2}, {}, "is cut into micro-batches"),
        (policy("on_red", "sum"), {}, "synchronization"),
    ],
)
def test_an_impossible_policy_is_refused(given: dict[str, Any], variable: dict[str, Any], text: str) -> None:
    one = lambda v, x: v.assign_add(tf.cast(ar.replica_id(), v.dtype))  # noqa: E731
    with pytest.raises(ConfigError, match=text):
        with_variable(one, config(**given), **variable)


def test_the_report_says_which_policy_holds_for_each_variable() -> None:
    w, n = tf.Variable([[1.0]], name="w"), tf.Variable(0, name="n", trainable=False)
    v = tf.Variable(0.0, name="v", trainable=False)

    def step(x: Any) -> Any:
        v.assign_add(tf.reduce_mean(x))
        n.assign_add(1)
        return trained(w, x)

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 1]))
    report = ar.rewrite(item, config(**policy("on_read", "mean"))).report
    assert dict(report.policies) == {
        "v": "on_read, mean (variable_policies)",
        "n": "on_write, as on one device",
        "w": "on_write, gradients are summed",
    }
    assert "policy: v: on_read, mean (variable_policies)" in str(report)
    assert [note.node for note in report.inexact] == ["v"]


def test_components_that_come_to_nothing_cannot_be_read() -> None:
    w, v = tf.Variable([[1.0]], name="w"), tf.Variable(0.0, name="v", trainable=False)

    def step(x: Any) -> Any:
        v.assign_add(number())
        return trained(w, x), v.read_value()

    with pytest.raises(GraphError, match="reads 'v' for all replicas"):
        ar.distribute(step, config(**policy("on_read", "none")), tf.TensorSpec([None, 1]))


def test_rows_cannot_be_scattered_into_components() -> None:
    w, v = tf.Variable([[1.0]], name="w"), tf.Variable(tf.zeros([2]), name="v", trainable=False)

    def step(x: Any) -> Any:
        v.scatter_add(tf.IndexedSlices(tf.reshape(number(), [1]), tf.constant([0])))
        return trained(w, x)

    with pytest.raises(GraphError, match="of which each replica has a component"):
        ar.distribute(step, config(**policy("on_read", "sum")), tf.TensorSpec([None, 1]))
