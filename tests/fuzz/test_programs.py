"""A sample of the random programs of `make fuzz`, and what judges them."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autograph_rewrite as ar
from tests.fuzz import jobs, many, one, table
from tests.fuzz.__main__ import seeds_of
from tests.fuzz.configurations import Layout
from tests.fuzz.net import D, Input
from tests.fuzz.program import COMBINED_FROM, Program
from tests.jobs.programs.nursery import Nursery, Worker

SAMPLE = (1, 6, 7, 10, 11, 15, 17, 27, 30, 33)
FOUND = (25, 93, 103, 3477, 3876, 131407, 131504, 150344, 150464)
"""A handle away from its variable; a trial without micro-batches; a lookup as an update; sizes and interleaved rows;
arrays of gradients that servers fill; a loop in which micro-batches meet; rows for a server from several model axes;
whether a variable that two axes cut has a value; blocks that devices exchange in the next stage."""

COMBINED = (10005, 10006, 10062, 10077, 10084, 31033, 31049, 31094, 34062)
"""A model axis, several steps per run, policies, local SGD and checkpoints, combined; two steps of a run after what one
device goes on from, a step at a time; gradients of stages that are cut in another way than their variables; what a
server makes enters a loop of every replica."""
IN_A_JOB = (20000, 20001, 20002, 20003, 20005, 20006, 20007, 20008, 20009, 20241, 20252)
"""Two workers and servers: functions, sessions, reference variables, checkpoints that are restored elsewhere; updates
of each worker that only a server waits for."""


@pytest.mark.parametrize("seed", SAMPLE + FOUND)
def test_a_random_program_gives_what_one_device_gives_or_is_refused(seed: int) -> None:
    outcome = one.run(seed)
    assert outcome.outcome in ("equal", "refused"), outcome


@pytest.mark.parametrize("seed", COMBINED)
def test_a_program_of_the_newest_features_gives_what_one_device_gives(seed: int) -> None:
    outcome = one.run(seed)
    assert outcome.outcome == "equal", outcome


@pytest.mark.slow
def test_random_programs_give_in_a_job_what_one_process_gives_or_are_refused(nursery: Nursery) -> None:
    found = list(jobs.outcomes(IN_A_JOB, nursery))
    assert [outcome.seed for outcome in found] == list(IN_A_JOB)
    for outcome in found:
        assert outcome.outcome in ("equal", "refused"), outcome


@pytest.mark.slow
def test_a_program_that_worker_0_runs_for_all_leaves_the_numbers_of_later_runs_alike(nursery: Nursery) -> None:
    """The second program lies across the workers, and the last one meets in its initialiser; it hung there."""
    found = list(jobs.outcomes((162130, 162131, 162132, 162134), nursery))
    assert [outcome.outcome for outcome in found] == ["equal"] * 4, found


def test_a_seed_always_gives_the_same_program() -> None:
    random.seed(1)
    first = [Program.draw(seed) for seed in range(50)]
    random.seed(2)
    assert [Program.draw(seed) for seed in range(50)] == first
    assert {program.mode for program in first} == {"session", "reference", "function", "keras"}


def test_a_number_that_is_off_by_more_than_rounding_is_wrong() -> None:
    right = {"step 0 loss": np.array(1.0), "variable w0": np.array([1.0, 2.0])}
    trial = one.Trial(lambda nudge: {n: v * (1 + nudge) for n, v in right.items()}, lambda: right, (), False)
    assert one.compare(trial, right, right)[0] == "equal"
    off = {**right, "variable w0": np.array([1.0, 2.0 + 1e-7])}
    assert one.compare(trial, right, off)[:2] == ("wrong", "differs: variable w#")
    assert one.compare(trial, right, {"step 0 loss": np.array(1.0)})[0] == "wrong"
    noisy = one.Trial(lambda nudge: {**right, "variable w0": np.array([1.0, 2.1])}, lambda: off, (), False)
    assert one.compare(noisy, right, off)[0] == "skipped"


def test_a_run_goes_on_where_it_stopped_and_is_compared(tmp_path: Path) -> None:
    out = tmp_path / "before.jsonl"
    lines = [{"seed": 3, "outcome": "equal", "reason": ""}, {"seed": 4, "outcome": "crash", "reason": "KeyError: _"}]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert many.run_many([3, 4], 1, out) == lines  # nothing is left, so no process is started
    after = [{"seed": 3, "outcome": "refused", "reason": "no"}, {"seed": 4, "outcome": "equal", "reason": ""}]
    text = "\n".join(table.comparison(lines, after))
    assert "was right: seed 3 is refused: no" in text
    assert "crash: seed" not in text
    assert "2 programs: 1 equal" in "\n".join(table.summary(lines))


def test_seeds_are_given_as_ranges_and_lists() -> None:
    assert seeds_of("2:5,9") == [2, 3, 4, 9]


def test_the_newest_seeds_draw_each_feature_and_combine_them() -> None:
    found = [Program.draw(seed).choice for seed in range(COMBINED_FROM, COMBINED_FROM + 200)]
    features = [
        {
            *({"mesh", "steps_per_run", "remat", "local_sgd"} & {*choice.config}),
            *(["policies"] if choice.policies else []),
            *(["checkpoint"] if choice.save_after else []),
        }
        for choice in found
    ]
    assert set.union(*features) == {"mesh", "steps_per_run", "remat", "local_sgd", "policies", "checkpoint"}
    assert max(map(len, features)) >= 3
    assert {choice.placed for choice in found} == {"", "regex", "code", "both"}


def test_the_parts_of_all_workers_are_the_batch_and_a_part_may_be_shorter_where_its_padding_counts_for_nothing() -> (
    None
):
    inputs = {
        "x": Input((4,), D, "normal", 0, 0),
        "steps": Input(("T", 2), D, "normal", 0, 1),
        "long": Input(("T", 3), D, "normal", 0, 0, trimmed_by="lengths"),
        "lengths": Input((), D, "lengths", 0, 0),
        "shared": Input((3,), D, "normal", 0, None),
    }
    programs = [Program.draw(seed, Layout(3, 0)) for seed in range(COMBINED_FROM, COMBINED_FROM + 60)]
    programs = [one for one in programs if one.choice.kind == "replicas" and one.style.time is None]
    programs = [one for one in programs if one.choice.steps_per_run == 1]
    were_cut = False
    for program in programs:
        feeds = program.feeds(inputs)
        parts = [program.parts(inputs, feeds, task) for task in range(3)]
        for step, whole in enumerate(feeds):
            np.testing.assert_array_equal(whole["x"], np.concatenate([part[step]["x"] for part in parts]))
            np.testing.assert_array_equal(whole["steps"], np.concatenate([part[step]["steps"] for part in parts], 1))
            assert all(part[step]["shared"] is whole["shared"] for part in parts)
            for part in parts:
                rows, length = part[step]["long"].shape[:2]
                assert rows == len(part[step]["lengths"])
                assert length == (part[step]["lengths"].max() if rows else whole["long"].shape[1])
                were_cut |= length < whole["long"].shape[1]
    assert were_cut


def test_a_worker_has_as_many_examples_of_each_step_of_a_run_as_long() -> None:
    inputs = {
        "long": Input(("T", 3), D, "normal", 0, 0, trimmed_by="lengths"),
        "lengths": Input((), D, "lengths", 0, 0),
    }
    programs = [Program.draw(seed, Layout(2, 0)) for seed in range(20000, 20400)]
    programs = [one for one in programs if one.choice.steps_per_run > 1 and one.choice.kind == "replicas"]
    uneven = 0
    for program in programs:
        parts = program.parts(inputs, program.feeds(inputs), 0)
        for chunk in program.chunks(program.choice.steps_per_run):
            (shape,) = {parts[i]["long"].shape for i in chunk}
            uneven += abs(2 * shape[0] - program.batches[chunk[0]]) > 1
    assert uneven


def test_behind_a_bad_program_another_job_goes_on_and_it_is_tried_once_more_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, ...]] = []

    def one_job(seeds: Sequence[int], _: Nursery) -> Iterator[one.Outcome]:
        asked.append(tuple(seeds))
        for seed in seeds:
            is_bad = seed == 21 and len(seeds) > 1  # only behind another one
            yield one.Outcome(seed, "crash" if is_bad else "equal", "KeyError" if is_bad else "")
            if is_bad:
                return

    monkeypatch.setattr(jobs, "one_job", one_job)
    found = list(jobs.outcomes(range(20, 24), None))  # type: ignore[arg-type]
    assert asked == [(20, 21, 22, 23), (21,), (22, 23)]
    assert [outcome.seed for outcome in found] == [20, 21, 22, 23]
    assert found[1].reason == "KeyError (alone it is equal: run --seeds 20,21)"


def test_an_error_about_a_mistake_of_the_rewriter_is_no_refusal() -> None:
    assert one.outcome_of(ar.GraphError("'w/Assign' has no output 0")) == "crash"
    assert one.outcome_of(ar.GraphError("the batch has 3 examples, fewer than the 4 micro-batches")) == "refused"


def _answer(outcome: str, reason: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "reason": reason, "detail": "", "results": {"step 0 loss": np.array(1.0)}}


@pytest.mark.parametrize(
    ("given", "expected", "is_clean"),
    [
        ((_answer("refused", "no"), _answer("refused", "no")), "refused", True),
        ((_answer("refused", "no"), _answer("equal")), "crash", False),
        ((_answer("hang", "it waits"), _answer("crash", "KeyError")), "crash", False),
        ((_answer("equal"), _answer("hang", "it waits")), "hang", False),
    ],
)
def test_the_worst_answer_of_a_job_counts_and_it_goes_on_only_where_all_are_alike(
    given: tuple[dict[str, Any], ...], expected: str, is_clean: bool, tmp_path: Path
) -> None:
    for task, answer in enumerate(given):
        (tmp_path / f"7.{task}.pkl").write_bytes(pickle.dumps(answer))
    answers = jobs.Answers(7, tmp_path, [Worker(0, tmp_path)] * 2, [])
    trial = one.Trial(lambda _: {}, lambda _: {}, (), False)
    with pytest.raises(one.AnswerError) as caught:
        list(answers.results(trial))
    assert (caught.value.outcome, answers.is_clean) == (expected, is_clean)


def test_replicas_that_train_alone_are_averaged_by_the_model_of_them_as_often_as_is_said() -> None:
    program = next(
        one
        for one in (Program.draw(seed) for seed in range(COMBINED_FROM, COMBINED_FROM + 400))
        if one.choice.config.get("local_sgd") == {"period": 2, "warmup_steps": 0}
    )
    add = lambda values, feed: {"w": values["w"] + feed["x"], "n": values["n"] + 1}  # noqa: E731
    blocks = [[{"x": np.array(float(x))} for x in (1, 1, 1)], [{"x": np.array(float(x))} for x in (3, 3, 3)]]
    found = one.trained_apart(program, {"w": np.array(0.0), "n": np.array(0)}, add, blocks)
    assert (float(found["w"]), int(found["n"])) == (5.0, 3)  # the mean of 2 and 6, and a step of its own
