"""What one rank ran in the measured steps: each kernel and exchange with its node, in nanoseconds of its own clock.

sources   replica_0/MatMul   MatMul              CPU:0   original MatMul   by expand
dw/all_reduce      CollectiveReduceV2  CPU:0   original dw       exchange dw:0, for w
ran       (0, 1000, 4200), (1, 4210, 5000), ...        place in sources, start, end
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Source(NamedTuple):
    """What ran.

    Attributes:
        node: its name in the rewritten graph, or what TensorFlow called it.
        op: type of the op.
        device: as `CPU:0`; empty where nobody knows.
        origin: the original node that it is, is a copy of, or serves; empty for what is in no graph.
        made_by: the pass that made it; empty for a node of the original graph.
        exchange: of communication, what is exchanged, and for whom; else empty.
        meeting: of a collective, what its members on all ranks have in common; else empty.
    """

    node: str
    op: str
    device: str
    origin: str
    made_by: str = ""
    exchange: str = ""
    meeting: str = ""


class Ran(NamedTuple):
    """One run of a source."""

    source: int
    start: int
    end: int


class Step(NamedTuple):
    """One measured step, with the examples that this rank gave to it; 0: nobody knows."""

    start: int
    end: int
    examples: int = 0


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        rank: its number.
        clock: what ranks have in common that read the same clock.
        steps: that were measured.
        sources: what ran, each once.
        ran: when.
        marks: start and end of exchanges outside of the steps that all ranks made together, in their order.
        flops: of one step of all ranks; 0: nobody knows.
    """

    rank: int
    clock: str
    steps: tuple[Step, ...]
    sources: tuple[Source, ...]
    ran: tuple[Ran, ...]
    marks: tuple[tuple[int, int], ...] = ()
    flops: float = 0.0

    def shifted(self, by: int) -> RankTrace:
        """Return the trace by a clock that shows so many nanoseconds more."""
        return replace(
            self,
            steps=tuple(step._replace(start=step.start + by, end=step.end + by) for step in self.steps),
            ran=tuple(Ran(one.source, one.start + by, one.end + by) for one in self.ran),
            marks=tuple((start + by, end + by) for start, end in self.marks),
        )

    def first(self, count: int) -> RankTrace:
        """Return the trace with the first steps only."""
        return replace(self, steps=self.steps[:count])

    def data(self) -> dict[str, Any]:
        """Return it as plain data, in columns; times since the first step."""
        begin = self.steps[0].start
        return {
            "rank": self.rank,
            "clock": self.clock,
            "begin": begin,
            "steps": [[step.start - begin, step.end - begin, step.examples] for step in self.steps],
            "sources": [list(source) for source in self.sources],
            "source": [one.source for one in self.ran],
            "start": [one.start - begin for one in self.ran],
            "length": [one.end - one.start for one in self.ran],
            "marks": [[start - begin, end - begin] for start, end in self.marks],
            "flops": self.flops,
        }

    @classmethod
    def of(cls, data: dict[str, Any]) -> RankTrace:
        """Return the trace that `data` describes."""
        begin = data["begin"]
        runs = zip(data["source"], data["start"], data["length"], strict=True)
        return cls(
            data["rank"],
            data["clock"],
            tuple(Step(begin + start, begin + end, examples) for start, end, examples in data["steps"]),
            tuple(Source(*source) for source in data["sources"]),
            tuple(Ran(source, begin + start, begin + start + length) for source, start, length in runs),
            tuple((begin + start, begin + end) for start, end in data["marks"]),
            data["flops"],
        )
