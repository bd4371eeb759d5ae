"""Seed mistakes, ask a judge about each, and print what came of each kind.

python -m tests.seeded_mistakes [--judge certificate] --out FILE.jsonl [--shard 0/4] [--per-draw 7] [--accepted]
python -m tests.seeded_mistakes --judge ranks [--only TEXT]

certificate    mistakes in rewrites, behind one pass; they are also run beside one device
ranks          mistakes in the graphs of all ranks of a job; the cross-rank verifier has to say where each is
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from tests.conftest import TensorFlowHook

T = TypeVar("T")
Row = Mapping[str, Any]
VERDICTS = ("broken", "changed", "failed", "hang", "unchanged", "not run")


def table(rows: Iterable[Row]) -> str:
    """Lay out how many mistakes of each kind had which outcome, and how many were refused."""
    rows = list(rows)
    verdicts = [verdict for verdict in VERDICTS if any(row["verdict"] == verdict for row in rows)]
    lines = [("kind", *verdicts, "refused", "missed")]
    for kind in (*sorted({row["kind"] for row in rows}), "all"):
        mine = [row for row in rows if kind in (row["kind"], "all")]
        numbers = [sum(row["verdict"] == verdict for row in mine) for verdict in verdicts]
        numbers += [sum(bool(row.get("refused")) for row in mine), sum(map(is_missed, mine))]
        lines.append((kind, *map(str, numbers)))
    return "\n".join(f"{kind:<30}" + "".join(f"{cell:>11}" for cell in cells) for kind, *cells in lines)


def is_missed(row: Row) -> bool:
    """Tell whether a mistake changed something and nobody refused it."""
    return row["verdict"] in ("broken", "changed", "failed", "hang") and not row.get("refused")


def by_certificate(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what comes of mistakes in rewrites."""
    from tests.seeded_mistakes.draws import draws
    from tests.seeded_mistakes.judge import judge
    from tests.seeded_mistakes.seed import is_refused, mistakes

    made: Counter[str] = Counter()
    for draw in chosen(args, draws()):
        if is_refused(draw):
            continue
        alive = 0
        for mistake in mistakes(draw, made):
            row = judge(mistake, run_refused=not args.accepted)
            if row["verdict"] == "stillborn":
                continue
            made[row["kind"]] += 1
            yield row
            alive += 1
            if alive == args.per_draw:
                break


def by_ranks(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what comes of mistakes in jobs."""
    from tests.seeded_mistakes.ranks import MODELS, judge, mutants
    from tests.support.rank_jobs import item_of, jobs_of

    jobs = (job for model in MODELS for job in jobs_of(model, item_of(model)))
    for job in chosen(args, jobs, attrgetter("name")):
        yield from map(judge, mutants(job))


def chosen(args: argparse.Namespace, among: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """Yield what is asked for of that into which mistakes can be seeded."""
    mine, of = map(int, args.shard.split("/"))
    return islice((one for one in among if args.only in name(one) and args.skip not in name(one)), mine, None, of)


JUDGES = {"certificate": by_certificate, "ranks": by_ranks}


def main() -> int:
    """Ask the judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge", choices=JUDGES, default="certificate")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="where a line of JSON for each is added")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--only", default="", help="take draws, or jobs, with this text in their name")
    parser.add_argument("--skip", default="\0", help="leave out draws, or jobs, with this text in their name")
    parser.add_argument("--per-draw", type=int, default=7, help="mistakes in each draw; a job is broken in all ways")
    parser.add_argument("--accepted", action="store_true", help="run only what the certificate accepts")
    args = parser.parse_args()
    sys.meta_path.insert(0, TensorFlowHook())
    rows: list[Row] = []
    with args.out.open("a") as out:
        for row in JUDGES[args.judge](args):
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            if is_missed(row):
                print("missed:", row["draw"], row["sentence"])
    print(table(rows))
    return int(any(map(is_missed, rows)))


if __name__ == "__main__":
    raise SystemExit(main())
