"""Find activations: forward values that gradients read, and the nodes that may run again to recompute them.

A node may run again if that gives the same value and changes nothing: no state, no effect, no conversion between
replicas, outside of loops and branches, one instance for each block. All other values are kept:

    RandomUniform   u ─► mask        u is drawn once; the mask, which has fewer bytes, is kept
    ReadVariableOp  w                read before the update, so never again
    Sum (partial)   ─► mean          summed over the replicas once
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autograph_rewrite.analysis.op_work import value_bytes
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node, Use, Value
from autograph_rewrite.ir.traversal import ancestors, descendants, grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import axis_along, is_pure
from autograph_rewrite.ir.variable_ops import variable_dependent_nodes
from autograph_rewrite.ops.facts.placement import LOCAL
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.traits import has


@dataclass(frozen=True)
class Activations:
    """The facts about a graph that rematerialisation needs.

    Attributes:
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
        """Yield the inputs of gradients that read the values of a node, except for reads of their size."""
        for value in node.read_outputs:
            for use in value.uses:
                if use.node in self.backward and not has(use.node.op, "sizes"):
                    yield use

    def is_kept_today(self, node: Node) -> bool:
        """Return whether a gradient reads one of its values."""
        return any(True for _ in self.readers(node))

    def nbytes(self, node: Node) -> int:
        """Return the bytes of its values for one example; a view has none."""
        return 0 if has(node.op, "views") else sum(value_bytes(self.state, value) for value in node.read_outputs)


def root_of(node: Node) -> Node:
    """Return the node that owns the memory of a node's first value."""
    while has(node.op, "views") and node.inputs:
        node = node.inputs[0].node
    return node


def find_activations(
    state: Propagation, forward: Collection[Node], trained: Iterable[Node], exchanged: Collection[Value]
) -> Activations:
    """Find the nodes that may be recomputed, and the gradients that read their values.

    Args:
        forward: the nodes that the loss depends on.
        trained: the nodes that make the gradients of variables.
        exchanged: values that are converted: exchanged between replicas, or cut.
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
    """Return whether a node computes a value, the same one when it runs again, without waiting for others."""
    if axis_along(node) and node.attr("before") != b"replicated":
        return False  # devices of a replica meet there: the result is kept
    if not is_pure(node.op) or has(node.op, "given", "routes", "loop_test") or not node.inputs:
        return False
    return not any(_is_handle(dtype) for dtype in (*node.input_dtypes, *node.output_dtypes))


def _is_handle(dtype: int) -> bool:
    return dtype in (dtypes.RESOURCE, dtypes.VARIANT, dtypes.STRING) or dtype > dtypes.REF_OFFSET


# The decision: which nodes are recomputed, in which segments; plain data.


@dataclass(frozen=True)
class Segment:
    """Nodes that are recomputed together, for the gradients that read them.

    Attributes:
        nodes: by name, producers first.
        kept: values that they read, and that are kept for them.
        saved_bytes: by how much fewer bytes are kept, for one example.
        added_flops: the cost of recomputing them, for one example.
        inside: segments within it: they are recomputed a second time, from values kept at the first.
    """

    nodes: tuple[str, ...]
    kept: tuple[str, ...]
    saved_bytes: float
    added_flops: float
    inside: tuple[Segment, ...] = ()

    @property
    def all_flops(self) -> float:
        """The cost of recomputing it with all segments within, for one example."""
        return self.added_flops + sum(one.all_flops for one in self.inside)


@dataclass(frozen=True)
class Left:
    """Nodes that a policy would recompute, but that are kept.

    Attributes:
        node: the first of them.
        reason: for people.
    """

    node: str
    reason: str


@dataclass(frozen=True)
class Peaks:
    """Static peaks of a step on one device: the most bytes that are alive at a time, by liveness over a schedule.

    Attributes:
        limit: the most bytes allowed.
        before: the peak without recomputation.
        after: the peak with it.
        batch: the examples of all replicas together.
    """

    limit: int
    before: int
    after: int
    batch: int

    @property
    def line(self) -> str:
        """Both peaks, as text."""
        return f"{self.after:,} B instead of {self.before:,} B"


@dataclass(frozen=True)
class Decision:
    """The recomputation and offloading of one graph.

    Attributes:
        segments: in the order of the forward.
        left: nodes that are kept although the policy would recompute them.
        peaks: of the step, for a policy with a budget.
        offloaded: nodes whose values are in the host's memory until gradients need them.
    """

    segments: tuple[Segment, ...] = ()
    left: tuple[Left, ...] = ()
    peaks: Peaks | None = None
    offloaded: tuple[str, ...] = ()

    @property
    def notes(self) -> list[tuple[str, str, str]]:
        """A note for each node in `left`: its name, its subject, and the reason."""
        return [(one.node, "remat", one.reason) for one in self.left]

    def lines(self) -> list[str]:
        """Return the decision in a line or two; none if nothing is recomputed or offloaded."""
        count = len(self.offloaded)
        moved = [f"offloaded: {count} values are in the host's memory until gradients need them"] if count else []
        if not self.segments:
            return moved
        peaks = self.peaks
        nodes = sum(len(segment.nodes) for segment in self.segments)
        saved = sum(segment.saved_bytes for segment in self.segments)
        flops = sum(segment.all_flops for segment in self.segments)
        return [
            f"recomputed: {nodes} nodes in {len(self.segments)} segments; of one example {saved:,.0f} B less are kept, "
            f"for {flops:,.0f} FLOPs more",
            *([f"static peak of a device, {peaks.batch} examples in all: {peaks.line}"] if peaks else []),
            *moved,
        ]


def first_of_each(left: Sequence[Left]) -> tuple[Left, ...]:
    """Return the first entry for each reason, with the number of others."""
    found = grouped((one.reason, one) for one in left)
    more = {reason: f" (and {len(same) - 1} more such segments)" for reason, same in found.items() if len(same) > 1}
    return tuple(Left(same[0].node, reason + more.get(reason, "")) for reason, same in found.items())
