"""Schedules come out as their formulae say: bubbles, makespans and what is in flight, for all small numbers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan.parts.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    Task,
    ideal_in_flight,
    iterations,
    orders,
)
from tests.support.paper_schedule import simulate

DEVICES, MICRO, CHUNKS = st.integers(1, 6), st.integers(1, 12), st.integers(1, 4)
COSTS = st.integers(1, 5)


def ideal_bubble(schedule: str, devices: int, micro: int, chunks: int = 1) -> Fraction:
    """Return the share of time in which devices wait where all stages take equally long."""
    if schedule in ("interleaved", "circular") and micro % devices:
        return 1 - Fraction(micro * devices * chunks, iterations(micro, devices, chunks) * devices)
    return Fraction(devices - 1, chunks * micro + devices - 1)


@given(st.sampled_from(["gpipe", "1f1b", "circular"]), DEVICES, MICRO)
def test_each_stage_runs_each_micro_batch_once_forwards_and_then_once_backwards(
    schedule: str, devices: int, micro: int
) -> None:
    for device, tasks in enumerate(orders(schedule, devices, micro)):
        assert Counter(tasks) == Counter(Task(k, m, device) for k in (FORWARD, BACKWARD) for m in range(micro))
        assert all(tasks.index(Task(FORWARD, m, device)) < tasks.index(Task(BACKWARD, m, device)) for m in range(micro))


@given(st.sampled_from(["gpipe", "1f1b"]), DEVICES, MICRO, COSTS, COSTS)
def test_gpipe_and_1f1b_take_equally_long(schedule: str, devices: int, micro: int, forward: int, backward: int) -> None:
    found = simulate(orders(schedule, devices, micro), [forward] * devices, [backward] * devices)
    assert found.makespan == (micro + devices - 1) * (forward + backward)
    assert found.bubble == ideal_bubble(schedule, devices, micro) == Fraction(devices - 1, micro + devices - 1)


@given(st.sampled_from(["gpipe", "1f1b"]), DEVICES, MICRO)
def test_1f1b_holds_no_more_than_the_stages_behind(schedule: str, devices: int, micro: int) -> None:
    found = simulate(orders(schedule, devices, micro), [1] * devices, [2] * devices)
    assert found.in_flight == tuple(ideal_in_flight(schedule, s, devices, micro) for s in range(devices))


@given(DEVICES, st.integers(1, 4), CHUNKS, COSTS, COSTS)
def test_several_chunks_per_device_shorten_the_bubble(
    devices: int, rounds: int, chunks: int, forward: int, backward: int
) -> None:
    micro = devices * rounds
    for schedule in ("interleaved", "circular"):
        given_orders = orders(schedule, devices, micro, chunks)
        stages = devices * chunks
        assert Counter(t for tasks in given_orders for t in tasks) == Counter(
            Task(k, m, s) for k in (FORWARD, BACKWARD) for m in range(micro) for s in range(stages)
        )
        found = simulate(given_orders, [forward] * stages, [backward] * stages)
        assert found.bubble == ideal_bubble(schedule, devices, micro, chunks), schedule
        assert found.bubble == Fraction(devices - 1, chunks * micro + devices - 1)


@given(DEVICES, MICRO, CHUNKS, COSTS, COSTS)
def test_a_circular_schedule_ends_whatever_the_numbers(
    devices: int, micro: int, chunks: int, forward: int, backward: int
) -> None:
    stages = devices * chunks
    found = simulate(orders("circular", devices, micro, chunks), [forward] * stages, [backward] * stages)
    assert found.makespan <= iterations(micro, devices, chunks) * (forward + backward)


@pytest.mark.parametrize(
    ("micro", "stages", "repeat", "expected"),
    [(4, 4, 2, 11), (8, 4, 3, 27), (5, 4, 2, 19), (3, 1, 2, 6), (8, 4, 1, 11)],
)
def test_the_loop_of_a_shifting_buffer_turns_as_often_as_its_formula_says(
    micro: int, stages: int, repeat: int, expected: int
) -> None:
    assert iterations(micro, stages, repeat) == expected


def test_five_micro_batches_in_four_stages_twice_leave_slots_empty() -> None:
    assert ideal_bubble("circular", 4, 5, 2) == 1 - Fraction(40, 76)


@pytest.mark.parametrize(("stages", "micro", "expected"), [(4, 8, 33), (4, 2, 15), (2, 4, 15), (8, 4, 33)])
def test_makespans_of_some_pipelines(stages: int, micro: int, expected: int) -> None:
    assert simulate(orders("1f1b", stages, micro), [1] * stages, [2] * stages).makespan == expected


def test_the_order_of_1f1b_is_as_published() -> None:
    assert " ".join(map(str, orders("1f1b", 2, 4)[0])) == "F0@0 F1@0 B0@0 F2@0 B1@0 F3@0 B2@0 B3@0"
    assert " ".join(map(str, orders("1f1b", 2, 4)[1])) == "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 F3@1 B3@1"


def test_an_order_that_waits_for_itself_is_refused_with_the_cycle() -> None:
    wrong = (
        (Task("B", 0, 0), Task("F", 0, 0)),
        (Task("F", 0, 1), Task("B", 0, 1)),
    )
    with pytest.raises(PlanError, match="B0@0 waits for F0@1 waits for B0@0"):
        simulate(wrong, [1, 1], [1, 1])


def test_what_a_schedule_cannot_do_is_refused() -> None:
    with pytest.raises(PlanError, match="rounds of 4 micro-batches, and there are 6"):
        orders("interleaved", 4, 6, 2)
    with pytest.raises(PlanError, match="one stage per device, not 2"):
        orders("1f1b", 4, 8, 2)
    with pytest.raises(PlanError, match="no schedule 'zb'"):
        orders("zb", 4, 8)
