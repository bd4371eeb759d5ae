"""Seed mistakes, run every spoilt rewrite beside one device, and print what came of each kind.

python -m tests.seeded_mistakes --out FILE.jsonl [--shard 0/4] [--per-draw 7] [--only TEXT] [--accepted]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import TensorFlowHook

VERDICTS = ("changed", "failed", "hang", "unchanged", "not run")


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay out how many mistakes of each kind had which outcome, and how many were refused."""
    rows = list(rows)
    counts = Counter((row["kind"], row["verdict"]) for row in rows)
    refused = Counter(row["kind"] for row in rows if row.get("refused"))
    missed = Counter(row["kind"] for row in rows if is_missed(row))
    head = f"{'kind':<30}" + "".join(f"{name:>11}" for name in (*VERDICTS, "refused", "missed"))
    lines = [head]
    for kind in sorted({row["kind"] for row in rows}):
        numbers = [counts[kind, verdict] for verdict in VERDICTS]
        lines.append(f"{kind:<30}" + "".join(f"{number:>11}" for number in (*numbers, refused[kind], missed[kind])))
    totals = [sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS]
    totals += [refused.total(), missed.total()]
    return "\n".join([*lines, f"{'all':<30}" + "".join(f"{number:>11}" for number in totals)])


def is_missed(row: Mapping[str, Any]) -> bool:
    """Tell whether a mistake changed something and nobody refused it."""
    return row["verdict"] in ("changed", "failed", "hang") and not row.get("refused")


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--per-draw", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", default="\0", help="leave out draws with this text in their name")
    parser.add_argument("--accepted", action="store_true", help="run only what the certificate accepts")
    args = parser.parse_args()
    sys.meta_path.insert(0, TensorFlowHook())
    from tests.seeded_mistakes.draws import draws
    from tests.seeded_mistakes.judge import judge
    from tests.seeded_mistakes.seed import is_refused, mistakes

    mine, of = map(int, args.shard.split("/"))
    rows: list[dict[str, Any]] = []
    made: Counter[str] = Counter()
    with args.out.open("a") as out:
        for draw in [draw for draw in draws() if args.only in str(draw) and args.skip not in str(draw)][mine::of]:
            if is_refused(draw):
                continue
            alive = 0
            for mistake in mistakes(draw, made):
                began = time.perf_counter()
                row = judge(mistake, run_refused=not args.accepted)
                if row["verdict"] == "stillborn":
                    continue
                row["seconds"] = round(time.perf_counter() - began, 2)
                rows.append(row)
                made[row["kind"]] += 1
                alive += 1
                out.write(json.dumps(row) + "\n")
                out.flush()
                if alive == args.per_draw:
                    break
    print(table(rows))
    return int(any(is_missed(row) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
