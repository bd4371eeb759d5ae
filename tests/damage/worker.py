"""One process that reads damaged files, one after the other, within limits, and says what came of each.

A line `{"format": ..., "seed": ...}` on standard input is a case; the answer is a line on standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import re
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tests.damage.good_files import Good, make
from tests.damage.mutate import mutated

MEMORY = 2**30
"""Bytes that a case may take beyond what an idle process with TensorFlow has."""
SECONDS = 5.0
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def verdict(good: Good, seed: int, folder: Path, base: Path) -> dict[str, Any]:
    """Damage a file, let a verb read it, and return what came of it.

    Args:
        good: the whole file.
        seed: of the damage; it also chooses the verb.
        folder: an empty one, for the damaged file.
        base: a whole graph.
    """
    from autograph_rewrite.tools.cli import main

    target = folder / good.path.name
    if good.path.name == "saved_model.pb":
        shutil.copytree(good.path.parent, folder / "model")
        target = folder / "model" / good.path.name
    target.write_bytes(mutated(good.path.read_bytes(), seed))
    named = target.parent if good.path.name == "saved_model.pb" else target
    line = [word.format(base=base) if word == "{base}" else word for word in good.verbs[seed % len(good.verbs)]]
    line = [str(named) if word == "{}" else word for word in line]
    before = _listing(folder)
    out, err = io.StringIO(), io.StringIO()
    began, cpu = time.perf_counter(), time.process_time()
    faulthandler.dump_traceback_later(2 * SECONDS, file=sys.__stderr__)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: object = main(line)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        code = type(error).__name__
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    said = out.getvalue() + err.getvalue()
    return {
        "format": good.name, "seed": seed, "verb": line[0], "code": code,
        "seconds": round(seconds, 2), "cpu": round(cpu, 2),
        "outcome": _outcome(code, said, min(cpu, seconds), _listing(folder) != before), "said": err.getvalue()[-1500:],
    }  # fmt: skip


def _outcome(code: object, said: str, seconds: float, written: bool) -> str:
    if "MemoryError" in said or code == "MemoryError":
        return "memory"
    if "Traceback" in said or code not in (0, 1, 2):
        return "traceback"
    if seconds > SECONDS:
        return "slow"
    if written:
        return "written"
    if _CONTROL.search(said):
        return "controls"
    return "refused" if code == 2 else "read"


def _listing(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def main() -> None:
    """Answer until standard input ends."""
    root = Path(sys.argv[1])
    (root / "good").mkdir()
    goods = make(root / "good")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    os.environ["TMPDIR"] = str(root)
    print(json.dumps({"ready": sorted(goods)}), file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        folder = root / "case"
        folder.mkdir()
        os.chdir(folder)
        found = verdict(goods[case["format"]], case["seed"], folder, goods["pb"].path)
        os.chdir(root)
        shutil.rmtree(folder)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
