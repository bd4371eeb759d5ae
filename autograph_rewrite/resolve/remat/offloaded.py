"""What is offloaded: values that gradients, or what is computed again, read much later than they are made.

names    what the patterns match
auto     what segments keep; where nothing is computed again, what gradients read
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.decision import Segment
from autograph_rewrite.resolve.remat.policies import named_nodes

OFFLOAD_ATTR = "_autograph_offload"
"""The attribute of what is in the host's memory."""


def values_to_offload(acts: Activations, remat: Remat, segments: Sequence[Segment]) -> list[Node]:
    """Return the nodes whose values are to be offloaded, in the order of the forward.

    Args:
        acts: what gradients read.
        remat: of the plan.
        segments: what is computed again.

    Raises:
        PlanError: a name of the plan matches nothing.
    """
    if remat.offload == "names":
        wanted = set(named_nodes(acts, remat))
    elif segments:
        kept = {name.partition(":")[0] for segment in segments for name in segment.kept}
        wanted = {node for node in acts.forward if node.name in kept}
    else:
        wanted = {node for node in acts.forward if acts.is_kept_today(node)}
    return [node for node in acts.forward if node in wanted and _can_move(acts, node)]


def _can_move(acts: Activations, node: Node) -> bool:
    """Return whether a node makes values of each block, once in a step."""
    if node not in acts.unconditional or has(node.op, "given"):
        return False
    return all(acts.state.source(value).placement.differs for value in node.read_outputs)
