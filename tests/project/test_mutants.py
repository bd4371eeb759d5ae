"""The mutants of the package can be made: each line that one breaks stands in its file, once."""

from __future__ import annotations

from tests.mutation.source_mutants import MUTANTS, broken_source, drawn


def test_every_mutant_breaks_a_line_that_is_there() -> None:
    assert [mutant.name for mutant in (*MUTANTS, *drawn()) if broken_source(mutant) is None] == []
