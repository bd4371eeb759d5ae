"""Which gradients are compressed, and their size on the wire.

    dw: partial(sum) ──► replicated, owner w      compressor: topk    dense, of a fixed shape: it sends 1 % of it
    rows: split(0)   ──► replicated, owner emb    compressor: topk    sparse: left as it is, with a note

What one replica sends, for n elements of w bytes, k = max(1, ceil(n / 100)), and an [m, n / m] matrix:

    fp16 bf16 fp16_ef bf16_ef   2 n
    topk                        k (w + 4)            values and int32 positions
    powersgd                    2 m w  +  2 (n/m) w  two factors, one exchange each
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.facts.placement import PARTIAL, Fact
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.item import Variable
from autograph_rewrite.plan.parts import lowerings
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import wire_types

NONE = "none"
SIXTEEN_BIT: Mapping[str, int] = {
    "fp16": dtypes.HALF,
    "bf16": dtypes.BFLOAT16,
    "fp16_ef": dtypes.HALF,
    "bf16_ef": dtypes.BFLOAT16,
}
"""The types in which 16-bit compressors send."""
FEEDBACK = frozenset(("fp16_ef", "bf16_ef", "topk", "powersgd"))
"""What these take away is sent in later steps."""
RANK = 2
"""Columns of the factors of powersgd."""
FACTOR = "factor"
"""The role of powersgd's second exchange."""
GATHERED_UP_TO = 3
"""Up to so many members, halves with error feedback are gathered and added in full precision, so that nothing is lost.

On a ring a gather moves (N - 1) 2n bytes, a sum in 16 bits 2 (N - 1) / N of 2n, and one in float32 of 4n: beyond 3
replicas a gather saves nothing any more. There the halves are added as halves, and what those additions round away is
not fed back.
"""
GATHERS: Mapping[str, str] = {
    "collective_reduce": "collective_gather",
    "micro_reduce": "micro_gather",
    "host_reduce": "host_gather",
}
"""By the lowering of a sum, what lets every member have all that is sent."""
SPARSE = "its gradient is sparse, and compressors act on dense ones"
SERVED = "a server adds it up, which takes whole gradients"
SHOWN = 3

Key = tuple[str, str]


def kept(count: int) -> int:
    """Return how many of `count` elements topk sends."""
    return max(1, -(-count // 100))


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def static_shape(fact: Fact) -> tuple[int, ...]:
    """Return the shape of a value whose shape is known."""
    return tuple(dim for dim in fact.shape or () if isinstance(dim, int))


def shape_of(fact: Fact, owner: Variable | None) -> tuple[int, ...]:
    """Return the shape of a gradient as its variable has it: one that broadcasts may give it dimensions of 1 more."""
    shape = static_shape(fact)
    of_owner = owner.shape if owner is not None and owner.shape is not None else (None,)
    known = tuple(dim for dim in of_owner if dim is not None)
    return known if len(known) == len(of_owner) and math.prod(known) == math.prod(shape) else shape


def wire_bytes(compressor: str, fact: Fact, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes that one member sends in each exchange of a compressed gradient.

    Args:
        compressor: its name in a plan.
        fact: of the gradient.
        shape: static, of the gradient.
    """
    count, width = math.prod(shape), dtypes.width(wire_types.wire_type(fact.dtype, "sum"))
    if compressor in SIXTEEN_BIT:
        return (2 * count,)
    if compressor == "topk":
        return (kept(count) * (width + 4),)
    if compressor == "powersgd":
        return tuple(RANK * side * width for side in matrix(shape))
    return (count * width,)


def _sent(edge: EdgePlan, compressor: str, state: Propagation, variables: Mapping[str, Variable]) -> tuple[int, ...]:
    fact = state.source(state.graph.value(edge.value))
    return wire_bytes(compressor, fact, shape_of(fact, variables.get(edge.owner)))


class CompressionRules:
    """Says what stands against compressing an edge.

    Args:
        plan: the request.
        state: the placements.
        edges: all of the graph.
        variables: of the item.
    """

    def __init__(
        self, plan: Plan, state: Propagation, edges: Iterable[EdgePlan], variables: Mapping[str, Variable]
    ) -> None:
        self._plan, self._state, self._variables = plan, state, variables
        owned = [edge for edge in edges if edge.owner != STEP]
        self._asks = any(self._asked(edge) != NONE for edge in owned)
        if self._asks:
            self._certain = unconditional_nodes(state.order)
            gradients = {state.graph.value(edge.value).node for edge in owned if edge.from_ == repr(PARTIAL)}
            self._before = ancestors(gradients, controls=False)

    def _asked(self, edge: EdgePlan) -> str:
        if self._plan.replicas == 1 or edge.owner == STEP or edge.to != "replicated":
            return NONE
        return self._plan.options_of(edge.owner).compressor

    def sent(self, edge: EdgePlan, compressor: str) -> tuple[int, ...]:
        """Return the bytes of each exchange."""
        return _sent(edge, compressor, self._state, self._variables)

    def choice(self, edge: EdgePlan) -> tuple[str, str]:
        """Return the compressor of an edge; where it is none although one was asked for, also why."""
        asked = self._asked(edge)
        if asked == NONE:
            return NONE, ""
        if edge.owner in self._plan.homes or edge.lowered.is_stored:
            return NONE, SERVED
        if edge.from_.startswith("split"):
            return NONE, SPARSE
        value = self._state.graph.value(edge.value)
        fact = self._state.source(value)
        if fact.placement != PARTIAL or fact.dtype not in dtypes.FLOATING:
            return NONE, ""
        reason = self._obstacle(edge, asked, value, fact)
        return (NONE, reason) if reason else (asked, "")

    def _obstacle(self, edge: EdgePlan, asked: str, value: Value, fact: Fact) -> str:
        if wire_types.may_change(fact):
            return "the shape of its gradient is not known before the step runs"
        if value.node not in self._certain:
            return "its gradient is combined inside a loop or branch"
        if any(use.node in self._before for use in value.uses):
            return "other gradients are computed from its gradient"
        if sum(self.sent(edge, asked)) >= sum(self.sent(edge, NONE)):
            return "nothing would be saved on its gradient"
        return ""


def choose(
    plan: Plan, state: Propagation, edges: Mapping[Key, EdgePlan], variables: Mapping[str, Variable]
) -> dict[Key, EdgePlan]:
    """Return the edges, those of gradients with their compressors and what goes with them.

    Args:
        plan: names the compressor of each variable.
        state: a propagation.
        edges: by value and target.
        variables: by name.
    """
    judge = CompressionRules(plan, state, edges.values(), variables)
    return {key: _with(edge, judge.choice(edge)[0], plan, judge) for key, edge in edges.items()}


def _with(edge: EdgePlan, compressor: str, plan: Plan, judge: CompressionRules) -> EdgePlan:
    if compressor == NONE:
        return edge
    sent, *_ = judge.sent(edge, compressor)
    return replace(edge, compressor=compressor, bytes=sent, lowering=_lowering(edge.lowering, compressor, plan))


def _lowering(lowering: str, compressor: str, plan: Plan) -> str:
    members = len(plan.processes) if lowerings.lowering(lowering).crosses else plan.replicas
    exact = compressor in SIXTEEN_BIT and compressor in FEEDBACK and members <= GATHERED_UP_TO
    if lowering in GATHERS:
        return GATHERS[lowering] if compressor == "topk" or exact else lowering
    return "concat" if compressor == "topk" else lowering


def with_factors(
    edges: Iterable[EdgePlan], state: Propagation, variables: Mapping[str, Variable]
) -> Iterator[EdgePlan]:
    """Yield the edges, and behind each that has two exchanges the second one.

    Args:
        edges: with compressors chosen.
        state: a propagation.
        variables: by name.
    """
    for edge in edges:
        yield edge
        if edge.compressor == "powersgd":
            _, sent = _sent(edge, edge.compressor, state, variables)
            yield replace(edge, role=FACTOR, bytes=sent)


def skipped(plan: Plan, state: Propagation, variables: Mapping[str, Variable]) -> Iterator[Note]:
    """Yield a note for each reason why gradients are not compressed although that was asked for.

    Args:
        plan: resolved.
        state: a propagation.
        variables: by name.
    """
    judge = CompressionRules(plan, state, plan.edges, variables)
    owners: dict[tuple[str, str], dict[str, None]] = {}
    for edge in plan.edges:
        _, reason = judge.choice(edge)
        if reason:
            asked = plan.options_of(edge.owner).compressor
            owners.setdefault((asked, reason), {})[edge.owner] = None
    for (asked, reason), names in owners.items():
        first, *others = names
        more = ", ".join(f"'{name}'" for name in others[: SHOWN - 1])
        more += f" and {len(others) - SHOWN + 1} more" if len(others) >= SHOWN else ""
        yield Note(first, asked, f"not compressed: {reason}" + (f"; the same holds for {more}" if more else ""))
