"""The variables of a session's graph by original name, read and assigned as full values.

All reads are added when the session opens: a graph that grew with every read would be sent to the runtime each time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.plan.parts.names import proxy_of
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.session.variable_copies import Copy, copies_of
from autograph_rewrite.training_graph import TrainingGraph, Variable


class WholeVariables:
    """What reads and writes the variables of an item, by original name.

    Args:
        item: an original or rewritten item.
        graph: the tf.Graph that holds the item's graph; reads are added here, and a variable's writes with its first.
    """

    def __init__(self, item: TrainingGraph, graph: Any) -> None:
        self._tf = tensorflow()
        self._item = item
        self._graph = graph
        self._known: Mapping[str, Variable] = {**item.state, **item.variables}
        self._held: dict[str, list[Any]] = {}
        self._writes: dict[str, tuple[list[Any], list[Any]]] = {}
        with graph.as_default():
            self._reads = {name: self._read(name) for name in self._known if self._is_there(name)}

    def reads(self, name: str) -> list[Any]:
        """Return the tensors with the value of a variable: one, of a variable in `item.state` one per replica.

        Raises:
            GraphError: there is no such variable.
        """
        if name not in self._reads:
            close = difflib.get_close_matches(name, self._reads, n=3)
            raise GraphError(f"there is no variable '{name}'", hint=f"closest: {', '.join(close)}" if close else None)
        return self._reads[name]

    def copies(self, name: str) -> list[Any]:
        """Return tensors with what each replica of this process has of a variable, made once."""
        if name not in self._held:
            with self._graph.as_default():
                self._held[name] = [copy.read() for copy in self._copies(name)]
        return self._held[name]

    @property
    def readable(self) -> dict[str, Variable]:
        """The variables of the original graph that come to one value."""
        unreadable = self._unreadable()
        return {n: v for n, v in self._item.variables.items() if n in self._reads and n not in unreadable}

    def require_readable(self, names: Iterable[str]) -> None:
        """Refuse variables of which each replica has a component, and nothing makes one value.

        Raises:
            GraphError: one of them is such a variable.
        """
        unreadable = self._unreadable()
        for name in names:
            if name in unreadable:
                raise GraphError(
                    f"each replica has a component of '{name}', and nothing makes one value of them",
                    hint=f"give its policy an aggregation, or read '{name}/autograph_component', a row per replica",
                )

    def _unreadable(self) -> set[str]:
        report = self._item.report
        return {p.variable for p in report.plan.policies if p.is_unreadable} if report is not None else set()

    def writes(self, name: str, value: Any) -> tuple[list[Any], dict[Any, Any]]:
        """Return the ops that set a variable in all its copies, and what to feed them.

        Raises:
            GraphError: there is no such variable, or not one value per replica.
        """
        self.reads(name)
        if name not in self._writes:
            with self._graph.as_default():
                self._writes[name] = self._write(name)
        sources, writes = self._writes[name]
        rows = value if name in self._item.state else [value]
        if len(rows) != len(sources):
            raise GraphError(
                f"'{name}' has a value for each of {len(sources)} replicas, not {len(rows)}",
                hint="pass zeros of the shape that read_variable returns to start anew",
            )
        return writes, dict(zip(sources, rows, strict=True))

    def _read(self, name: str) -> list[Any]:
        copies = self._copies(name)
        return [copy.read() for copy in (copies if name in self._item.state else copies[:1])]

    def _write(self, name: str) -> tuple[list[Any], list[Any]]:
        dtype = self._tf.as_dtype(self._known[name].dtype)
        sources: list[Any] = []
        writes: list[Any] = []
        for copy in self._copies(name):
            if not sources or name in self._item.state:
                sources.append(self._tf.compat.v1.placeholder(dtype))
            writes.append(copy.write(sources[-1]))
        return sources, writes

    def _copies(self, name: str) -> list[Copy]:
        copies = [*copies_of(self._item, self._known[name])]
        if copies:  # of a variable on a server, what this worker reads instead
            copies += [names for names in [tuple(map(proxy_of, copies[0]))] if self._has_all(names)]
        return [Copy(self._graph, handles, self._known[name]) for handles in copies]

    def _is_there(self, name: str) -> bool:
        copies = copies_of(self._item, self._known[name])
        return bool(copies) and all(map(self._has_all, copies))

    def _has_all(self, names: Iterable[str]) -> bool:
        try:
            return all(self._graph.get_operation_by_name(name) for name in names)
        except KeyError:
            return False
