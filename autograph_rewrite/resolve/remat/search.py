"""What a search for a budget has looked at: what is computed again, with its FLOPs and the peak of the step.

    kept a, c     ─► segments of the rest     ─► FLOPs of their nodes, and the peak of the step with them

A segment whose gradients have nothing to wait for is no part of what is found in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.decide import segments_of
from autograph_rewrite.resolve.remat.decision import Segment
from autograph_rewrite.resolve.remat.policies import Parts
from autograph_rewrite.resolve.remat.step_memory import StepMemory
from autograph_rewrite.resolve.remat.triggers import triggers_of


@dataclass(frozen=True)
class Choice:
    """One way to spend FLOPs on memory.

    Attributes:
        segments: what is computed again.
        flops: that they add, of one example.
        peak: bytes of the whole step.
    """

    segments: tuple[Segment, ...]
    flops: float
    peak: int

    @property
    def again(self) -> frozenset[str]:
        """The nodes that are computed again, by name."""
        return frozenset(name for segment in self.segments for name in segment.nodes)


@dataclass
class Search:
    """Choices that have been looked at.

    Attributes:
        acts: what may be computed again.
        memory: tells the peak of a choice.
        seen: by the nodes of its segments.
    """

    acts: Activations
    memory: StepMemory
    seen: dict[tuple[tuple[str, ...], ...], Choice] = field(default_factory=dict)
    _waits: dict[tuple[str, ...], bool] = field(default_factory=dict)

    def look(self, parts: Parts) -> Choice:
        """Return what comes of computing some parts again."""
        return self._priced(segments_of(self.acts, parts, only_saving=True)[0])

    def settled(self, choice: Choice) -> Choice:
        """Return a choice without the segments that have no gradient to wait for: their nodes are kept."""
        waiting = [segment for segment in choice.segments if self._has_trigger(segment)]
        return choice if len(waiting) == len(choice.segments) else self._priced(waiting)

    def fitting(self, limit: int) -> Choice | None:
        """Return the choice that fits, and adds the fewest FLOPs."""
        fits = [choice for choice in self.seen.values() if choice.peak <= limit]
        for choice in sorted(fits, key=lambda one: (one.flops, one.peak)):
            if (settled := self.settled(choice)).peak <= limit:
                return settled
        return None

    def _priced(self, segments: Sequence[Segment]) -> Choice:
        key = tuple(segment.nodes for segment in segments)
        if key not in self.seen:
            peak = self.memory.peak([self._nodes(segment) for segment in segments])
            self.seen[key] = Choice(tuple(segments), sum(segment.added_flops for segment in segments), peak)
        return self.seen[key]

    def _has_trigger(self, segment: Segment) -> bool:
        if segment.nodes not in self._waits:
            nodes = self._nodes(segment)
            readers = {use.node for node in nodes for use in self.acts.readers(node)}
            self._waits[segment.nodes] = bool(triggers_of(self.acts, nodes, readers))
        return self._waits[segment.nodes]

    def _nodes(self, segment: Segment) -> list[Node]:
        return [self.acts.state.graph.nodes[name] for name in segment.nodes]


def least(choices: Iterable[Choice]) -> Choice:
    """Return the choice of the least peak."""
    return min(choices, key=lambda one: (one.peak, one.flops))
