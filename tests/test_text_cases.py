"""Each pass on small graphs in text (tests/cases): what it changes, and nothing else. None needs TensorFlow."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autograph_rewrite.passes.pipeline import PIPELINE
from tests import text_cases


@pytest.mark.parametrize("path", text_cases.cases(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_pass_changes_what_its_case_says(path: Path) -> None:
    text_cases.check(path)


def test_every_pass_has_cases() -> None:
    assert {path.parent.name for path in text_cases.cases()} == {one.name for one in PIPELINE} - {"expand"}


def test_a_case_fails_where_the_pass_changes_something_else(tmp_path: Path) -> None:
    path = next(path for path in text_cases.cases() if path.parent.name == "insert-reshards")
    spoilt = tmp_path / "insert-reshards" / path.name
    spoilt.parent.mkdir()
    spoilt.write_text(path.read_text(encoding="utf-8").replace("AddN", "MulN"), encoding="utf-8")
    with pytest.raises(AssertionError, match="UPDATE_CASES"):
        text_cases.check(spoilt)


def test_cases_run_without_tensorflow(fresh_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = (
        "import sys; from tests import text_cases; [text_cases.check(path) for path in text_cases.cases()[::7]]; "
        "assert 'tensorflow' not in sys.modules"
    )
    done = fresh_python(code, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
