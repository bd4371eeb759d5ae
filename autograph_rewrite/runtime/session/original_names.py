"""The original names of a session: what is run for a fetch, and which tensor a feed goes to, in the rewritten graph.

"loss"       output    -> loss:0 of the first replica
"logits:0"   split(0)  -> its block on each replica, concatenated
"train"      target    -> the operation on each replica
"w"          variable  -> read whole, before the run
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograph_rewrite.analysis.facts.placement import REPLICATED
from autograph_rewrite.errors import GraphError
from autograph_rewrite.passes.emit.tensor_map import View
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.session.fetches import Fetch, name_of, variable_of
from autograph_rewrite.training_graph import TrainingGraph


class OriginalNames:
    """Finds original names in a graph.

    Args:
        item: an original or rewritten item.
        graph: the tf.Graph that holds the item's graph.
    """

    def __init__(self, item: TrainingGraph, graph: Any) -> None:
        self._tf = tensorflow()
        self._item, self._graph = item, graph
        self._known: dict[str, Fetch] = {}

    def has(self, name: str) -> bool:
        """Return whether the graph has an operation of this name."""
        try:
            return bool(self._graph.get_operation_by_name(name))
        except KeyError:
            return False

    def fetch(self, name: str) -> Fetch:
        """Return what is run for an original name, and how its value is put together.

        Raises:
            GraphError: the rewritten graph does not have it.
        """
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def require_same_writes(self, names: Sequence[str]) -> None:
        """Refuse to fetch what writes other variables than in the original graph.

        Raises:
            GraphError: it writes more, or less.
        """
        if self._item.layout is None or not self._item.layout.writes.changed:
            return
        outputs = self._item.outputs
        tensors = [outputs[name].tensor if name in outputs else name for name in names]
        more, less = self._item.layout.writes.differences(tensor.partition(":")[0] for tensor in tensors)
        if more or less:
            what = f"would write '{more[0]}', which it does not" if more else f"would not write '{less[0]}', as it does"
            raise GraphError(
                f"a run of {', '.join(map(repr, names))} {what} in the original graph",
                hint="declare what runs by itself (train_op=[..., name], outputs=[..., name]), or fetch the train op",
            )

    def _find(self, name: str) -> Fetch:
        output = self._item.outputs.get(name)
        name = output.tensor if output is not None else name
        variable, late = variable_of(self._item.variables, name)
        if not variable or (not late and self._is_value(name)):
            return self._instances(name)
        own = name.partition(":")[0] in (variable, f"{variable}/read")
        is_there = late and (not own or self.has(name.partition(":")[0]))
        elements = self._instances(name).elements if is_there else ()  # it may wait for updates, which have to run
        return Fetch(elements, REPLICATED, variable=variable, late=late)

    def _instances(self, name: str) -> Fetch:
        """Return the instances of an original tensor or operation.

        Raises:
            GraphError: the rewritten graph does not have them.
        """
        layout = self._item.layout
        is_tensor = ":" in name
        node = name.partition(":")[0]
        try:
            if is_tensor or (self._has_value(node) and node not in self._item.targets and node != self._item.init_op):
                view = layout.find(name) if layout is not None else None
                view = view or View((name if is_tensor else f"{name}:0",), REPLICATED)
                return Fetch(
                    tuple(self._graph.get_tensor_by_name(t) for t in view.tensors), view.placement, view.segments
                )
            names = (layout.instances(node) if layout is not None else ()) or (node,)
            return Fetch(tuple(self._graph.get_operation_by_name(n) for n in names), None)
        except (KeyError, ValueError):
            raise GraphError(
                f"'{name}' is not in the rewritten graph: no declared output or target needs it",
                hint=f"declare it: outputs=[..., '{node}']",
            ) from None

    def _is_value(self, name: str) -> bool:
        """Return whether the graph has a tensor of this name that is no handle."""
        try:
            found = self._graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        except (KeyError, ValueError):
            return False
        return bool(found.dtype != self._tf.resource)

    def _has_value(self, node: str) -> bool:
        layout = self._item.layout
        name = ((layout.instances(node) if layout is not None else ()) or (node,))[0]
        return self.has(name) and bool(self._graph.get_operation_by_name(name).outputs)

    def feed(self, key: Any) -> str | None:
        """Return the tensor to feed; None for a placeholder of the original graph that no step needs.

        Raises:
            GraphError: there is nothing of this name.
        """
        name = name_of(key)
        info = self._item.inputs.get(name)
        if info is not None:
            return info.tensor
        tensor = name if ":" in name else f"{name}:0"
        try:
            self._graph.get_tensor_by_name(tensor)
        except (KeyError, ValueError):
            if self._item.layout is not None and name.partition(":")[0] in self._item.layout.feeds:
                return None
            known = ", ".join(self._item.inputs)
            raise GraphError(f"there is no '{name}' to feed", hint=f"the inputs are: {known}") from None
        return tensor
