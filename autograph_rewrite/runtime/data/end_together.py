"""Pad exhausted workers with empty batches until the datasets of all workers end.

    worker 0   a  b  c  .          before each batch all tell each other whether they have one;
    worker 1   d  .  .  .          the first time that nobody has, all end

An empty batch is as long in each open dimension as the others' are: it has no rows, and is a part of theirs.
They do so in the program's own thread, between its steps. A tf.data pipeline may run ahead in threads of its own: it
would ask for a batch that the program never wants, and wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.runtime.consensus.all_reduce_session import Array, Exchange
from autograph_rewrite.runtime.data.rows import lengths, none_of

Connect = Callable[[Array], Exchange]


class EndingTogether:
    """What one worker gets of a dataset; iterate over it as over the dataset, as often as all others do.

    Args:
        dataset: this worker's.
        member: which one this is.
        connect: makes an exchange between the workers, of arrays like a given one.

    Attributes:
        dataset: this worker's, which ends when its own examples do.
        element_spec: of its batches.
    """

    def __init__(self, dataset: Any, member: Membership, connect: Connect) -> None:
        self.dataset = dataset
        self.element_spec = dataset.element_spec
        self._member = member
        self._connect = connect
        self._exchange: Exchange | None = None
        self._iterations = 0

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        iteration = self._iterations
        own = iter(self.dataset)
        batch, number, last = next(own, None), 0, None
        while (sizes := self._of_somebody(batch, iteration, number)) is not None:
            if batch is not None:
                last = batch
                yield batch
                batch = next(own, None)
            else:
                yield none_of(self.element_spec, sizes, last)
            number += 1

    def _of_somebody(self, batch: Any, iteration: int, number: int) -> list[int] | None:
        """Tell the others whether there is another batch; return the lengths of one, None if nobody has any.

        Raises:
            ClusterError: they are somewhere else, or somebody is missing.
        """
        mine = [iteration, number, batch is not None, *lengths(batch, self.element_spec)]
        table = np.zeros((len(self._member.workers), len(mine)), np.int64)
        table[self._member.task] = mine
        if self._exchange is None:
            self._exchange = self._connect(table)
        table = self._exchange.add_up(table, "tell whether they have another batch")
        if (table[:, :2] != table[0, :2]).any():
            at = ", ".join(f"worker {task}: {n + 1} of time {i}" for task, (i, n) in enumerate(table[:, :2].tolist()))
            raise ClusterError(
                f"the workers want different batches of a dataset ({at})",
                hint="all have to iterate over it equally often, and to leave it early at the same batch",
            )
        having = table[table[:, 2] > 0]
        return [int(size) for size in having[0, 3:]] if len(having) else None
