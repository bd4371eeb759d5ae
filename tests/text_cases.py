"""Text cases of passes: a graph, and the lines that one pass changes in it, in a file of the pass's folder.

    # What it is about, in a sentence.
    # config: {devices: [CPU:0, CPU:1]}
    # target %train
    %x: float32[?,3] = Placeholder()
    ...
    ===
    + %dw/add_n: float32 = AddN(all(%dw))  # insert-reshards for dw
    - %dead

All passes before the one that the folder is named after run first. A line begins with `+` where it is new or another
one, with `-` where its node is gone; a refusal is `!` and its message. UPDATE_CASES=1 writes what comes out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from autograph_rewrite.api import request
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.optimize import comments_of, optimize
from autograph_rewrite.ir.quiet import no_garbage_collection
from autograph_rewrite.ir.text import line
from autograph_rewrite.load.normal import normalise_original
from autograph_rewrite.load.printed import from_printed
from autograph_rewrite.passes.pass_manager import run_passes
from autograph_rewrite.passes.pipeline import PIPELINE
from autograph_rewrite.passes.rewriting import Rewrite
from autograph_rewrite.plan.config import Config

FOLDER = Path(__file__).parent / "cases"
BORDER = "==="
IDLE = "(nothing to do)"


def cases() -> list[Path]:
    """Return the files of all cases."""
    return sorted(FOLDER.glob("*/*.txt"))


def check(path: Path) -> None:
    """Run a case, and compare what its pass changes with what stands below the border."""
    given, _, expected = path.read_text(encoding="utf-8").partition(f"\n{BORDER}\n")
    found = changed(given, path.parent.name)
    if os.environ.get("UPDATE_CASES"):
        path.write_text(f"{given}\n{BORDER}\n{found}", encoding="utf-8")
    else:
        assert found.splitlines() == expected.splitlines(), f"{path}: UPDATE_CASES=1 writes what came out"


def changed(given: str, name: str) -> str:
    """Return what one pass changes in a graph, or why it or one before it refuses."""
    config = Config.of(_config(given))
    position = [one.name for one in PIPELINE].index(name)
    with no_garbage_collection():
        try:
            item = normalise_original(from_printed(given, {}))
            rewrite = optimize(item, request(item, config), PIPELINE[:position])
            before, last = _lines(rewrite), PIPELINE[position]
            if not last.when(rewrite):
                return f"{IDLE}\n"
            run_passes(rewrite, [last], verify=True)
        except RewriteError as error:
            return f"! {type(error).__name__}: {error.problem}\n"
        return _difference(before, _lines(rewrite))


def _config(given: str) -> object:
    mark = "# config:"
    said = next((text for text in given.splitlines() if text.startswith(mark)), None)
    assert said is not None, "a case begins with its configuration"
    return yaml.safe_load(said.removeprefix(mark))


def _lines(rewrite: Rewrite) -> dict[str, str]:
    comments = comments_of(rewrite)
    return {node.name: f"{line(node)}{_behind(comments(node))}" for node in rewrite.graph}


def _behind(comment: str) -> str:
    return f"  # {comment}" if comment else ""


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    lines = [f"+ {text}" for name, text in after.items() if before.get(name) != text]
    lines += [f"- %{name}" for name in before if name not in after]
    return "".join(f"{text}\n" for text in lines) or "(no change)\n"
