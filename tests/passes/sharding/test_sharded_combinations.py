"""Shards with micro-batches, loops of steps, rematerialisation and compressors: as on one device, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import ConfigError, PassError, PlanError, RewriteError
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.collectives import local_ops
from autograph_rewrite.passes.collectives.local_ops import scatter_among_peers
from autograph_rewrite.plan.parts.lowerings import Operation
from tests.support.compressing import COMPRESSORS
from tests.support.covering import covering
from tests.support.keras_floats import keras_floats
from tests.support.sharded_models import worst
from tests.support.training import v1
from tests.zoo.oracle import model_variables

Array = np.ndarray[Any, Any]
STEPS, ROWS, EACH = 4, 7, 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(STEPS, ROWS, 6)), RNG.normal(size=(STEPS, ROWS, 6))
WEIGHTS = [RNG.normal(size=(6, 12) if at % 2 == 0 else (12, 6), scale=0.4) for at in range(4)]
SHARDED: dict[str, dict[str, Any]] = {
    "FSDP": {"name": "FSDP", "variables": "mirrored"},
    "PartitionedPS": {"name": "PartitionedPS"},
    "FSDP, shared": {"name": "FSDP", "variables": "shared"},
    "PartitionedPS, mirrored": {"name": "PartitionedPS", "variables": "mirrored"},
}
MICRO: dict[str, dict[str, Any]] = {
    "whole": {},
    "unrolled": {"microbatches": 2},
    "loop": {"microbatches": 2, "accumulation": {"form": "loop"}},
    "interleaved": {"microbatches": 2, "accumulation": {"layout": "interleaved"}},
}
REMAT: dict[str, dict[str, Any]] = {"kept": {}, "again": {"remat": {"policy": "sqrt"}}}


def config(sharded: str, *more: Mapping[str, Any], replicas: int = 2) -> dict[str, Any]:
    """Return a configuration of one process."""
    found = {"devices": [f"CPU:{i}" for i in range(replicas)], "strategy": SHARDED[sharded]}
    for one in more:
        found.update(one)
    return found


def item(dtype: str = "float64") -> GraphItem:
    """Return the graph of a deep perceptron with Adam."""
    with tf.Graph().as_default() as graph:
        x, y = (v1.placeholder(dtype, [None, 6], name) for name in "xy")
        h = x
        for at, weight in enumerate(WEIGHTS):
            h = tf.tanh(h @ v1.get_variable(f"w{at}", initializer=weight.astype(dtype), use_resource=True))
        loss = tf.reduce_mean(tf.square(h - y), name="loss")
        v1.train.AdamOptimizer(0.05).minimize(loss, v1.train.get_or_create_global_step(), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def runs(each: int) -> list[slice]:
    """Return which steps each run makes."""
    return [slice(at, min(at + each, STEPS)) for at in range(0, STEPS, each)]


def session(given: dict[str, Any] | None, dtype: str = "float64") -> Mapping[str, Array]:
    """Train in a session; return all variables."""
    each = 1 if given is None else given.get("steps_per_run", 1)
    with (item(dtype) if given is None else ar.rewrite(item(dtype), given)).session() as opened:
        opened.run("init")
        for steps in runs(each):
            rows = (X[steps], Y[steps]) if each > 1 else (X[steps.start], Y[steps.start])
            opened.run(["loss", "train"], {name: value.astype(dtype) for name, value in zip("xy", rows, strict=True)})
        return dict(opened.read_variables())


def function(given: dict[str, Any] | None) -> Mapping[str, Array]:
    """Train a function with momentum; return its variables."""
    weights = [tf.Variable(weight) for weight in WEIGHTS]
    slots = [tf.Variable(np.zeros_like(weight), trainable=False) for weight in WEIGHTS]

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean((h - y) ** 2)
        for weight, slot, slope in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * slot.assign(0.9 * slot + slope))
        return loss

    each = 1 if given is None else given.get("steps_per_run", 1)
    many = tf.function(step) if given is None else ar.distribute(step, given)
    for steps in runs(each):
        many(*(tf.constant(one[steps] if each > 1 else one[steps.start]) for one in (X, Y)))
    return {str(at): variable.numpy() for at, variable in enumerate((*weights, *slots))}


def model(given: dict[str, Any] | None) -> Mapping[str, Array]:
    """Fit a Keras model with Adam; return its weights and slots."""
    keras.utils.clear_session()
    with keras_floats("float64"):
        layers = [keras.layers.Dense(weight.shape[1], "tanh", use_bias=False) for weight in WEIGHTS]
        made = keras.Sequential([keras.Input((6,)), *layers])
        made.set_weights(WEIGHTS)
        made.compile(keras.optimizers.Adam(0.05), keras.losses.MeanSquaredError(), jit_compile=False)
    many = made if given is None else ar.distribute(made, given)
    many.fit(X.reshape(-1, 6), Y.reshape(-1, 6), batch_size=ROWS, shuffle=False, verbose=0)
    return {name: value for name, value in model_variables(many).items() if not name.startswith("metric/")}


KINDS: dict[str, Callable[[dict[str, Any] | None], Mapping[str, Array]]] = {
    "session": session,
    "function": function,
    "model": model,
}


@cache
def expected(kind: str, dtype: str = "float64") -> Mapping[str, Array]:
    """Return what one device has after all steps, which are made one by one."""
    return session(None, dtype) if kind == "session" else KINDS[kind](None)


@pytest.mark.parametrize(
    ("kind", "sharded", "micro", "remat", "steps"),
    covering(list(KINDS), list(SHARDED), list(MICRO), list(REMAT), (1, 3)),
)
def test_what_shards_are_combined_with_computes_the_same_or_is_refused(
    kind: str, sharded: str, micro: str, remat: str, steps: int
) -> None:
    given = config(sharded, MICRO[micro], REMAT[remat], {"steps_per_run": steps} if steps > 1 else {})
    found, where = worst(KINDS[kind](given), expected(kind))
    assert found < 1e-9, where


def test_of_a_graph_in_shards_something_is_computed_again() -> None:
    new = ar.rewrite(item(), config("FSDP", REMAT["again"]))
    assert new.report.recomputed.segments
    assert new.variables["w0"].shards is not None


ON_ONE_DEVICE = [name for name in SHARDED if "FSDP" not in name]


@pytest.mark.parametrize(("sharded", "compressor"), covering(ON_ONE_DEVICE, COMPRESSORS))
def test_gradients_of_shards_on_one_device_each_are_not_compressed_and_that_is_said(
    sharded: str, compressor: str
) -> None:
    given = config(sharded, {"strategy": {**SHARDED[sharded], "compressor": compressor}})
    with pytest.warns(UserWarning, match=f"strategy.compressor: {compressor} does nothing here"):
        found, where = worst(session(given, "float32"), expected("session", "float32"))
    assert found < 1e-5, where


@pytest.mark.parametrize(
    ("strategy", "compressor", "micro"), covering(("PartitionedAR", "FSDP"), COMPRESSORS, list(MICRO))
)
def test_gradients_of_shards_on_every_replica_are_compressed_and_near(
    strategy: str, compressor: str, micro: str
) -> None:
    named = {"name": strategy, "variables": "mirrored", "compressor": compressor}
    given = config("FSDP", MICRO[micro], {"strategy": named})
    edges = ar.rewrite(item("float32"), given).report.plan.edges
    assert compressor in {edge.compressor for edge in edges}
    got, exact = session(given, "float32"), expected("session", "float32")
    for at, start in enumerate(WEIGHTS):  # what a compressor keeps for later steps is as much as a step moves
        moved = np.abs(exact[f"w{at}"] - start).max()
        assert np.abs(got[f"w{at}"] - exact[f"w{at}"]).max() < 2 * moved


def test_gathers_of_variables_are_no_work_that_is_not_divided() -> None:
    assert ar.rewrite(item(), config("FSDP")).report.covered.share > 0.999


SCHEDULES: dict[str, dict[str, Any]] = {"gpipe": {}, "1f1b": {"schedule": "1f1b"}, "loop": {"form": "loop"}}


@pytest.mark.parametrize(("kind", "stage", "schedule"), covering(list(KINDS), (1, 2, 3), list(SCHEDULES)))
def test_shards_go_with_stages_in_every_schedule(kind: str, stage: int, schedule: str) -> None:
    given = {
        **FOUR,
        "variables": [{"match": ".*", "partition": {"over": "data", "stage": stage}}],
        "pipeline": {"stages": 2, "microbatches": 2, **SCHEDULES[schedule]},
    }
    found, where = worst(KINDS[kind](given), expected(kind))
    assert found < 1e-9, where


def test_a_shard_is_on_the_device_of_its_stage_in_its_replica() -> None:
    new = ar.rewrite(item(), config("FSDP, shared", STAGES, FOUR))
    homes = {name: new.variables[name].shards.devices for name in ("w0", "w3")}  # type: ignore[union-attr]
    assert homes == {
        "w0": ("/device:CPU:0", "/device:CPU:2"),
        "w3": ("/device:CPU:1", "/device:CPU:3"),
    }


@pytest.mark.parametrize("workers", [2, 4])
def test_the_graphs_of_a_job_whose_shards_are_uneven_fit_together(workers: int) -> None:
    cluster = {"workers": [f"h{i}:1" for i in range(workers)]}
    given = {"devices": ["CPU:0", "CPU:1"], "cluster": cluster, "strategy": {"name": "FSDP"}}
    assert ar.verify(item(), given, steps=1).ok


FOUR = {"devices": [f"CPU:{i}" for i in range(4)]}
STAGES = {"pipeline": {"stages": 2, "microbatches": 2}}
LOOP_OF_STAGES = {"pipeline": {**STAGES["pipeline"], "form": "loop"}}
JOB = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1"]}}
POLICY = {"variable_policies": [{"match": "w0", "synchronization": "on_read", "aggregation": "mean"}]}


def test_a_policy_of_a_variable_that_a_model_axis_cuts_goes_with_shards() -> None:
    mesh = {"mesh": {"data": 2, "model": 2}, "sharding": [{"match": "w0", "split": [1, 2]}]}
    policy = {"variable_policies": [{"match": "w0", "synchronization": "on_write", "aggregation": "mean"}]}
    assert ar.verify(item(), config("FSDP, shared", {**mesh, **policy}, FOUR), steps=2).ok


REFUSED: dict[str, tuple[str, dict[str, Any], type[RewriteError], str]] = {
    "stages in a loop, a copy on each replica": (
        "FSDP",
        LOOP_OF_STAGES,
        ConfigError,
        "stages in a loop .* hold one copy",
    ),
    "replicas that train alone": ("FSDP", {"local_sgd": {"period": 2}}, ConfigError, "not with the strategy FSDP"),
    "components in micro-batches": ("FSDP", {**POLICY, "microbatches": 2}, ConfigError, "a component of 'w0'"),
    "steps per run, on workers": ("PartitionedPS", {**JOB, "steps_per_run": 3}, PlanError, "on single workers"),
    "both in a job, on servers": ("PartitionedPS", {**JOB, **MICRO["loop"]}, PlanError, "micro-batches in several"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_shards_cannot_be_combined_with_is_refused_with_a_reason(what: str) -> None:
    sharded, more, error, why = REFUSED[what]
    with pytest.raises(error, match=why):
        ar.rewrite(item(), config(sharded, more), task=0 if "cluster" in more else None)


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("count", [2, 3])
def test_what_a_policy_says_of_a_variable_next_to_shards_is_done(count: int, aggregation: str) -> None:
    """A variable that is made of a gradient gets what each replica contributes, and no shards of a sum."""

    def trained(strategy: str, **more: Any) -> list[Any]:
        w = tf.Variable(np.linspace(-1, 1, 12).reshape(4, 3), name="w")
        kept = tf.Variable(np.zeros((4, 3)), name="kept", trainable=False)

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
            slope = tape.gradient(loss, w)
            w.assign_sub(0.1 * slope)
            kept.assign(0.9 * kept + 0.3 * slope)
            return loss

        devices = {"devices": [f"CPU:{i}" for i in range(count)]}
        distributed = ar.distribute(tf.function(step), {**devices, "strategy": {"name": strategy}, **more})
        for number in range(3):
            distributed(tf.constant(np.random.default_rng(number).normal(size=(5, 4))))
        return [w.numpy(), kept.numpy()]

    policy = {"variable_policies": [{"match": "kept", "synchronization": "on_write", "aggregation": aggregation}]}
    whole, sharded, without = trained("AllReduce", **policy), trained("FSDP", **policy), trained("FSDP")
    for one, other in zip(whole, sharded, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12)
    assert np.abs(without[1] - sharded[1]).max() > 1e-4


@pytest.mark.parametrize("sharded", ["FSDP", "PartitionedPS"])
def test_an_update_under_a_condition_is_refused_in_shards_after_a_loop_over_micro_batches(sharded: str) -> None:
    w, count = tf.Variable(np.linspace(-1, 1, 36).reshape(6, 6), name="w"), tf.Variable(0, name="count")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ w) @ w) ** 2)
        slope = tape.gradient(loss, w)
        tf.cond(count % 2 > 0, lambda: w.assign_sub(0.1 * slope), lambda: w.read_value())
        count.assign_add(1)
        return loss

    given = GraphItem.from_function(step, tf.TensorSpec([None, 6], tf.float64))
    assert ar.verify(given, config(sharded, MICRO["unrolled"])).ok
    with pytest.raises(PassError, match=r"is in a branch or a loop, and needs .* from outside|which may not be there"):
        ar.rewrite(given, config(sharded, MICRO["loop"]))


def test_a_gradient_that_is_cut_wrong_is_noticed_in_a_loop_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_others(rewrite: Any, value: Any, block: Any, node: Any) -> Any:
        return scatter_among_peers(
            rewrite, FoldedBuilder.of(rewrite, value).op("Neg", value, what="wrong"), block, node
        )

    monkeypatch.setitem(local_ops.PEERS, Operation.SCATTER, of_the_others)  # type: ignore[arg-type]
    wrong = session(config("FSDP", MICRO["loop"], {"steps_per_run": 3}))
    assert worst(wrong, expected("session"))[0] > 1e-3
