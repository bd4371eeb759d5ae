"""The versions that work together, read from setup.py and constraints.txt."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from autograph_rewrite.tools.dev.reference.sources import ROOT, table

HEAD = """\
# Versions

What the package asks for, from `setup.py`, and what `make` installs and tests, from `constraints.txt`. An upper bound
is the first version that nobody has tried: graphs of another TensorFlow may hold ops and attributes without a rule.

"""
TAIL = """
Linux only. The checks of every change (`.ci/run`) use one Python, that of the machine; `make PYTHON=python3.10 test` is
how to try another. [TensorFlow and Keras](../versions.md) says what was run with each release, on CPUs; see
[accelerators](../accelerators.md) for GPUs.
The site itself (`make docs`) needs Python 3.11 or later with the versions in `constraints.txt`.
"""


def compatibility_page() -> str:
    """Return the page of the versions."""
    tested = _constraints()
    asked = _requirements()
    rows = [(f"`{name}`", f"`{wanted or 'any'}`", ", ".join(tested.get(name, ("",)))) for name, wanted in asked.items()]
    return HEAD + table(("package", "asked for", "tested with"), *rows) + TAIL


def _constraints() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pinned = re.match(r"([\w.-]+)==([^;\s]+)(?:; python_version (\S+) \"(\S+)\")?", line)
        if pinned is not None:
            where = f" (Python {pinned[3]} {pinned[4]})" if pinned[3] else ""
            found.setdefault(pinned[1].lower(), []).append(pinned[2] + where)
    return found


def _requirements() -> dict[str, str]:
    """Return what setup.py asks for: Python, TensorFlow, and what is installed with the package."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "setup")
    keywords = {one.arg: one.value for one in call.keywords}
    extras = keywords["extras_require"]
    assert isinstance(extras, ast.Dict)
    wanted = {"python": str(ast.literal_eval(keywords["python_requires"]))}
    texts = [text for value in extras.values[:2] for text in ast.literal_eval(value)]
    for text in [*texts, *ast.literal_eval(keywords["install_requires"])]:
        name, bounds = re.fullmatch(r"([\w.-]+)(.*)", text).groups()  # type: ignore[union-attr]
        wanted[name] = bounds
    return wanted


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else ""
