"""Which test runs which block of the package: a plugin of pytest that also sees forked, killed and started processes.

    python -m tests.mutation.blocks record build/blocks [tests ...]    runs the tests, two at a time
    python -m tests.mutation.blocks tests build/blocks passes/emit/expand.py:120

Each block of statements begins with one assignment to a file that the process has mapped into memory, so nothing is
lost where a worker is killed, and the tests take a few percent longer. coverage.py takes twice as long over code that
is mostly Python, and loses what killed workers ran.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.abc
import importlib.machinery
import json
import marshal
import mmap
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = "AUTOGRAPH_BLOCKS"
"""The environment variable that names the folder of a recording; its tests' processes inherit it."""

HITS = "__block_hits__"
RENEW = "__renew_block_hits__"
"""What `sys` has in a process that is recorded: a function that begins a file of its own after a fork."""

BETWEEN = "between"
"""What runs while a test is set up, and between two tests: fixtures of a module, which all its tests use."""


class Block(NamedTuple):
    """Statements that run together: their list, where a statement goes in front of them, and their lines."""

    body: list[ast.stmt]
    at: int
    first: int
    last: int


def blocks_of(tree: ast.Module) -> Iterator[Block]:
    """Yield the blocks below functions, always in the same order; an `elif` is a block of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if not isinstance(body, list) or not body or not isinstance(body[0], ast.stmt):
                continue
            if field == "orelse" and isinstance(node, ast.If) and len(body) == 1 and isinstance(body[0], ast.If):
                continue  # its test belongs to the block outside, its body is found by itself
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            has_docstring = is_function and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            yield Block(body, int(has_docstring), body[0].lineno, body[-1].end_lineno or body[-1].lineno)


@cache
def numbered() -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Return for each file of the package the number of its first block, and the lines of each block."""
    found, number = {}, 0
    for path in sorted(p for top in ("autograph_rewrite", "strategies", "tools") for p in (ROOT / top).rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            lines = [(block.first, block.last) for block in blocks_of(ast.parse(path.read_text(encoding="utf-8")))]
            found[str(path.relative_to(ROOT))] = (number, lines)
            number += len(lines)
    return found


class Marking(importlib.abc.MetaPathFinder):
    """Finds modules of the package as others do, and lets each block of them set its byte."""

    def __init__(self, hits: mmap.mmap) -> None:
        self.hits = hits
        self._asks = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the package with a loader that marks its blocks."""
        if self._asks or fullname.split(".")[0] != "autograph_rewrite":
            return None
        self._asks = True
        try:
            found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._asks = False
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = MarkingLoader(spec.loader.name, spec.loader.path, self.hits)
        return spec


class MarkingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module with a mark at the beginning of each block."""

    def __init__(self, name: str, path: str, hits: mmap.mmap) -> None:
        super().__init__(name, path)
        self._hits = hits

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the module with its marks, once for all processes."""
        path = Path(self.get_filename(fullname))
        known = numbered().get(os.path.relpath(path, ROOT))
        if known is None:
            return super().get_code(fullname)
        source = path.read_bytes()
        kept = Path(os.environ[FOLDER]) / "code" / hashlib.sha256(str(path).encode() + source).hexdigest()
        if kept.exists():
            code: CodeType = marshal.loads(kept.read_bytes())
            return code
        tree = ast.parse(source)
        for i, block in enumerate(list(blocks_of(tree))):
            mark = ast.parse(f"{HITS}[{known[0] + i}] = 1").body[0]
            for node in ast.walk(mark):
                ast.copy_location(node, block.body[0])
            block.body.insert(block.at, mark)
        code = compile(tree, str(path), "exec", dont_inherit=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(marshal.dumps(code))
        partial.replace(kept)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the bytes that its marks set."""
        module.__dict__[HITS] = self._hits
        super().exec_module(module)


def opened(folder: Path) -> mmap.mmap:
    """Map a new file for the marks of this process, beside which the name of the test stands that it runs for."""
    size = max(number + len(lines) for number, lines in numbered().values())
    path = folder / f"{os.getpid()}-{time.monotonic_ns()}"
    path.with_suffix(".test").write_text(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
    with path.with_suffix(".hits").open("wb+") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def begin(folder: Path) -> None:
    """Let this process mark its blocks from now on."""
    finder = Marking(opened(folder))
    sys.meta_path.insert(0, finder)

    def renew() -> None:
        finder.hits = opened(folder)
        for module in list(sys.modules.values()):
            if HITS in getattr(module, "__dict__", ()):
                module.__dict__[HITS] = finder.hits

    setattr(sys, RENEW, renew)
    setattr(sys, HITS, finder.hits)


class Recorder:
    """A plugin of pytest: which blocks this process has run for each test, and how long tests take."""

    def __init__(self, hits: mmap.mmap, folder: Path) -> None:
        self._hits = hits
        self._log = (folder / f"{os.getpid()}.jsonl").open("a")

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Take what ran since the last test: most of it modules at their import."""
        self._take(nodeid, BETWEEN)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note what ran in a phase of a test, and for how long."""
        self._take(report.nodeid, "call" if report.when == "call" else BETWEEN, round(report.duration, 4))

    def _take(self, nodeid: str, phase: str, seconds: float = 0.0) -> None:
        hits = [i for i, hit in enumerate(self._hits[:]) if hit]
        self._hits[:] = bytes(len(self._hits))
        self._log.write(json.dumps([nodeid, phase, seconds, hits]) + "\n")
        self._log.flush()


def pytest_configure(config: Any) -> None:
    """Record this process's tests; with xdist, those of its workers."""
    hits = getattr(sys, HITS, None)
    is_controller = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if hits is not None and not is_controller:
        config.pluginmanager.register(Recorder(hits, Path(os.environ[FOLDER])))


def record(folder: Path, tests: Sequence[str]) -> int:
    """Run tests with their blocks recorded; return pytest's exit code."""
    (folder / "code").mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        f"from tests.mutation import blocks\nfrom pathlib import Path\n"
        f"blocks.begin(Path({str(folder)!r}))\n"
    )
    environ = {**os.environ, FOLDER: str(folder), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutation.blocks", *(tests or ["-n2", "-q"])]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


class Recording:
    """What a recording tells: the tests that run a line, the ones that are set up with it, and their seconds."""

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[int, set[str]] = defaultdict(set)
        self._modules: dict[int, set[str]] = defaultdict(set)
        for log in folder.glob("*.jsonl"):
            for line in log.read_text().splitlines():
                nodeid, phase, seconds, hits = json.loads(line)
                self.seconds[nodeid] += seconds
                for hit in hits:
                    if phase == BETWEEN:
                        self._modules[hit].add(nodeid.partition("::")[0])
                    else:
                        self._tests[hit].add(nodeid)
        for started in folder.glob("*.test"):
            if nodeid := started.read_text():
                for hit, value in enumerate(started.with_suffix(".hits").read_bytes()):
                    if value:
                        self._tests[hit].add(nodeid)

    def blocks(self) -> dict[str, frozenset[int]]:
        """Return the blocks that each test runs."""
        found: dict[str, set[int]] = defaultdict(set)
        for hit, tests in self._tests.items():
            for nodeid in tests:
                found[nodeid].add(hit)
        return {nodeid: frozenset(hits) for nodeid, hits in found.items()}

    def tests_of(self, path: str, line: int) -> list[str]:
        """Return the tests that run the innermost block with a line, quickest first.

        Where fixtures of a module run it, which a later test of that module may use, so does each of its tests; where
        none runs it but at import, the answer is all tests of the modules that import it.
        """
        number, blocks = numbered()[path]
        inside = [(last - first, i) for i, (first, last) in enumerate(blocks) if first <= line <= last]
        if not inside:
            return []
        hit = number + min(inside)[1]
        found = {nodeid for nodeid in self.seconds if nodeid.partition("::")[0] in self._modules[hit]}
        return sorted(found | self._tests[hit], key=lambda nodeid: self.seconds[nodeid])


def main() -> int:
    """Record, or tell which tests run a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "tests"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", nargs="*", help="arguments of pytest; or FILE:LINE of the package")
    given, more = parser.parse_known_args()
    if given.verb == "record":
        return record(given.folder.resolve(), [*given.what, *more])
    recording = Recording(given.folder)
    for what in given.what:
        path, _, line = what.partition(":")
        path = path if path in numbered() else f"autograph_rewrite/{path}"
        print("\n".join(recording.tests_of(path, int(line))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
