"""Feed the barriers between micro-batches in runs that update no variable, so that no gradient is computed.

run(["loss", "train"])       each micro-batch waits for the gradients of the one before
run("prediction")            the gates are fed: neither gradients nor labels are needed
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from autograph_rewrite.passes.base.instance_order import GATE


class GateFeeds:
    """The gates of one graph.

    Args:
        graph: a tf.Graph.
        targets: names of the operations that train.
    """

    def __init__(self, graph: Any, targets: Collection[str]) -> None:
        ops = (op for op in graph.get_operations() if op.type == "PlaceholderWithDefault")
        self._names = {op.name for op in ops if f"/{GATE}" in op.name}
        self._targets = targets
        self._known: dict[str, bool] = {}

    def feeds(self, fetched: Iterable[Any]) -> dict[str, float]:
        """Return what to feed besides, to run some tensors and operations."""
        if not self._names or any(self._trains(getattr(element, "op", element)) for element in fetched):
            return {}
        return dict.fromkeys((f"{name}:0" for name in self._names), 0.0)

    def _trains(self, root: Any) -> bool:
        """Return whether an operation needs one that trains, by any way but through a gate."""
        if root.name not in self._known:
            seen, pending = {root.name}, [root]
            while pending and pending[-1].name not in self._targets:
                op = pending.pop()
                producers = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
                found = {p.name: p for p in producers if p.name not in seen and p.name not in self._names}
                seen.update(found)
                pending.extend(found.values())
            self._known[root.name] = bool(pending)
        return self._known[root.name]
