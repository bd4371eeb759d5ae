"""Activations: forward values that gradients read, and the nodes that may run again to recompute them.

A node may run again if that gives the same value and changes nothing: no state, no effect, no conversion between
replicas, outside of loops and branches, one instance for each block. Everything else is kept as it is:

    RandomUniform   u ─► mask        u is drawn once; the mask, which has fewer bytes, is kept
    ReadVariableOp  w                read before the update, so never again
    Sum (partial)   ─► mean          summed over the replicas once
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autograph_rewrite.analysis.networks import grouped
from autograph_rewrite.analysis.op_work import value_bytes
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node, Use, Value
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import axis_along, is_pure
from autograph_rewrite.ir.variable_ops import variable_dependent_nodes
from autograph_rewrite.ops.facts.placement import LOCAL
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.traits import has


@dataclass(frozen=True)
class Activations:
    """What rematerialisation has to know about a graph.

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
    """Return whether a node computes something, gives the same when it runs again, and does so without waiting."""
    if axis_along(node) and node.attr("before") != b"replicated":
        return False  # devices of a replica meet there: what they have found is kept
    if not is_pure(node.op) or has(node.op, "given", "routes", "loop_test") or not node.inputs:
        return False
    return not any(_is_handle(dtype) for dtype in (*node.input_dtypes, *node.output_dtypes))


def _is_handle(dtype: int) -> bool:
    return dtype in (dtypes.RESOURCE, dtypes.VARIANT, dtypes.STRING) or dtype > dtypes.REF_OFFSET


# The decision: which nodes are recomputed, in which segments; plain data.


@dataclass(frozen=True)
class Segment:
    """Nodes that are computed again together, for the gradients that read them.

    Attributes:
        nodes: by name, producers first.
        kept: values that they read, and that are kept for them.
        saved_bytes: how much less is kept, of one example.
        added_flops: what computing them again costs, of one example.
        inside: segments within it: they are computed again once more, from what is kept of it the first time.
    """

    nodes: tuple[str, ...]
    kept: tuple[str, ...]
    saved_bytes: float
    added_flops: float
    inside: tuple[Segment, ...] = ()

    @property
    def all_flops(self) -> float:
        """What computing it again costs with all within, of one example."""
        return self.added_flops + sum(one.all_flops for one in self.inside)


@dataclass(frozen=True)
class Left:
    """Nodes that a policy would compute again, and that are kept all the same.

    Attributes:
        node: the first of them.
        reason: why, for people.
    """

    node: str
    reason: str


@dataclass(frozen=True)
class Peaks:
    """Static peaks of a step on one device: the most bytes that are alive at a time, by liveness over a schedule.

    Attributes:
        limit: what it must not exceed.
        before: where nothing is computed again.
        after: with what is.
        batch: of how many examples, of all replicas together.
    """

    limit: int
    before: int
    after: int
    batch: int

    @property
    def line(self) -> str:
        """Say both."""
        return f"{self.after:,} B instead of {self.before:,} B"


@dataclass(frozen=True)
class Decision:
    """What is computed again in one graph.

    Attributes:
        segments: in the order of the forward.
        left: what is kept all the same.
        peaks: of the step, for a policy that asks for one.
        offloaded: values that are in the host's memory until gradients need them, by node.
    """

    segments: tuple[Segment, ...] = ()
    left: tuple[Left, ...] = ()
    peaks: Peaks | None = None
    offloaded: tuple[str, ...] = ()

    @property
    def notes(self) -> list[tuple[str, str, str]]:
        """Of what is left, the node, what the note is about, and the reason."""
        return [(one.node, "remat", one.reason) for one in self.left]

    def lines(self) -> list[str]:
        """Say it in a line or two; nothing if nothing is computed again."""
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
    """Return one of those with one reason, with how many more there are."""
    found = grouped((one.reason, one) for one in left)
    more = {reason: f" (and {len(same) - 1} more such segments)" for reason, same in found.items() if len(same) > 1}
    return tuple(Left(same[0].node, reason + more.get(reason, "")) for reason, same in found.items())
