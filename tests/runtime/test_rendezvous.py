"""What all workers take from the first one, whatever its type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
