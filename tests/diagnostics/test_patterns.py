"""Patterns of a configuration, of which some would search for ever."""

from __future__ import annotations

import time

import pytest

from autograph_rewrite.diagnostics.limits import check_pattern, first_match, matches
from autograph_rewrite.errors import ConfigError


def test_a_pattern_of_a_hundred_thousand_brackets_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ValueError, match=r"at most 10,000 characters, and has 100,000"):
        check_pattern("(" * 100_000)


def test_a_pattern_matches_a_name_as_a_whole() -> None:
    assert matches("dense_[0-9]+/kernel", "dense_12/kernel")
    assert not matches("dense", "dense_12")
    assert first_match(["a", "b.*", ".*"], "bias") == 1
    assert first_match(["a"], "bias") is None


def test_a_search_without_end_is_ended_and_says_why() -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"takes more than 1 s to be matched with 'aaa[\s\S]*several ways"):
        matches("(a|aa)+b", "a" * 60)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("pattern", ["(", "[", "*", "(?P<x"])
def test_what_is_no_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="must be a regular expression"):
        check_pattern(pattern)
