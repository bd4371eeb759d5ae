"""Tensors cut over the logical devices of a replica train as on one device; what a user gets wrong is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.communication import MODEL_AXIS, meetings
from autograph_rewrite.passes.sharding.unroll import Unroll
from tests.support import split_models as models

EXACT = 1e-9

MESHES = {
    "two devices": models.config(1, 2),
    "four devices": models.config(1, 4),
    "three devices, blocks of 3, 3 and 2": models.config(1, 3),
    "two replicas of two": models.config(2, 2),
    "two replicas of two, mirrored": models.config(2, 2, strategy={"variables": "mirrored"}),
    "two replicas of two, a bucket for each gradient": models.config(
        2, 2, strategy={"variables": "mirrored", "bucket_bytes": 64}
    ),
    "micro-batches": models.config(2, 2, microbatches=2),
    "micro-batches in a loop": models.config(1, 2, microbatches=2, accumulation={"form": "loop"}),
    "stages": models.config(1, 2, 2),
    "replicas, stages and blocks": models.config(2, 2, 2),
    "stages in a loop": models.config(1, 2, 2, pipeline={"stages": 2, "microbatches": 3, "form": "loop"}),
    "replicas, stages in a loop and blocks": models.config(
        2, 2, 2, pipeline={"stages": 2, "microbatches": 2, "form": "loop"}
    ),
    "ZeRO of what is whole": models.config(2, 2, strategy={"name": "FSDP"}),
    "parameter servers": models.config(2, 2, strategy={"name": "PS"}),
    "recomputation": models.config(2, 2, remat={"policy": "every:1"}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_on_a_mesh_computes_what_one_device_does(mesh: str) -> None:
    report = ar.verify(models.item(), MESHES[mesh])
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


@pytest.mark.parametrize("hidden", [5, 7, 9])
def test_blocks_need_not_be_of_one_size(hidden: int) -> None:
    report = ar.verify(models.item(hidden), models.config(2, 2))
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


def test_a_sum_that_is_left_out_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unroll, "_join", lambda self, parts, placement, near: parts[0])
    try:
        report = ar.verify(models.item(), models.config(1, 2))
    except RewriteError:
        return
    assert not report.ok


def test_a_function_trains_on_a_mesh_and_its_variables_stay_the_truth() -> None:
    models.assert_a_function_trains_alike(models.config(2, 2, strategy={"variables": "mirrored"}), (8, 5, 8))


def test_a_session_saves_whole_variables_and_shards_them_when_it_restores() -> None:
    item = ar.rewrite(models.item(), models.config(1, 2))
    plan = item.report.plan
    assert [axis.size for axis in plan.mesh] == [1, 2]
    assert {name for name, one in item.variables.items() if one.shards is not None} == {
        "up0", "bias0", "down0", "up1", "bias1", "down1", "slot",
    }  # fmt: skip


def transformer() -> Any:
    """Two blocks of attention and feed-forward, in float64."""
    layers, width, heads = keras.layers, 8, 4
    keras.utils.set_random_seed(0)
    ids = layers.Input((6,), dtype="int32")
    x = layers.Embedding(16, width, name="embedding", dtype="float64")(ids)
    for i in range(2):
        a = layers.LayerNormalization(name=f"norm_a{i}", dtype="float64")(x)
        a = layers.MultiHeadAttention(heads, width // heads, name=f"attention{i}", dtype="float64")(a, a)
        x = layers.Add(dtype="float64")([x, a])
        h = layers.LayerNormalization(name=f"norm_f{i}", dtype="float64")(x)
        h = layers.Dense(32, activation="gelu", name=f"up{i}", dtype="float64")(h)
        x = layers.Add(dtype="float64")([x, layers.Dense(width, name=f"down{i}", dtype="float64")(h)])
    model = keras.Model(ids, layers.Dense(16, name="head", dtype="float64")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def megatron(count: int) -> list[dict[str, Any]]:
    """Heads and columns first, then rows."""
    return [
        {"match": r"attention\d/(query|key|value)/kernel", "split": [1, count, 1]},
        {"match": r"attention\d/attention_output/kernel", "split": [count, 1, 1]},
        {"match": r"up\d/kernel", "split": [1, count]},
        {"match": r"down\d/kernel", "split": [count, 1]},
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_a_transformer_needs_two_sums_per_block_forward_and_two_backward(count: int) -> None:
    specs = [tf.TensorSpec([None, 6], tf.int32)] * 2
    config = {**models.config(2, count), "sharding": megatron(count)}
    item = ar.rewrite(ar.GraphItem.from_keras(transformer(), *specs), config)
    edges = [edge for edge in item.report.plan.model_edges if edge.from_ == "partial(sum)"]
    assert Counter(edge.lowering for edge in edges) == {"add_n": 2 * (2 + 2)}
    assert not [edge for edge in item.report.plan.model_edges if edge.lowering == "concat"]


def test_a_keras_transformer_fits_on_a_mesh_as_on_one_device() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (8, 6)), rng.integers(0, 16, (8, 6))
    alone, cut = transformer(), transformer()
    cut = ar.distribute(cut, {**models.config(2, 2), "sharding": megatron(2)})
    losses = [
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"] for model in (alone, cut)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)  # Keras adds losses up in single precision
    for one, other in zip(alone.trainable_variables, cut.trainable_variables, strict=True):
        if "key/bias" not in one.path:  # its gradient is zero in theory, and Adam divides it by its own size
            np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=0, atol=EXACT, err_msg=one.path)


def test_what_does_nothing_is_said() -> None:
    without = ar.rewrite(models.item(), {"devices": ["CPU:0", "CPU:1"], "sharding": models.shardings(2)})
    assert any("there is no model axis" in note for note in without.report.plan.notes)
    idle = ar.rewrite(models.item(), {**models.config(2, 2), "sharding": []})
    assert any("nothing is placed on it" in note for note in idle.report.plan.notes)
    served = ar.rewrite(models.item(), models.config(2, 2, strategy={"name": "PS"}))
    assert any("'up0' is cut on the model axis" in note for note in served.report.plan.notes)


def test_comm_lists_the_sums_on_the_model_axis_of_each_replica() -> None:
    item = ar.rewrite(models.item(), models.config(2, 2))
    sums = [one for one in meetings(item) if one.owner == MODEL_AXIS]
    assert Counter(one.kind for one in sums) == {"AddN": 2 * 3}  # two blocks forward, one backward
    assert {place for one in sums for place in one.places} == {"/device:CPU:0", "/device:CPU:2"}
