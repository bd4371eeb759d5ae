"""What the graphs of all workers must have in common before they are rewritten, as text that they can compare."""

from __future__ import annotations

import re
import zlib

from autograph_rewrite.ir.format import printer
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph

_CHANCE = re.compile(r' ?\b(shared_name|container|token|_\w+)=("[^"]*"|\[[^\]]*\]|[^,}]*),?|@\S+')
"""What means nothing to others in the line of a node: numbers that TensorFlow counts or draws, devices, functions."""


def contents(item: TrainingGraph) -> bytes:
    """Return what all workers must have in common of a graph, constants included, as compressed text."""
    graph = item.graph
    roots = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    roots += [v.initializer for v in item.variables.values() if v.initializer is not None]
    pending = [graph.nodes[name] for name in roots if name in graph.nodes]
    seen: set[Node] = set(pending)
    while pending:
        node = pending.pop()
        if has(node.op, "input_or_output"):
            continue
        for other in (*(value.node for value in node.inputs), *node.controls):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    lines = sorted(_CHANCE.sub("", printer.line(node)) for node in seen if not has(node.op, "input_or_output"))
    return zlib.compress("\n".join(lines).encode(), 1)
