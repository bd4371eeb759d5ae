"""The list of slow tests: what goes into it, what `make test` keeps of it, and when it is stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slow
from tests.slow import Row, Spent
from tests.support.paths import ROOT

TOO_MUCH, TOO_LITTLE = 1.01 * slow.MOST * slow.SLACK, 0.99 * slow.LEAST / slow.SLACK


@pytest.mark.parametrize(
    ("spent", "problem"),
    [
        (Spent(count=1, quick=[TOO_MUCH]), "without the marker"),
        (Spent(count=2, quick=[0.1, TOO_MUCH]), "without the marker"),
        (Spent(count=2, quick=[2.9, 2.9]), ""),
        (Spent(count=1, slow=[TOO_LITTLE]), "its slow cases take"),
        (Spent(count=2, quick=[0.1], slow=[TOO_LITTLE]), "its slow cases take"),
        (Spent(count=1, quick=[2.9]), ""),
        (Spent(count=1, slow=[1.1]), ""),
        (Spent(count=3, slow=[0.1]), ""),  # the other cases did not run, so nobody knows
    ],
)
def test_a_row_is_stale_where_its_function_is_too_slow_or_too_quick(spent: Spent, problem: str) -> None:
    assert problem in slow.verdict("a.py::test_a", spent)
    assert bool(problem) == bool(slow.verdict("a.py::test_a", spent))


SECONDS = {"a::quick[1]": 0.4, "a::quick[2]": 0.4, **{f"a::slow[{i}]": 1.0 + i / 10 for i in range(9)}, "a::job": 9.0}
BLOCKS = {name: frozenset({1}) for name in SECONDS} | {"a::slow[5]": frozenset({1, 2})}


def test_a_function_keeps_its_quickest_case_and_what_runs_blocks_that_nothing_else_runs() -> None:
    rows = slow.choose(SECONDS, BLOCKS, budget=100)
    assert rows == {"a::slow": Row(sum(1.0 + i / 10 for i in range(9)), frozenset({"0"})), "a::job": Row(9.0)}
    cheaper = {name: seconds / 2 for name, seconds in SECONDS.items()}
    assert slow.choose(cheaper, BLOCKS, budget=100)["a::slow"].quick == {"0", "5"}
    assert slow.choose(cheaper, BLOCKS, budget=0.8)["a::slow"].quick == set()


def test_the_list_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = {"a.py::test_a": Row(12.3, frozenset({"x: 1", "[]-2"})), "b.py::test_b": Row(4.0)}
    slow.write(rows, tmp_path / "list.yaml")
    assert slow.read(tmp_path / "list.yaml") == rows


def test_every_row_names_a_function_that_there_is() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {name.split("::")[0] for name in slow.read()}}
    lost = [name for name in slow.read() if f"def {name.split('::')[-1]}(" not in texts[name.split("::")[0]]]
    assert lost == []
