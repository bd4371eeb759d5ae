"""Mistakes can be seeded into rewrites of every sort, and change what comes out."""

from __future__ import annotations

import pytest

from tests.seeded_mistakes.draws import Draw
from tests.seeded_mistakes.judge import judge
from tests.seeded_mistakes.seed import KINDS, Mistake

MADE = (
    ("ordered_updates", "own", "shared2", "stale_alias"),
    ("ordered_updates", "own", "fsdp2", "read_before_update"),
    ("mlp", "sgd", "mirrored2", "contribution_lost"),
    ("counted", "own", "shared3", "size_of_one_replica"),
)


def test_there_are_thirty_kinds_of_mistakes() -> None:
    assert len({kind.__name__ for kind in KINDS}) >= 30


@pytest.mark.parametrize(("program", "optimizer", "config", "kind"), MADE)
def test_a_seeded_mistake_changes_what_is_trained(program: str, optimizer: str, config: str, kind: str) -> None:
    chosen = next(one for one in KINDS if one.__name__ == kind)
    row = judge(Mistake(Draw(program, optimizer, config), chosen))
    assert row["verdict"] in ("changed", "failed"), row
