"""Rewrites of a job broken on purpose, each in one way that a sentence tells: what the cross-rank verifier must refuse.

    job of 2 or 3 ranks ──► kind of damage ──► Mutant: graphs, which rank and collective, a sentence
    python -m tests.mutation.mutations                  prints how many there are of each kind, and how many are refused

Which collective is hit follows from the names in the job, so mutants never change.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from autograph_rewrite.ir.verify.ranks import verify_ranks
from tests.mutation import kinds as mutation_kinds
from tests.mutation import orders
from tests.mutation.bench import Bench, Kind, Mutant
from tests.support.rank_jobs import Job, item_of, jobs_of

MODELS = ("mlp", "keras_cnn", "language_model", "transformer", "lstm_v1", "cond_v1", "norm_in_loop")
KINDS = (*mutation_kinds.KINDS, *orders.KINDS)


def mutants(job: Job, kinds: Sequence[Kind] = KINDS) -> Iterator[Mutant]:
    """Yield a job broken in every way that it can be broken."""
    for kind in kinds:
        bench = Bench(job, random.Random(f"{kind.__name__} {job.name}"))
        with suppress(IndexError, StopIteration):  # nothing here to break that way
            yield kind(bench)


def refusal(mutant: Mutant) -> str:
    """Return the fault that the verifier finds and that says where; empty where it finds none."""
    faults = verify_ranks(mutant.job.graphs, mutant.job.original)
    found = (fault.problem for fault in faults)
    return next((text for text in found if mutant.is_named_in(text)), "")


def table(made: Counter[str], refused: Counter[str]) -> str:
    """Lay out how many mutants of each kind there are, and how many are refused."""
    rows = [("kind of damage", "made", "refused")]
    rows += [(kind, str(made[kind]), str(refused[kind])) for kind in sorted(made)]
    rows.append(("all", str(made.total()), str(refused.total())))
    return "\n".join(f"{kind:<22}{count:>6}{found:>9}" for kind, count, found in rows)


def main() -> int:
    """Break every model in every way and layout; print the table, and what is not refused."""
    made: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for model in MODELS:
        for job in jobs_of(model, item_of(model)):
            for mutant in mutants(job):
                text = refusal(mutant)
                made[mutant.kind] += 1
                refused[mutant.kind] += bool(text)
                if not text:
                    print("accepted:", mutant.sentence)
    print(table(made, refused))
    return int(made != refused)


if __name__ == "__main__":
    raise SystemExit(main())
