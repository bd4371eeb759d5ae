"""An earlier commit, installed in a folder of its own, and what it makes of some cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.oracle.recording import Recording
from tests.oracle.rewrites import Case, outcomes

ROOT = Path(__file__).parents[2]


class NoCommit(Exception):
    """The repository does not have a commit."""


@dataclass(frozen=True)
class Request:
    """What is asked of the earlier code, in a process of its own."""

    items: str
    cases: Sequence[Case]
    jobs: int
    ignored: Collection[str]
    texts: str | None = None
    """The folder for printed forms, where they are asked for."""


def git(*arguments: str, **environment: str) -> str:
    """What a git command in this repository prints."""
    every = {**os.environ, **environment}
    done = subprocess.run(("git", *arguments), cwd=ROOT, env=every, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def head() -> str:
    """The commit that is checked out; with a plus sign if the package differs from it."""
    changed = git("status", "--porcelain", "--", "autograph_rewrite", "strategies", "tools", "configs", "setup.py")
    return git("rev-parse", "HEAD") + ("+" if changed else "")


@contextmanager
def installed(revision: str) -> Iterator[Path]:
    """A folder with the package, and the tests, of a revision.

    Raises:
        NoCommit: there is no such revision.
    """
    try:
        commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise NoCommit(f"this repository has no commit {revision}") from None
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        tree, site = Path(folder, "tree"), Path(folder, "site")
        # With an index of its own the repository keeps no trace of this, however it ends.
        index = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        git("read-tree", commit, **index)
        git("checkout-index", "--all", f"--prefix={tree}/", **index)
        command = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps")
        subprocess.run((*command, "--no-build-isolation", "--target", str(site), str(tree)), check=True)
        # The oracle of that commit knows its internals; a commit from before the oracle has today's.
        has_oracle = (tree / "tests/oracle/earlier.py").exists()
        (site / "tests").symlink_to((tree if has_oracle else ROOT) / "tests")
        yield site


def ask(site: Path, request: Request) -> Recording:
    """Let the package that is installed in a folder answer."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(json.dumps({**asdict(request), "ignored": sorted(request.ignored)}))
        # The folder that Python starts in comes first, before what is installed in its environment.
        command = (sys.executable, "-m", "tests.oracle.earlier", str(question), str(answer))
        subprocess.run(command, cwd=site, env={**os.environ, "PYTHONPATH": ""}, check=True)
        return Recording.of_json(answer.read_text())


def main(question: Path, answer: Path) -> None:
    """Answer a request."""
    import autograph_rewrite as ar

    assert Path(ar.__file__).is_relative_to(Path.cwd()), f"{ar.__file__} is not the package that was asked"
    asked = json.loads(question.read_text())
    cases = [Case(**case) for case in asked["cases"]]
    texts = None if asked["texts"] is None else Path(asked["texts"])
    found = dict(outcomes(Path(asked["items"]), cases, asked["jobs"], asked["ignored"], texts))
    answer.write_text(Recording("", found).to_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
