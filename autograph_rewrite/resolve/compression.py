"""Decide which gradients are compressed, and compute their size on the wire.

    dw: partial(sum) ──► replicated, owner w      compressor: topk    dense, of a fixed shape: it sends 1 % of it
    rows: split(0)   ──► replicated, owner emb    compressor: topk    sparse: left as it is, with a note

The codec (`codecs`) gives the bytes that one replica sends. For n elements of w bytes, k = max(1, ceil(n / 100)), and
an [m, n / m] matrix:

    fp16 bf16 fp16_ef bf16_ef   2 n
    int8_ef                     n + w                numbers and their scale
    topk                        k (w + 4)            values and int32 positions
    powersgd                    2 m w  +  2 (n/m) w  two factors, one exchange each
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.codecs.codec import round_bytes
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, Fact
from autograph_rewrite.plan.codecs import codec_of, shown
from autograph_rewrite.plan.parts.lowerings import Lowering
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.training_graph import Variable

FACTOR = "factor"
"""The role of the second exchange of a codec that has two."""
GATHERS: Mapping[str, str] = {
    "collective_reduce": "collective_gather",
    "micro_reduce": "micro_gather",
    "host_reduce": "host_gather",
}
"""By the lowering of a sum, the lowering that gathers the encoded parts at every member."""
SPARSE = "its gradient is sparse, and compressors act on dense ones"
ON_SERVER = "a server adds it up, which takes whole gradients"
SHOWN = 3

Key = tuple[str, str]


def static_shape(fact: Fact) -> tuple[int, ...]:
    """Return the shape of a value whose shape is known."""
    return tuple(dim for dim in fact.shape or () if isinstance(dim, int))


def shape_of(fact: Fact, owner: Variable | None) -> tuple[int, ...]:
    """Return the shape of a gradient as its variable has it: broadcasts may add dimensions of 1 to a gradient."""
    shape = static_shape(fact)
    of_owner = owner.shape if owner is not None and owner.shape is not None else (None,)
    known = tuple(dim for dim in of_owner if dim is not None)
    return known if len(known) == len(of_owner) and math.prod(known) == math.prod(shape) else shape


def wire_bytes(compressor: str, fact: Fact, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes that one member sends in each exchange of a gradient.

    Args:
        shape: static, of the gradient.
    """
    wide = wire_types.wire_type(fact.dtype, "sum")
    if compressor == NONE:
        return (math.prod(shape) * dtypes.width(wide),)
    return tuple(round_bytes(codes) for codes in codec_of(compressor).rounds(shape, wide))


def members_of(lowering: Lowering, plan: Plan) -> int:
    """Return the number of members in the last hop of a lowering."""
    return len(plan.processes) if lowering.crosses else plan.replicas


class CompressionRules:
    """Finds the reasons against compressing an edge.

    Args:
        edges: all of the graph.
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
        fact = self._state.source(self._state.graph.value(edge.value))
        return wire_bytes(compressor, fact, self._shape(edge, fact))

    def choice(self, edge: EdgePlan) -> tuple[str, str]:
        """Return the compressor of an edge; if it is none although one was asked for, also the reason."""
        asked = self._asked(edge)
        if asked == NONE:
            return NONE, ""
        if edge.owner in self._plan.homes or edge.lowered.is_stored:
            return NONE, ON_SERVER
        if edge.from_.startswith("split"):
            return NONE, SPARSE
        fact = self._state.source(self._state.graph.value(edge.value))
        if fact.placement != PARTIAL or fact.dtype not in dtypes.FLOATING:
            return NONE, ""
        reason = self._obstacle(edge, asked, fact)
        return (NONE, reason) if reason else (asked, "")

    def _obstacle(self, edge: EdgePlan, asked: str, fact: Fact) -> str:
        value = self._state.graph.value(edge.value)
        if wire_types.may_change(fact):
            return "the shape of its gradient is not known before the step runs"
        if value.node not in self._certain:
            return "its gradient is combined inside a loop or branch"
        if any(use.node in self._before for use in value.uses):
            return "other gradients are computed from its gradient"
        sent, whole = (sum(self.sent(edge, name)) for name in (asked, NONE))
        lowered, members = edge.lowered, members_of(edge.lowered, self._plan)
        if sent >= whole or codec_of(asked).obstacle(self._shape(edge, fact)):
            return "nothing would be saved on its gradient"
        if lowered.is_collective and not codec_of(asked).adds and members * sent >= 2 * whole:
            return f"gathered from {members} members it would take longer than the sum of the whole gradients"
        return ""

    def _shape(self, edge: EdgePlan, fact: Fact) -> tuple[int, ...]:
        return shape_of(fact, self._variables.get(edge.owner))


def choose(
    plan: Plan, state: Propagation, edges: Mapping[Key, EdgePlan], variables: Mapping[str, Variable]
) -> dict[Key, EdgePlan]:
    """Return the edges, those of gradients with their compressors, and with the bytes and lowerings of these.

    Args:
        plan: names the compressor of each variable.
        edges: by value and target.
    """
    judge = CompressionRules(plan, state, edges.values(), variables)
    return {key: _with(edge, judge.choice(edge)[0], plan, judge) for key, edge in edges.items()}


def _with(edge: EdgePlan, compressor: str, plan: Plan, judge: CompressionRules) -> EdgePlan:
    if compressor == NONE:
        return edge
    sent, *_ = judge.sent(edge, compressor)
    codec, lowering = codec_of(compressor), edge.lowering
    if not codec.adds:
        lowering = GATHERS.get(lowering, "concat")
    elif members_of(edge.lowered, plan) <= codec.gather_up_to:
        lowering = GATHERS.get(lowering, lowering)
    return replace(edge, compressor=compressor, bytes=sent, lowering=lowering)


def with_rounds(edges: Iterable[EdgePlan], state: Propagation, variables: Mapping[str, Variable]) -> Iterator[EdgePlan]:
    """Yield the edges, each followed by an edge for each further exchange of its codec.

    Args:
        edges: with compressors chosen.
    """
    for edge in edges:
        yield edge
        if edge.compressor != NONE:
            fact = state.source(state.graph.value(edge.value))
            _, *later = wire_bytes(edge.compressor, fact, shape_of(fact, variables.get(edge.owner)))
            for i, sent in enumerate(later, 1):
                yield replace(edge, role=role_of(i), bytes=sent)


def role_of(number: int) -> str:
    """Return the role of an exchange of a compressed edge, by its number."""
    return "" if not number else FACTOR if number == 1 else f"{FACTOR}_{number}"


def skipped(plan: Plan, state: Propagation, variables: Mapping[str, Variable]) -> Iterator[Note]:
    """Yield a note for each reason why gradients are not compressed although the plan asks for it."""
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
        yield Note(first, shown(asked), f"not compressed: {reason}" + (f"; the same holds for {more}" if more else ""))
