"""Set and read anchors: stable names of values that passes may replace."""

from __future__ import annotations

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.training_graph import TrainingGraph

DIGEST_OF_PROCESS, DIGESTS_OF_ALL = "digest of this process", "digests of all processes"
_OUTPUT = "output {}"
"""The name of a declared output's anchor, which follows the value when a pass replaces it."""


def anchor_outputs(graph: Graph, item: TrainingGraph) -> None:
    """Anchor the declared outputs of an item, so that they are found after passes replace them."""
    for name, info in item.outputs.items():
        graph.set_anchor(_OUTPUT.format(name), graph.value(info.tensor))


def outputs_of(graph: Graph, item: TrainingGraph) -> list[Value]:
    """Return the current values of an item's declared outputs."""
    return [graph.anchors[_OUTPUT.format(name)] for name in item.outputs]


def digest_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of both digest tensors; none with one process."""
    return [graph.anchors[name].node for name in (DIGEST_OF_PROCESS, DIGESTS_OF_ALL) if name in graph.anchors]


def digest_names(graph: Graph) -> tuple[str, str] | None:
    """Return the names of both digest tensors; None with one process."""
    names = [f"{node.name}:0" for node in digest_nodes(graph)]
    return (names[0], names[1]) if names else None
