"""Step numbers: runs with collectives have one number in all workers, and after an error one that no run has had.

    worker 0   run 7 done      number 78     worker 1   run 7 done       number 78
               run 8 fails     number 79                run 8 is done    number 79
               carries on      runs nothing, twice      carries on       runs nothing, once
               run 9           number 81                run 9            number 81

TensorFlow numbers the runs under one key one after the other in each process, and a run that fails does not use its
number up (`RetireStepId`). With the same number again, what a failed run has asked another process for would take a
value of the next one, and the cleaning up after it would end that. A key is of graphs, not of runs: TensorFlow keeps
the one with which something was first fetched. It does not look for collectives in the functions of a loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.agreement import CARRY_ON
from autograph_rewrite.runtime.consensus.rendezvous import Rendezvous
from autograph_rewrite.runtime.consensus.session_digest import ancestors
from autograph_rewrite.runtime.job import tf_server

_KEY = 0x5745
"""What all runs with collectives of a program are numbered under."""


class StepNumbers:
    """Numbers the runs of one session.

    Args:
        graph: the tf.Graph of the session, to which a node is added.
        member: this process; None: it is alone, or its session runs for all workers.
    """

    def __init__(self, graph: Any, member: Membership | None) -> None:
        self._graph, self._member = graph, member
        self._known: dict[tuple[str, ...], bool] = {}
        self._loops_meet = any(is_collective(one.type) for one in graph.get_operations())
        if member is not None:
            tf = tensorflow()
            with graph.as_default(), tf.device(f"/job:{member.job}/replica:0/task:{member.task}/device:CPU:0"):
                self._nothing = tf.no_op()

    def is_numbered(self, fetches: Iterable[Any], options: Any, *, in_loop: bool) -> bool:
        """Return whether a run has a number that others know, and have it so.

        Args:
            fetches: tensors and operations, or names of them.
            options: the RunOptions of the run.
            in_loop: the steps are in a loop.
        """
        meets = self._loops_meet if in_loop else self._member is not None and self._meets(fetches)
        if meets:
            options.experimental.collective_graph_key = _KEY
        return meets and self._member is not None

    def _meets(self, fetches: Iterable[Any]) -> bool:
        names = tuple(getattr(one, "name", one) for one in fetches)
        if names not in self._known:
            elements = [self._graph.as_graph_element(name) for name in names]
            step = ancestors(getattr(element, "op", element) for element in elements)
            self._known[names] = any(is_collective(one.type) for one in step)
        return self._known[names]

    def renew(self, session: Any, seconds: float) -> None:
        """Go on with a number that no worker has used; all of them call this.

        Args:
            session: of the graph.
            seconds: to wait for the others.

        Raises:
            ClusterError: somebody is missing.
        """
        if self._member is None:
            return
        mine = tf_server.numbers_used()
        used = Rendezvous(self._member, seconds).rows(np.array(mine, np.int64), CARRY_ON)
        options = tensorflow().compat.v1.RunOptions()
        options.experimental.collective_graph_key = _KEY
        for _ in range(mine, int(used.max()) + 1):
            session.run(self._nothing, options=options)
            tf_server.use_number()
