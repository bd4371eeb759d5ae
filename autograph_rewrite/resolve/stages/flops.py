"""FLOPs of nodes and bytes of values for one example, for balancing stages; unknown sizes count as one."""

from __future__ import annotations

import math

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ops.facts.concrete_sizes import static_bytes, static_elements
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.traits import has


def value_bytes(state: Propagation, value: Value) -> int:
    """Return the size of one example's part of a value."""
    fact = state.facts.get(value)
    return 0 if fact is None else static_bytes(fact)


def cost_of(state: Propagation, node: Node) -> float:
    """Return the floating-point operations of a node; of most, one for each element that it makes."""
    facts = [state.facts.get(value) for value in node.inputs]
    made = sum(static_elements(fact) for fact in state.transfers[node].outputs)
    if has(node.op, "matmuls") and facts[0] is not None:
        dims = facts[0].shape or ()
        transposed = node.attr("transpose_a", False) or node.attr("adj_x", False)
        return 2.0 * made * (_size(dims[-2 if transposed else -1]) if len(dims) >= 2 else 1)
    if node.op.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d")) and len(facts) > 1 and facts[1] is not None:
        kernel = facts[1].shape or ()
        return 2.0 * made * math.prod(_size(dim) for dim in kernel[:-1])
    if node.op == "Einsum":
        sizes = [static_elements(fact) for fact in facts if fact is not None]
        return 2.0 * math.sqrt(made * math.prod(sizes)) if len(sizes) == 2 else float(made)
    return float(made)


def _size(dim: Dim) -> int:
    if dim is None:
        return 1
    return dim if isinstance(dim, int) else dim.coef
