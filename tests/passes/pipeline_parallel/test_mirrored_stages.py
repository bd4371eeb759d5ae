"""Stages whose replicas have variables of their own: the devices of a stage meet, and the numbers are one device's."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, PassError
from autograph_rewrite.inspect.communication import meetings
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types.device_names import short
from tests.support import split_models
from tests.support.staged import MODELS, staged_item
from tests.zoo import ZOO, Options

EXACT = 1e-9
MIRRORED = {"name": "AllReduce", "variables": "mirrored"}
ROUND: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "circular_repeat": 2},
    "circular": {"schedule": "circular", "circular_repeat": 2},
    "one micro-batch": {"microbatches": 1},
}
WITH: dict[str, dict[str, Any]] = {
    **{
        name: {"strategy": {"name": name, "variables": "mirrored"}}
        for name in ("FSDP", "PS", "PartitionedPS", "Parallax")
    },
    "ZeRO 1": {"variables": [{"match": ".*", "partition": {"over": "data", "stage": 1, "axis": 0}}]},
    "recomputation": {"remat": {"policy": "sqrt"}},
    "two steps in a run": {"steps_per_run": 2},
}


def config(**more: Any) -> dict[str, Any]:
    """Two replicas of two stages: CPU:0 and CPU:2 hold the first, CPU:1 and CPU:3 the second."""
    pipeline = {"stages": 2, "microbatches": 2, **more.pop("pipeline", {})}
    return {"devices": [f"CPU:{i}" for i in range(4)], "pipeline": pipeline, "strategy": MIRRORED, **more}


def item(name: str = "mlp") -> ar.GraphItem:
    """Return a model of the zoo."""
    return ZOO[name].build(Options(dtype="float64")).item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ROUND)
def test_stages_train_as_one_device_under_every_schedule(how: str) -> None:
    report = ar.verify(item(), config(pipeline=ROUND[how]), steps=2)
    assert report.ok, report
    assert report.max_error <= EXACT


@pytest.mark.parametrize("what", WITH)
def test_what_else_a_configuration_says_goes_with_them(what: str) -> None:
    report = ar.verify(item(), config(**WITH[what]), steps=2)
    assert report.ok, report
    assert report.max_error <= EXACT


@pytest.mark.parametrize("strategy", ["AllReduce", "FSDP"])
def test_data_model_and_stage_axes_have_collectives_each_among_its_devices(strategy: str) -> None:
    given = split_models.config(2, 2, 2, strategy={"name": strategy, "variables": "mirrored"})
    report = ar.verify(split_models.item(), given, steps=2)
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT
    exchanged = meetings(ar.rewrite(split_models.item(), given))
    found = {frozenset(map(short, one.places)) for one in exchanged if one.kind.startswith("Collective")}
    # Replicas lie major to stages, and these to the devices of the model axis: replica 0 has CPU:0 to CPU:3.
    of_replicas = {frozenset({f"CPU:{i}", f"CPU:{i + 4}"}) for i in range(4)}
    of_layers = {frozenset({f"CPU:{i}", f"CPU:{i + 1}"}) for i in range(0, 8, 2)}
    assert of_layers <= found <= of_layers | of_replicas
    assert strategy == "FSDP" or of_replicas <= found


def places(graph: Graph) -> dict[str, str]:
    """Return the device of each variable's handle."""
    return {node.name: short(node.device) for node in graph if node.op == "VarHandleOp"}


def test_each_device_has_the_variables_of_its_stage_and_one_sum_for_a_bucket_of_them() -> None:
    new = ar.rewrite(item(), config())
    of = places(new.graph)
    first, second = (
        {name.split("/")[-2] for name, device in of.items() if device == at and "replica" not in name and "/" in name}
        for at in ("CPU:0", "CPU:1")
    )
    assert {"hidden_0"} <= first - second
    assert {"logits"} <= second - first
    for name in [name for name in of if name.startswith("replica_1/")]:
        own = of[name.removeprefix("replica_1/")]
        assert of[name] == {"CPU:0": "CPU:2", "CPU:1": "CPU:3"}[own]
    assert {(edge.bucket, edge.logical) for edge in new.report.plan.edges if edge.bucket} == {(1, 1), (2, 0)}
    sums = [node for node in new.graph if node.op == "CollectiveReduceV2" and "bucket" in node.name]
    assert sorted(short(node.device) for node in sums) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


def test_shards_of_a_stage_lie_on_its_replicas() -> None:
    new = ar.rewrite(item(), config(strategy={"name": "FSDP", "variables": "mirrored"}))
    shapes = {node.name: node.attr("shape") for node in new.graph if node.op == "VarHandleOp"}
    of = places(new.graph)
    assert [of[f"replica_{i}/logits/w"] for i in range(2)] == ["CPU:1", "CPU:3"]
    assert [shapes[f"replica_{i}/logits/w"] for i in range(2)] == [(3, 3), (2, 3)]


def test_keras_trains_replicas_of_stages() -> None:
    def model() -> Any:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(6, activation="tanh", dtype="float64") for _ in range(3)]
        made = keras.Sequential([keras.Input((4,), dtype="float64"), *layers, keras.layers.Dense(1, dtype="float64")])
        made.compile(keras.optimizers.Adam(0.01), "mse")
        return made

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), rng.normal(size=(12, 1))
    alone, together = model(), ar.distribute(model(), config())
    for one in (alone, together):
        one.fit(x, y, batch_size=6, epochs=2, verbose=0, shuffle=False)
    for left, right in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, atol=EXACT)


def test_a_simulation_counts_variables_of_each_replica_and_shards_of_them_as_parts() -> None:
    whole, sharded, shared = (
        ar.simulate(staged_item(MODELS["mlp"])[0], config(strategy={"name": name, "variables": mode}))
        for name, mode in (("AllReduce", "mirrored"), ("FSDP", "mirrored"), ("AllReduce", "shared"))
    )
    held = [[one.variable_bytes for one in found.devices] for found in (whole, sharded, shared)]
    assert held[0][:2] == held[0][2:] == held[2][:2]
    assert held[2][2:] == [0, 0]
    assert sum(held[1]) < 0.6 * sum(held[0])
    assert "all_reduce" in {one.kind for one in whole.exchanges}


def test_where_replicas_of_stages_cannot_have_variables_it_is_said() -> None:
    with pytest.raises(ConfigError, match=r"stages in a loop \(pipeline\.form\) hold one copy of each variable"):
        ar.rewrite(item(), config(pipeline={"form": "loop"}))
    with pytest.raises(ConfigError, match="stages in a job hold one copy of each variable"):
        ar.rewrite(item(), {**config(), "cluster": {"workers": ["a:1", "b:1"]}}, task=0)


def test_a_loop_with_sums_in_it_is_refused_and_shared_variables_lift_that() -> None:
    def recurrent() -> Any:
        x = keras.Input((4, 3), dtype="float64")
        h = keras.layers.LSTM(4, return_sequences=True, dtype="float64", name="first")(x)
        made = keras.Model(x, keras.layers.LSTM(4, dtype="float64", name="second")(h))
        made.compile("sgd", "mse")
        return made

    rng = np.random.default_rng(0)
    made = ar.GraphItem.from_keras(recurrent(), rng.normal(size=(8, 4, 3)), rng.normal(size=(8, 4)))
    given = split_models.config(1, 2, 2, strategy=MIRRORED, sharding=[{"match": ".*kernel", "split": [1, 2]}])
    with pytest.raises(PassError, match="in a loop, which all micro-batches run together") as refused:
        ar.rewrite(made, given)
    assert re.search("set strategy.variables to shared", str(refused.value))
