"""Break the rewrites of a job, each in one way: what the cross-rank verifier must refuse.

    job of 2 or 3 ranks ──► kind of mistake ──► Mutant: graphs, which rank and collective, a sentence

Which collective is hit follows from the names in the job, so mutants never change.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.ir.verify.ranks import verify_ranks
from tests.seeded_mistakes import members, orders
from tests.seeded_mistakes.bench import attempt
from tests.seeded_mistakes.job_bench import JobBench, JobKind
from tests.support.rank_jobs import Job

MODELS = ("mlp", "keras_cnn", "language_model", "transformer", "lstm_v1", "cond_v1", "norm_in_loop")
KINDS: tuple[JobKind, ...] = (*members.KINDS, *orders.KINDS)


@dataclass(frozen=True)
class Mutant:
    """A broken job.

    Attributes:
        kind: its name.
        job: the graphs, all of them its own.
        rank: the one that was changed; None where all were.
        named: what a fault has to name one of.
        sentence: what was done.
    """

    kind: str
    job: Job
    rank: int | None
    named: tuple[str, ...]
    sentence: str

    def is_named_in(self, text: str) -> bool:
        """Tell whether a fault says on which rank something is wrong, and with what."""
        ranked = self.rank is None or f"rank {self.rank}" in text
        return ranked and (not self.named or any(name in text for name in self.named))


def mutants(job: Job, kinds: Sequence[JobKind] = KINDS) -> Iterator[Mutant]:
    """Yield a job broken in every way that it can be broken."""
    for kind in kinds:
        bench = JobBench(job, random.Random(f"{kind.__name__} {job.name}"))
        if sentence := attempt(kind, bench):
            yield Mutant(kind.__name__, bench.job, bench.blamed_rank, bench.blamed, sentence)


def refusal(mutant: Mutant) -> str:
    """Return the fault that the verifier finds and that says where; empty where it finds none."""
    faults = verify_ranks(mutant.job.graphs, mutant.job.original)
    found = (fault.problem for fault in faults)
    return next((text for text in found if mutant.is_named_in(text)), "")


def judge(mutant: Mutant) -> dict[str, Any]:
    """Return what came of a mutant: nobody runs it, and it is broken whatever a run would show."""
    return {
        "draw": mutant.job.name,
        "kind": mutant.kind,
        "verdict": "broken",
        "sentence": mutant.sentence,
        "refused": refusal(mutant),
    }
