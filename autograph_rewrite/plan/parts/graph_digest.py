"""What planning needs to know of a graph item, and the digest by which a plan recognises its graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class ValueLike(Protocol):
    """A value of the graph."""

    @property
    def name(self) -> str: ...  # noqa: D102


class NodeLike(Protocol):
    """A node of the graph."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def op(self) -> str: ...  # noqa: D102
    @property
    def inputs(self) -> Sequence[ValueLike]: ...  # noqa: D102
    @property
    def output_dtypes(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def attrs(self) -> Mapping[str, object]: ...  # noqa: D102
    def attr(self, key: str, default: Any = None, /) -> Any: ...  # noqa: D102


class GraphLike(Protocol):
    """The graph."""

    @property
    def nodes(self) -> Mapping[str, NodeLike]: ...  # noqa: D102

    def remembered(self, what: str, find: Callable[[], str]) -> str: ...  # noqa: D102


class InputLike(Protocol):
    """An input of the step."""

    @property
    def tensor(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int | None, ...] | None: ...  # noqa: D102
    @property
    def batch_axis(self) -> int | None: ...  # noqa: D102


class VariableLike(Protocol):
    """A variable."""

    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int | None, ...] | None: ...  # noqa: D102
    @property
    def trainable(self) -> bool | None: ...  # noqa: D102
    @property
    def synchronization(self) -> str: ...  # noqa: D102
    @property
    def aggregation(self) -> str: ...  # noqa: D102
    @property
    def handle(self) -> str: ...  # noqa: D102


class ItemLike(Protocol):
    """A graph with its signature."""

    @property
    def graph(self) -> GraphLike: ...  # noqa: D102
    @property
    def inputs(self) -> Mapping[str, InputLike]: ...  # noqa: D102
    @property
    def variables(self) -> Mapping[str, VariableLike]: ...  # noqa: D102


def graph_digest(graph: GraphLike) -> str:
    """A hash of the graph's wiring: names, ops and data inputs, whatever order the nodes come in."""
    return graph.remembered("digest", lambda: _digest(graph))


def _digest(graph: GraphLike) -> str:
    lines = sorted(
        f"{node.name}={node.op}({','.join([value.name for value in node.inputs])})" for node in graph.nodes.values()
    )
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
