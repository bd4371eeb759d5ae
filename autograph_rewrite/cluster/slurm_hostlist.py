"""Expand SLURM's compressed host lists (`node[01-04]`).

    node[01-03,07],other      ->  node01 node02 node03 node07 other
    r[1-2]n[1-2]-ib           ->  r1n1-ib r1n2-ib r2n1-ib r2n2-ib
    2(x3),1                   ->  2 2 2 1      (how many tasks each of them runs)

Both raise ValueError with a sentence that tells what is wrong; who reads a variable adds its name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

# Nobody has that many nodes; a slip of the hand in a range should not fill the memory.
MOST_HOSTS = 100_000

_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\]){1,100000}")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Write a list of hosts out, in its order.

    Raises:
        ValueError: it is malformed.
    """
    hosts: list[str] = []
    for entry in _entries(text):
        pieces = [_alternatives(match[1], match[2]) for match in _PIECE.finditer(entry)]
        hosts += map("".join, itertools.islice(itertools.product(*pieces), MOST_HOSTS + 1))
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"'{text}' names more than {MOST_HOSTS:,} hosts")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Write a list of task counts out, in its order.

    Raises:
        ValueError: it is malformed.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = _COUNT.fullmatch(entry)
        if match is None:
            raise ValueError(f"'{entry}' in '{text}' is no count like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > MOST_HOSTS:
            raise ValueError(f"'{text}' counts for more than {MOST_HOSTS:,} hosts")
    return tuple(counts)


def _entries(text: str) -> Iterator[str]:
    """Cut at the commas that stand outside brackets."""
    place = 0
    while True:
        match = _ENTRY.match(text, place)
        if match is None:
            raise ValueError(f"'{text}' is no list of hosts: there is none at position {place + 1}")
        yield match[0]
        place = match.end()
        if place == len(text):
            return
        if text[place] != ",":
            raise ValueError(f"'{text}' is no list of hosts: a bracket at position {place + 1} has no partner")
        place += 1


def _alternatives(ranges: str | None, literal: str) -> list[str]:
    """What one piece of a name stands for: itself, or the numbers of its ranges."""
    if ranges is None:
        return [literal]
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"'{part}' in '[{ranges}]' is no number or range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"the range '{part}' ends before it begins")
        if len(found) + int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"'[{ranges}]' names more than {MOST_HOSTS:,} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found
