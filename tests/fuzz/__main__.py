"""Run random programs, or compare two runs.

python -m tests.fuzz --seeds 0:3000 --workers 2 --out results.jsonl
python -m tests.fuzz --seeds 17 --verbose          one seed, here, with everything that it says
python -m tests.fuzz --jobs --seeds 20000:20100    as jobs of two and three workers, ten programs in each
python -m tests.fuzz compare before.jsonl after.jsonl
python -m tests.fuzz show results.jsonl
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.fuzz import many, table, worker
from tests.fuzz.words import BAD
from tests.jobs.programs.nursery import Nursery

SEEDS = "0:3000"
"""The programs that are compared from one version to the next."""


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 where a program came out wrong, crashed or hung."""
    if arguments[:1] == ["compare"]:
        before, after = (many.read(Path(name)) for name in arguments[1:3])
        print("\n".join(table.comparison(before, after)))
        return int(any(one["outcome"] in BAD for one in after))
    if arguments[:1] == ["show"]:
        print("\n".join(table.summary(many.read(Path(arguments[1])))))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Run random programs.")
    parser.add_argument("--seeds", default=SEEDS, help="FIRST:BEHIND, or seeds with commas between them")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/fuzz.jsonl"), help="continued where it exists")
    parser.add_argument(
        "--jobs", action="store_true", help="train them as jobs of two or three workers, with servers or not"
    )
    parser.add_argument("--verbose", action="store_true", help="run here, in this process, and print everything")
    options = parser.parse_args(arguments)
    seeds = seeds_of(options.seeds)
    if options.verbose:
        return verbose(seeds, in_jobs=options.jobs)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = set(seeds)
    if options.jobs:
        worker.prepare()
        from tests.fuzz.jobs import run_jobs

        every = run_jobs(seeds, options.out)
    else:
        every = many.run_many(seeds, options.workers, options.out)
    found = [one for one in every if one["seed"] in chosen]
    print("\n".join(table.summary(found)))
    return int(any(one["outcome"] in BAD for one in found))


def seeds_of(text: str) -> list[int]:
    """Return the seeds that a text names."""
    found: list[int] = []
    for part in text.split(","):
        first, colon, behind = part.partition(":")
        found += range(int(first), int(behind)) if colon else [int(first)]
    return found


def verbose(seeds: list[int], *, in_jobs: bool) -> int:
    """Run seeds in this process, or in jobs that it starts."""
    worker.prepare()
    from tests.fuzz import jobs, one

    is_bad = False
    with Nursery() if in_jobs else nullcontext() as nursery:
        found = jobs.outcomes(seeds, nursery) if nursery is not None else map(one.run, seeds)
        for outcome in found:
            is_bad = print_outcome(outcome) or is_bad
    return int(is_bad)


def print_outcome(outcome: Any) -> bool:
    """Print all that is known of an outcome; return whether it is bad."""
    print(
        f"{outcome.seed}: {outcome.outcome} {outcome.reason}\n  {outcome.mode}, {outcome.config}\n  {outcome.program}"
    )
    print(f"  {outcome.seconds:.1f} s {outcome.detail}", flush=True)
    return outcome.outcome in BAD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
