"""Whether a change of the code leaves every rewritten graph and every resolved plan as they were.

python -m tests.oracle.digests compare                    with what is recorded; exit code 1 where anything differs
python -m tests.oracle.digests compare --only transformer --names-may-differ
python -m tests.oracle.digests compare --against HEAD~3   with what that commit makes of the same items, made anew
python -m tests.oracle.digests record                     after a change that is meant; the recording is committed

The recording is a file in the repository that holds the items, the digests and the commit that they are of. The texts
in which a difference shows are made by that commit when there is one: nothing that is recorded can then be out of step
with the code that it is said to come from, and the file stays small.

Each graph has two digests: of its bytes, and modulo the names of nodes that passes have added. Attributes that say
which pass made a node are in neither.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.oracle import earlier, recording
from tests.oracle.differences import Place, by_turns, counts, first_place, kinds, only_names, report
from tests.oracle.graphs import PROVENANCE
from tests.oracle.recording import Recording
from tests.oracle.rewrites import Case, Outcome, Texts, outcomes

EXPLAINED = 20


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    verb: str
    file: Path
    only: str
    jobs: int
    against: str
    ignored: frozenset[str]
    explained: int
    names_may_differ: bool
    trace: bool


def record(options: Options) -> int:
    """Make the recording: stored items stay as they are, new ones are traced."""
    commit = earlier.head()
    if commit.endswith("+"):
        print("the package differs from the commit that the recording would name: commit it first", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        items, begin = Path(folder), time.monotonic()
        if options.file.exists() and not options.trace:
            recording.read(options.file, items)
        kept = [file.stem for file in items.glob("*.ar")]
        quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = (sys.executable, "-m", "tests.oracle.items", folder, *kept)
        subprocess.run(command, cwd=earlier.ROOT, env=quiet, check=True)
        found = dict(outcomes(items, _cases(items), options.jobs))
        recording.write(Recording(commit, found), items, options.file)
        print(f"recorded {_summary(found, begin)}; {options.file.stat().st_size:,} bytes")
    return 0


def compare(options: Options) -> int:
    """Rewrite the stored items again, and print what differs."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        items, begin = Path(folder), time.monotonic()
        kept = recording.read(options.file, items)
        old = {case: one for case, one in kept.outcomes.items() if options.only in str(case)}
        revision = options.against or kept.commit
        if options.against or options.ignored != PROVENANCE:
            with earlier.installed(revision) as site:
                asked = earlier.Request(folder, list(old), options.jobs, options.ignored)
                old = dict(earlier.ask(site, asked).outcomes)
        new = dict(outcomes(items, list(old), options.jobs, options.ignored))
        differing = [case for case in sorted(new, key=str) if kinds(old[case], new[case])]
        seconds = time.monotonic() - begin
        shown = by_turns(differing)[: options.explained]
        for line in report(old, new, _places(shown, items, revision, options) if shown else {}):
            print(line)
    named = sum(only_names(old[case], new[case]) for case in differing)
    if len(shown) < len(differing):
        print(f"the first line of {len(shown)} is shown; --explain {len(differing)} shows that of all")
    print(f"compared {counts(new.values())}, with {revision[:12]}, in {seconds:.0f} s")
    print(f"{len(differing)} differ, {named} of them in names of added nodes only" if differing else "nothing differs")
    return int(len(differing) > (named if options.names_may_differ else 0))


def _cases(items: Path) -> Sequence[Case]:
    import autograph_rewrite as ar
    from tests.oracle import table

    return list(table.cases({file.stem: ar.GraphItem.load(file) for file in sorted(items.glob("*.ar"))}))


def _places(cases: Sequence[Case], items: Path, revision: str, options: Options) -> Mapping[Case, Place | None]:
    """Where cases first differ: both sides make their texts again."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as old, tempfile.TemporaryDirectory(prefix="oracle-") as new:
        try:
            with earlier.installed(revision) as site:
                earlier.ask(site, earlier.Request(str(items), cases, options.jobs, options.ignored, old))
        except earlier.NoCommit as error:
            print(f"no lines can be shown: {error}, of which the recording is (--against names another one)")
            return {}
        made = dict(outcomes(items, cases, options.jobs, options.ignored, Path(new)))
        return {case: first_place(Texts.read(Path(old), case), Texts.read(Path(new), case)) for case in made}


def _summary(found: Mapping[Case, Outcome], begin: float) -> str:
    items = len({case.item for case in found})
    return f"{len(found):,} rewrites of {items} items: {counts(found.values())}, in {time.monotonic() - begin:.0f} s"


def parsed(arguments: Collection[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.digests")
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("--file", type=Path, default=recording.FILE, help="of the recording")
    parser.add_argument("--only", default="", help="compare the rewrites with this text in their name")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes rewrite")
    parser.add_argument("--against", default="", metavar="REV", help="compare with what this commit makes now")
    parser.add_argument("--ignore", action="append", default=[], metavar="ATTR", help="an attribute that may differ")
    parser.add_argument("--explain", type=int, default=EXPLAINED, metavar="N", help="show the first line of so many")
    parser.add_argument("--names-may-differ", action="store_true", help="exit with 0 if only names of added nodes do")
    parser.add_argument("--trace", action="store_true", help="record: trace all items anew (needs TensorFlow)")
    given = parser.parse_args(None if arguments is None else list(arguments))
    return Options(
        verb=given.verb,
        file=given.file,
        only=given.only,
        jobs=given.jobs,
        against=given.against,
        ignored=PROVENANCE | set(given.ignore),
        explained=given.explain,
        names_may_differ=given.names_may_differ,
        trace=given.trace,
    )


def main(arguments: Collection[str] | None = None) -> int:
    """Return the exit code."""
    options = parsed(arguments)
    return record(options) if options.verb == "record" else compare(options)


if __name__ == "__main__":
    raise SystemExit(main())
