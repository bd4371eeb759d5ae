"""Exchanges of a step by name, for whoever wonders where it stands still."""

from __future__ import annotations

from autograph_rewrite.plan.parts.messages import SIZES, EdgePlan
from autograph_rewrite.plan.parts.names import named_exchanges


def edge(value: str, owner: str, key: int, order: int, bucket: int = 0, to: str = "replicated") -> EdgePlan:
    keys: dict[str, int] = {"group_key": 1, "instance_key": key, "order": order, "bucket": bucket}
    return EdgePlan(value, "partial(sum)", to, owner, "", "host_reduce", **keys)


def test_exchanges_are_named_in_their_order_by_what_they_are_for_and_their_keys() -> None:
    edges = [
        edge("grad/w", "w", 7, 2, 1),
        edge("grad/b", "b", 7, 2, 1),
        edge("x", "step", 5, 1, to=SIZES),
        edge("loss", "step", 9, 3),
    ]
    assert named_exchanges(edges) == "the sizes of the parts (key 5), bucket 1: 'w', 'b' (key 7), 'loss' (key 9)"


def test_of_many_exchanges_and_variables_the_first_are_named_and_the_others_counted() -> None:
    edges = [edge(f"grad/{n}", f"w{n}", 7, 1, 1) for n in range(5)]
    edges += [edge(f"v{n}", "step", 10 + n, 2 + n) for n in range(4)]
    found = named_exchanges(edges)
    assert found == "bucket 1: 'w0', 'w1', 'w2' and 2 more (key 7), 'v0' (key 10), 'v1' (key 11), and 2 more"
    stored = [EdgePlan("grad/w", "partial(sum)", "replicated", "w", "", "accumulator")]
    assert named_exchanges(stored) == "'w' (stores on a server)"
    assert named_exchanges([]) == ""
