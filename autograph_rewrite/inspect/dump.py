"""Print a graph, or a selection of its nodes, as text, table, JSON, Graphviz source, drawing, GraphML or web page."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.export import item_data, results, to_graphml
from autograph_rewrite.inspect.forms import Form
from autograph_rewrite.inspect.graph_source import Source, as_item, chosen
from autograph_rewrite.inspect.table import drawn, table
from autograph_rewrite.inspect.values import Values, conversion_data, over, types_text
from autograph_rewrite.ir.attr_inference import closest
from autograph_rewrite.ir.format.annotations import Annotations
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.format.printer import provenance, render, static_shape, type_text
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE, word
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.notebook import Shown
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

Nodes = Collection[Node] | None  # None: all of them
DETAILED = 200  # nodes that a table still lists one by one

# A web page: a searchable list of nodes, each with links to its neighbours.


def to_html(item: TrainingGraph, nodes: Nodes) -> str:
    """Return a self-contained page with data, style and script."""
    template = Path(__file__).with_name("page").joinpath("graph.html").read_text(encoding="utf-8")
    data = json.dumps(item_data(item, nodes), ensure_ascii=False, separators=(",", ":"))
    safe = data.replace("<", "\\u003c")  # a value must not close the script element
    title = ", ".join(item.targets) or f"{len(item.graph)} nodes"
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", safe)


# Pictures of a graph: Graphviz source, and SVG if the `dot` program is installed.


LARGEST_PICTURE = 3000  # nodes; above it Graphviz runs for minutes, and the result is unreadable
TIMEOUT_SECONDS = 120
_COLOURS = ("#cfe2f3", "#fce5cd", "#d9ead3", "#ead1dc", "#fff2cc", "#d0e0e3", "#f4cccc", "#d9d2e9")


def to_dot(graph: Graph, nodes: Nodes, placements: Annotations) -> str:
    """Return Graphviz source; colours are devices, double borders nodes per replica, dashed edges control edges.

    Args:
        placements: of values, by their names; they label the edges.
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


def to_svg(graph: Graph, nodes: Nodes, placements: Annotations) -> str:
    """Return the drawing of the source from `to_dot`, as SVG.

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
    if node.span != ONCE:
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
            _type(value),
            repr(stated.placement) if (stated := placements.get(value.name)) and not stated.is_plain else "",
        ]
        yield f"{_quoted(value.node.name)} -> {_quoted(node.name)} [label={_quoted(' '.join(filter(None, parts)))}];"
    for control in node.controls:
        if control in shown:
            yield f"{_quoted(control.name)} -> {_quoted(node.name)} [style=dashed];"


def _type(value: Value) -> str:
    try:
        return type_text(value.dtype, static_shape(value))
    except GraphError:
        return ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def dump(
    source: Source,
    format: Form = "text",
    *,
    op: str | None = None,
    name: str | None = None,
    device: str | None = None,
    around: str | None = None,
    depth: int = 2,
    full: bool = False,
    plan: Plan | None = None,
) -> Shown:
    """Return a graph, or a part of it, in a readable form.

    Args:
        source: an item, a graph, encoded bytes, or a path that `GraphItem.load` reads.
        format: text, table, json, dot, svg, graphml or html.
        op: show only nodes whose op type this regular expression matches somewhere.
        name: the same for node names.
        device: the same for devices.
        around: show only nodes near this node.
        depth: how many edges away a node may be for `around`.
        full: text with every attribute, constant and function, which `ir.format.parser` reads.
        plan: of the rewrite, to show conversions; default: the plan of a rewritten item, also from an archive.

    Raises:
        GraphError: the format is unknown or has no full form, a filter is malformed, the node does not exist, or
            Graphviz is missing.
    """
    if format not in FORMATS:
        raise GraphError(f"unknown format '{format}'", hint=closest(format, FORMATS) or f"known: {', '.join(FORMATS)}")
    if full and format != "text":
        raise GraphError(f"there is no full form of {format}, only text has one", hint="--format text --full")
    item = as_item(source)
    if plan is not None:
        item = replace(item, report=None, plan_bytes=plan.to_bytes())
    nodes: Nodes = None
    if any(one is not None for one in (op, name, device, around)):
        nodes = chosen(item.graph, {"op": op, "name": name, "device": device}, around, depth)
    with no_garbage_collection():
        return Shown(_text(item, nodes, full=True) if full else FORMATS[format](item, nodes))


def _text(item: TrainingGraph, nodes: Nodes, *, full: bool = False) -> str:
    shown = None if nodes is None else set(nodes)
    remarks = {} if full else Values(item).remarks()
    return header(item, nodes) + render(item.graph, nodes=shown, full=full, placements=item.placements, remarks=remarks)


def header(item: TrainingGraph, nodes: Nodes) -> str:
    """Return comment lines with the signature of an item and the number of nodes shown."""
    count = f"{len(item.graph)} nodes" if nodes is None else f"{len(nodes)} of {len(item.graph)} nodes"
    lines = [f"# {count}"]
    lines += [f"# input {_signature(info)}" for info in item.inputs.values()]
    lines += [f"# output {_signature(info)}" for info in item.outputs.values()]
    lines += [f"# target %{target}" for target in item.targets]
    lines += [f"# init %{item.init_op}"] if item.init_op else []
    return "\n".join(lines) + "\n"


def _signature(info: TensorInfo) -> str:
    batch = "" if info.batch_axis is None else f", batch axis {info.batch_axis}"
    shape = shape_text(info.shape) if info.shape is not None else ""
    return f"{info.name} = %{info.tensor.removesuffix(':0')}: {info.dtype}{shape}{batch}"


def _table(item: TrainingGraph, nodes: Nodes) -> str:
    shown = list(item.graph if nodes is None else nodes)
    parts = [_op_table(shown)]
    if len(shown) <= DETAILED:
        parts.append(_node_table(Values(item), shown))
    return drawn(*parts)


def _node_table(values: Values, nodes: Collection[Node]) -> Any:
    """Return a table of nodes, without the columns that are empty for all."""
    remarks = values.remarks()
    rows = [
        (
            *(n.name, n.op, types_text(n), _placements(values, n), remarks.get(n.name, "")),
            *(device_specs.short(n.device), provenance(n)),
        )
        for n in nodes
    ]
    columns = ("name", "op", "type", "placement", "converted", "device", "made by")
    return table("nodes", columns, rows)


def _placements(values: Values, node: Node) -> str:
    stated = [values.placement(value) for value in results(node)]
    return ", ".join(
        " ".join(filter(None, (over(one.placement), word(one.span) if one.span is not None else "")))
        for one in dict.fromkeys(filter(None, stated))
    )


def _op_table(nodes: Collection[Node]) -> Any:
    per_device: dict[str, Counter[str]] = {}
    for node in nodes:
        per_device.setdefault(device_specs.short(node.device), Counter())[node.op] += 1
    total = sum(per_device.values(), Counter[str]())
    places = sorted(per_device)
    rows: list[tuple[object, ...]] = [
        (op, count, *(per_device[place][op] or "" for place in places))
        for op, count in sorted(total.items(), key=lambda pair: (-pair[1], pair[0]))
    ]
    rows.append(("all", len(nodes), *(sum(per_device[place].values()) for place in places)))
    return table("ops", ("op", "#nodes", *(f"#{place or '(no device)'}" for place in places)), rows)


def _json(item: TrainingGraph, nodes: Nodes) -> str:
    values = Values(item)

    def conversions(value: Value) -> list[dict[str, Any]]:
        return [conversion_data(edge) for edge in values.conversions(value)]

    data = item_data(item, nodes, conversions if values.edges else None)
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


FORMATS: dict[Form, Callable[[TrainingGraph, Nodes], str]] = {
    "text": _text,
    "table": _table,
    "json": _json,
    "dot": lambda item, nodes: to_dot(item.graph, nodes, item.placements),
    "svg": lambda item, nodes: to_svg(item.graph, nodes, item.placements),
    "graphml": lambda item, nodes: to_graphml(item.graph, nodes),
    "html": to_html,
}
