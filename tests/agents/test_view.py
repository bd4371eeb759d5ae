"""Who goes on, and who may decide it: however a job falls apart, at most one side forms a generation."""

from __future__ import annotations

from itertools import product

import pytest

from autograph_rewrite.tools.launcher.agent_view import (
    Bounds,
    GenerationHosts,
    HostReport,
    Losses,
    Seat,
    asked_for_more,
    can_join,
    cut_off,
    following,
    losses,
    may_go_on,
)

NAMES = "abcde"


def seats(*workers: int) -> tuple[Seat, ...]:
    """Return the seats of hosts a, b, ... that run as many workers as they can."""
    return tuple(Seat(name, f"{name}:1", count, count) for name, count in zip(NAMES, workers, strict=False))


@pytest.mark.parametrize("count", range(1, 6))
def test_of_sides_that_do_not_reach_each_other_at_most_one_goes_on(count: int) -> None:
    view = GenerationHosts(1, seats(*[1] * count))
    went_on = 0
    for sides in product((0, 1, 2), repeat=count):  # 2: the process has ended
        ended = {name for name, side in zip(NAMES, sides, strict=False) if side == 2}
        each = [{name for name, side in zip(NAMES, sides, strict=False) if side == number} for number in (0, 1)]
        for known in (set(), ended):  # what the other side knows does not matter
            able = [may_go_on(view, each[0], ended), may_go_on(view, each[1], known)]
            assert sum(a for a, side in zip(able, each, strict=True) if side) <= 1, sides
            went_on += any(able)
    assert went_on, "the rule lets somebody go on"


def test_half_of_the_hosts_goes_on_with_the_first_only() -> None:
    view = GenerationHosts(1, seats(1, 1))
    assert may_go_on(view, {"a"})
    assert not may_go_on(view, {"b"})
    assert may_go_on(view, {"b"}, {"a"}), "the first has ended for certain"


def test_a_host_that_is_lost_takes_its_workers_along_and_the_others_are_numbered_anew() -> None:
    view = GenerationHosts(3, seats(2, 1, 2))
    after = following(view, Losses("b is lost"), True, [view.seats[0], view.seats[2]], Bounds(2, 5))
    assert after is not None
    assert (after.generation, after.workers, after.agents) == (4, 4, ("a", "c"))
    assert list(after.ranks("c")) == [2, 3]
    assert following(view, Losses("b is lost"), True, [view.seats[1]], Bounds(2, 5)) is None


def test_a_worker_that_is_lost_is_replaced_at_the_next_epoch_while_there_are_restarts() -> None:
    view = GenerationHosts(1, seats(2, 1), restarts=1)
    after = following(view, Losses("x", (1,)), True, view.seats, Bounds(1, 3))
    assert after is not None
    assert [(seat.workers, seat.ready, seat.lost) for seat in after.seats] == [(1, 1, 0), (1, 0, 0)]
    assert can_join(after, (), Bounds(1, 3)) == 1
    again = following(after, Losses("others can join"), True, after.seats, Bounds(1, 3))
    assert again is not None
    assert (again.workers, again.restarts) == (3, 0)
    less = following(again, Losses("x", (2,)), True, again.seats, Bounds(1, 3))
    assert less is not None
    assert (less.workers, can_join(less, (), Bounds(1, 3))) == (2, 0)
    assert can_join(asked_for_more(less), (), Bounds(1, 3)) == 1


def test_who_was_restarted_joins_at_once_if_too_few_would_be_left() -> None:
    view = GenerationHosts(1, seats(2), restarts=2)
    after = following(view, Losses("x", (0,)), True, view.seats, Bounds(2, 2))
    assert after is not None
    assert (after.workers, after.restarts) == (2, 1)


def test_a_standby_host_steps_in_when_another_is_lost() -> None:
    view = GenerationHosts(1, (*seats(1, 1), Seat("c", "c:1", 1)))
    after = following(view, Losses("b is lost"), True, [view.seats[0], view.seats[2]], Bounds(1, 2))
    assert after is not None
    assert [seat.workers for seat in after.seats] == [1, 1]


def test_a_new_host_waits_for_the_end_of_an_epoch() -> None:
    view = GenerationHosts(1, seats(1, 1))
    new = Seat("c", "c:1", 2)
    assert can_join(view, [new], Bounds(1, 3)) == 1
    after = following(view, Losses("others can join"), True, (*view.seats, new), Bounds(1, 3))
    assert after is not None
    assert [seat.workers for seat in after.seats] == [1, 1, 1]


def test_who_was_killed_is_lost_rather_than_who_failed_for_its_sake() -> None:
    failed = HostReport("worker 2 failed with exit code 1", "worker 2", blames={"2": [0]})
    killed = HostReport("worker 1 was killed by SIGKILL", "worker 1", was_killed=True)
    assert losses([failed, killed]).ranks == (1,)
    assert losses([failed]).ranks == (0,)
    assert losses([failed]).words == "worker 0 did not answer"
    assert losses([HostReport(ended_well=True)]) == Losses()


@pytest.mark.parametrize(
    ("blames", "lost"),
    [
        ({0: [1], 2: [1], 1: [0, 2]}, (1,)),
        ({1: [0, 2]}, (1,)),  # the one that is cut off is the first to say something
        ({1: [0, 2], 0: [1]}, (1,)),
        ({0: [1, 2, 3]}, (0,)),
        ({1: [0]}, (0,)),
        ({0: [1], 1: [0]}, (1,)),
        ({0: [2], 1: [3]}, (2, 3)),
        ({0: [], 1: []}, ()),
    ],
)
def test_of_those_who_blame_each_other_the_fewest_are_lost(blames: dict[int, list[int]], lost: tuple[int, ...]) -> None:
    assert cut_off(blames) == lost
    failed = HostReport("worker 5 failed with exit code 1", "worker 5", blames={str(n): b for n, b in blames.items()})
    assert losses([failed]).ranks == (lost or (5,))


def test_a_server_that_never_served_is_not_replaced_for_ever() -> None:
    view = GenerationHosts(1, seats(2), restarts=1)
    lost = losses([HostReport("ps 0 failed with exit code 1", "ps 0")])
    assert lost.auxiliary == 1
    after = following(view, lost, False, view.seats, Bounds(1, 2))
    assert after is not None
    assert following(after, lost, False, after.seats, Bounds(1, 2)) is None
    assert following(after, lost, True, after.seats, Bounds(1, 2)) is not None


def test_a_view_is_the_same_as_plain_data() -> None:
    view = GenerationHosts(4, seats(2, 1), 3)
    assert GenerationHosts.of(view.data()) == view
