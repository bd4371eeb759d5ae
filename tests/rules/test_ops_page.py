"""The page that lists all ops is what the table says."""

from __future__ import annotations

import pytest

from autograph_rewrite.ops.rules.signature import Signature
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.tools.dev.list_ops import describe, render, spell
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "ops.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m autograph_rewrite.tools.dev.list_ops"


@pytest.mark.parametrize("op", sorted(TABLE))
def test_every_rule_says_what_it_does(op: str) -> None:
    assert len(describe(op, TABLE[op])) > 10


def test_a_signature_is_spelt_dimension_by_dimension() -> None:
    signature = Signature((("n", ""), None, ("n",)), (("", ""), ()), summed=frozenset("n"))
    assert spell(signature) == "n. , * , n -> .. , scalar (partial over n)"
