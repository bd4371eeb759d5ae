"""What all workers take from the first one, whatever its type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.runtime.job import exchanges
from autograph_rewrite.runtime.job.exchanges import Rendezvous


class OfWorker1(Rendezvous):
    """A rendezvous of worker 1 with a worker 0 whose texts are in capitals."""

    def __init__(self) -> None:
        """Take part in no job."""

    def texts(self, text: str, what: str) -> list[str]:
        """Return what both say."""
        return [text.upper(), text]


@pytest.mark.parametrize("words", [[b"a", b"b"], [[b"a"], [b""]], []])
def test_texts_are_adopted_from_the_first_worker_as_numbers_are(words: Any) -> None:
    mine = np.array(words, object)
    (got,) = OfWorker1().of_chief([mine], "adopt")
    assert got.dtype == object
    assert got.shape == mine.shape
    assert [word for word in got.ravel()] == [word.upper() for word in mine.ravel()]


class OfWorker0(Rendezvous):
    """A rendezvous of worker 0 with workers that add zeros; counts what is sent, and what has been read before it."""

    def __init__(self) -> None:
        """Take part in no job."""
        object.__setattr__(self, "member", SimpleNamespace(is_chief=True))
        object.__setattr__(self, "sent", [])

    def add_up(self, value: Any, what: str) -> Any:
        """Return the sum, which is this worker's summand."""
        self.sent.append(value.nbytes)
        return value.copy()


def test_arrays_of_any_type_and_shape_keep_every_bit() -> None:
    nan = np.array([0x7FC00001, 0x80000000], np.uint32).view(np.float32)  # a NaN with a payload, and -0.0
    mine = [nan, np.array(True), np.zeros((0, 4)), np.arange(5, dtype=np.float16), np.arange(6.0).reshape(2, 3).T]
    got = list(OfWorker0().of_chief(mine, "adopt"))
    assert [(one.dtype, one.shape, one.tobytes()) for one in got] == [(a.dtype, a.shape, a.tobytes()) for a in mine]


def test_arrays_are_read_only_when_those_before_them_are_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "NUMBERS", 4)
    meeting, read = OfWorker0(), []
    given = (read.append(i) or np.full(6, i, np.int32) for i in range(5))
    for count, one in enumerate(meeting.of_chief(given, "adopt"), 1):
        assert one.tolist() == [count - 1] * 6
        assert len(read) <= count + 1  # one ahead: whether it goes with the one before is seen from its size
    assert meeting.sent == [16, 8] * 5
