"""A pytest plugin that ends a run with the matrix as a table: how many cases, how long, how exact.

Each matrix test records its result as a user property, which xdist carries to the controlling process; the
table is printed there and written to build/matrix.txt. This module does not import TensorFlow.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .run import Result

PROPERTY = "matrix"
OUTPUT = Path("build/matrix.txt")


def record(request: pytest.FixtureRequest, result: Result) -> None:
    """Attach a result to the running test."""
    data = {
        "model": result.case.model,
        "dtype": result.case.dtype,
        "error": result.max_error,
        "worst": f"{result.case}: {result.worst}",
        "seconds": result.seconds,
        "ok": result.ok,
    }
    request.node.user_properties.append((PROPERTY, json.dumps(data)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table, if any matrix test ran."""
    found = [
        json.loads(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if not found:
        return
    text = table(found)
    terminalreporter.section("matrix")
    terminalreporter.write_line(text)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(text + "\n")


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the results: one line per model and dtype, the sum, and the worst case of each dtype."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for each in found:
        groups[each["model"], each["dtype"]].append(each)
    lines = [f"{'model':<18}{'dtype':<9}{'cases':>6}{'wrong':>6}{'seconds':>9}  worst relative error"]
    lines += [f"{model:<18}{dtype:<9}{_numbers(group)}" for (model, dtype), group in sorted(groups.items())]
    lines.append(f"{'all':<27}{_numbers(found)}")
    for dtype in sorted({each["dtype"] for each in found}):
        worst = max((each for each in found if each["dtype"] == dtype), key=lambda each: float(each["error"]))
        lines.append(f"worst {dtype}: {worst['error']:.1e} in {worst['worst']}")
    return "\n".join(lines)


def _numbers(group: Sequence[Mapping[str, Any]]) -> str:
    wrong = sum(not each["ok"] for each in group)
    seconds = sum(each["seconds"] for each in group)
    return f"{len(group):>6}{wrong:>6}{seconds:>9.1f}  {max(each['error'] for each in group):.1e}"
