"""Let a run of a session do several steps (`steps_per_run`), by a loop in the graph around one step.

    session.run(["loss", "train"], {"x": [k, batch, ...]})   k steps; the loss of the last one
    session.run("loss", {"x": [batch, ...]})                 nothing is trained: no loop

The fetches of a run become a function; its arguments are the fed placeholders and the handles of variables and
iterators. A loop that calls the function is added to the session's graph at the first run with these fetches.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ops.traits import has
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine import native
from autograph_rewrite.runtime.engine.native import Stacked, run_steps
from autograph_rewrite.runtime.job.digests import ancestors
from autograph_rewrite.training_graph import TrainingGraph


class _Loop(NamedTuple):
    """The fetches of a loop, and the placeholders of inputs with rows, by original name."""

    fetches: list[Any]
    rows: dict[str, Any]


class StepsLoops:
    """The loops of one session.

    Args:
        graph: the tf.Graph of the session, to which the loops are added.
        device: on which they count the steps.
    """

    def __init__(self, item: TrainingGraph, graph: Any, device: str) -> None:
        self._tf = tensorflow()
        self._item, self._graph, self._device = item, graph, device
        self._steps: int = item.report.plan.steps_per_run
        self._loops: dict[Any, _Loop] = {}
        self._ranks = {info.tensor: None if info.shape is None else len(info.shape) for info in item.inputs.values()}
        targets = [op for op in graph.get_operations() if op.name in set(item.targets)]
        self._targets = {op.name for op in targets if any(has(one.type, "writes") for one in ancestors([op]))}
        self._batches = {info.tensor for info in item.inputs.values() if info.batch_axis is not None}

    def repeats(self, fetches: Collection[Any]) -> bool:
        """Return whether a run does steps: one of its fetches is a target that writes variables."""
        return not self._targets.isdisjoint(getattr(one, "name", "") for one in fetches)

    def stacked(self, feeds: Mapping[str, Any]) -> list[str]:
        """Return the tensors that are fed in rows, one for each step.

        Raises:
            GraphError: they have different numbers of rows, too many or none, or a batch input is not fed in rows.
        """
        found = {name: np.shape(value) for name, value in feeds.items() if self._has_rows(name, value)}
        counts = {name: shape[0] for name, shape in found.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"'{name}' {count}" for name, count in counts.items())
            raise GraphError(
                f"the steps of a run are the rows of what is fed, and these have different numbers: {listed}",
                hint="stack the batches of up to steps_per_run steps: [steps, batch, ...]",
            )
        for name, count in counts.items():
            if not 1 <= count <= self._steps:
                raise GraphError(f"'{name}' is fed rows for {count} steps, and steps_per_run is {self._steps}")
        unstacked = sorted(self._batches & feeds.keys() - found.keys())
        if unstacked:
            raise GraphError(
                f"'{unstacked[0]}' is fed one batch, and a run does up to {self._steps} steps",
                hint="stack the batches of its steps: [steps, batch, ...]; with one row it does one",
            )
        return list(found)

    def _has_rows(self, name: str, value: Any) -> bool:
        rank = self._ranks.get(name, -1)
        if rank is None:
            return name in self._batches and np.ndim(value) > 0
        return np.ndim(value) == rank + 1

    def of(self, fetches: Sequence[Any], feeds: Mapping[str, Any]) -> tuple[list[Any], dict[Any, Any]]:
        """Return the fetches and feeds of the loop in place of those of a step."""
        rows = tuple(self.stacked(feeds))
        key = (tuple(getattr(one, "name", str(one)) for one in fetches), tuple(feeds), rows)
        if key not in self._loops:
            with self._graph.as_default(), self._tf.device(self._device), self._tf.control_dependencies(None):
                self._loops[key] = self._added(key[0], key[1], rows)
        loop = self._loops[key]
        return loop.fetches, {loop.rows.get(name, name): value for name, value in feeds.items()}

    def _added(self, fetches: Sequence[str], fed: Sequence[str], rows: Sequence[str]) -> _Loop:
        """Add a loop around the step with these fetches and feeds, given by name."""
        tf = self._tf
        tensors = [name for name in fetches if ":" in name]
        handles = [op.name for op in self._graph.get_operations() if _is_handle(tf, op)]
        signature = native.FunctionSignature(
            arguments=[*(name.partition(":")[0] for name in fed), *handles],
            outputs=tensors,
            targets=[name for name in fetches if ":" not in name],
        )
        name = native.new_name("steps")
        function = native.build(self._item.graph_bytes, name, signature, salt=b"")
        native.add_library(function)
        placeholders = {name: tf.compat.v1.placeholder(self._tensor(name).dtype, None) for name in rows}
        inputs = [placeholders.get(f"{node}:0", self._tensor(f"{node}:0")) for node in function.arguments]
        stacked = Stacked(tuple(f"{node}:0" in placeholders for node in function.arguments), self._steps)
        types = [tf.as_dtype(one) for one in function.output_types]
        step = functools.partial(native.add_call, name, types)
        number, results = run_steps(step, types, inputs, stacked)
        found = dict(zip(tensors, results, strict=True))
        return _Loop([found.get(name, number.op) for name in fetches], placeholders)

    def _tensor(self, name: str) -> Any:
        return self._graph.get_tensor_by_name(name)


def _is_handle(tf: Any, op: Any) -> bool:
    """Return whether an operation gives a handle of a resource that outlives a step."""
    return not op.inputs and len(op.outputs) == 1 and op.outputs[0].dtype == tf.resource
