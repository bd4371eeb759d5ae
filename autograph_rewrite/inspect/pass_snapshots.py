"""Snapshots after each pass: `NN_pass.pb`, `.txt` and `.json` in a folder, and the changes between them.

A folded graph is no GraphDef; its snapshot is written as one all the same, for viewers: what is folded stands in
attributes that start with `_autograph_`. The last snapshot, of the expanded graph, can be run.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.inspect.export import node_data
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.format.annotations import Annotation, Annotations, annotation
from autograph_rewrite.ir.format.printer import line, render
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.replication import PerInstance, Span
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.passes.base.pass_manager import RewriteObserver
from autograph_rewrite.passes.base.rewriting import Rewrite

CHANGES_SHOWN = 20


def viewable(graph: Graph) -> bytes:
    """Return a GraphDef of a graph that may still be folded; only for viewers."""
    nodes = []
    for node in graph:
        inputs = [name.encode() for name in serde.input_names(node)]
        tail = wire.write_attrs(_plain_attrs(node)) + node.rest
        nodes.append(wire.write_node(node.name.encode(), node.op.encode(), inputs, node.device.encode(), tail))
    return serde.frame(nodes, graph)


def _plain_attrs(node: Node) -> dict[str, bytes]:
    attrs = {key: raw.raws[0] if isinstance(raw, PerInstance) else raw for key, raw in node.attrs.items()}
    if node.span is not Span.ONCE:
        attrs["_autograph_span"] = encode("string", node.span.word)
    if node.selects:
        texts = [f"{index}:{select.value}" for index, select in sorted(node.selects.items())]
        attrs["_autograph_selects"] = encode("list(string)", texts)
    return attrs


class PassSnapshots(RewriteObserver):
    """An observer of the pipeline that keeps every state of the graph; nothing stands in the folder until `publish`.

    Args:
        folder: where the files go; it may exist, and files of the same names are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        self._count = 0

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Keep the state of a rewrite after the pass of that name, with the placements that are known by then."""
        self.keep(name, rewrite.graph, placements_of(rewrite))

    def keep(self, name: str, graph: Graph, placements: Annotations) -> None:
        """Keep the state of a graph.

        Args:
            name: of the pass that has left it.
            graph: folded or expanded.
            placements: of values, by name, as far as they are known.
        """
        self._count += 1
        stem = self._partial / f"{self._count:02}_{name}"
        stem.with_suffix(".pb").write_bytes(viewable(graph))
        stem.with_suffix(".txt").write_text(render(graph, placements=placements), encoding="utf-8")
        data = {"pass": name, "nodes": [node_data(node, placements) for node in graph]}
        stem.with_suffix(".json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    def publish(self) -> None:
        """Move everything into the folder."""
        self.folder.mkdir(exist_ok=True)
        for file in sorted(self._partial.iterdir()):
            os.replace(file, self.folder / file.name)
        self.discard()

    def discard(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self._partial, ignore_errors=True)


class Changes:
    """An observer of the pipeline that reports which lines of the printed form each pass changed.

    Args:
        original: the graph before the first pass.
        write: takes each line of the report.
    """

    def __init__(self, original: Graph, write: Callable[[str], None]) -> None:
        self._before = _lines(original)
        self._write = write

    def __call__(self, name: str, graph: Graph) -> None:
        """Report what the pass of that name has changed."""
        after = _lines(graph)
        for text in changes(name, self._before, after):
            self._write(text)
        self._before = after


def _lines(graph: Graph) -> dict[str, str]:
    return {node.name: line(node) for node in graph}


def changes(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yield a heading, and the old and new lines of the nodes that differ.

    Args:
        name: of the pass.
        before: printed lines before it, by node.
    """
    differing = [node for node in {**before, **after} if before.get(node) != after.get(node)]
    yield f"== after {name}: {len(differing)} of {len(after)} nodes changed"
    for node in differing[:CHANGES_SHOWN]:
        if node in before:
            yield f"- {before[node]}"
        if node in after:
            yield f"+ {after[node]}"
    if len(differing) > CHANGES_SHOWN:
        yield f"... and {len(differing) - CHANGES_SHOWN} more nodes"


# Placements of the values of a rewrite under way, for who looks on: `opt`, snapshots.


def placements_of(rewrite: Rewrite) -> dict[str, Annotation]:
    """Return the placements of the values of a rewrite that propagation has reached; none before `propagate`."""
    if not rewrite.has(Propagation):
        return {}
    state = rewrite.get(Propagation)
    found: dict[str, Annotation] = {}
    for node in rewrite.graph:
        if node in state.transfers:
            values = [node.output(i) for i in range(len(state.transfers[node].outputs))]
            found |= {
                value.name: annotation(rewrite.fact(value).placement, state.facts[value].placement) for value in values
            }
    for value, placement in rewrite.converted.items():
        if rewrite.graph.nodes.get(value.node.name) is value.node:
            found[value.name] = annotation(placement, placement)
    return found
