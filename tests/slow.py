"""Which tests `make test` leaves out, by measured seconds: `slow.yaml`, whose rows become the marker `slow`.

    python -m tests.slow choose build/blocks --seconds 600   writes slow.yaml from a recording (tests.mutation.blocks)
    python -m tests.slow show 10                             the slowest functions of the list

A row is a test function: what all of its cases take, and the cases that `make test` runs all the same. They are chosen
by what they alone run: a case that runs blocks of the package which no quicker test runs comes before one that runs
what others have run. As a plugin of pytest this module marks the tests, and names at the end of a run the rows that its
times speak against. No run fails by a time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

LIST = Path(__file__).with_name("slow.yaml")
MOST = 3.0
"""Seconds that a test of `make test` may take."""
LEAST = 1.0
"""Seconds that leaving a test out, or the marked cases of one, has to save."""
SLACK = 2.0
"""How much slower than where the list was made a machine may be; waiting for a processor does not count."""
AIM, AIM_OF_ALL = 2.0, 4.0
"""Seconds of a case, and of all cases of a function, that `choose` stays below: a busy machine has to pass, too."""
SHARED = "once"
"""The fixture of what all test processes share, such as a job with many cases: whoever comes first pays for it, so its
tests are slow though each by itself may be quick."""
ALWAYS = {"tests/jobs/test_training.py::test_two_processes_train_one_model_in_each_mode"}
"""Functions that `make test` runs whole, though their cases take more together: one job of each mode."""
CASE, COUNT, WAITED = "slow_case", "slow_count", "slow_waited"


@dataclass(frozen=True)
class Row:
    """A slow function: the seconds of all its cases, and the ids of the quick ones ("" where it has no cases)."""

    seconds: float
    quick: frozenset[str] = frozenset()


def split(nodeid: str) -> tuple[str, str]:
    """Return the function of a test, and which case of it this is."""
    function, bracket, case = nodeid.partition("[")
    return function, case.removesuffix("]") if bracket else ""


def read(path: Path = LIST) -> dict[str, Row]:
    """Return the rows by function."""
    given = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader) if path.exists() else {}
    return {
        f"{file}::{function}": Row(row["seconds"], frozenset(row.get("quick", ())))
        for file, functions in (given or {}).items()
        for function, row in functions.items()
    }


def write(rows: Mapping[str, Row], path: Path = LIST) -> None:
    """Write the rows, by file."""
    files: dict[str, dict[str, Any]] = defaultdict(dict)
    for function, row in sorted(rows.items()):
        file, _, name = function.partition("::")
        quick = {"quick": sorted(row.quick)} if row.quick else {}
        files[file][name] = {"seconds": round(row.seconds, 1), **quick}
    head = "# Written by `python -m tests.slow choose`; tests/slow.py says what it means.\n"
    path.write_text(head + yaml.safe_dump(dict(files), width=120, allow_unicode=True), encoding="utf-8")


# The plugin: marks, and a report of whether they are still right.


@dataclass
class Spent:
    """What the cases of a function took in a run: of those that are marked, and of the others."""

    count: int = 0
    slow: list[float] = field(default_factory=list)
    quick: list[float] = field(default_factory=list)


class Freshness:
    """Adds up what tests take, and says where the list seems wrong about a function.

    A loaded disk or a neighbour on the machine can make any test slow once, so this is a message and not a failure.
    """

    def __init__(self) -> None:
        self._spent: dict[str, Spent] = defaultdict(Spent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the call alone: what a module sets up is for all of its tests."""
        if report.when != "call" or report.outcome != "passed":
            return
        told = dict(report.user_properties)
        if CASE not in told:
            return
        spent = self._spent[split(report.nodeid)[0]]
        spent.count = told[COUNT]
        (spent.slow if told[CASE] else spent.quick).append(report.duration - told.get(WAITED, 0.0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the functions that seem to belong into the list, or out of it."""
        stale = [text for name, spent in sorted(self._spent.items()) if (text := verdict(name, spent))]
        if stale:
            terminalreporter.section("tests/slow.yaml: other times in this run", yellow=True)
            terminalreporter.write_line("\n".join(stale))


def verdict(name: str, spent: Spent) -> str:
    """Return what is wrong with the row of a function, or with its absence; "" where all is well."""
    quick = max(spent.quick, default=0.0)
    slow = sum(spent.slow)
    if quick > MOST * SLACK:
        return f"{name}: takes {quick:.1f} s without the marker: make it cheaper, or mark it slow (limit {MOST} s)"
    is_whole = len(spent.slow) + len(spent.quick) == spent.count
    if spent.slow and is_whole and slow < LEAST / SLACK:
        return f"{name}: its slow cases take {slow:.1f} s: take the marker away (from {LEAST} s on)"
    return ""


def waited() -> float:
    """Return for how many seconds this thread has waited for a processor; 0.0 where the system does not tell."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note for how long a test has waited for a processor."""
    before = waited()
    yield
    item.user_properties.append((WAITED, round(waited() - before, 3)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the list names, before `-m` chooses."""
    rows = read()
    counts: dict[str, int] = defaultdict(int)
    for item in items:
        counts[split(item.nodeid)[0]] += item.get_closest_marker("full") is None
    for item in items:
        function, case = split(item.nodeid)
        row = rows.get(function)
        is_shared = SHARED in getattr(item, "fixturenames", ())
        if is_shared or (row is not None and case not in row.quick):
            item.add_marker(pytest.mark.slow)
        if not is_shared:
            is_slow = item.get_closest_marker("slow") is not None
            item.user_properties += [(CASE, is_slow), (COUNT, counts[function])]


def pytest_configure(config: pytest.Config) -> None:
    """Check the list where reports of all processes arrive."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Freshness())


# Choosing: by seconds, and by what a case alone runs.


def choose(seconds: Mapping[str, float], blocks: Mapping[str, frozenset[int]], budget: float) -> dict[str, Row]:
    """Return the rows of a list with which `make test` stays within a budget.

    Functions that take little run whole. Of the others the cheapest case per new block is taken first, until the budget
    or what a function may take is used up.

    Args:
        seconds: by test.
        blocks: that each test runs.
        budget: seconds of all tests.
    """
    cases: dict[str, list[str]] = defaultdict(list)
    for nodeid in seconds:
        cases[split(nodeid)[0]].append(nodeid)
    totals = {function: sum(seconds[one] for one in each) for function, each in cases.items()}
    large = {function for function, total in totals.items() if total > AIM}
    large -= {function for function in large if function in ALWAYS}
    covered: set[int] = set()
    spent: dict[str, float] = defaultdict(float)
    for function in cases.keys() - large:
        spent[function] = totals[function]
        for nodeid in cases[function]:
            covered |= blocks.get(nodeid, frozenset())
    left = {nodeid for function in large for nodeid in cases[function] if seconds[nodeid] <= AIM}
    quick: dict[str, set[str]] = defaultdict(set)

    def take(nodeid: str) -> None:
        function, case = split(nodeid)
        quick[function].add(case)
        spent[function] += seconds[nodeid]
        covered.update(blocks.get(nodeid, ()))
        left.discard(nodeid)

    # First of each function its quickest case, as nothing else shows what its sentence says.
    for function in sorted(large, key=lambda one: totals[one]):
        mine = sorted((one for one in cases[function] if one in left), key=lambda one: (seconds[one], one))
        if mine and sum(spent.values()) + seconds[mine[0]] <= budget:
            take(mine[0])
    while left:
        fitting = [
            n for n in left if spent[split(n)[0]] + seconds[n] <= AIM and sum(spent.values()) + seconds[n] <= budget
        ]
        worth = {n: len(blocks.get(n, frozenset()) - covered) / (seconds[n] + 0.01) for n in fitting}
        best = max(sorted(worth), key=lambda n: worth[n], default="")
        if not best or worth[best] <= 0:
            break
        take(best)
    return {
        function: Row(totals[function], frozenset(quick[function]))
        for function in large
        if any(split(one)[1] not in quick[function] for one in cases[function])
        and sum(seconds[one] for one in cases[function] if split(one)[1] not in quick[function]) >= LEAST
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the list, or show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    chooser = verbs.add_parser("choose", help="write the list from a recording")
    chooser.add_argument("recording", type=Path)
    chooser.add_argument("--seconds", type=float, default=600.0, help="of all tests of `make test`")
    shower = verbs.add_parser("show", help="the slowest functions")
    shower.add_argument("count", type=int, default=10, nargs="?")
    given = parser.parse_args(arguments)
    if given.verb == "choose":
        from tests.mutation.blocks import Recording

        recording = Recording(given.recording)
        rows = choose(recording.seconds, recording.blocks(), given.seconds)
        write(rows)
        print(f"{len(rows)} functions are slow: {sum(row.seconds for row in rows.values()):.0f} s")
        return 0
    for function, row in sorted(read().items(), key=lambda pair: -pair[1].seconds)[: given.count]:
        print(f"{row.seconds:7.1f} s  {len(row.quick):3d} cases quick  {function}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
