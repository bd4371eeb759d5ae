"""The role of a variable in a training step: trained, sparse (its gradient has indexed rows), used in a branch only.

Read off the graph alone, before any plan: strategy builders decide by it where a variable lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.analysis.variables.uses import VariableUse, plain_uses
from autograph_rewrite.ir.variable_ops import handle_uses, is_update
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Role:
    """What one variable is.

    Attributes:
        trained: a step updates it by a gradient.
        sparse: it is only looked up by row, so that its gradient consists of rows.
        captured: a branch or a loop uses it.
    """

    trained: bool
    sparse: bool = False
    captured: bool = False


def roles(item: TrainingGraph) -> dict[str, Role]:
    """Return the role of every variable of an item.

    Where nothing says what is trained, it is what a step updates and an output depends on.
    """
    graph = item.graph
    names = (info.tensor.partition(":")[0] for info in item.outputs.values())
    outputs = [graph.nodes[name] for name in names if name in graph.nodes]
    uses = plain_uses(list(graph), item.variables, graph, outputs)
    trains = any(is_update(node) for node in graph)
    absent = {name: Role(bool(variable.trainable) and not trains) for name, variable in item.variables.items()}
    return absent | {name: _role(use) for name, use in uses.items()}


def _role(use: VariableUse) -> Role:
    return Role(use.trained, use.sparse, any(has(node.op, "captures") for node, _ in handle_uses(use.handle)))
