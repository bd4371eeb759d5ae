"""Whether the other workers have begun the next step: what worker 0 waits for before it writes on a server.

They may still read there what the last step has left. Each says so when it begins (`passes.parameter_server.turns`);
worker 0 takes that in the step, or, where it has something to write, before it.
"""

from __future__ import annotations

from typing import Any

from autograph_rewrite.ir.graph import PASS_ATTR
from autograph_rewrite.passes.parameter_server.turns import PREFIX
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.session.session import DistributedSession

_TAKE = "QueueDequeueManyV2"


class OthersBegan:
    """Takes what the others say; does nothing where a step does not wait for it.

    Args:
        session: of a step.
    """

    def __init__(self, session: DistributedSession) -> None:
        self._session = session
        self._has_waited = False
        ops = (op for op in session.graph.get_operations() if op.type == _TAKE and op.name.startswith(f"{PREFIX}/"))
        found = next((op for op in ops if PASS_ATTR in op.node_def.attr), None)
        self._count, self._take = None, None
        if found is None:
            return
        queue, self._count = found.inputs
        # TensorFlow's own way to look into a constant forbids to feed it from then on.
        self._others = int(tensorflow().make_ndarray(self._count.op.node_def.attr["value"].tensor))
        with session.graph.as_default(), tensorflow().device(queue.device):
            taken = tensorflow().raw_ops.QueueDequeueManyV2(
                handle=queue, n=self._others, component_types=found.get_attr("component_types")
            )
        self._take = taken[0].op

    def wait(self) -> None:
        """Wait until the others have begun the next step.

        Raises:
            ClusterError: somebody is missing.
        """
        if self._take is not None and not self._has_waited:
            self._session.run_ops([self._take])
            self._has_waited = True

    def feeds(self) -> dict[Any, int]:
        """Return what a step is fed besides: how many it still has to wait for."""
        if self._count is None:
            return {}
        still = 0 if self._has_waited else self._others
        self._has_waited = False
        return {self._count: still}
