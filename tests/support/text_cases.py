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
one, with `-` where it is gone; a refusal is `!` and its message. What a pass finds besides the graph has lines, too
(`found_text`). UPDATE_CASES=1 writes what comes out.

    # task: 1                            the graph of another process
    # lowerings: {dw: add_n}             the plan has its edges, and somebody has edited them
    # captured %w: float32[3,1]          the variable of a placeholder belongs to a function
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from autograph_rewrite.compile import request
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.pass_states import optimize, placements_of
from autograph_rewrite.ir.format.printer import line
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.files import from_printed
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.pass_manager import run_passes
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.pass_pipeline import PIPELINE, resolve
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import Variable
from tests.support.found_text import found as found_by
from tests.support.paths import CASES

FOLDER = CASES
BORDER = "==="
IDLE = "(nothing to do)"


def cases() -> list[Path]:
    """Return the files of all cases; those in `mesh` are of no single pass (`mesh_cases`)."""
    return sorted(path for path in FOLDER.glob("*/*.txt") if path.parent.name != "mesh")


def parts(path: Path) -> tuple[str, str]:
    """Return what stands above the border of a case, and below."""
    given, _, expected = path.read_text(encoding="utf-8").partition(f"\n{BORDER}\n")
    return given, expected


def check(path: Path) -> None:
    """Run a case, and compare what its pass changes with what stands below the border."""
    given, expected = parts(path)
    found = changed(given, path.parent.name)
    if os.environ.get("UPDATE_CASES"):
        path.write_text(f"{given}\n{BORDER}\n{found}", encoding="utf-8")
    else:
        assert found.splitlines() == expected.splitlines(), f"{path}: UPDATE_CASES=1 writes what came out"


def changed(given: str, name: str) -> str:
    """Return what one pass changes in a graph, or why it or one before it refuses."""
    config, task = Config.of(_said(given, "config")), _said(given, "task", 0)
    position = [one.name for one in PIPELINE].index(name)
    with no_garbage_collection():
        try:
            item = normalise_original(_with_captured(from_printed(given, {}), given))
            plan = _edited(item, request(item, config), _said(given, "lowerings", {}))
            rewrite = optimize(item, plan, PIPELINE[:position], task=task)
            before, last = _lines(rewrite), PIPELINE[position]
            if not last.when(rewrite):
                return f"{IDLE}\n"
            run_passes(rewrite, [last], verify=True)
        except RewriteError as error:
            return f"! {type(error).__name__}: {error.problem}\n"
        return _difference(before, _lines(rewrite))


def optimized(given: str, last: str) -> tuple[Rewrite, Config]:
    """Return the rewrite of a case when all passes up to one have run, and the configuration of the case."""
    config, position = Config.of(_said(given, "config")), [one.name for one in PIPELINE].index(last)
    item = normalise_original(_with_captured(from_printed(given, {}), given))
    return optimize(item, request(item, config), PIPELINE[: position + 1], task=_said(given, "task", 0)), config


def _said(given: str, key: str, default: Any = None) -> Any:
    mark = f"# {key}:"
    said = next((text for text in given.splitlines() if text.startswith(mark)), None)
    assert said is not None or default is not None, f"a case says its {key}"
    return default if said is None else yaml.safe_load(said.removeprefix(mark))


def _edited(item: GraphItem, plan: Plan, lowerings: Mapping[str, str]) -> Plan:
    """Return the plan with its edges, lowered as somebody has written; the request alone where nobody has."""
    if not lowerings:
        return plan
    edges = resolve(item, plan).edges
    return plan.with_edges(replace(edge, lowering=lowerings.get(edge.value, edge.lowering)) for edge in edges)


def _with_captured(item: GraphItem, given: str) -> GraphItem:
    """Return the item of a function: the placeholders of its captured variables are no inputs."""
    captured = {}
    for name, dtype, dims in re.findall(r"^# captured %(\S+): (\w+)\[([\d,]*)\]$", given, re.MULTILINE):
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
        captured[name] = Variable(name, name, dtype, shape, trainable=True, captured=True)
    inputs = {name: info for name, info in item.inputs.items() if name not in captured}
    return replace(item, inputs=inputs, variables={**item.variables, **captured})


def _lines(rewrite: Rewrite) -> dict[str, str]:
    """Return the line of each node, and of each finding, by what it is about."""
    placements = placements_of(rewrite)
    nodes = {f"%{node.name}": line(node, placements=placements, places=True) for node in rewrite.graph}
    return nodes | {text: text for text in found_by(rewrite)}


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    lines = [f"+ {text}" for name, text in after.items() if before.get(name) != text]
    lines += [f"- {name}" for name in before if name not in after]
    return "".join(f"{text}\n" for text in lines) or "(no change)\n"
