"""A user's script is checked against the types of the public names: `stepz=3` is an error, and what is right is none.

`tests/typing/mistakes.py` says of each line which error belongs there. An installed package is one tree; here the trees
that are installed as one are linked together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPTS = ROOT / "tests" / "typing"
CACHE = ROOT / ".mypy_cache" / "users"  # the first run of all takes half a minute, the next ones a few seconds
EXPECTED = re.compile(r"# E: ([a-z-]+)$", re.MULTILINE)
FOUND = re.compile(r"^.*/(\w+\.py):(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> list[tuple[str, int, str]]:
    """Return what mypy finds in the scripts: file, line and kind of each error."""
    package = CACHE / "site" / "autograph_rewrite"
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        old.unlink()
    own = [path for path in (ROOT / "autograph_rewrite").iterdir() if path.name != "__pycache__"]
    for source in [*own, *(ROOT / top for top in ("strategies", "tools", "configs"))]:
        (package / source.name).symlink_to(source)
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    line = [sys.executable, "-m", "mypy", *options, f"--cache-dir={CACHE}", *map(str, SCRIPTS.glob("*.py"))]
    given = {**os.environ, "MYPYPATH": str(package.parent)}
    ended = subprocess.run(line, cwd=CACHE, env=given, capture_output=True, text=True, timeout=170, check=False)
    assert ended.stderr == ""
    return [(name, int(number), kind) for name, number, kind in FOUND.findall(ended.stdout)]


def expected(script: Path) -> list[tuple[str, int, str]]:
    text = script.read_text(encoding="utf-8")
    return [(script.name, text.count("\n", 0, one.start()) + 1, one[1]) for one in EXPECTED.finditer(text)]


@pytest.mark.parametrize("name", ["correct.py", "mistakes.py"])
def test_a_type_checker_finds_the_mistakes_of_a_script_and_nothing_else(
    found: list[tuple[str, int, str]], name: str
) -> None:
    assert [one for one in found if one[0] == name] == expected(SCRIPTS / name)


def test_the_marker_of_types_is_installed() -> None:
    assert (ROOT / "autograph_rewrite" / "py.typed").exists()
    assert '"autograph_rewrite": ["py.typed"]' in (ROOT / "setup.py").read_text(encoding="utf-8")
