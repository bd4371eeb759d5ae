"""Rendezvous: small exchanges between workers outside of any step, with timeouts that name missing workers.

    compare what all are about to run  ──  adopt the chief's variables  ──  agree on a seed

They run in a session of their own, so that they work before the first step in every mode, and a failure does not spoil
the collectives of the steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.runtime.consensus.all_reduce_session import Array, Exchange
from autograph_rewrite.runtime.job import tf_server

FIRST_KEY = 2**29
"""Group and instance keys of rendezvous; those of steps are spread over all numbers below 2^30 and above."""

PIECE = 2**24
"""How many numbers travel at once: a message of gRPC cannot hold two gigabytes."""


class Rendezvous:
    """Exchanges of one job. All workers must make the same ones in the same order.

    Args:
        member: this process.
        seconds: how long to wait for the others.
    """

    def __init__(self, member: Membership, seconds: float) -> None:
        self._member = member
        self._seconds = seconds

    def add_up(self, value: Array, what: str) -> Array:
        """Return the sum of the workers' arrays, of equal shape; int32, int64, float32 or float64.

        Args:
            value: this worker's.
            what: what it is for, for messages.

        Raises:
            ClusterError: somebody is missing.
        """
        key = FIRST_KEY + tf_server.next_exchange()
        with Exchange(self._member, self._seconds, value, FIRST_KEY, key) as exchange:
            return exchange.add_up(value, what)

    def meet(self, what: str) -> None:
        """Wait until all workers are here.

        Args:
            what: what it is for, for messages.

        Raises:
            ClusterError: somebody is missing.
        """
        self.add_up(np.zeros((), np.int32), what)

    def rows(self, value: Array, what: str) -> Array:
        """Return the workers' arrays, of equal shape, stacked in their order."""
        mine = np.zeros((len(self._member.workers), *value.shape), value.dtype)
        mine[self._member.task] = value
        return self.add_up(mine, what)

    def texts(self, text: str, what: str) -> list[str]:
        """Return the texts of all workers."""
        return [data.decode() for data in self.contents(text.encode(), what)]

    def contents(self, data: bytes, what: str) -> list[bytes]:
        """Return what all workers give, of any length."""
        sizes = self.rows(np.array(len(data), np.int64), what)
        words = np.zeros((int(sizes.max()) + 3) // 4, np.int32)
        words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        pieces = [self.rows(words[i : i + PIECE], what) for i in range(0, words.size, PIECE)]
        rows = np.concatenate(pieces, axis=1) if pieces else np.zeros((len(sizes), 0), np.int32)
        return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    def rounds(self, count: int, what: str) -> list[tuple[int, int]]:
        """Meet so many times; return when each began and ended, in nanoseconds by the clock of this process."""
        key = FIRST_KEY + tf_server.next_exchange()
        mine, found = np.zeros((), np.int32), []
        with Exchange(self._member, self._seconds, mine, FIRST_KEY, key) as exchange:
            exchange.add_up(mine, what)  # the first one waits for connections, and for who comes late
            for _ in range(count):
                begin = time.time_ns()
                exchange.add_up(mine, what)
                found.append((begin, time.time_ns()))
        return found

    def of_chief(self, values: Sequence[Array], what: str) -> list[Array]:
        """Return the arrays that worker 0 has; all workers give arrays of the same types and shapes."""
        result: list[Array] = [np.asarray(value) for value in values]
        words_of = [i for i, value in enumerate(result) if value.size and value.dtype == object]
        if words_of:
            said = [[word.decode("latin-1") for word in result[i].ravel()] for i in words_of]
            for i, words in zip(words_of, json.loads(self.texts(json.dumps(said), what)[0]), strict=True):
                result[i] = np.array([word.encode("latin-1") for word in words], object).reshape(result[i].shape)
        by_type: dict[np.dtype[Any], list[int]] = {}
        for position, value in enumerate(result):
            if value.size and value.dtype != object:
                by_type.setdefault(value.dtype, []).append(position)
        for positions in by_type.values():
            flat = np.concatenate([result[i].reshape(-1) for i in positions])
            bits = flat.view(np.uint8)
            bits = np.pad(bits, (0, -bits.size % 4)).view(np.int32)  # they travel unchanged as integers
            chosen = bits if self._member.is_chief else np.zeros_like(bits)
            pieces = [self.add_up(chosen[i : i + PIECE], what) for i in range(0, chosen.size, PIECE)]
            shared = np.concatenate(pieces).view(np.uint8)[: flat.nbytes].view(flat.dtype)
            at = 0
            for i in positions:
                size = result[i].size
                result[i] = shared[at : at + size].reshape(result[i].shape)
                at += size
        return result
