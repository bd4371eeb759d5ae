"""Breaks one line of the package at a time, and tells which test files notice.

    python -m tests.mutation.source_mutants                       every mutant against FILES
    python -m tests.mutation.source_mutants --only cast tests/passes/compression
    python -m tests.mutation.source_mutants --list

Each mutant has a process of its own, forked with TensorFlow imported, in which an import hook compiles the broken line;
no file changes. A file has noticed with its first test that fails, and its others are left out. Who shortens a test
runs this before and after: what the longer one noticed must be noticed still.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "autograph_rewrite"
FILES = (
    "tests/passes/test_text_cases.py",
    "tests/passes/reshard",
    "tests/passes/emit",
    "tests/passes/batch",
    "tests/passes/compression/test_numerics.py",
    "tests/passes/variable_sharding/test_shard_variables.py",
)
"""Where a mutant is looked for if nothing else is said: the tests of single passes, quickest first."""


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
        'return cast(context, total, fact.dtype, f"{name}/narrow")',
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
        "[int(task < context.task) for task",
        "[int(task <= context.task) for task",
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
        "if node.op in REFUSES_EMPTY or (",
        "if (",
    ),
    Mutant(
        "replicas draw the same numbers",
        "passes/batch/decorrelate_randomness.py",
        "bits = (STRIDE * replica) % 2**64",
        "bits = STRIDE % 2**64 * (replica > 0)",
    ),
    Mutant(
        "the first replica has another seed",
        "passes/batch/decorrelate_randomness.py",
        "seeds = [second ^ own_bits(r, 64)",
        "seeds = [second ^ own_bits(r + 1, 64)",
    ),
    Mutant(
        "what is drawn whole is not cut",
        "passes/batch/split_draws.py",
        "return shape.is_local and count == 1 and made.placement == REPLICATED",
        "return False",
    ),
    Mutant(
        "an access is not ordered",
        "passes/emit/order_accesses.py",
        "        other.add_control(one)\n",
        "        pass\n",
    ),
    Mutant(
        "an update does not wait for a read",
        "passes/emit/read_before_update.py",
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
        "codecs/cast16.py",
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
        "passes/variable_sharding/sharded_lookup.py",
        'limits.append(self._add("Less", [flat',
        'limits.append(self._add("LessEqual", [flat',
    ),
    Mutant(
        "a shard is looked up by the rows of the whole",
        "passes/variable_sharding/sharded_lookup.py",
        'local = self._add("Sub", [local, self._id(ids, offsets[shard])]',
        'local = self._add("Sub", [local, self._id(ids, 0)]',
    ),
)


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module that a mutant breaks, and compiles it so."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"{PACKAGE}.{mutant.path.removesuffix('.py').replace('/', '.')}"
        self._path = ROOT / PACKAGE / mutant.path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module of the mutant, and no other."""
        return (
            importlib.util.spec_from_file_location(fullname, self._path, loader=self)
            if fullname == self._name
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the broken source."""
        exec(self._code(), module.__dict__)

    def _code(self) -> CodeType:
        source = broken_source(self._mutant)
        assert source is not None
        return compile(source, str(self._path), "exec")


def broken_source(mutant: Mutant) -> str | None:
    """Return the file of a mutant with its line broken; None if the line is not there, or stands twice."""
    path = ROOT / PACKAGE / mutant.path
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    return source.replace(mutant.old, mutant.new) if source.count(mutant.old) == 1 else None


class Noticed:
    """A plugin of pytest: the files whose tests fail, of each the first that does."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}
        self.count = 0

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Leave out the tests of a file that has noticed."""
        return True if item.nodeid.partition("::")[0] in self.tests else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what fails."""
        self.count += report.when == "call"
        if report.failed:
            self.tests.setdefault(report.nodeid.partition("::")[0], report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what cannot even be imported."""
        if report.failed:
            self.tests.setdefault(report.nodeid, report.nodeid)


def noticing(mutant: Mutant | None, arguments: Sequence[str]) -> tuple[dict[str, str], int]:
    """Run tests in a forked process; return the files that notice, with a test of each, and how many tests ran."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        if mutant is not None:
            sys.meta_path.insert(0, Broken(mutant))
        noticed = Noticed()
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *arguments], plugins=[noticed])
        with os.fdopen(write, "wb") as out:
            pickle.dump((noticed.tests, noticed.count), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as result:
        text = result.read()
    os.waitpid(child, 0)
    found: tuple[dict[str, str], int] = pickle.loads(text) if text else ({"(the process ended)": ""}, 0)
    return found


def main() -> int:
    """Break every line in its turn; print who notices, and return 1 if nobody does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=FILES, help="files, folders or names of tests")
    parser.add_argument("--only", default="", help="the mutants whose name or path has this in it")
    parser.add_argument("--first", action="store_true", help="stop at the first test that notices")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    given = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if given.only in f"{mutant.name} {mutant.path}"]
    if stale := [f"{mutant.path}: {mutant.name}" for mutant in chosen if broken_source(mutant) is None]:
        raise SystemExit("\n".join(["these files do not have the line, once, that is broken:", *stale]))
    if given.list:
        print("\n".join(f"{mutant.path}: {mutant.name}" for mutant in chosen))
    if given.list:
        return 0
    import tensorflow  # noqa: F401  the children need not

    arguments = [*given.tests, *(["-x"] if given.first else [])]
    missed = 0
    for mutant in chosen:
        began = time.monotonic()
        tests, count = noticing(mutant, arguments)
        missed += not tests
        print(f"{mutant.name} ({mutant.path}): {len(tests)} files, {count} tests, {time.monotonic() - began:.0f} s")
        print("".join(f"    {test or path}\n" for path, test in tests.items()) or "    MISSED\n", end="", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutants were noticed")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
