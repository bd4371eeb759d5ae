"""Profiles: which node a kernel is, one clock for all ranks, where the time of a device went, the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autograph_rewrite as ar
from autograph_rewrite.inspect.profile import Profile, aligned, estimated
from autograph_rewrite.inspect.rank_trace import (
    Attribution,
    MeasuredStep,
    Ran,
    RankTrace,
    RunSource,
    union,
    within,
    without,
)
from tests.support.small_items import regression

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
MATMUL = RunSource("replica_0/y", "MatMul", "CPU:0", "y", "expand")
EXCHANGE = RunSource("dw/all_reduce", "CollectiveReduceV2", "CPU:0", "dw", "lower-reshards", "all_reduce dw", "0 dw")
OTHER = RunSource("Iterator", "Batch", "", "")


def rank(number: int, ahead: int = 0, clock: str = "") -> RankTrace:
    """Return a rank that computes, and reduces until both are there; rank 1 comes 100 later."""
    late = 100 * number
    ran = (Ran(0, 1_000, 1_500 + late), Ran(1, 1_400 + late, 1_900), Ran(2, 1_950, 1_980))
    made = RankTrace(
        number, clock or f"clock {number}", (MeasuredStep(1_000, 2_000, 4),), (MATMUL, EXCHANGE, OTHER), ran
    )
    return made.shifted(ahead)


def test_times_are_united_cut_and_taken_away() -> None:
    assert union([(5, 7), (1, 3), (2, 4), (9, 9)]) == [(1, 4), (5, 7)]
    assert within([(1, 4), (5, 7)], 2, 6) == [(2, 4), (5, 6)]
    assert without([(0, 10), (20, 30)], [(1, 2), (4, 22), (29, 40)]) == [(0, 1), (2, 4), (22, 29)]


@pytest.mark.parametrize("ahead", [0, 5_000_000, -123_456])
def test_collectives_bound_how_far_clocks_are_off(ahead: int) -> None:
    first, other = rank(0), rank(1, ahead)
    found = estimated(first, other)
    assert found.error is not None
    assert abs(found.value - ahead) <= found.error < 500
    together, _ = aligned([first, other])
    assert abs(together[1].steps[0].start - 1_000) <= found.error


def test_ranks_that_read_one_clock_stay_as_they_are() -> None:
    together, offsets = aligned([rank(0, clock="here"), rank(1, 7, clock="here")])
    assert together[1] == rank(1, 7, clock="here")
    assert offsets[1].is_same


def test_a_clock_that_nothing_bounds_is_said_to_be_unknown() -> None:
    alone = RankTrace(1, "elsewhere", (MeasuredStep(1_000, 2_000),), (MATMUL,), (Ran(0, 1_000, 1_500),))
    assert Profile.of([rank(0), alone]).notes == ("rank 1's clock could not be compared: it is shown as it was",)


def test_the_time_of_a_device_is_compute_exposed_communication_and_idle() -> None:
    found = Profile.of([rank(0)])
    (device,) = found.devices
    assert (device.compute, device.communication, device.idle) == pytest.approx((500e-9, 400e-9, 100e-9))
    shares = found.attributed
    assert (shares.nodes, shares.communication, shares.other, shares.outside) == pytest.approx((0.5, 0.4, 0.03, 0.07))
    assert found.examples_per_second == pytest.approx(4 / 1e-6)


def test_a_saved_profile_is_the_same_and_a_timeline_of_all_ranks(tmp_path: Path) -> None:
    found = Profile.of([rank(0), rank(1, 50)], notes=["a note"])
    path = found.save(tmp_path / "profile.json")
    again = Profile.load(path)
    assert (again, str(again)) == (found, str(found))
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert {event["name"] for event in events} >= {"MatMul y", "all_reduce dw", "step 0"}
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for times in by_thread.values():  # what overlaps on one row would be drawn as nested calls
        assert all(before[1] <= after[0] for before, after in zip(sorted(times), sorted(times)[1:], strict=False))


def test_kernels_are_found_under_the_names_that_tensorflow_gives_them() -> None:
    new = ar.rewrite(regression(), CONFIG)
    found = Attribution([new])
    assert found.source("replica_1/y", "_MklMatMul") == RunSource("replica_1/y", "_MklMatMul", "CPU:1", "y", "expand")
    exchange = found.source("replica_0/gradient/all_reduce", "CollectiveReduceV2")
    assert (exchange.origin, exchange.made_by) == ("gradient", "lower-reshards")
    assert exchange.exchange == "CollectiveReduceV2 gradient for w"
    assert exchange.meeting
    assert found.source("while/body/_12/replica_0/y", "MatMul").origin == "y"
    assert found.source("ConstantFolding/replica_0/y-folded-0", "Const").origin == "y"
    route = ("/job:localhost/replica:0/task:0/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:1")
    sent = found.source("replica_0/y/_7", "_Send", route)
    assert (sent.origin, sent.exchange, sent.device) == ("y", "send y from CPU:0 to CPU:1", "CPU:0")
    received = found.source("replica_0/gradient/all_reduce_S17", "_Recv")  # between processes
    assert (received.origin, received.made_by) == ("gradient", "")
    assert received.exchange.startswith("send gradient")
    assert found.source("TensorSlice/Batch", "Cast") == RunSource("TensorSlice/Batch", "Cast", "", "")


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ar.GraphError, match="is no profile"):
        Profile.load(tmp_path / "other.json")
    with pytest.raises(ar.GraphError, match="no rank has left a trace"):
        Profile.of([])
    one = rank(0)
    twice = RankTrace(1, "", one.steps * 2, one.sources, one.ran)
    with pytest.raises(ar.GraphError, match="different numbers of steps: 1, 2"):
        Profile.of([one, twice])
