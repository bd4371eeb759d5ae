"""Each pass on small graphs in text (tests/cases): what it changes, and nothing else. None needs TensorFlow."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autograph_rewrite.passes.pass_pipeline import PIPELINE
from tests.support import text_cases


@pytest.mark.parametrize("path", text_cases.cases(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_pass_changes_what_its_case_says(path: Path) -> None:
    text_cases.check(path)


def test_every_pass_has_cases() -> None:
    assert {path.parent.name for path in text_cases.cases()} == {one.name for one in PIPELINE} - {"expand"}


@pytest.mark.parametrize("folder", sorted({path.parent for path in text_cases.cases()}), ids=lambda folder: folder.name)
def test_some_case_shows_what_a_pass_does(folder: Path) -> None:
    expected = [text_cases.parts(path)[1] for path in folder.glob("*.txt")]
    assert len(expected) > 1
    assert any(text.startswith(("+ ", "- ", "! ")) for text in expected)


@pytest.mark.parametrize("path", text_cases.cases(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_case_begins_with_a_sentence(path: Path) -> None:
    first = text_cases.parts(path)[0].splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


@pytest.mark.parametrize(
    ("case", "found", "other"),
    [("lower-reshards/dense_layer", "AddN", "MulN"), ("resolve-plan/mirrored", "12 bytes", "16 bytes")],
    ids=["a line of the graph", "a finding"],
)
def test_a_case_fails_where_something_else_comes_out(
    case: str, found: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UPDATE_CASES", raising=False)
    text = (text_cases.FOLDER / f"{case}.txt").read_text(encoding="utf-8")
    spoilt = tmp_path / f"{case}.txt"
    spoilt.parent.mkdir()
    assert found in text
    spoilt.write_text(text.replace(found, other), encoding="utf-8")
    with pytest.raises(AssertionError, match="UPDATE_CASES"):
        text_cases.check(spoilt)


def test_cases_run_without_tensorflow(fresh_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = (
        "import sys; from tests.support import text_cases; "
        "[text_cases.check(path) for path in text_cases.cases()[::7]]; "
        "assert 'tensorflow' not in sys.modules"
    )
    done = fresh_python(code, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
