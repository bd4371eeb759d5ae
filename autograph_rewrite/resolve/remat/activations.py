"""Activations: forward values that gradients read, and the nodes that may run again to recompute them.

A node may run again if that gives the same value and changes nothing: no state, no effect, no conversion between
replicas, outside of loops and branches, one instance for each block. Everything else is kept as it is:

    RandomUniform   u ─► mask        u is drawn once; the mask, which has fewer bytes, is kept
    ReadVariableOp  w                read before the update, so never again
    Sum (partial)   ─► mean          summed over the replicas once
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node, Use, Value
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.variable_ops import variable_dependent_nodes
from autograph_rewrite.ops.facts.placement import LOCAL
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.traits import has
from autograph_rewrite.resolve.stages.flops import value_bytes


@dataclass(frozen=True)
class Activations:
    """What rematerialisation has to know about a graph.

    Attributes:
        state: its placements.
        forward: the nodes that the loss depends on, producers first.
        backward: the nodes that only gradients depend on.
        repeatable: the forward nodes that may run again.
        unconditional: the nodes that run in any case, and once.
    """

    state: Propagation
    forward: tuple[Node, ...]
    backward: frozenset[Node]
    repeatable: frozenset[Node]
    unconditional: frozenset[Node]

    def readers(self, node: Node) -> Iterator[Use]:
        """Yield the inputs of gradients at which the values of a node are read, other than for their size."""
        for value in node.read_outputs:
            for use in value.uses:
                if use.node in self.backward and not has(use.node.op, "sizes"):
                    yield use

    def is_kept_today(self, node: Node) -> bool:
        """Return whether a gradient reads one of its values."""
        return any(True for _ in self.readers(node))

    def nbytes(self, node: Node) -> int:
        """Return the memory of its values, of one example; that of a view is its source's."""
        return 0 if has(node.op, "views") else sum(value_bytes(self.state, value) for value in node.read_outputs)


def root_of(node: Node) -> Node:
    """Return the node in whose memory the first value of a node is."""
    while has(node.op, "views") and node.inputs:
        node = node.inputs[0].node
    return node


def find_activations(
    state: Propagation, forward: Collection[Node], trained: Iterable[Node], exchanged: Collection[Value]
) -> Activations:
    """Find what may be computed again, and for whom.

    Args:
        state: the placements.
        forward: the nodes that the loss depends on.
        trained: the nodes that make the gradients of variables.
        exchanged: values that are converted: they are exchanged between replicas, or cut.
    """
    order = state.order
    unconditional = unconditional_nodes(order)
    drawn = descendants([node for node in order if "Random" in node.op], controls=False)
    inside = variable_dependent_nodes(order) | drawn
    exchange = {value.node for value in exchanged if state.source(value).placement.differs}

    def may_run_again(node: Node) -> bool:
        if node not in inside or node not in unconditional or node in exchange or not may_repeat(node):
            return False
        placements = [state.source(value).placement for value in node.read_outputs]
        return all(one.differs and one not in (LOCAL, OWN_VALUE) for one in placements)

    needed = ancestors(trained, controls=False)
    return Activations(
        state,
        tuple(node for node in order if node in forward),
        frozenset(node for node in needed if node not in forward),
        frozenset(node for node in order if node in forward and may_run_again(node)),
        frozenset(unconditional),
    )


def may_repeat(node: Node) -> bool:
    """Return whether a node computes something, and gives the same when it runs again."""
    if not is_pure(node.op) or has(node.op, "given", "routes", "loop_test") or not node.inputs:
        return False
    return not any(_is_handle(dtype) for dtype in (*node.input_dtypes, *node.output_dtypes))


def _is_handle(dtype: int) -> bool:
    return dtype in (dtypes.RESOURCE, dtypes.VARIANT, dtypes.STRING) or dtype > dtypes.REF_OFFSET
