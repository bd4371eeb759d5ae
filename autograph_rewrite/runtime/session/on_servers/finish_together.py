"""Finish together: a run that meets other workers by collectives and on servers is over for all of them at once.

    before   loss, train ──► done                                          another worker's part on the server: deleted
    after    loss, train ──^──► ControlTrigger ──^──► CollectiveReduceV2 ──► done

TensorFlow gives a run with collectives one number in all processes, and the first worker that is done has servers
forget everything of that number: also what they hand to a worker that is not done. So there is one more collective,
behind all that is fetched. What a server computes is fetched by way of this worker, so that it has come when all are
done. No process sends into a branch or loop (`resolve.edges.lowering_choice`): nothing would wait for what comes to
one that is not taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.passes.collectives.key_operands import salted
from autograph_rewrite.plan.parts.collective_keys import group_key
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.session_digest import ancestors
from autograph_rewrite.training_graph import TrainingGraph

INSTANCE = 0
"""Instance key of that collective: edges have others (`plan.parts.collective_keys`)."""


class FinishTogether:
    """What the runs of one session fetch besides.

    Args:
        item: rewritten, for several processes.
        member: which of them this is.
        graph: the tf.Graph of the session, to which nodes are added.
    """

    def __init__(self, item: TrainingGraph, member: Membership, graph: Any) -> None:
        plan = item.report.plan
        self._tf, self._graph, self._workers = tensorflow(), graph, len(plan.processes)
        self._group = salted(group_key(plan.hosts), plan.digest())
        self._process = f"/job:{member.job}/replica:0/task:{member.task}"
        self._known: dict[tuple[str, ...], list[Any]] = {}
        operations = graph.get_operations()
        self._is_needed = bool(plan.homes) and any(is_collective(one.type) for one in operations)
        self._behind: dict[str, list[Any]] = defaultdict(list)
        if not self._is_needed:
            return
        # Control edges from operations that have been run would change them: TensorFlow warns, and will refuse it.
        for name in item.targets:
            operation = graph.get_operation_by_name(name)
            if not operation.outputs:
                self._behind[name].append(self._once(operation, operation.device))

    def of(self, fetches: Sequence[Any]) -> list[Any]:
        """Return what a run fetches instead: as many elements, and possibly one more.

        Args:
            fetches: tensors and operations, or names of them.
        """
        if not self._is_needed:
            return list(fetches)
        names = tuple(getattr(one, "name", one) for one in fetches)
        if names not in self._known:
            self._known[names] = self._joined([self._graph.as_graph_element(one) for one in fetches])
        return self._known[names]

    def _joined(self, fetches: Sequence[Any]) -> list[Any]:
        tf = self._tf
        roots = [getattr(one, "op", one) for one in fetches]
        step = ancestors(roots)
        if not any(is_collective(one.type) for one in step):
            return list(fetches)
        with self._graph.as_default(), tf.device(f"{self._process}/device:CPU:0"):
            here = [tf.identity(one) if hasattr(one, "op") and self._is_away(one.op) else one for one in fetches]
            awaited = [one for one in here if hasattr(one, "op")]
            awaited += [one for operation in step for one in self._behind.get(operation.name, ())]
            last = [self._once(one, one.device).op for one in awaited]
            last += [root for root in roots if not root.outputs and root.name not in self._behind]
            with tf.control_dependencies(last):
                trigger = tf.raw_ops.ControlTrigger()  # it runs whichever branch did
            with tf.control_dependencies([trigger]):
                over = tf.raw_ops.CollectiveReduceV2(
                    input=tf.ones([1]),
                    group_size=self._workers,
                    group_key=self._group,
                    instance_key=INSTANCE,
                    ordering_token=[],
                    merge_op="Add",
                    final_op="Id",
                )
        return [*here, over.op]

    def _once(self, source: Any, device: str) -> Any:
        """Return a tensor that is there once another one is, or an operation is done.

        Args:
            source: tensor or operation.
            device: where it is to be.
        """
        with self._graph.as_default(), self._tf.device(device or f"{self._process}/device:CPU:0"):
            if hasattr(source, "op"):
                return self._tf.identity(source)
            with self._tf.control_dependencies([source]):
                return self._tf.constant(True)

    def _is_away(self, operation: Any) -> bool:
        return process_of(operation.device) not in ("", self._process)
