"""Run random programs of orders: `python -m tests.orders 0:200 10`, each of them ten times."""

from __future__ import annotations

import sys
from collections import Counter

from tests.fuzz import worker
from tests.fuzz.__main__ import seeds_of


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 where an order was lost."""
    worker.prepare()
    from tests.orders.programs import outcome

    found = []
    for seed in seeds_of(arguments[0]):
        found.append(one := outcome(seed, int(arguments[1])))
        print(one, flush=True)
    print(Counter(one.verdict for one in found))
    ratios = sorted(one.edges[1] / one.edges[0] for one in found if one.edges[0])
    print(f"control edges, rewritten / original: median {ratios[len(ratios) // 2]:.2f}")
    return int(any(one.verdict == "wrong" for one in found))


sys.exit(main(sys.argv[1:]))
