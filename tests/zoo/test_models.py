"""The zoo itself: every entry trains on one device, is the same every time, and can tell right from wrong."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.zoo import GRAPHS, MODELS, ZOO, Case, train
from tests.zoo.case import Array

BATCHES = (12, 7, 3)
FIRST_HALF = slice(0, 6)


def losses(case: Case, **changes: str) -> list[float]:
    trace = train(case.build(dtype=case.dtypes[0], **changes), BATCHES)
    return [float(next(v for k, v in each.items() if k.startswith("loss"))) for each in trace.outputs]


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_an_entry_trains_on_one_device_to_the_same_losses_whenever_it_is_built(case: Case):
    first = losses(case)

    assert np.isfinite(first).all()
    assert len(set(first)) > 1
    assert losses(case) == pytest.approx(first, rel=1e-12, abs=0)


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_half_a_batch_trains_to_other_values_so_a_comparison_can_fail(case: Case):
    whole = train(case.build(dtype=case.dtypes[0]), (12, 12)).variables
    half = train(case.build(dtype=case.dtypes[0]), (12, 12), rows=FIRST_HALF).variables

    assert max(_distance(half[name], whole[name]) for name in whole) > 1e-4


# TensorFlow numbers the bodies of functional loops and branches through the process: v2 cases are left out.
@pytest.mark.parametrize("name", [case.name for case in GRAPHS if not case.name.endswith("_v2")])
def test_a_graph_has_the_same_bytes_whenever_it_is_built(name: str):
    case = ZOO[name]
    first, second = (case.build(dtype=case.dtypes[0]).graph.as_graph_def() for _ in range(2))

    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


@pytest.mark.parametrize("case", GRAPHS[::3], ids=lambda case: case.name)
def test_a_static_batch_dimension_and_a_sum_change_the_graph_but_not_its_truth(case: Case):
    dynamic, static = (case.build(dtype=case.dtypes[0], batch=batch, reduction="sum") for batch in (None, 7))

    assert dynamic.graph.as_graph_def() != static.graph.as_graph_def()
    left, right = train(dynamic, (7, 7)), train(static, (7, 7))
    for name, value in left.variables.items():
        assert _distance(right.variables[name], value) < 1e-6, name


@pytest.mark.parametrize("name", ["mlp", "language_model", "transformer", "cnn"])
def test_ref_variables_train_to_the_values_of_resource_variables(name: str):
    resource, ref = (train(ZOO[name].build(ref_variables=ref), BATCHES).variables for ref in (False, True))

    for variable, value in resource.items():
        np.testing.assert_allclose(ref[variable], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_keras_entry_computes_in_the_dtype_that_was_asked_for(case: Case):
    model = case.build(dtype="float64").model

    assert {each.dtype for each in model.trainable_variables} == {"float64"}
    assert tf.keras.config.floatx() == "float32"


def test_loops_and_branches_come_as_functions_and_as_frames():
    def ops(name: str) -> set[str]:
        return {node.op for node in ZOO[name].build().graph.as_graph_def().node}

    assert "While" in ops("lstm_v2") | ops("gru_v2") or "StatelessWhile" in ops("lstm_v2")
    assert {"Enter", "LoopCond", "NextIteration"} <= ops("lstm_v1") & ops("gru_v1")
    assert {"If", "StatelessIf"} & ops("cond_v2")
    assert {"Switch", "Merge"} <= ops("cond_v1")
    assert tf.compat.v1.control_flow_v2_enabled()  # building v1 frames left the setting as it was


def test_bert_base_has_the_size_that_the_benchmarks_need():
    built = ZOO["transformer"].build(size="large", dtype="float32", optimizer="adam")

    assert 12_500 < built.nodes < 13_500
    assert built.graph.as_graph_def().ByteSize() < 4 * 2**20


def test_an_overflow_in_the_last_example_skips_the_step():
    trace = train(ZOO["loss_scaling"].build(), (12,) * 4)

    assert [bool(each["applied"]) for each in trace.outputs] == [True, True, False, True]


def _distance(left: Array, right: Array) -> float:
    scale = np.abs(right.astype(float)).max(initial=0) + 1e-7
    return float(np.abs(left.astype(float) - right.astype(float)).max(initial=0) / scale)
