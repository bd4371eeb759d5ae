"""A sample of the programs of `make corpus`, what judges them, and the page that lists them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.corpus import catalogue, fit, many, table, training
from tests.corpus.__main__ import PAGE
from tests.corpus.configurations import BY_NAME, CONFIGURATIONS, DESCRIPTIONS
from tests.corpus.judge import Judge, Original, judged
from tests.corpus.program import Built, Feed, Program, stepped
from tests.support.paths import ROOT

SAMPLE = ("linear_regression_basics", "averaged_weights_v1", "deep_and_cross", "word2vec")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_program_of_the_corpus_is_exact(name: str) -> None:
    judge = Judge(catalogue.programs()[name][1])
    for configuration in ("all_reduce_2", "mirrored_3"):
        line = judge.run(BY_NAME[configuration])
        assert line["outcome"] == "exact", line
        assert line["coverage"] > 0.9


def test_a_number_that_differs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Original(catalogue.programs()["linear_regression_basics"][1])
    expected = original.run((8,))
    assert max(original.noise.values()) < 1e-14

    def off(*given: object, **options: object) -> training.Run:
        last = {name: [value + 1e-6 for value in copies] for name, copies in expected.steps[-1].items()}
        return replace(expected, steps=(*expected.steps[:-1], last))

    configuration = BY_NAME["all_reduce_2"]
    assert judged(original, configuration)["outcome"] == "exact"
    monkeypatch.setattr(training, "train", off)
    monkeypatch.setattr(Original, "measure_noise", lambda self, sizes: None)
    line = judged(original, configuration)
    assert line["outcome"] == "wrong"
    assert "differ" in line["reason"]


def test_what_a_job_trains_is_wrong_where_it_differs_by_more_than_rounding() -> None:
    alone = {"w": np.arange(1.0, 4.0), "loss": np.array([0.5])}
    off, rounded = ({**alone, "w": alone["w"] * (1 + by)} for by in (1e-6, 1e-7))
    assert fit.compared(alone, dict(alone), rtol=1e-9)["outcome"] == "exact"
    assert fit.compared(alone, off, alone, rtol=1e-9)["outcome"] == "wrong"
    assert fit.compared(alone, off, alone, rounded, rtol=1e-9)["outcome"] == "exact"  # 10 times what the last bit does
    assert fit.compared(alone, {"w": alone["w"]}, rtol=1e-9)["outcome"] == "wrong"


def test_what_tensorflow_cannot_trace_is_broken_and_not_refused() -> None:
    def adds_words() -> Built:
        return stepped(lambda x: {"loss": x + tf.constant("one")}, x=Feed((2,)))

    def has_no_batch() -> Built:
        return stepped(lambda x: {"loss": x}, x=Feed((2,), whole=True))

    for build, outcome in ((adds_words, "broken"), (has_no_batch, "refused")):
        line = Judge(Program(build, "example.org")).run(BY_NAME["all_reduce_2"])
        assert line["outcome"] == outcome, line


def test_training_leaves_the_values_that_it_began_with() -> None:
    original = Original(catalogue.programs()["linear_regression_basics"][1])
    run = original.run((8,))
    begin = {name: np.array(value) for name, value in run.initial.items()}
    training.train(original.item, original.feeds((8,)), original.given, run.initial)
    assert all(np.array_equal(begin[name], value) for name, value in run.initial.items())


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "corpus.jsonl"
    lines = [
        {"program": "dcgan", "configuration": "fsdp_2", "outcome": "exact"},
        {"program": "vae", "configuration": "fsdp_2", "outcome": "refused", "reason": "no"},
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    library = catalogue.programs()["dcgan"][0]
    pairs = [("dcgan", "fsdp_2"), ("vae", "fsdp_2")]
    assert many.run_many([(library, pairs)], out) == lines  # nothing is left, so no process is started
    many.forget(out, {"refused"}, {"dcgan"})
    assert many.read(out) == lines
    many.forget(out, {"refused"}, {"vae"})
    assert many.read(out) == lines[:1]


def test_what_is_not_installed_or_bad_stands_in_the_page() -> None:
    lines = [
        {"program": "bert", "configuration": "fsdp_2", "outcome": "not installed", "reason": "keras_hub: no"},
        {"program": "dcgan", "configuration": "fsdp_2", "outcome": "wrong", "reason": "2 of 9 differ"},
    ]
    page = table.page(lines)
    assert "- bert (fsdp_2): keras_hub: no" in page
    assert "- dcgan (fsdp_2): 2 of 9 differ" in page
    assert "**wrong**" in page


def test_the_page_names_every_program_and_configuration() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert [name for name in catalogue.programs() if f"[{name}]" not in page] == []
    assert [one.name for one in CONFIGURATIONS if f"`{one.name}`" not in page] == []
    assert set(DESCRIPTIONS) == set(BY_NAME)


def test_there_are_at_least_eighty_programs() -> None:
    assert len(catalogue.programs()) >= 80
