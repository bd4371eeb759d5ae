"""Record the states of a graph between passes: in columns for a report, as files, as text.

    original     put 0..999                       the graph that was given
    propagate    put 17, 30, ...                  nodes whose row differs: here, placements
    expand       put ..., drop 12                 replica_0/x, replica_1/x are stacked: x, in 2 copies

A node is a number, the index of its name in `names`; other texts are numbers of `strings`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.communication import bare
from autograph_rewrite.inspect.dump import header
from autograph_rewrite.inspect.export import node_data
from autograph_rewrite.inspect.values import types_text
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.format.annotations import Annotation, Annotations, annotation
from autograph_rewrite.ir.format.printer import NO_PLACEMENTS, line, render, shown_attrs
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node
from autograph_rewrite.ir.mesh import ONCE, PerInstance, word
from autograph_rewrite.ir.types import device_specs, wire
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.passes.base.pass_manager import Pass, RewriteObserver, run_passes
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.preconditions import require_no_servers
from autograph_rewrite.passes.propagate import take_placements_as_given
from autograph_rewrite.passes.sharding.local_program import ModelBlocks, blocks_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph

FIRST = ("replica_0", "replica_0/micro_0")
COLUMNS = ("op", "device", "span", "pass", "origin", "attrs", "type", "placement", "copies")


class NodeRow(NamedTuple):
    """One node of one state; texts are indices of `strings`."""

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
    """The changes of one pass.

    Attributes:
        put: rows of nodes that it added or changed, by node.
        drop: nodes that it removed.
        added: how many of `put` are new.
        rewired: how many of the others have other inputs or control edges.
        nodes: how many nodes there are after the pass.
    """

    name: str
    put: dict[int, NodeRow]
    drop: list[int]
    added: int
    rewired: int
    nodes: int

    def data(self) -> dict[str, Any]:
        """Return it as plain data, in columns; inputs alternate between producer and output number."""
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


class Numbered(dict[str, int]):
    """Numbers texts in the order in which they are first used."""

    def of(self, text: str) -> int:
        """Return the number of a text; a new text gets the next number."""
        return self.setdefault(text, len(self))

    @property
    def texts(self) -> list[str]:
        """The texts, by their numbers."""
        return list(self)


class GraphStates(RewriteObserver):
    """An observer of the pipeline that records the changes of each pass."""

    def __init__(self) -> None:
        self.names = Numbered()
        self.strings = Numbered()
        self.steps: list[PassStep] = []
        self._state: dict[int, NodeRow] = {}
        self._seen: tuple[int, int] | None = None
        self._stated: dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[int, int]] = {}

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Record the state of a rewrite after a pass."""
        seen = (rewrite.graph.edits, rewrite.has(Propagation) and id(rewrite.get(Propagation)))
        if seen == self._seen:
            self.steps.append(PassStep(name, {}, [], 0, 0, len(self._state)))
            return
        self._seen = seen
        self.keep(name, rewrite.graph, placements_of(rewrite))

    def keep(self, name: str, graph: Graph, placements: Annotations = NO_PLACEMENTS) -> None:
        """Record the state of a graph.

        Args:
            graph: folded or expanded; the copies of a node share one row.
        """
        before, after = self._state, dict(self._rows(graph, placements))
        put = {node: row for node, row in after.items() if before.get(node) != row}
        known = [(before[node], row) for node, row in put.items() if node in before]
        rewired = sum((old.inputs, old.controls) != (new.inputs, new.controls) for old, new in known)
        drop = [node for node in before if node not in after]
        self.steps.append(PassStep(name, put, drop, len(put) - len(known), rewired, len(after)))
        self._state = after

    def data(self) -> dict[str, Any]:
        """Return names, strings, and the name and counts of each step; `PassStep.data` has the rows."""
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
                    text("" if node.span == ONCE else word(node.span)),
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
        """Return the numbers of two texts: a node's attributes, and the types of its results."""
        key = (node.op, tuple(node.attrs.items()))
        if key not in self._stated:
            attrs = "\n".join(f"{name}={value}" for name, value in shown_attrs(node).items())
            self._stated[key] = self.strings.of(attrs), self.strings.of(types_text(node))
        return self._stated[key]


def _stack_names(graph: Graph) -> dict[str, str]:
    """Return the name of the row of each copy: the original's, with a prefix if a merge of the copies has that name.

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
    """Yield producers and output numbers alternately; consecutive copies of a producer count once."""
    last: tuple[int, int] | None = None
    for pair in values:
        if pair != last:
            yield from pair
        last = pair


def _placement(node: Node, placements: Annotations) -> str:
    stated = [placements[value.name] for value in node.read_outputs if value.name in placements]
    if not stated and node.name in placements:
        stated = [placements[node.name]]
    return ", ".join(dict.fromkeys(map(str, stated)))


# Snapshots after each pass: `NN_pass.pb`, `.txt` and `.json` in a folder, and the changes between them.
#
# A folded graph is no GraphDef, but its snapshot is written as one for viewers: spans and selects become attributes
# that start with `_autograph_`. The last snapshot, of the expanded graph, can be run.

CHANGES_SHOWN = 20


def viewable(graph: Graph) -> bytes:
    """Return the bytes of a GraphDef, for viewers, of a graph that may still be folded."""
    nodes = []
    for node in graph:
        inputs = [name.encode() for name in serde.input_names(node)]
        tail = wire.write_attrs(_plain_attrs(node)) + node.rest
        nodes.append(wire.write_node(node.name.encode(), node.op.encode(), inputs, node.device.encode(), tail))
    return serde.frame(nodes, graph)


def _plain_attrs(node: Node) -> dict[str, bytes]:
    attrs = {key: raw.raws[0] if isinstance(raw, PerInstance) else raw for key, raw in node.attrs.items()}
    if node.span != ONCE:
        attrs["_autograph_span"] = encode("string", word(node.span))
    if node.selects:
        texts = [f"{index}:{select.value}" for index, select in sorted(node.selects.items())]
        attrs["_autograph_selects"] = encode("list(string)", texts)
    return attrs


class PassSnapshots(RewriteObserver):
    """An observer of the pipeline that writes every state of the graph; `publish` moves the files into the folder.

    Args:
        folder: it may exist; files of the same names are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        self._count = 0

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Write the state of a rewrite after a pass, with the placements that are known then."""
        self.keep(name, rewrite.graph, placements_of(rewrite))

    def keep(self, name: str, graph: Graph, placements: Annotations) -> None:
        """Write the state of a graph, folded or expanded."""
        self._count += 1
        stem = self._partial / f"{self._count:02}_{name}"
        stem.with_suffix(".pb").write_bytes(viewable(graph))
        stem.with_suffix(".txt").write_text(render(graph, placements=placements), encoding="utf-8")
        data = {"pass": name, "nodes": [node_data(node, placements) for node in graph]}
        stem.with_suffix(".json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    def publish(self) -> None:
        """Move all files into the folder."""
        self.folder.mkdir(exist_ok=True)
        for file in sorted(self._partial.iterdir()):
            os.replace(file, self.folder / file.name)
        self.discard()

    def discard(self) -> None:
        """Remove the files that were not published."""
        shutil.rmtree(self._partial, ignore_errors=True)


class Changes:
    """An observer of the pipeline that reports the lines of the printed graph that each pass changed.

    Args:
        original: the graph before the first pass.
        write: called with each line of the report.
    """

    def __init__(self, original: Graph, write: Callable[[str], None]) -> None:
        self._before = _lines(original)
        self._write = write

    def __call__(self, name: str, graph: Graph) -> None:
        """Report a heading, and the old and new lines of the nodes that a pass has changed."""
        before, after = self._before, _lines(graph)
        self._before = after
        differing = [node for node in {**before, **after} if before.get(node) != after.get(node)]
        self._write(f"== after {name}: {len(differing)} of {len(after)} nodes changed")
        for node in differing[:CHANGES_SHOWN]:
            if node in before:
                self._write(f"- {before[node]}")
            if node in after:
                self._write(f"+ {after[node]}")
        if len(differing) > CHANGES_SHOWN:
            self._write(f"... and {len(differing) - CHANGES_SHOWN} more nodes")


def _lines(graph: Graph) -> dict[str, str]:
    return {node.name: line(node) for node in graph}


# Placements of the values of an unfinished rewrite, for `opt` and snapshots.


def placements_of(rewrite: Rewrite) -> dict[str, Annotation]:
    """Return the known placements of values by name; none before the pass `propagate`."""
    if not rewrite.has(Propagation):
        return {}
    state, blocks = rewrite.get(Propagation), blocks_of(rewrite)
    found: dict[str, Annotation] = {}
    for node in rewrite.graph:
        if node in state.transfers:
            values = [node.output(i) for i in range(len(state.transfers[node].outputs))]
            for value in values:
                others = blocks.along(value)
                made, seen = rewrite.fact(value).placement, state.facts[value].placement
                found[value.name] = annotation(made, seen, others=others, seen_others=others)
    for value, placement in rewrite.converted.items():
        if rewrite.graph.nodes.get(value.node.name) is value.node:
            others = blocks.along(value, converted=True)
            found[value.name] = annotation(placement, placement, others=others, seen_others=others)
    return found


# Run chosen passes on a graph, and print the result as text with placements.
#
# %dw: float32[3,1] @ partial(sum) = MatMul(%x, %dy) {transpose_a=true}
#
# The text can be read again. `propagate` compares its placements with the text's; if the first pass comes after
# `propagate`, the placements of the text are taken as given.


@dataclass(frozen=True)
class PrintedPasses:
    """The passes before and after which the graph is printed.

    Attributes:
        full: print every attribute and constant.
    """

    before: Collection[str] = ()
    after: Collection[str] = ()
    full: bool = False


NOTHING = PrintedPasses()


def optimize(
    item: TrainingGraph,
    plan: Plan,
    passes: Sequence[Pass],
    *,
    task: int = 0,
    shown: PrintedPasses = NOTHING,
    verify: bool = True,
) -> Rewrite:
    """Run passes on a copy of a normalised item.

    Args:
        item: flat; it is not changed. Its placements are compared with those of `propagate`, or taken as given.
        task: the process of the plan that the graph is for.

    Raises:
        RewriteError: a pass refuses.
    """
    rewrite = Rewrite.of(Request(item, plan, task), item.graph.clone())
    require_no_servers(rewrite.job)
    along_model = {name: stated.others for name, stated in item.placements.items() if stated.others}
    if along_model:  # `partition-model` has run, and `propagate` finds placements along the data axis only
        rewrite.put(ModelBlocks({}, values=along_model))
    for one in passes:
        if Propagation in one.needs and not rewrite.has(Propagation) and item.placements:
            take_placements_as_given(rewrite)
        if one.name in shown.before:
            print(f"# before {one.name}\n{text_of(rewrite, full=shown.full)}")
        run_passes(rewrite, [one], verify=verify)
        if one.name in shown.after:
            print(f"# after {one.name}\n{text_of(rewrite, full=shown.full)}")
    return rewrite


def require_unfolded(item: TrainingGraph) -> None:
    """Refuse a graph on which passes that convert values have run.

    Raises:
        GraphError: the graph is folded or expanded.
    """
    hint = "begin with the original graph, or with what the passes before 'insert-reshards' leave"
    if any(node.span != ONCE for node in item.graph):
        raise GraphError("this graph is folded: passes have run on it, and what they found is not in it", hint=hint)
    if any(stated.span is not None for stated in item.placements.values()):
        raise GraphError("this graph is expanded: it has the instances of its nodes, and no more passes run", hint=hint)


def text_of(rewrite: Rewrite, *, full: bool = False) -> str:
    """Return the graph of a rewrite as text, with its signature and the placements of its values."""
    graph, moved = rewrite.graph, zip(rewrite.item.outputs.items(), rewrite.outputs, strict=True)
    outputs = {name: replace(info, tensor=value.name) for (name, info), value in moved}
    item = replace(rewrite.item, source=graph, outputs=outputs)
    return header(item, None) + render(graph, full=full, placements=placements_of(rewrite))
