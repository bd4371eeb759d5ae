"""Breaks one line of the package at a time, and tells which tests notice.

    python -m tests.mutation.blocks record build/blocks               first: which test runs which block
    python -m tests.mutation.source_mutants --recording build/blocks  every mutant against the tests that run its line
    python -m tests.mutation.source_mutants --recording build/blocks --marked "not slow and not full" --only drawn
    python -m tests.mutation.source_mutants --draw 100 --recording build/blocks      new mutants, into drawn.json

Each mutant is written into a copy of the checkout, so that processes which tests start run it, too. Its tests run
quickest first, in a process forked with TensorFlow imported, and end with the first that fails. Who shortens a test
runs this before and after: what the longer one noticed must be noticed still.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutation.blocks import Recording, numbered

ROOT = Path(__file__).parents[2]
PACKAGE = "autograph_rewrite"
DRAWN = Path(__file__).with_name("drawn.json")
COPIED = (PACKAGE, "strategies", "tools", "configs", "tests", "benchmarks", "examples", "docs")
SHARES = {
    "analysis": 20,
    "passes": 25,
    "resolve": 15,
    "codecs": 10,
    "runtime": 20,
    "load": 10,
}
"""How many of a hundred drawn mutants break which folder; of `analysis`, its rules."""

SECONDS = 120.0
"""How long the tests of a mutant may take that nobody notices: some lines are run by thousands of tests."""


class Mutant(NamedTuple):
    """One line of the package, broken.

    Attributes:
        name: of what is broken.
        path: of the file in the package.
        old: what stands there, once.
        new: what stands there instead.
    """

    name: str
    path: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a first block one example short",
        "plan/parts/batch_split.py",
        "return [block_begin(r, each, more) for r",
        "return [block_begin(r, each, max(more - 1, 0)) for r",
    ),
    Mutant(
        "a batch of a process begins too late",
        "passes/batch/slice_batch_inputs.py",
        "(self._const(what, self._at(ends[self._task + i]))",
        "(self._const(what, self._at(ends[self._task + i] + 1 - i))",
    ),
    Mutant(
        "other dimensions of a part are cut",
        "passes/batch/slice_batch_inputs.py",
        "before = (1 << self._axis) - 1",
        "before = 0",
    ),
    Mutant(
        "a sum is not narrowed again",
        "passes/collectives/all_reduce.py",
        'return cast(rewrite, total, fact.dtype, f"{name}/narrow")',
        "return total",
    ),
    Mutant(
        "a mean in the place of a sum",
        "passes/collectives/all_reduce.py",
        '{"merge_op": MERGES[reduction.op], "final_op": "Id"}',
        '{"merge_op": MERGES[reduction.op], "final_op": "Div"}',
    ),
    Mutant(
        "a sum of one replica too few",
        "passes/collectives/local_ops.py",
        'what="add_n", gather=(0,), N=count,',
        'what="add_n", gather=(0,), N=count - 1,',
    ),
    Mutant(
        "blocks are joined along the first dimension only",
        "passes/collectives/local_ops.py",
        'value, build.numbers(dim, "axis"), what="concat"',
        'value, build.numbers(0, "axis"), what="concat"',
    ),
    Mutant(
        "remainders go to the last replicas",
        "passes/collectives/block_bounds.py",
        'self._once("Less", "is_longer", ranks,',
        'self._once("LessEqual", "is_longer", ranks,',
    ),
    Mutant(
        "a process counts itself among those before",
        "passes/collectives/block_bounds.py",
        "[int(task < rewrite.task) for task",
        "[int(task <= rewrite.task) for task",
    ),
    Mutant(
        "padding to nothing",
        "passes/collectives/block_bounds.py",
        'self._once("Maximum", "padded", longest, self._const("least", 1))',
        'self._once("Maximum", "padded", longest, self._const("least", 0))',
    ),
    Mutant(
        "an empty block divides by zero",
        "passes/batch/pad_empty_blocks.py",
        "if fact.placement == PARTIAL:\n                    guard",
        "if fact.placement != PARTIAL:\n                    guard",
    ),
    Mutant(
        "a kernel is given no row",
        "passes/batch/pad_empty_blocks.py",
        'if has(node.op, "refuses_empty") or (',
        "if (",
    ),
    Mutant(
        "replicas draw the same numbers",
        "passes/batch/random_numbers.py",
        "bits = (STRIDE * replica) % 2**64",
        "bits = STRIDE % 2**64 * (replica > 0)",
    ),
    Mutant(
        "the first replica has another seed",
        "passes/batch/random_numbers.py",
        "seeds = [second ^ own_bits(r, 64)",
        "seeds = [second ^ own_bits(r + 1, 64)",
    ),
    Mutant(
        "what is drawn whole is not cut",
        "passes/batch/random_numbers.py",
        "return shape.is_local and count == 1 and made.placement == REPLICATED",
        "return False",
    ),
    Mutant(
        "an access is not ordered",
        "passes/base/order_accesses.py",
        "        other.add_control(one)\n",
        "        pass\n",
    ),
    Mutant(
        "an update does not wait for a read",
        "passes/base/order_accesses.py",
        "        update.add_control(read)\n",
        "        pass\n",
    ),
    Mutant(
        "a fetch leaves collectives waiting",
        "passes/reshard/insert_reshards.py",
        "            node.add_control(value.node)  # fetching",
        "            pass  # fetching",
    ),
    Mutant(
        "sizes of a block for those of the batch",
        "passes/reshard/global_sizes.py",
        "counted = None if crosses else sizes.product(sizes.local, batch)",
        "return value",
    ),
    Mutant(
        "half as much of a sum of halves",
        "codecs/builtin.py",
        "build.const(2.0**exponent, gradient.dtype",
        "build.const(2.0 ** (exponent - 1), gradient.dtype",
    ),
    Mutant(
        "what did not travel is forgotten",
        "passes/compression/compress.py",
        'rest = build.op("Sub", total, own, what="rest")',
        'rest = build.op("Sub", total, total, what="rest")',
    ),
    Mutant(
        "what travelled is kept, too",
        "passes/compression/compress.py",
        'rest = build.op("SelectV2", build.op("IsFinite", rest, what="keeps"), rest, before, what="residual")',
        'rest = build.op("SelectV2", build.op("IsFinite", rest, what="keeps"), total, before, what="residual")',
    ),
    Mutant(
        "a row belongs to two shards",
        "passes/sharding/block_rows.py",
        "[*(end - 1 for end in ends[1:-1]), np.iinfo(kind).max]",
        "[*(end for end in ends[1:-1]), np.iinfo(kind).max]",
    ),
    Mutant(
        "a shard is looked up by the rows of the whole",
        "passes/sharding/block_rows.py",
        'return inside, self.program.each(ids, ends[:-1], f"{scope}first")',
        'return inside, self.program.each(ids, [0] * len(rows), f"{scope}first")',
    ),
)


def broken_source(mutant: Mutant) -> str | None:
    """Return the file of a mutant with its line broken; None if the line is not there, or stands twice."""
    path = ROOT / PACKAGE / mutant.path
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    return source.replace(mutant.old, mutant.new) if source.count(mutant.old) == 1 else None


def drawn() -> tuple[Mutant, ...]:
    """Return the mutants that `--draw` has drawn."""
    return tuple(Mutant(*one) for one in json.loads(DRAWN.read_text())) if DRAWN.exists() else ()


def line_of(mutant: Mutant) -> int:
    """Return the first line of what a mutant breaks that it changes."""
    source = (ROOT / PACKAGE / mutant.path).read_text(encoding="utf-8")
    same = next(i for i, (one, other) in enumerate(zip(mutant.old, mutant.new, strict=False)) if one != other)
    return source[: source.index(mutant.old) + same].count("\n") + 1


# Drawing: small mistakes of the kinds that people make, each in one expression.

COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
            ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}  # fmt: skip
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "*", ast.BitOr: "&"}


def changes_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what can be written instead of a node, each with what kind of mistake it is."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARED:
            other = COMPARED[type(operator)]
            yield f"compares with {other}", f"{ast.unparse(left)} {other} {ast.unparse(right)}"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in COMPUTED:
            other = COMPUTED[type(operator)]
            yield f"computes with {other}", f"({ast.unparse(left)} {other} {ast.unparse(right)})"
        case ast.BoolOp(op=operator, values=[first, *_]):
            yield "leaves a condition out", ast.unparse(first)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negates no longer", ast.unparse(operand)
        case ast.Constant(value=bool() as value):
            yield "takes the other truth", str(not value)
        case ast.Constant(value=int() as value):
            yield "counts one more", str(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield "takes the other branch", ast.unparse(orelse)
            yield "takes one branch always", ast.unparse(body)
        case ast.Call(func=ast.Name(id="sorted" | "reversed"), args=[first]):
            yield "keeps the order", ast.unparse(first)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=words):
            other = {"min": "max", "max": "min"}[name]
            yield f"takes the {other}", f"{other}({', '.join(map(ast.unparse, (*args, *words)))})"


def mutants_of(path: Path) -> Iterator[tuple[int, Mutant]]:
    """Yield the mutants of a file, each with its line."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line.encode()))
    encoded = source.encode()
    relative = str(path.relative_to(ROOT / PACKAGE))
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Raise | ast.JoinedStr):
                    continue
                for kind, text in changes_of(node):
                    first, last = begins[node.lineno - 1], begins[node.end_lineno]
                    at, end = first + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
                    old = encoded[first:last].decode()
                    new = (encoded[first:at] + text.encode() + encoded[end:last]).decode()
                    if source.count(old) == 1 and old != new and "raise" not in old and 'f"' not in old:
                        yield node.lineno, Mutant(f"drawn: {function.name} {kind}", relative, old, new)


def draw(count: int, recording: Recording, seed: int) -> list[Mutant]:
    """Draw mutants of lines that tests run, one of a function at most."""
    rng = random.Random(seed)
    chosen: list[Mutant] = []
    for folder, share in SHARES.items():
        top = ROOT / PACKAGE / ("ops/rules" if folder == "analysis" else folder)
        found = [one for path in sorted(top.rglob("*.py")) for one in mutants_of(path)]
        rng.shuffle(found)
        functions: set[tuple[str, str]] = set()
        for line, mutant in found:
            function = mutant.path, mutant.name.split()[1]
            path = f"{PACKAGE}/{mutant.path}"
            if len(functions) == round(count * share / 100):
                break
            if function in functions or path not in numbered() or not recording.tests_of(path, line):
                continue
            functions.add(function)
            chosen.append(mutant)
    return chosen


# Running: a copy of the checkout for each process that works, and a fork for each mutant.


class Noticed:
    """A plugin of pytest: the first test that fails, how many ran before it, and for how long."""

    def __init__(self, seconds: float, marked: str) -> None:
        self.test = ""
        self.count = 0
        self.seconds = 0.0
        self._limit = seconds
        self._marked = marked

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what fails."""
        self.count += report.when == "call"
        self.seconds += report.duration
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what cannot even be imported."""
        if report.failed:
            self.test = report.nodeid

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """End after the first failure, or when the time is over."""
        return True if self.test or self.seconds > self._limit else None


class Result(NamedTuple):
    """What came of a mutant: the test that noticed or "", how many ran, and their seconds."""

    mutant: Mutant
    test: str
    count: int
    seconds: float


def chosen_tests(mutant: Mutant, recording: Recording, seconds: float) -> list[str]:
    """Return the tests that run a mutant's line: of each function the quickest case first, then the others.

    Limited to what takes as long as may be; that limit is met by lines that nearly everything runs.
    """
    found = recording.tests_of(f"{PACKAGE}/{mutant.path}", line_of(mutant))
    functions: set[str] = set()
    firsts, others = [], []
    for nodeid in found:
        function = nodeid.partition("[")[0]
        (others if function in functions else firsts).append(nodeid)
        functions.add(function)
    total, kept = 0.0, []
    for nodeid in (*firsts, *others):
        total += recording.seconds[nodeid]
        if total > seconds:
            break
        kept.append(nodeid)
    return kept


def run(mutant: Mutant, tests: Sequence[str], copy: Path, seconds: float, marked: str) -> Result:
    """Run tests in a forked process, in a copy of the checkout with the mutant in it."""
    path = copy / PACKAGE / mutant.path
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutant.old, mutant.new))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        os.chdir(copy)
        os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(one for one in sys.path if one not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", PACKAGE)]:
            del sys.modules[name]
        noticed = Noticed(seconds, marked)
        marks = ["-m", marked] if marked else ["-m", ""]
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *marks, *tests], plugins=[noticed])
        with os.fdopen(write, "wb") as out:
            pickle.dump((noticed.test, noticed.count, noticed.seconds), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as result:
        text = result.read()
    os.waitpid(child, 0)
    path.write_text(source)
    return Result(mutant, *(pickle.loads(text) if text else ("(the process ended)", 0, 0.0)))


def work(mutants: Sequence[Mutant], recording: Path, seconds: float, marked: str, out: Path) -> None:
    """Run mutants one after another, in a copy of this process's."""
    import tensorflow  # noqa: F401  the children need not

    known = Recording(recording)
    with tempfile.TemporaryDirectory() as folder, out.open("a") as lines:
        copy = Path(folder)
        for top in COPIED:
            shutil.copytree(ROOT / top, copy / top, ignore=shutil.ignore_patterns("__pycache__"))
        for file in (one for one in ROOT.iterdir() if one.is_file() and not one.name.startswith(".git")):
            shutil.copy(file, copy)
        for mutant in mutants:
            result = run(mutant, chosen_tests(mutant, known, seconds), copy, seconds, marked)
            lines.write(json.dumps([*result[0], *result[1:]]) + "\n")
            lines.flush()
            print(f"{mutant.path}: {mutant.name}: {result.test or 'MISSED'} ({result.count} tests, "
                  f"{result.seconds:.1f} s)", flush=True)  # fmt: skip


def main() -> int:
    """Break every line, one at a time; print who notices, and return 1 if nobody does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, required=True, help="folder of tests.mutation.blocks")
    parser.add_argument("--only", default="", help="the mutants whose name or path has this in it")
    parser.add_argument("--marked", default="not full", help="tests of this expression of marks only")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of tests for a mutant, at most")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.jsonl")
    parser.add_argument("--draw", type=int, default=0, help="draw so many instead, into drawn.json")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    given = parser.parse_args()
    recording = given.recording.resolve()
    if given.draw:
        DRAWN.write_text(json.dumps(draw(given.draw, Recording(recording), given.seed), indent=1) + "\n")
        return 0
    every = (*MUTANTS, *drawn())
    chosen = [mutant for mutant in every if given.only in f"{mutant.name} {mutant.path}"]
    if stale := [f"{mutant.path}: {mutant.name}" for mutant in chosen if broken_source(mutant) is None]:
        raise SystemExit("\n".join(["these files do not have the line, once, that is broken:", *stale]))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=work, args=(chosen[i :: given.jobs], recording, given.seconds, given.marked, given.out))
        for i in range(given.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows = [json.loads(line) for line in given.out.read_text().splitlines()]
    noticed = [row for row in rows if row[4]]
    seconds = statistics.median([row[6] for row in noticed] or [0.0])
    print(f"{len(noticed)} of {len(rows)} mutants were noticed; the first failure after {seconds:.1f} s (median)")
    return int(len(noticed) < len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
