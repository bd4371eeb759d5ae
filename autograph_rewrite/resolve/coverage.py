"""Coverage: the share of a step's FLOPs that is divided between replicas, and the ops that keep the rest from it.

    12.4 of 12.5 GFLOP for 64 examples: each device does a part         coverage 99.2 %
    0.1 GFLOP whole: TopKV2 'sort/TopKV2' wants all of 'sort/transpose:0'

Updates are left out: they are as large as the variables, however many devices there are. The figures are functions of
the batch, so that a session or function that sees the first real one has its coverage without another rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.errors import PassError
from autograph_rewrite.plan.plan import Plan

ENOUGH = 0.9
"""Below this share there is a warning."""
SHOWN = 5
WORTH_NAMING = 0.005
"""The share from which on an op is named."""
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
        """Return the amount of several."""
        return Amount(self.fixed * count, self.linear * count, self.square * count)

    @property
    def flops(self) -> float:
        """All of them."""
        return self.fixed + self.linear + self.square


@dataclass(frozen=True)
class WholeWork:
    """An op of the original that made work whole.

    Attributes:
        node: its name.
        op: its type.
        reason: why.
        amount: its own work, and that of what follows from it.
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
    """What of one step is divided.

    Attributes:
        batch: the examples of all devices together for which the amounts hold.
        assumed: nobody has said how many there are.
        parts: among how many replicas, or stages of them, work can be divided.
        divided: the work of which the instances on different devices each do a part.
        whole: the work that is done once, or alike everywhere, by the op that made it so.
        least: the smallest share that is accepted.
        place: where that is said.
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
        """The share that is divided, 0..1; where there is no work, or one device, nothing is left to divide."""
        total = self.flops
        return self.divided.flops / total if total and self.parts > 1 else 1.0

    @property
    def largest(self) -> tuple[WholeWork, ...]:
        """What made work whole, the most expensive first."""
        limit = WORTH_NAMING * self.flops
        found = [one for one in self.whole if one.amount.flops > limit] if self.parts > 1 else []
        return tuple(sorted(found, key=lambda one: -one.amount.flops))

    def at(self, batch: int | None) -> Coverage:
        """Return the coverage of another batch; a batch without examples says nothing."""
        if not batch or (batch == self.batch and not self.assumed):
            return self
        ratio = batch / self.batch
        whole = tuple(replace(one, amount=one.amount.times(ratio)) for one in self.whole)
        return replace(self, batch=batch, assumed=False, divided=self.divided.times(ratio), whole=whole)

    def lines(self, count: int = SHOWN) -> list[str]:
        """Return the ops that made work whole, with what they cost, and how many more there are."""
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
    """Return a share in percent, never rounded up to all of it."""
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
    """Refuse less than the configuration accepts.

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
