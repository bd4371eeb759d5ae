"""Measure coverage: the share of a step's FLOPs that is divided between replicas, and the ops that keep the rest whole.

    12.4 of 12.5 GFLOP for 64 examples: each device does a part         coverage 99.2 %
    0.1 GFLOP whole: TopKV2 'sort/TopKV2' wants all of 'sort/transpose:0'

Updates are left out: they are as large as the variables, however many devices there are. The figures are functions of
the batch size, so that a session or function that sees the first real batch needs no other rewrite for its coverage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autograph_rewrite.analysis.op_work import runs, trips_of, work_of
from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.analysis.transfer import NodeTransfer
from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES, Shape, Sizes
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact
from autograph_rewrite.ops.facts.symbolic_dims import is_open
from autograph_rewrite.ops.rules import random
from autograph_rewrite.ops.rules.marked import WHOLE, marked
from autograph_rewrite.ops.rules.table import families, family_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import STEP
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph, Variable

ENOUGH = 0.9
"""Below this share there is a warning."""
SHOWN = 5
WORTH_NAMING = 0.005
"""The share from which an op is named."""
NOTE = "coverage "
_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


@dataclass(frozen=True)
class Amount:
    """Floating-point operations that do not depend on the batch, grow with it, and with its square."""

    fixed: float = 0.0
    linear: float = 0.0
    square: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.linear + other.linear, self.square + other.square)

    def times(self, ratio: float) -> Amount:
        """Return the amount of a batch that is `ratio` times as large."""
        return Amount(self.fixed, self.linear * ratio, self.square * ratio * ratio)

    def repeated(self, count: int) -> Amount:
        """Return `count` times the amount."""
        return Amount(self.fixed * count, self.linear * count, self.square * count)

    @property
    def flops(self) -> float:
        """Their sum."""
        return self.fixed + self.linear + self.square


@dataclass(frozen=True)
class WholeWork:
    """An op of the original that made work whole.

    Attributes:
        amount: the work of this op, and of the ops that are whole because of it.
    """

    node: str
    op: str
    reason: str
    amount: Amount

    def says(self, total: float) -> str:
        """Return name, cost and reason in one line."""
        flops = self.amount.flops
        return f"{self.op} '{self.node}': {amount_of(flops)} ({percent(flops / total)}): {self.reason}"


@dataclass(frozen=True)
class Coverage:
    """The work of one step that is divided.

    Attributes:
        batch: the examples of all devices together for which the amounts hold.
        assumed: the number of examples is not known.
        parts: among how many replicas, or stages of them, work can be divided.
        divided: the work of which the instances on different devices each do a part.
        whole: the work that is done once, or alike everywhere, by the op that made it whole.
        least: the smallest share that is accepted.
        place: the line that sets it.
    """

    batch: int
    assumed: bool
    parts: int
    divided: Amount = Amount()
    whole: tuple[WholeWork, ...] = ()
    least: float = 0.0
    place: str = ""

    @property
    def flops(self) -> float:
        """All work outside of updates."""
        return self.divided.flops + sum(one.amount.flops for one in self.whole)

    @property
    def share(self) -> float:
        """The share that is divided, 0..1; without work, or on one device, 1."""
        total = self.flops
        return self.divided.flops / total if total and self.parts > 1 else 1.0

    @property
    def largest(self) -> tuple[WholeWork, ...]:
        """The ops that made work whole, the most expensive first."""
        limit = WORTH_NAMING * self.flops
        found = [one for one in self.whole if one.amount.flops > limit] if self.parts > 1 else []
        return tuple(sorted(found, key=lambda one: -one.amount.flops))

    def at(self, batch: int | None) -> Coverage:
        """Return the coverage for another batch size; without one, or for 0, this coverage."""
        if not batch or (batch == self.batch and not self.assumed):
            return self
        ratio = batch / self.batch
        whole = tuple(replace(one, amount=one.amount.times(ratio)) for one in self.whole)
        return replace(self, batch=batch, assumed=False, divided=self.divided.times(ratio), whole=whole)

    def lines(self, count: int = SHOWN) -> list[str]:
        """Return the ops that made work whole, with their costs, and how many more there are."""
        largest = self.largest
        more = [f"... and {len(largest) - count} more"] if len(largest) > count else []
        return [one.says(self.flops) for one in largest[:count]] + more

    def __str__(self) -> str:
        examples = f"{self.batch:,} examples{' assumed' if self.assumed else ''}"
        if not self.flops:
            return f"{percent(self.share)}: the step has no floating-point work outside of updates"
        return (
            f"{percent(self.share)} of the step's {amount_of(self.flops)} outside of updates are divided "
            f"over {self.parts} devices ({examples})"
        )


NOT_MEASURED = Coverage(1, assumed=True, parts=1)


def amount_of(flops: float) -> str:
    """Return `1.5 GFLOP` and the like."""
    for unit, name in _UNITS:
        if flops >= unit:
            return f"{flops / unit:.3g} {name}"
    return f"{flops:.0f} FLOP"


def percent(share: float) -> str:
    """Return a share in percent, never rounded up to 100 %."""
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{min(share, 0.9999):.2%}"


def with_coverage(plan: Plan, coverage: Coverage) -> Plan:
    """Return the plan with its coverage among its notes, instead of an earlier one."""
    if coverage.parts == 1:
        return plan
    causes = "; ".join(coverage.lines(2)) if coverage.share < ENOUGH else ""
    said = f"{NOTE}{coverage}{'; whole: ' if causes else ''}{causes}"
    if any(note.startswith(NOTE) for note in plan.notes):
        return replace(plan, notes=tuple(said if note.startswith(NOTE) else note for note in plan.notes))
    return replace(plan, notes=(*plan.notes, said))


def warn_below(coverage: Coverage) -> None:
    """Warn where much of the work is whole, naming the first ops that made it so."""
    if coverage.share >= ENOUGH:
        return
    listed = _listed(coverage.lines())
    warn_user(f"only {coverage}; whole are:{listed}")


def require(coverage: Coverage) -> None:
    """Refuse a coverage that is less than the configuration accepts.

    Raises:
        PassError: it is less.
    """
    if coverage.share >= coverage.least:
        return
    raise PassError(
        f"{coverage}, and semantics.min_coverage asks for {percent(coverage.least)}; whole are:"
        f"{_listed(coverage.lines())}",
        where=coverage.place or None,
        hint="change these ops, or lower semantics.min_coverage to run them whole, which is right but slower",
    )


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


# How much of each node's work is divided between replicas, and for replicated work the op that caused it.
#
#     x ──► MatMul ──► h: split(0)                    divided: each replica computes its rows
#           h ──► TopKV2 wants h whole ──► Neg        whole, both because of TopKV2
#           dw ═══ reduced ══► 0.1 * dw ──► update    outside: an update is as large as its variable
#
# Work is counted for the whole batch, as one device would do it. A whole node is charged to the nearest conversion
# upstream: that of its operands, else the one to which its largest input is charged.


ALONE = "computed from variables and sizes alone, alike on every device"
DRAWN = "drawn whole, as on one device (semantics.random: exact)"
NO_BATCH = "an input that is no batch input: every device has all of it"
AS_LARGE = "made as large as the whole batch"
ONCE = "it runs once"
PARTED = frozenset(("split", "partial"))
TYPICAL = Sizes(EXAMPLES, 1)
BY_ELEMENT = families("elementwise", "layout")
"""Families of ops through which the search for a gradient passes."""


def coverage_of(
    plan: Plan, state: Propagation, item: TrainingGraph, *, parts: int, sizes: Sizes, assumed: bool
) -> Coverage:
    """Measure a step.

    Args:
        state: the placements; the graph is as propagation saw it.
        item: normalised, with the variables of that graph.
        parts: among how many replicas and stages the work is divided.
        sizes: with the examples of all of them together.
        assumed: whether the number of examples is not known.
    """
    examples = sizes.batch
    coverage = Coverage(examples, assumed, parts, least=plan.semantics.min_coverage)
    if parts == 1:
        return coverage
    work = _Work(state, examples)
    parted, whole = _sorted(state)
    divided = work.of_all(parted)
    causes = _Causes(plan, state, set(parted), whole, item.variables)
    amounts: dict[str, Amount] = {}
    for node, cause in causes.found(work):
        own = work.of(node)
        if own is not None and cause is None:
            divided += own
        elif own is not None and cause is not None:
            amounts[cause] = amounts.get(cause, Amount()) + own
    listed = (WholeWork(name, state.graph.nodes[name].op, causes.reasons[name], own) for name, own in amounts.items())
    return replace(coverage, divided=divided, whole=tuple(listed))


def _sorted(state: Propagation) -> tuple[dict[Node, int], list[Node]]:
    """Return the nodes of which each instance does a part, with a number that equal ones share, and all other nodes."""
    divided: dict[Node, int] = {}
    whole: list[Node] = []
    known: dict[int, bool] = {}
    transfers = state.transfers
    for node in state.order:
        if has(node.op, "constant"):
            continue
        transferred = transfers[node]
        key = id(transferred)
        if key not in known:
            known[key] = _is_divided(node, transferred)
        if known[key]:
            divided[node] = key
        else:
            whole.append(node)
    return divided, whole


def _is_divided(node: Node, transferred: NodeTransfer) -> bool:
    """Return whether the instances of a node hold, or read, different parts of a value.

    Replicas that share a device compute some weight gradients once for all of them
    (`passes.canonicalize.compute_once`); these count, too.
    """
    for fact in transferred.outputs:
        if fact.placement.kind in PARTED:
            return True
    for index, fact in enumerate(transferred.inputs):
        if fact.placement.kind in PARTED and index not in transferred.operand_reshards:
            return True
    return marked(node, WHOLE) == ""


def _whole_gradients(
    state: Propagation, updates: Iterable[Node], exchanged: Collection[Value], variables: Mapping[str, Variable]
) -> set[Value]:
    """Return the gradients that are not exchanged, since they are whole.

    A walk back from an update, through element-wise ops on values of the variable's shape, ends at them.
    """
    found: set[Value] = set()
    shapes = {variable.handle: variable.shape for variable in variables.values()}
    seen: set[Value] = set()
    for node in updates:
        shape = shapes.get(handle_node(node.inputs[0]).name)
        pending = [value for value in node.inputs[1:] if shape]
        while pending:
            value = pending.pop()
            if value in seen or value in exchanged or state.facts[value].shape != shape:
                continue
            seen.add(value)
            if family_of(value.node.op) in BY_ELEMENT and value.node.inputs:
                pending += value.node.inputs
            else:
                found.add(value)
    return found


def _dependent(
    plan: Plan,
    state: Propagation,
    whole: Sequence[Node],
    divided: Collection[Node],
    updates: Collection[Node],
    variables: Mapping[str, Variable],
) -> set[Node]:
    """Return the whole nodes that are computed from the batch, and not from the gradients of variables alone.

    Sizes do not count as computed from the batch; nor do, downstream of a gradient, the indices of its rows.
    """
    graph, transfers = state.graph, state.transfers
    exchanged = {graph.value(edge.value) for edge in plan.edges if edge.owner != STEP and edge.node in graph}
    gradients = _whole_gradients(state, updates, exchanged, variables)
    found = {value.node for value in state.whole_inputs}
    behind: set[Node] = set()
    while True:
        before = len(found) + len(behind)
        for node in whole:
            if node in found or node in behind or has(node.op, "measures"):
                continue
            is_behind = depends = computes = False
            for index, value in enumerate(node._inputs):
                maker = value.node
                if (
                    value in gradients
                    or maker in behind
                    or (
                        value in exchanged
                        and (value in state.reduced or transfers[node].operand_reshards.get(index) == REPLICATED)
                    )
                ):
                    is_behind = True
                elif maker in found or maker in divided:
                    depends = True
                    computes = computes or dtypes.base(value.dtype) in dtypes.INEXACT
            if is_behind and not computes:
                behind.add(node)
            elif depends:
                found.add(node)
        if not state.loops or len(found) + len(behind) == before:
            return found


def _serving(whole: Sequence[Node], dependent: set[Node], divided: set[Node], updates: Collection[Node]) -> set[Node]:
    """Return the whole nodes that are not computed from the batch, but read by nodes that are.

    All others serve updates only, or initialise variables.
    """
    found: set[Node] = set()
    for node in reversed(whole):
        if node in dependent:
            continue
        readers = {reader for value in node.read_outputs for reader, _ in value._uses}
        if not (readers.isdisjoint(divided) and (readers & dependent).issubset(updates) and readers.isdisjoint(found)):
            found.add(node)
    return found


class _Work:
    """Counts the work of nodes for the whole batch; equal nodes share one answer."""

    def __init__(self, state: Propagation, batch: int) -> None:
        self._state = state
        self._sizes = (Sizes(batch, 1), Sizes(2 * batch, 1))
        self._known: dict[int, tuple[float, float]] = {}
        self._frames = frames_of(state.order) if state.loops else {}
        self._trips = [trips_of(state.order, self._frames, self._bound(s)) for s in self._sizes if state.loops]

    def of_all(self, nodes: Mapping[Node, int]) -> Amount:
        """Return the floating-point work of nodes; those with one number are equal except for the loops around them."""
        total = Amount()
        if self._state.loops:
            for node in nodes:
                if (own := self.of(node)) is not None:
                    total += own
            return total
        one_of = {number: node for node, number in nodes.items()}
        for number, count in Counter(nodes.values()).items():
            if (own := self.of(one_of[number])) is not None:
                total += own.repeated(count)
        return total

    def of(self, node: Node) -> Amount | None:
        """Return the floating-point work of a node; None where it has none."""
        if has(node.op, "free"):
            return None
        transferred = self._state.transfers[node]
        flops = self._known.get(id(transferred))
        if flops is None:
            one, two = self._sizes
            flops = self._known[id(transferred)] = (
                self._count(node, transferred, one),
                self._count(node, transferred, two),
            )
        once, twice = flops
        if node in self._frames:
            first, second = self._trips
            once, twice = once * runs(self._frames[node], first), twice * runs(self._frames[node], second)
        if not once:
            return None
        if twice < 1.5 * once:
            return Amount(fixed=once)
        return Amount(linear=once) if twice < 3 * once else Amount(square=once)

    def _count(self, node: Node, transferred: NodeTransfer, sizes: Sizes) -> float:
        facts = [*transferred.inputs, *transferred.outputs]
        if not any(dtypes.base(fact.dtype) in dtypes.INEXACT for fact in facts):
            return 0.0
        shapes = [whole_shape(fact, sizes) for fact in facts]
        count = len(transferred.inputs)
        return work_of(node, shapes[:count], shapes[count:], 0.0).flops

    def _bound(self, sizes: Sizes) -> Callable[[Value], int]:
        """Return a function that gives the number in a value that is computed from the batch size."""

        def bound(value: Value) -> int:
            known = self._state.facts[value].value
            return sizes.number(known[0]) if known is not None and len(known) == 1 and known[0] is not None else 0

        return bound


def whole_shape(fact: Fact, sizes: Sizes) -> Shape:
    """Return the shape of the whole value; an open first dimension counts examples, since weights have none."""
    if fact.shape is None:
        return (sizes.batch,)
    if fact.shape and (fact.shape[0] is None or is_open(fact.shape[0])):
        return (sizes.batch, *(sizes.number(dim) for dim in fact.shape[1:]))
    return sizes.shape(fact)


class _Causes:
    """Finds the nodes that made others whole, from producers to readers.

    Attributes:
        reasons: by the name of the node that made itself, and the nodes that depend on it, whole.
    """

    def __init__(
        self,
        plan: Plan,
        state: Propagation,
        divided: set[Node],
        whole: Sequence[Node],
        variables: Mapping[str, Variable],
    ) -> None:
        self._state, self._whole = state, whole
        self._in_a_stage = plan.pipeline is not None and plan.replicas == 1
        self._updates = {node for node in whole if node._inputs and is_update(node)}
        self._dependent = _dependent(plan, state, whole, divided, self._updates, variables)
        self._serving = _serving(whole, self._dependent, divided, self._updates)
        self._of: dict[Node, str] = {}
        self._settled = True
        self.reasons: dict[str, str] = {}

    def found(self, work: _Work) -> list[tuple[Node, str | None]]:
        """Return the whole nodes outside of updates, each with the name of the node that made it whole.

        None: the node runs only in the pipeline stage that reads it.
        """
        outside = self._dependent | self._serving
        counted = [node for node in self._whole if node in outside and node not in self._updates]
        made: list[tuple[Node, str | None]] = []
        for settled in (False, True) if self._state.loops else (True,):  # a back edge is read before its cause is known
            self._settled = settled
            made = [(node, self._cause(node, work)) for node in counted]
        return made

    def _cause(self, node: Node, work: _Work) -> str | None:
        if self._in_a_stage and node not in self._dependent:
            return None
        own = DRAWN if node.op in random.RULES else self._conversion(node)
        before = self._before(node) if own is None else None
        if own is None and before is None:
            own = self._source(node, work)
        if own is not None:
            self.reasons[node.name], before = own, node.name
        if before is not None:
            self._of[node] = before
        return before

    def _conversion(self, node: Node) -> str | None:
        """Return why a node reads a divided value whole; None where it does not."""
        state, transferred = self._state, self._state.transfers[node]
        for index, reshard in transferred.operand_reshards.items():
            seen = state.facts[node._inputs[index]].placement
            if reshard == REPLICATED and seen.kind in PARTED:
                return transferred.note or _wants(node._inputs[index], is_split=seen.is_split)
        for value in node._inputs:
            if value in state.reduced and (made := state.source(value).placement).kind in PARTED:
                return _wants(value, is_split=made.is_split)
        return None

    def _before(self, node: Node) -> str | None:
        """Return the node that made the inputs whole; of several, that of the largest input made from the batch."""
        found = [value for value in node._inputs if value.node in self._of]
        dependent = [value for value in found if value.node in self._dependent]
        if node in self._dependent and not dependent and not self._settled:
            return None  # the cause on the back edge is not known yet, and the initial value tells nothing
        found = dependent or found
        if len({self._of[value.node] for value in found}) > 1:
            found.sort(key=lambda value: -math.prod(whole_shape(self._state.facts[value], TYPICAL)))
        return self._of[found[0].node] if found else None

    def _source(self, node: Node, work: _Work) -> str | None:
        """Return why a node without divided or charged inputs is whole."""
        transferred = self._state.transfers[node]
        if is_pinned(node):
            return NO_BATCH if node.op.startswith(("Placeholder", "Iterator")) else ONCE
        if any(self._state.facts[node._inputs[index]].is_local for index in transferred.operand_reshards):
            return transferred.note or AS_LARGE
        if has(node.op, "forwards_handle") or not self._settled or work.of(node) is None:
            return None
        return ONCE if node in self._dependent else ALONE


def _wants(value: Value, *, is_split: bool) -> str:
    return f"it wants all of '{value.name}'" if is_split else f"it wants the sum '{value.name}' over all replicas"
