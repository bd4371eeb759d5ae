"""Patterns of a configuration: regular expressions that end in time, whoever wrote them.

    variables: [{match: '(a|aa)+b', ...}]     on a name of sixty `a`s: an error after a second, not hours of searching

Python's own `re` cannot be ended once it searches; `regex`, which understands the same expressions, can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import regex

from autograph_rewrite.errors import ConfigError

SECONDS = 1.0
"""Of one match; names are short, so a pattern that takes milliseconds is rare already."""
LENGTH = 10_000
"""Characters of a pattern: compiling it takes time that grows faster than it does."""


def check_pattern(pattern: str) -> None:
    """Check that a text is a regular expression.

    Raises:
        ValueError: it is none.
    """
    if len(pattern) > LENGTH:
        raise ValueError(f"must be a regular expression of at most {LENGTH:,} characters, and has {len(pattern):,}")
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except RecursionError:
        raise ValueError("must be a regular expression with fewer brackets in each other") from None
    except (re.error, regex.error) as error:
        raise ValueError(f"must be a regular expression, and {pattern!r} is not: {error}") from None


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name as a whole.

    Raises:
        ConfigError: nobody knows in time.
    """
    try:
        return regex.fullmatch(pattern, name, timeout=SECONDS) is not None
    except TimeoutError:
        raise ConfigError(
            f"the pattern {pattern!r} takes more than {SECONDS:g} s to be matched with '{name}'",
            hint="repetitions of what can be cut in several ways, as (a|aa)+, try them all: write it as a+",
        ) from None


def first_match(patterns: Iterable[str], name: str) -> int | None:
    """Return the number of the first pattern that matches a name as a whole; None if none does.

    Raises:
        ConfigError: nobody knows in time.
    """
    return next((i for i, pattern in enumerate(patterns) if matches(pattern, name)), None)
