"""Micro-batches with a copy of the variables on each device: each replica adds up its own, and then all reduce.

Compared with one device after several steps, uneven and tiny batches among them, of small graphs and of the zoo. The
copies have to stay equal. Without the sum over a replica's micro-batches the numbers are wrong, and are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.check.side_by_side import TrainedGraph
from autograph_rewrite.errors import PassError, VerifyError
from autograph_rewrite.ir.mesh import ONCE, PER_REPLICA, Span
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.collectives import local_ops
from tests.matrix.run import FLOOR, compare, distributed, truth
from tests.passes.micro_batches.test_accumulation import (
    FEEDS,
    LAYOUTS,
    assert_alike,
    contrastive,
    embedding,
    looped,
    masked,
    on_one_device,
    perceptron,
)
from tests.passes.micro_batches.test_local_batch_norm import FEEDS as IMAGES
from tests.passes.micro_batches.test_local_batch_norm import given
from tests.support.covering import covering
from tests.support.staged import assert_alike as alike
from tests.support.staged import train as train_staged
from tests.support.training import make_item, train
from tests.zoo import ZOO, Options

FORMS = ("unrolled", "loop")
SIZES = (12, 7, 13, 3)
MEETS = (contrastive,)
"""What needs the whole batch in the middle of the step, which a loop refuses."""


def config(replicas: int, micro: int, **how: str) -> dict[str, Any]:
    devices = [f"CPU:{i}" for i in range(replicas)]
    strategy = {"name": "AllReduce", "variables": "mirrored"}
    return {"devices": devices, "microbatches": micro, "accumulation": how, "strategy": strategy}


@pytest.mark.parametrize(
    ("model", "counts", "form", "layout"),
    covering([perceptron, masked, contrastive, embedding, looped], [(2, 2), (4, 3)], FORMS, LAYOUTS),
)
def test_small_graphs_train_as_on_one_device(model: Any, counts: tuple[int, int], form: str, layout: str) -> None:
    item, feeds, expected = on_one_device(model)
    asked = config(*counts, form=form, layout=layout)
    if form == "loop" and model in MEETS:
        with pytest.raises(PassError, match=r"set accumulation\.form to unrolled"):
            ar.rewrite(item, asked)
        return
    assert_alike(train(ar.rewrite(item, asked), feeds), expected)


ZOO_CASES = [
    ("cnn", "momentum", 4, 2, "unrolled"),
    ("transformer", "momentum", 2, 2, "loop"),
    ("language_model", "adam", 4, 3, "unrolled"),
    ("lstm_v2", "momentum", 2, 2, "unrolled"),
    ("cond_v1", "adam", 2, 3, "unrolled"),
    ("function_sparse", "adam", 2, 2, "unrolled"),
    ("keras_two_inputs", "adam", 2, 3, "loop"),
]


@pytest.mark.parametrize(("model", "optimizer", "replicas", "micro", "form"), ZOO_CASES)
def test_the_zoo_trains_as_on_one_device(model: str, optimizer: str, replicas: int, micro: int, form: str) -> None:
    options = Options(optimizer=optimizer)
    actual, report = distributed(ZOO[model].build(options), config(replicas, micro, form=form), SIZES)
    errors = dict(compare(actual, truth(model, options, SIZES), FLOOR["float64"]))
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < 1e-9, f"{worst}: {errors[worst]:.1e}"
    assert "micro_reduce" in {edge.lowering for edge in report.edges}


@pytest.mark.parametrize("form", FORMS)
def test_all_copies_of_a_variable_are_equal_after_each_step(form: str) -> None:
    new = ar.rewrite(make_item(perceptron), config(4, 2, form=form))
    with TrainedGraph(new, 60.0) as trainee:
        trainee.initialise()
        for feed in FEEDS:
            trainee.observe(feed, [])
            for name, copies in trainee.read():
                assert len(copies) == 4, name
                for copy in copies[1:]:
                    np.testing.assert_allclose(copy, copies[0], 1e-12, 1e-12, err_msg=name)


def without_other_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each replica hand its first micro-batch's contribution to the collective, instead of the sum."""
    whole = local_ops.reduce_local

    def first(context: Any, value: Any, op: str, name: str, role: str = "", *, span: Span = ONCE) -> Any:
        if span == PER_REPLICA:
            return context.of_replica(value)
        return whole(context, value, op, name, role, span=span)

    monkeypatch.setattr(local_ops, "reduce_local", first)


@pytest.mark.parametrize("form", FORMS)
def test_leaving_out_the_sum_over_micro_batches_would_be_noticed(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item, feeds, expected = on_one_device(perceptron)
    without_other_micro_batches(monkeypatch)
    got = train(ar.rewrite(item, config(2, 3, form=form)), feeds)
    assert np.abs(got.variables["w"] - expected.variables["w"]).max() > 1e-3
    with pytest.raises(AssertionError):
        assert_alike(got, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("broken", [False, True])
def test_the_certificate_tells_whether_micro_batches_are_added_up(
    form: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = make_item(perceptron)
    certify(monkeypatch)
    if not broken:
        ar.rewrite(item, config(2, 3, form=form))
        return
    without_other_micro_batches(monkeypatch)
    with pytest.raises(VerifyError, match="should read the whole of"):
        ar.rewrite(item, config(2, 3, form=form))


def certify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare rewrites with their originals behind every pass."""
    plain = pass_pipeline.rewrite

    def certified(asked: Any, **options: Any) -> Any:
        return plain(replace(asked, certificate=Certificate(strict=True)), **options)

    monkeypatch.setattr(pass_pipeline, "rewrite", certified)


@pytest.mark.parametrize(("fused", "form", "rows"), covering([True, False], FORMS, [8, 3]))
def test_moving_averages_take_micro_batches_in_turn_as_they_do_where_variables_are_shared(
    fused: bool, form: str, rows: int
) -> None:
    item, _ = given(fused)
    feeds = [{"x": feed["x"][:rows]} for feed in IMAGES]
    asked = {**config(2, 2, form=form), "semantics": {"batch_norm": "local"}}
    shared = {**asked, "strategy": {"variables": "shared"}}
    alike(train_staged(ar.rewrite(item, asked), feeds), train_staged(ar.rewrite(item, shared), feeds), 2e-5)


@pytest.mark.parametrize(("compressor", "replicas"), covering(["fp16", "bf16_ef", "topk", "powersgd"], [2, 4]))
def test_a_replica_compresses_the_sum_of_its_micro_batches(compressor: str, replicas: int) -> None:
    asked = config(replicas, 2)
    asked["strategy"]["compressor"] = compressor
    report = ar.verify(make_item(perceptron), asked, steps=2)
    assert report.ok, str(report)
    assert [row for row in report.rows if row.kind == "compressed"]


@pytest.mark.parametrize(
    ("model", "how", "form"),
    covering([perceptron, embedding], ["servers", "shards", "partition", "recomputed"], FORMS),
)
def test_other_settings_go_with_it(model: Any, how: str, form: str) -> None:
    item, feeds, expected = on_one_device(model)
    asked = config(2, 3, form=form)
    if how == "recomputed":
        asked["remat"] = {"policy": "sqrt"}
    elif how == "partition":
        asked["variables"] = [{"match": ".*", "partition": {"over": "data", "stage": 2}}]
    else:
        asked["strategy"]["name"] = {"servers": "Parallax", "shards": "PartitionedAR"}[how]
    assert_alike(train(ar.rewrite(item, asked), feeds), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_graphs_of_several_processes_fit_together(devices: int, form: str) -> None:
    asked = {**config(devices, 2, form=form), "cluster": {"workers": ["a:1", "b:2"]}}
    report = ar.verify(make_item(masked), asked, steps=2)
    assert report.ok, str(report)


def test_each_output_can_be_fetched_alone() -> None:
    item = make_item(perceptron)
    with ar.rewrite(item, config(2, 3)).session() as session, item.session() as single:
        for each in (session, single):
            each.run(item.init_op)
        for name in ("out_prediction", "out_loss", "out_norm"):
            np.testing.assert_allclose(session.run(name, FEEDS[0]), single.run(name, FEEDS[0]), 1e-12)
