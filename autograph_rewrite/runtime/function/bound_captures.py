"""What a function captured, bound to arguments of its rewritten graph once: variables, their copies, shards, constants.

captured tf.Variable w ──► w                       replica 0 reads the user's own
                       └─► replica_1/w             the others a copy, which the guard keeps equal
                       └─► w/part_0, w/part_1      or shards of it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types.dtypes import NUMBERS
from autograph_rewrite.load.signature.captures import FunctionBinding
from autograph_rewrite.runtime.function.guard import Guard
from autograph_rewrite.runtime.function.mirrored_variables import Mirrored, Mirrors
from autograph_rewrite.runtime.function.served_variables import bring
from autograph_rewrite.runtime.native.function_def import ReadAfter, Stack
from autograph_rewrite.runtime.session.variable_copies import copies_of
from autograph_rewrite.training_graph import TrainingGraph


class BoundCaptures:
    """The captures of a function in its rewritten graph.

    Args:
        item: the rewritten item, or the original one.
        binding: what the function captured.
        mirrors: where copies of variables are kept.
        is_compared: whether it is noticed if only some workers write a variable from Python.

    Attributes:
        nodes: the placeholders that stand for captures and for what the rewrite added.
        guard: keeps the copies equal; None where there are none.
        watched: handles whose values are read after each step.
        names: of variables, by the id of their handles.
    """

    def __init__(
        self, item: TrainingGraph, binding: FunctionBinding, mirrors: Mirrors, is_compared: Callable[[str], bool]
    ) -> None:
        self._item, self._mirrors = item, mirrors
        self._captured = [(capture, instances_of(item, capture.node)) for capture in binding.captures]
        self._copied = {
            names[0]: mirrors.of(capture.value, *kind_of(item, capture.name))
            for capture, names in self._captured
            if capture.name is not None and (len(names) > 1 or is_compared(capture.name))
        }
        for capture, names in self._captured:
            if item.report is not None and capture.name in item.report.alone and names[0] in self._copied:
                self._copied[names[0]].alone = True
        self.names = {id(capture.value): capture.name for capture, _ in self._captured}
        self._cut = [
            (mirrors.in_shards(capture.value, variable, variable.shards), copies_of(item, variable))
            for capture, _ in self._captured
            if capture.name is not None and (variable := item.variables[capture.name]).shards is not None
        ]
        cut = [sharded for sharded, _ in self._cut]
        self.guard = Guard(self._copied.values(), cut, mirrors) if self._copied or cut else None
        self.watched = self._watched()
        self._added = [(variable, instances_of(item, variable.handle)) for variable in item.state.values()]
        self.nodes = [name for _, names in self._captured for name in names]
        self.nodes += [name for _, names in self._added for name in names]
        self.nodes += [name for _, copies in self._cut for names in copies for name in names]

    def bring(self) -> None:
        """Bring the values of variables that are on a server between the steps of another function."""
        if self._mirrors.held.has_served:
            bring(one.served for one in self.variables if one.served is not None)

    def _watched(self) -> ReadAfter:
        """Return what the guard is told after a step."""
        if self.guard is None:
            return ReadAfter()
        node_of = {id(mirrored): node for node, mirrored in self._copied.items()}
        single = {node_of[id(mirrored)]: mirrored.dtype.as_datatype_enum for mirrored in self.guard.single}
        single |= {node: sharded.dtype.as_datatype_enum for sharded, copies in self._cut for node in copies[0]}
        stacks = [
            [Stack(tuple(node_of[id(one)] for one in rows), rows[0].dtype.as_datatype_enum) for rows in device]
            for device in self.guard.stacks
        ]
        return ReadAfter(single, stacks)

    @property
    def variables(self) -> list[Mirrored]:
        """The captured variables."""
        return self.named([capture.name for capture, _ in self._captured if capture.name is not None])

    def named(self, names: Collection[str]) -> list[Mirrored]:
        """Return those of the captured variables that have one of these names."""
        return [
            self._mirrors.of(capture.value, *kind_of(self._item, capture.name))
            for capture, _ in self._captured
            if capture.name is not None and capture.name in names
        ]

    def values(self, arguments: Sequence[str], devices: Sequence[str]) -> list[Any]:
        """Return what a call gives for each argument; None for what is no capture.

        Args:
            arguments: names of placeholders.
            devices: the first one of each replica.
        """
        fixed = {}
        for capture, names in self._captured:
            for replica, name in enumerate(names):
                if name in arguments:
                    mirrored = self._copied.get(names[0]) if replica else None
                    fixed[name] = mirrored.copy_on(devices[replica]) if mirrored is not None else capture.value
        for variable, names in self._added:
            for replica, name in enumerate(names):
                index = self._item.report.first_replica + replica
                fixed[name] = self._mirrors.extra.of(variable, index, devices[replica]).handle
        for sharded, copies in self._cut:
            for replica, names in enumerate(copies):
                fixed |= dict(zip(names, sharded.copy_on(devices[replica]), strict=True))
        return [fixed.get(name) for name in arguments]


def instances_of(item: TrainingGraph, node: str) -> tuple[str, ...]:
    """Return the instances of an original node; the node itself in an original graph."""
    return (item.layout.instances(node) if item.layout is not None else ()) or (node,)


def kind_of(item: TrainingGraph, name: str) -> tuple[str, Sequence[int | None] | None]:
    """Return the element type and the shape of a variable.

    Raises:
        GraphError: nobody knows the type.
    """
    variable = item.variables[name]
    if variable.dtype not in NUMBERS:
        raise GraphError(f"the variable '{name}' has the unknown element type {variable.dtype}")
    return variable.dtype, variable.shape
