"""Coverage: how much of a step is divided, what made the rest whole, and where all of it is told."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, PassError
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact
from autograph_rewrite.ops.facts.symbolic_dims import Dim, common_symbol
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.resolve.coverage import Amount, Coverage, WholeWork, percent, whole_shape
from autograph_rewrite.tools import cli
from tests.matrix.report import report_of
from tests.matrix.table import rewritten
from tests.support.small_items import regression
from tests.support.staged import mlp, staged_item
from tests.zoo import ZOO

TWO = ["CPU:0", "CPU:1"]
CONFIG = {"devices": TWO}
SIZE = 16
Told = Callable[[], list[str]]


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Told:
    """Return what gives the lines about coverage since the last call."""

    def lines() -> list[str]:
        return [line for line in capfd.readouterr().err.splitlines() if line.startswith("autograph_rewrite: ")]

    return lines


def step_of(between: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], tf.Variable]:
    """Return a step of two layers with something between them."""
    random = np.random.default_rng(0)
    w, u = (tf.Variable(random.normal(size=(SIZE, SIZE)), dtype=tf.float32, name=n) for n in "wu")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(between(tf.tanh(x @ w)) @ u))
        for variable, gradient in zip((w, u), tape.gradient(loss, [w, u]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step, w


def item_of(between: Callable[[Any], Any]) -> ar.GraphItem:
    return ar.GraphItem.from_function(step_of(between)[0], tf.TensorSpec([None, SIZE]))


def in_order(h: Any) -> Any:
    """Sort each feature over the batch: legal, and of the whole batch only."""
    return tf.sort(h, axis=0, name="in_order")


def mapped(h: Any) -> Any:
    return tf.map_fn(tf.tanh, h)


def quietly(item: ar.GraphItem, config: Any = None, **options: Any) -> ar.GraphItem:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ar.rewrite(item, config or CONFIG, **options)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lstm_v2", "function_sparse", "custom_loop"])
def test_what_data_parallelism_divides_is_nearly_all(name: str) -> None:
    case = ZOO[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = report_of(rewritten(case.build(optimizer="adam", dtype=case.dtypes[0]), CONFIG))
    assert 0.98 < report.coverage <= 1


def test_a_step_that_is_whole_from_its_input_on_is_not_covered_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "Softsign")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softsign(x) @ w)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    w = tf.Variable(tf.ones([SIZE, SIZE]))
    new = quietly(ar.GraphItem.from_function(step, tf.TensorSpec([None, SIZE])), CONFIG)
    assert new.report.coverage == 0


def test_the_warning_names_the_op_that_made_the_rest_whole_and_what_it_costs() -> None:
    with pytest.warns(UserWarning, match="only ") as caught:
        new = ar.rewrite(item_of(in_order), CONFIG)
    (text,) = [str(one.message) for one in caught if "whole are" in str(one.message)]
    first = text.splitlines()[1]
    assert "in_order" in first
    assert "FLOP" in first
    assert "it wants all of" in first
    assert 0.1 < new.report.coverage < 0.9
    assert new.report.covered.largest[0].amount.flops > 0.5 * (1 - new.report.coverage) * new.report.covered.flops
    assert caught[0].filename == __file__


def test_an_op_without_a_rule_is_named_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "Softsign")
    (first, *_) = quietly(item_of(tf.nn.softsign)).report.covered.largest
    assert (first.op, first.reason) == ("Softsign", "Softsign has no rule")


def test_what_follows_from_a_whole_value_is_charged_to_the_op_that_made_it_whole() -> None:
    one = quietly(item_of(in_order)).report.covered.largest[0]
    two = quietly(item_of(lambda h: in_order(h) @ tf.ones([SIZE, SIZE]))).report.covered.largest[0]
    assert one.node == two.node
    assert two.amount.flops > one.amount.flops + 64 * 2 * SIZE * SIZE


def test_updates_do_not_count() -> None:
    item = regression()
    covered = ar.rewrite(item, CONFIG, batch=4).report.covered
    assert covered.share > 0.99
    assert all("momentum" not in one.node.lower() for one in covered.whole)


def test_a_whole_gradient_has_its_update_outside_too() -> None:
    new = quietly(item_of(lambda h: h), {**CONFIG, "strategy": {"variables": "mirrored"}})
    covered = quietly(item_of(in_order), {**CONFIG, "strategy": {"variables": "mirrored"}}).report.covered
    scaled = SIZE * SIZE  # 0.1 * gradient of one of the variables, and nothing else has so much that is fixed
    assert new.report.covered.divided.fixed < scaled
    assert sum(one.amount.fixed for one in covered.whole) < scaled


def test_every_stage_of_a_pipeline_does_a_part() -> None:
    item, cuts = staged_item(mlp)
    config = {"devices": TWO, "pipeline": {"stages": 2, "microbatches": 2, "boundaries": cuts[1:2]}}
    new = ar.rewrite(item, config)
    assert new.report.covered.parts == 2
    assert new.report.coverage > 0.95


def test_one_device_has_nothing_to_divide() -> None:
    new = ar.rewrite(regression(), {"devices": ["CPU:0"], "microbatches": 2})
    assert new.report.coverage == 1
    assert not [note for note in new.report.plan.notes if "coverage" in note]


def test_a_larger_batch_is_counted_without_another_rewrite() -> None:
    item = item_of(in_order)
    assumed = quietly(item).report.covered
    asked = quietly(item, batch=1000).report.covered
    assert assumed.assumed
    assert not asked.assumed
    assert assumed.at(1000).flops == pytest.approx(asked.flops)
    assert assumed.at(1000).share == pytest.approx(asked.share)
    assert assumed.at(None) is assumed


def test_amounts_grow_as_their_parts_do() -> None:
    covered = Coverage(10, True, 2, Amount(linear=90), (WholeWork("a", "Sort", "r", Amount(5, 0, 5)),))
    assert covered.share == 0.9
    assert covered.at(20).share == pytest.approx(180 / (180 + 5 + 20))
    assert percent(0.99999) == "99.99%"
    assert Coverage(1, True, 2).share == 1


def test_a_static_batch_is_the_one_that_is_counted() -> None:
    item = ar.GraphItem.from_function(step_of(lambda h: h)[0], tf.TensorSpec([8, SIZE]), batch_inputs={"x": 0})
    covered = ar.rewrite(item, CONFIG).report.covered
    assert (covered.batch, covered.assumed) == (8, False)


@pytest.mark.parametrize("least", [0.9, 1])
def test_less_than_the_least_coverage_is_refused_at_its_line(least: float, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"devices: [CPU:0, CPU:1]\nsemantics:\n  min_coverage: {least}\n")
    with pytest.raises(PassError, match="min_coverage asks for") as refused:
        ar.rewrite(item_of(in_order), str(path))
    assert f"{path}:3" in str(refused.value)
    assert "in_order" in str(refused.value)


def test_enough_coverage_is_accepted() -> None:
    ar.rewrite(item_of(lambda h: h), {**CONFIG, "semantics": {"min_coverage": 0.9}})


@pytest.mark.parametrize("least", [-0.1, 1.5, "much"])
def test_a_least_coverage_is_a_share(least: Any) -> None:
    with pytest.raises(ConfigError, match="min_coverage"):
        ar.Config.of({**CONFIG, "semantics": {"min_coverage": least}})


def test_a_plan_keeps_the_least_coverage_and_its_refusal(tmp_path: Path) -> None:
    item = item_of(in_order)
    path = tmp_path / "plan.yaml"
    ar.build_plan(item, {**CONFIG, "semantics": {"min_coverage": 0.9}}).save(path)
    with pytest.raises(PassError, match="min_coverage") as refused:
        ar.rewrite(item, ar.Plan.load(path))
    assert f"{path}:" in str(refused.value)


def test_a_plan_notes_its_coverage_once() -> None:
    item = item_of(in_order)
    plan = ar.build_plan(item, CONFIG)
    (note,) = [note for note in plan.notes if note.startswith("coverage ")]
    assert "in_order" in note
    assert quietly(item, plan).report.plan.notes == plan.notes


def test_report_and_explanation_say_it() -> None:
    new = quietly(item_of(in_order))
    text = ar.explain(new, batch=640)
    assert str(new.report.covered) in str(new.report)
    assert "(640 examples)" in text
    assert "in_order" in text
    assert "Every op that depends on the batch is divided" not in text
    assert "Every op that depends on the batch is divided" in ar.explain(ar.rewrite(item_of(lambda h: h), CONFIG))


def test_elements_of_a_map_over_the_batch_are_noted_and_refused_when_strict() -> None:
    item = item_of(mapped)
    new = quietly(item)
    assert any("one element for each example" in note.text for note in new.report.notes)
    assert any(one.op == "TensorListFromTensor" for one in new.report.covered.largest)
    with pytest.raises(PassError, match="one element for each example"):
        ar.rewrite(item, {**CONFIG, "semantics": {"strict": True}})


def test_the_first_call_says_it_once_for_the_batch_that_it_has(told: Told) -> None:
    step = ar.distribute(step_of(lambda h: h)[0], CONFIG)
    for size in (6, 6, 8):
        step(tf.ones([size, SIZE]))
    (line,) = told()
    assert "divided over 2 devices (6 examples)" in line


def test_the_first_call_warns(told: Told) -> None:
    step = ar.distribute(step_of(in_order)[0], CONFIG)
    with pytest.warns(UserWarning, match="in_order"):
        step(tf.ones([6, SIZE]))
    assert len(told()) == 1


def test_the_first_call_refuses_and_changes_nothing() -> None:
    function, w = step_of(in_order)
    step = ar.distribute(function, {**CONFIG, "semantics": {"min_coverage": 0.9}})
    before = w.numpy()
    for _ in range(2):
        with pytest.raises(PassError, match="min_coverage"):
            step(tf.ones([6, SIZE]))
    np.testing.assert_array_equal(w.numpy(), before)


def test_the_line_can_be_silenced(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOGRAPH_REWRITE_QUIET", "1")
    ar.distribute(step_of(lambda h: h)[0], CONFIG)(tf.ones([6, SIZE]))
    assert told() == []


def test_a_session_says_it_at_the_first_batch_and_not_when_it_initialises(told: Told) -> None:
    built = ZOO["mlp"].build()
    new = ar.rewrite(built.item(), CONFIG)
    with new.session() as session:
        session.run(new.init_op)
        assert told() == []
        for step in range(2):
            session.run(["train"], built.feeds(step, 10))
    (line,) = told()
    assert "(10 examples)" in line


def test_fit_says_it_once_and_evaluate_not(told: Told) -> None:
    import keras

    model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(SIZE, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((24, SIZE), "float32"), np.ones((24, 1), "float32")
    model = ar.distribute(model, CONFIG)
    model.evaluate(x, y, verbose=0)
    assert told() == []
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    (line,) = told()
    assert "(8 examples)" in line


def test_the_command_line_says_it_for_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    regression().save("item.ar")
    Path("c.yaml").write_text("devices: [CPU:0, CPU:1]\n")
    given = ["--config", "c.yaml", "--batch"]
    assert cli.main(["explain", "item.ar", *given, "500"]) == 0
    assert "(500 examples)" in capsys.readouterr().out
    for line in ("explain item.ar", "rewrite item.ar -o new.ar", "verify item.ar --steps 1"):
        assert cli.main([*line.split(), *given, "6", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["coverage"] > 0.99
        assert data["batch"] == 6
    assert os.path.exists("new.ar")
    assert cli.main(["plan", "item.ar", *given, "6"]) == 0
    assert "(6 examples)" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [None, common_symbol("kept/0")])
def test_rows_of_a_whole_value_that_nobody_counts_are_taken_for_examples(rows: Dim) -> None:
    assert whole_shape(Fact(REPLICATED, dtypes.FLOAT, (rows, 3)), Sizes(batch=8, replicas=1)) == (8, 3)
