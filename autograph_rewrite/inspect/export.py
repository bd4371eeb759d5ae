"""Export a graph for other tools: networkx, GraphML, plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.annotations import Annotations
from autograph_rewrite.ir.format.printer import functions, shown_attrs, static_shape
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE, word
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    import networkx


def to_networkx(graph: Graph, nodes: Collection[Node] | None = None) -> networkx.MultiDiGraph[str]:
    """Return a networkx graph: nodes by name, with op, device and span; edges with their kind (data or control)."""
    import networkx

    result: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    shown = set(graph if nodes is None else nodes)
    ordered = [node for node in graph if node in shown]
    for node in ordered:
        result.add_node(node.name, op=node.op, device=node.device, span=word(node.span))
    for node in ordered:
        for index, value in enumerate(node.inputs):
            if value.node in shown:
                result.add_edge(value.node.name, node.name, kind="data", output=value.index, input=index)
        for control in node.controls:
            if control in shown:
                result.add_edge(control.name, node.name, kind="control")
    return result


def to_graphml(graph: Graph, nodes: Collection[Node] | None) -> str:
    """Return GraphML, which yEd, Gephi and Cytoscape read."""
    import networkx

    return "\n".join(networkx.generate_graphml(to_networkx(graph, nodes))) + "\n"


Conversions = Callable[[Value], list[dict[str, Any]]]
"""Returns the conversions of a value as plain data."""


def node_data(node: Node, placements: Annotations, conversions: Conversions | None = None) -> dict[str, Any]:
    """Return one node as plain data, with the known placements of its results.

    Args:
        placements: of values, by their names.
        conversions: None: conversions are left out.
    """
    data: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "device": node.device,
        "inputs": [value.name for value in node.inputs],
        "controls": [control.name for control in node.controls],
        "outputs": output_data(node),
        "attrs": shown_attrs(node),
    }
    for index, output in enumerate(data["outputs"]):
        if stated := placements.get(node.output(index).name):
            output["placement"] = str(stated)
        if conversions is not None and (found := conversions(node.output(index))):
            output["conversions"] = found
    if node.span != ONCE:
        data["span"] = word(node.span)
    if node.selects:
        data["selects"] = {str(index): select.value for index, select in sorted(node.selects.items())}
    for key, attr in (("pass", PASS_ATTR), ("origin", ORIGIN_ATTR)):
        if attr in node.attrs:
            data[key] = node.attr(attr).decode()
    return data


def output_data(node: Node) -> list[dict[str, Any]]:
    """Return the element types and static shapes of the outputs."""
    return [{"dtype": dtypes.dtype_name(value.dtype), "shape": static_shape(value)} for value in results(node)]


def results(node: Node) -> tuple[Value, ...]:
    """Return the results of a node; none if its op is unknown or its attributes are malformed."""
    try:
        return node.outputs
    except GraphError:
        return ()


def signature_data(item: TrainingGraph) -> dict[str, Any]:
    """Return inputs, outputs, targets and initialiser as plain data."""
    return {
        "inputs": [asdict(info) for info in item.inputs.values()],
        "outputs": [asdict(info) for info in item.outputs.values()],
        "targets": list(item.targets),
        "init_op": item.init_op,
    }


def item_data(
    item: TrainingGraph, nodes: Collection[Node] | None, conversions: Conversions | None = None
) -> dict[str, Any]:
    """Return an item as plain data: signature, nodes in graph order, functions.

    Args:
        nodes: the nodes to export; None for all.
        conversions: None: conversions are left out.
    """
    graph = item.graph
    shown = set(graph if nodes is None else nodes)
    return {
        **signature_data(item),
        "nodes": [node_data(node, item.placements, conversions) for node in graph if node in shown],
        "functions": functions(graph),
    }
