"""Files that worker 0 writes for all: the others wait for them as long as worker 0 lives, and learn what failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.runtime import keras_workers
from autograph_rewrite.runtime.job import exchanges, liveness, tf_server
from autograph_rewrite.runtime.keras_workers import WrittenFiles

WORKERS = ("10.0.0.1:2222", "10.0.0.2:2222")
CHIEF = f"worker 0 ({WORKERS[0]})"
Pair = tuple[WrittenFiles, WrittenFiles]


@pytest.fixture
def batch() -> list[int]:
    """How many batches the model was given."""
    return [0]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return who does not answer."""
    names: list[str] = []
    monkeypatch.setattr(keras_workers, "_ASK", 0.1)
    monkeypatch.setattr(liveness.PeerMonitor, "lost", lambda _: names)
    monkeypatch.setattr(liveness, "silent", lambda *_: names)
    return names


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, batch: list[int], lost: list[str]) -> Pair:
    """Return the files of both workers, whose flags are a list of this process."""
    texts: list[str] = []

    class Here:
        def __init__(self, *_: Any) -> None:
            pass

        def counts(self) -> list[int]:
            return [len(texts)]

        def texts(self, at: int) -> list[str]:
            return [texts[at]]

    def put(member: Membership, name: str, tasks: Sequence[int], target: str = "", text: str = "") -> None:
        assert list(tasks) == [1]
        texts.append(text)

    monkeypatch.setattr(exchanges, "Flags", Here)
    monkeypatch.setattr(exchanges, "put", put)
    monkeypatch.setattr(liveness, "ask", lambda addresses, *_: dict.fromkeys(addresses, "OK"))
    monkeypatch.setattr(keras_workers, "counts", tf_server.Counts)
    members = [Membership(WORKERS, (), "worker", task) for task in range(2)]
    chief, other = (WrittenFiles(member, 0.5, lambda: batch[0], lambda: False) for member in members)
    return chief, other


def nothing(*_: Any) -> None:
    """Write no file."""


def test_the_others_go_on_once_a_file_is_whole(pair: Pair) -> None:
    chief, other = pair
    events: list[str] = []

    def write() -> None:
        time.sleep(0.1)
        events.append("whole")

    thread = threading.Thread(target=chief.of_chief(write, "save"))
    thread.start()
    other.of_chief(nothing, "save")()
    events.append("goes on")
    thread.join()
    assert events == ["whole", "goes on"]


def test_what_worker_0_saves_alone_is_not_taken_for_another(pair: Pair, batch: list[int]) -> None:
    chief, other = pair
    chief.of_chief(nothing, "save")()  # under `if task == 0`
    batch[0] = 1
    with pytest.raises(ar.ClusterError, match=r"waited 0\.5 s for the other workers to be done with 'save'"):
        other.of_chief(nothing, "save")()


def test_of_two_files_the_one_of_the_same_path_is_waited_for(pair: Pair) -> None:
    chief, other = pair
    save = chief.of_chief(nothing, "save")
    save("a.keras")  # under `if task == 0`
    later = threading.Timer(0.2, save, ["b.keras"])
    later.start()
    began = time.monotonic()
    other.of_chief(nothing, "save")("b.keras")
    assert time.monotonic() - began > 0.15


def test_each_worker_may_give_a_path_of_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_workers, "_OTHER", 0.1)
    chief, other = pair
    chief.of_chief(nothing, "save")("0.keras")
    other.of_chief(nothing, "save")("1.keras")


def test_parts_of_a_file_are_not_taken_for_it(pair: Pair) -> None:
    chief, other = pair
    save_weights = chief.of_chief(nothing, "save_weights")
    chief.of_chief(save_weights, "BackupAndRestore")()
    other.of_chief(nothing, "BackupAndRestore")()
    with pytest.raises(ar.ClusterError, match="'save_weights'"):
        other.of_chief(nothing, "save_weights")()


def test_what_cannot_be_written_is_an_error_on_all_workers(pair: Pair) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    chief, other = pair
    with pytest.raises(OSError, match="No space"):
        chief.of_chief(full, "save")()
    with pytest.raises(ar.ClusterError, match=r"'save' has failed on worker 0.*OSError: .*No space left on device"):
        other.of_chief(nothing, "save")()


def test_after_a_fit_that_failed_everywhere_the_next_one_is_waited_for(pair: Pair) -> None:
    def fails() -> None:
        raise ValueError("no data")

    for one in pair:
        with pytest.raises(ValueError, match="no data"):
            one.at_end(fails, "fit")()
    ran: list[str] = []
    fits: list[Callable[[], Any]] = [
        one.at_end(lambda name=name: ran.append(name), "fit") for one, name in zip(pair, "ab", strict=True)
    ]
    with pytest.raises(ar.ClusterError, match="be done with 'fit'"):
        fits[1]()
    fits[0]()
    assert ran == ["b", "a"]


def test_a_worker_0_that_dies_while_it_writes_is_named_and_one_that_has_ended_after_it_is_not(
    pair: Pair, lost: list[str]
) -> None:
    chief, other = pair
    lost.append(CHIEF)
    with pytest.raises(
        ar.ClusterError, match=r"worker 1 .*waited for worker 0 \(10.0.0.1:2222\) to be done with 'save'"
    ):
        other.of_chief(nothing, "save")()
    for _ in range(2):
        chief.of_chief(nothing, "save")()
    other.of_chief(nothing, "save")()
