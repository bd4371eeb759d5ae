"""Damage files of every format, read each, and count what came of it.

python -m tests.damage --cases 10000 --out out/damage.jsonl [--first 0] [--only text]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from tests.damage.formats import FORMATS
from tests.damage.many import BAD, run_many


def main() -> int:
    """Run them; 1 where one came out badly."""
    parser = argparse.ArgumentParser(prog="python -m tests.damage", description="Read damaged files.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=FORMATS, help="one format")
    parser.add_argument("--out", type=Path, default=Path("out/damage.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [options.only] if options.only else FORMATS
    cases = [
        (chosen[at % len(chosen)], at // len(chosen)) for at in range(options.first, options.first + options.cases)
    ]
    counts: Counter[tuple[str, str]] = Counter()
    slowest = 0.0
    with options.out.open("a") as out:
        for found in run_many(cases):
            counts[found["format"], found["outcome"]] += 1
            slowest = max(slowest, min(found["cpu"], found["seconds"]))
            if found["outcome"] in BAD:
                out.write(json.dumps(found) + "\n")
                out.flush()
    for name in chosen:
        print(f"{name:<16}" + "  ".join(f"{kind} {n:,}" for (of, kind), n in sorted(counts.items()) if of == name))
    bad = sum(number for (_, kind), number in counts.items() if kind in BAD)
    print(f"{sum(counts.values()):,} damaged files, {bad} came out badly; the slowest took {slowest:.1f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
