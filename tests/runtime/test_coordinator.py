"""A job's coordinator: what every later step meets after an error."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.runtime.job import coordinator as coordinators
from autograph_rewrite.runtime.job import liveness
from autograph_rewrite.runtime.job import watchdog as watchdogs
from autograph_rewrite.runtime.job.coordinator import Coordinator, FailedSteps, SingleProcess, Workers
from autograph_rewrite.runtime.job.digests import StepAccount
from autograph_rewrite.runtime.job.liveness import PeerMonitor
from autograph_rewrite.runtime.job.watchdog import Watchdog

MEMBER = Membership(("127.0.0.1:2001", "127.0.0.1:2002"), (), "worker", 0)
OTHER = "worker 1 (127.0.0.1:2002)"


class CancelledError(Exception):
    """As TensorFlow's: the other worker may have ended."""

    message = "the other has gone"


class Told(FailedSteps):
    """What is told, without the other worker's process.

    Args:
        theirs: how many steps of the other worker have failed.
        raised: what it has raised.
    """

    def __init__(self, theirs: int = 0, raised: Exception | None = None) -> None:
        super().__init__(MEMBER)
        self.theirs, self.raised = theirs, raised
        self.mine: list[Exception | None] = []

    def tell(self, error: Exception | None = None) -> None:
        self.mine.append(error)

    def ahead(self) -> list[str]:
        return [OTHER] if self.theirs > len(self.mine) else []

    awaited = ahead

    def error(self, ahead: list[str]) -> Exception | None:
        assert ahead == [OTHER]
        return self.raised


def workers(told: FailedSteps | None = None, **options: object) -> tuple[Workers, list[str]]:
    done: list[str] = []
    agree = lambda: done.append("agreed")  # noqa: E731
    made = Workers(MEMBER, Watchdog(1.0), agree, told or Told(), **options)  # type: ignore[arg-type]
    return made, done


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "missing", lambda *given: ClusterError(f"{given[0].name} waited to {given[1]}"))
    told = ClusterError("not the same")
    monkeypatch.setattr(coordinators, "disagreement", lambda *_: told)


def test_a_step_that_failed_is_followed_by_one_agreement() -> None:
    made, done = workers()
    made.before_step()
    assert done == []
    made.step_failed()
    made.before_step()
    made.before_step()
    assert done == ["agreed"]


def test_what_has_failed_on_another_worker_is_raised_here_too_and_both_carry_on() -> None:
    raised = ValueError("x is too large")
    told = Told(1, raised)
    made, done = workers(told)
    assert made.failure(CancelledError(), "finish step 1", None) is raised
    made.step_failed(raised)
    assert told.mine == [raised]  # others hear of it from this worker, too, and once
    made.before_step()
    assert done == ["agreed"]
    assert "waited to finish step 2" in str(made.failure(CancelledError(), "finish step 2", None))


def test_workers_that_go_on_by_themselves_tell_and_agree_on_nothing() -> None:
    done: list[str] = []
    made = Workers(MEMBER, Watchdog(1.0), lambda: done.append("agreed"))
    made.step_failed(ValueError("x is too large"))
    made.before_step()
    assert done == []


def test_a_failed_agreement_is_asked_for_again() -> None:
    def nobody() -> None:
        raise ClusterError("nobody is there")

    made = Workers(MEMBER, Watchdog(1.0), nobody, Told())
    made.step_failed()
    for _ in range(2):
        with pytest.raises(ClusterError, match="nobody"):
            made.before_step()


def test_an_error_of_the_program_itself_ends_nothing() -> None:
    made, _ = workers()
    assert made.failure(ValueError("bad data"), "finish step 1", None) is None
    made.check()


def test_a_session_that_waited_for_somebody_is_left_behind_and_raises_the_same_from_then_on() -> None:
    left: list[str] = []
    made, _ = workers(abandon=lambda: left.append("left"))
    problem = made.failure(CancelledError(), "finish run 2", None)
    assert "worker 0 waited to finish run 2" in str(problem)
    assert left == ["left"]
    with pytest.raises(ClusterError) as again:
        made.check()
    assert again.value is problem


def test_a_function_that_waited_for_somebody_can_be_called_again() -> None:
    made, _ = workers()
    assert made.failure(CancelledError(), "finish step 2", None) is not None
    made.check()


def test_workers_that_were_not_given_the_same_have_to_agree_before_the_next_step() -> None:
    made, done = workers()
    made.require_equal(StepAccount("step 1"), np.array([[4, 7], [3, 7]]))  # the first column holds sizes
    made.before_step()
    assert done == []
    with pytest.raises(ClusterError, match="not the same"):
        made.require_equal(StepAccount("step 2"), np.array([[4, 7], [4, 8]]))
    made.before_step()
    assert done == ["agreed"]


def test_a_process_of_its_own_names_what_stood_still() -> None:
    watchdog = Watchdog(2.0)
    made = SingleProcess(watchdog)
    assert made.failure(CancelledError(), "finish step 1", None) is None
    watchdog.expired = True
    told = str(made.failure(CancelledError(), "finish step 1", None))
    assert "stood still for 2 s" in told
    assert "autograph-rewrite plan GRAPH" in told


def test_where_nobody_waits_errors_stay_what_they_are() -> None:
    made = Coordinator()
    made.step_failed()
    made.before_step()
    assert made.failure(CancelledError(), "finish step 1", None) is None
    assert made.watchdog is None


def test_a_step_that_another_worker_has_left_ends_when_its_connection_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorFlow may lose the cancellation of a request that is just being sent; then only its connection ends it."""
    broken = threading.Event()
    monkeypatch.setattr(liveness, "ask", lambda names, *_, **__: dict.fromkeys(names, "OK"))
    monkeypatch.setattr(liveness, "break_connections", lambda _: broken.set() or True)
    monkeypatch.setattr(watchdogs, "_ASK", 0.05)
    watchdog = Watchdog(60.0, lambda: PeerMonitor(MEMBER, 60.0), ahead=lambda: [OTHER])
    monkeypatch.setattr(watchdog, "_period", lambda: 0.02)
    watchdog.start()
    assert broken.wait(20)
    watchdog.stop(failed=True)
    made = Workers(MEMBER, watchdog, lambda: None, Told())
    assert made.failure(ValueError("bad data"), "finish step 3", None) is None  # its own error comes first
    assert re.search(
        r"worker 0 could not finish step 3: it has failed on worker 1",
        str(made.failure(CancelledError(), "finish step 3", None)),
    )


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return whether a connection was broken, where every step is idle, all answer, and looks are made by hand."""
    broken = threading.Event()
    monkeypatch.setattr(liveness, "ask", lambda names, *_, **__: dict.fromkeys(names, "OK"))
    monkeypatch.setattr(liveness, "break_connections", lambda _: broken.set() or True)
    monkeypatch.setattr(watchdogs, "_processor_time", lambda _: {1: 7.0})
    monkeypatch.setattr(watchdogs, "repeat", lambda *_: threading.current_thread())
    return broken


def wait_for_answers() -> None:
    for thread in threading.enumerate():
        if thread.name == "autograph_question":
            thread.join(20)


def test_a_step_that_another_worker_has_left_ends_within_three_looks(broken: threading.Event) -> None:
    answered = threading.Event()
    watchdog = Watchdog(5.0, lambda: PeerMonitor(MEMBER, 5.0), ahead=lambda: answered.set() or [OTHER])
    watchdog.start()
    watchdog.look(0.6)
    assert not answered.is_set(), "a step that has just begun makes no work for others"
    watchdog.look(0.6)
    assert answered.wait(20)
    assert not broken.is_set(), "a step may be idle for a moment"
    wait_for_answers()
    watchdog.look(0.6)
    watchdog.stop(failed=True)
    assert broken.is_set()
    assert watchdog.left == [OTHER]


def test_a_session_leaves_a_second_step_that_another_worker_has_left_as_soon_as_the_first(
    broken: threading.Event,
) -> None:
    watchdog = Watchdog(5.0, lambda: PeerMonitor(MEMBER, 5.0), ahead=lambda: [OTHER])

    def stand_still() -> None:
        for _ in range(3):
            watchdog.look(0.6)
            wait_for_answers()
        raise CancelledError

    for _ in range(2):
        broken.clear()
        with pytest.raises(CancelledError):
            watchdog.run(stand_still)
        assert broken.is_set()
        assert watchdog.left == [OTHER]
    watchdog.run(lambda: None)
    assert not watchdog.left, "nobody has left that one"


def test_nobody_is_left_while_all_have_failed_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(liveness, "ask", lambda names, *_, **__: dict.fromkeys(names, "OK"))
    monkeypatch.setattr(liveness, "break_connections", lambda _: pytest.fail("a healthy connection was broken"))
    monkeypatch.setattr(watchdogs, "_ASK", 0.05)
    watchdog = Watchdog(60.0, lambda: PeerMonitor(MEMBER, 60.0), ahead=lambda: asked.set() or [])
    monkeypatch.setattr(watchdog, "_period", lambda: 0.02)
    watchdog.start()
    assert asked.wait(20)
    time.sleep(0.2)
    watchdog.stop()
    assert watchdog.left == []
