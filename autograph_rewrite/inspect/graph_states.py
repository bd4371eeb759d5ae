"""The states of a graph between passes: each as what differs from the one before, in columns.

    original     put 0..999                       the graph that was given
    propagate    put 17, 30, ...                  nodes whose row differs: here, placements
    expand       put ..., drop 12                 replica_0/x, replica_1/x are stacked: x, in 2 copies

A node is a number, the place of its name in `names`; texts that recur stand once, in `strings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.communication import bare
from autograph_rewrite.inspect.pass_snapshots import placements_of
from autograph_rewrite.ir.format.annotations import Annotations
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.format.printer import NO_PLACEMENTS, shown_attrs, static_shape
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node
from autograph_rewrite.ir.replication import Span
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.passes.base.pass_manager import RewriteObserver
from autograph_rewrite.passes.base.rewriting import Rewrite

FIRST = ("replica_0", "replica_0/micro_0")
COLUMNS = ("op", "device", "span", "pass", "origin", "attrs", "type", "placement", "copies")


class NodeRow(NamedTuple):
    """One node of one state; texts are numbers of strings."""

    op: int
    device: int
    span: int
    made_by: int
    origin: int
    attrs: int
    type: int
    placement: int
    copies: int
    inputs: tuple[int, ...]
    controls: tuple[int, ...]


@dataclass
class PassStep:
    """What one pass changed.

    Attributes:
        name: of the pass.
        put: rows of nodes that it added or changed, by node.
        drop: nodes that are gone.
        added: how many of `put` are new.
        rewired: how many of the others read other values, or wait for others.
        nodes: how many there are behind it.
    """

    name: str
    put: dict[int, NodeRow]
    drop: list[int]
    added: int
    rewired: int
    nodes: int

    def data(self) -> dict[str, Any]:
        """Return it as plain data, in columns: of each node's inputs, producers and output numbers in turn."""
        rows = list(self.put.values())
        return {
            "id": list(self.put),
            **{name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)},
            "inputs": [number for row in rows for number in row.inputs],
            "input_counts": [len(row.inputs) // 2 for row in rows],
            "controls": [number for row in rows for number in row.controls],
            "control_counts": [len(row.controls) for row in rows],
            "drop": self.drop,
        }


@dataclass
class Numbered:
    """Texts by number, each once."""

    texts: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, text: str) -> int:
        """Return the number of a text."""
        number = self.numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


class GraphStates(RewriteObserver):
    """An observer of the pipeline that keeps what each pass has changed."""

    def __init__(self) -> None:
        self.names = Numbered()
        self.strings = Numbered()
        self.steps: list[PassStep] = []
        self._state: dict[int, NodeRow] = {}
        self._seen: tuple[int, int] | None = None
        self._stated: dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[int, int]] = {}

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Keep the state of a rewrite after the pass of that name."""
        seen = (rewrite.graph.edits, rewrite.has(Propagation) and id(rewrite.get(Propagation)))
        if seen == self._seen:
            self.steps.append(PassStep(name, {}, [], 0, 0, len(self._state)))
            return
        self._seen = seen
        self.keep(name, rewrite.graph, placements_of(rewrite))

    def keep(self, name: str, graph: Graph, placements: Annotations = NO_PLACEMENTS) -> None:
        """Keep the state of a graph.

        Args:
            name: of the pass that has left it.
            graph: folded or expanded; copies of one node are stacked.
            placements: of values, by name, as far as they are known.
        """
        before, after = self._state, dict(self._rows(graph, placements))
        put = {node: row for node, row in after.items() if before.get(node) != row}
        known = [(before[node], row) for node, row in put.items() if node in before]
        rewired = sum((old.inputs, old.controls) != (new.inputs, new.controls) for old, new in known)
        drop = [node for node in before if node not in after]
        self.steps.append(PassStep(name, put, drop, len(put) - len(known), rewired, len(after)))
        self._state = after

    def data(self) -> dict[str, Any]:
        """Return names, strings, and of each step its name and how much it changed; `Step.data` has the rest."""
        said = [
            {
                "pass": step.name,
                "nodes": step.nodes,
                "added": step.added,
                "removed": len(step.drop),
                "rewired": step.rewired,
                "changed": len(step.put) - step.added,
            }
            for step in self.steps
        ]
        return {"names": self.names.texts, "strings": self.strings.texts, "steps": said}

    def _rows(self, graph: Graph, placements: Annotations) -> Iterator[tuple[int, NodeRow]]:
        stacks: dict[str, list[Node]] = {}
        shown = _stack_names(graph)
        for node in graph:
            stacks.setdefault(shown.get(node.name, node.name), []).append(node)
        text, named = self.strings.of, self.names.of
        devices: dict[tuple[str, ...], int] = {}
        for name, nodes in stacks.items():
            node = nodes[0]
            places = tuple(dict.fromkeys(one.device for one in nodes))
            if places not in devices:
                devices[places] = text(", ".join(map(device_specs.short, filter(None, places))))
            attrs, kind = self._stated_by(node)
            made_by, origin = (node.attr(key, b"").decode() for key in (PASS_ATTR, ORIGIN_ATTR))
            yield (
                named(name),
                NodeRow(
                    text(node.op),
                    devices[places],
                    text("" if node.span is Span.ONCE else node.span.word),
                    text(made_by),
                    text(origin),
                    attrs,
                    kind,
                    text(_placement(node, placements)),
                    len(nodes),
                    tuple(_pairs((named(shown.get(v.node.name, v.node.name)), v.index) for v in node.inputs)),
                    tuple(dict.fromkeys(named(shown.get(one.name, one.name)) for one in node.controls)),
                ),
            )

    def _stated_by(self, node: Node) -> tuple[int, int]:
        """Return the numbers of a node's attributes and of the types of its results, as texts."""
        key = (node.op, tuple(node.attrs.items()))
        if key not in self._stated:
            attrs = "\n".join(f"{name}={value}" for name, value in shown_attrs(node).items())
            self._stated[key] = self.strings.of(attrs), self.strings.of(_types(node))
        return self._stated[key]


def _stack_names(graph: Graph) -> dict[str, str]:
    """Return the name of the stack of each copy; where a merge of the copies has their name, a prefix tells them apart.

    The copy of the first replica may have kept the name of the original.
    """
    found: dict[str, str] = {}
    for node in graph:
        name = bare(node.name)
        if name == node.name:
            continue
        own = graph.nodes.get(name)
        merges = own is not None and (own.op != node.op or any(f"{first}/{name}" in graph for first in FIRST))
        found[node.name] = f"replica_*/{name}" if merges else name
    return found


def _pairs(values: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield producers and output numbers in turn; what several copies of a producer give counts once."""
    last: tuple[int, int] | None = None
    for pair in values:
        if pair != last:
            yield from pair
        last = pair


def _types(node: Node) -> str:
    try:
        types = node.output_dtypes
    except GraphError:
        return ""
    shapes = [static_shape(node.output(index)) for index in range(len(types))]
    return ", ".join(
        dtypes.dtype_name(kind) + (shape_text(shape) if shape is not None else "")
        for kind, shape in zip(types, shapes, strict=True)
    )


def _placement(node: Node, placements: Annotations) -> str:
    stated = [placements[value.name] for value in node.read_outputs if value.name in placements]
    if not stated and f"{node.name}" in placements:
        stated = [placements[node.name]]
    return ", ".join(dict.fromkeys(map(str, stated)))
