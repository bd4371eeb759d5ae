"""How many calls of functions a rewrite takes: a measure of its cost that no other load of the machine changes.

To be counted in a process of its own: CPython 3.11 can go round in its interpreter forever under `sys.setprofile`,
in a process in which much has run before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.ir.format import serde
from tests.support.rank_jobs import item_of


def counted(call: Callable[[], GraphItem]) -> tuple[GraphItem, int]:
    """Return a result, and how many calls of functions it took."""
    calls = 0

    def hook(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    call()  # caches
    sys.setprofile(hook)
    try:
        new = call()
    finally:
        sys.setprofile(None)
    return new, calls


def print_costs(model: str, tasks: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    """Print the calls and the nodes of rewrites under Parallax, of each task for some numbers of workers."""
    item = item_of(model)
    costs: list[list[tuple[int, int]]] = [[] for _ in tasks]
    for found, task, workers in ((found, task, n) for found, task in zip(costs, tasks, strict=True) for n in numbers):
        addresses = [f"10.0.{i // 250}.{i % 250 + 1}:2222" for i in range(workers)]
        cluster = {"workers": addresses, "ps": ["10.1.0.1:2222", "10.1.0.2:2222"]}
        config = {"devices": ["CPU:0"], "cluster": cluster, "strategy": {"name": "Parallax"}}
        new, calls = counted(lambda config=config, task=task: ar.rewrite(item, config, task=task))
        found.append((calls, len(serde.from_bytes(new.graph_bytes))))
    print(json.dumps(costs))
