"""The decision: which nodes are recomputed, in which segments; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    found: dict[str, list[Left]] = {}
    for one in left:
        found.setdefault(one.reason, []).append(one)
    more = {reason: f" (and {len(same) - 1} more such segments)" for reason, same in found.items() if len(same) > 1}
    return tuple(Left(same[0].node, reason + more.get(reason, "")) for reason, same in found.items())
