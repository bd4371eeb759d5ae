"""Pictures of a graph: Graphviz source, and SVG where the `dot` program is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Collection, Iterator

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.annotations import Annotations
from autograph_rewrite.ir.format.printer import NO_PLACEMENTS, type_text
from autograph_rewrite.ir.format.printer import static_shape as stated_shape
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node
from autograph_rewrite.ir.replication import Span
from autograph_rewrite.ir.types import device_specs

LARGEST_PICTURE = 3000  # nodes; above it Graphviz runs for minutes, and nobody can read the result
TIMEOUT_SECONDS = 120
_COLOURS = ("#cfe2f3", "#fce5cd", "#d9ead3", "#ead1dc", "#fff2cc", "#d0e0e3", "#f4cccc", "#d9d2e9")


def to_dot(graph: Graph, nodes: Collection[Node] | None = None, placements: Annotations = NO_PLACEMENTS) -> str:
    """Return Graphviz source: colours are devices, double borders run per replica, dashed edges only order.

    Args:
        graph: folded or expanded.
        nodes: which of its nodes; None for all.
        placements: of values, by their names; they stand at the edges.
    """
    shown = set(graph if nodes is None else nodes)
    ordered = [node for node in graph if node in shown]
    colours = {
        device: _COLOURS[i % len(_COLOURS)] for i, device in enumerate(sorted({n.device for n in ordered} - {""}))
    }
    lines = ["digraph graph_ {", "  rankdir=TB;", '  node [shape=box, style="rounded,filled", fillcolor=white];']
    lines += [f"  {line}" for node in ordered for line in _node_lines(node, colours)]
    lines += [f"  {line}" for node in ordered for line in _edge_lines(node, shown, placements)]
    return "\n".join([*lines, "}"]) + "\n"


def to_svg(graph: Graph, nodes: Collection[Node] | None = None, placements: Annotations = NO_PLACEMENTS) -> str:
    """Return a drawing.

    Args:
        graph: folded or expanded.
        nodes: which of its nodes; None for all.
        placements: of values, by their names; they stand at the edges.

    Raises:
        GraphError: Graphviz is not installed, or cannot draw this graph.
    """
    program = shutil.which("dot")
    if program is None:
        raise GraphError(
            "the format 'svg' needs Graphviz, whose program 'dot' is not on the PATH",
            hint="install Graphviz, or write --format dot and draw it elsewhere",
        )
    count = len(graph) if nodes is None else len(nodes)
    if count > LARGEST_PICTURE:
        raise GraphError(
            f"{count} nodes are too many to draw (at most {LARGEST_PICTURE})",
            hint="choose some with --name, --op, --device, or --around NODE --depth K",
        )
    try:
        ran = subprocess.run(
            [program, "-Tsvg"],
            input=to_dot(graph, nodes, placements),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GraphError(f"Graphviz has not drawn it within {TIMEOUT_SECONDS} s", hint="choose fewer nodes") from None
    if ran.returncode:
        raise GraphError(f"Graphviz failed: {ran.stderr.strip()[:200]}")
    return ran.stdout


def _node_lines(node: Node, colours: dict[str, str]) -> Iterator[str]:
    label = f"{node.op}\n{node.name}" + (f"\n@{device_specs.short(node.device)}" if node.device else "")
    options = [f"label={_quoted(label)}"]
    if node.device:
        options.append(f'fillcolor="{colours[node.device]}"')
    if node.span is not Span.ONCE:
        options.append("peripheries=2")
    if PASS_ATTR in node.attrs:
        options.append("color=red")
    yield f"{_quoted(node.name)} [{', '.join(options)}];"


def _edge_lines(node: Node, shown: set[Node], placements: Annotations) -> Iterator[str]:
    for index, value in enumerate(node.inputs):
        if value.node not in shown:
            continue
        select = node.selects.get(index)
        parts = [
            f":{value.index}" if value.index else "",
            select.value if select is not None else "",
            _type(value.node, value.index),
            repr(stated.placement) if (stated := placements.get(value.name)) and not stated.is_plain else "",
        ]
        yield f"{_quoted(value.node.name)} -> {_quoted(node.name)} [label={_quoted(' '.join(filter(None, parts)))}];"
    for control in node.controls:
        if control in shown:
            yield f"{_quoted(control.name)} -> {_quoted(node.name)} [style=dashed];"


def _type(node: Node, index: int) -> str:
    try:
        value = node.output(index)
        return type_text(value.dtype, stated_shape(value))
    except GraphError:
        return ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
