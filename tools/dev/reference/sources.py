"""What the pages are made from: the sources of the package as syntax trees, and cells of Markdown tables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
_TOPS = ("autograph_rewrite", "strategies", "tools")


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the package, by its path below the checkout, in order."""
    for path in sorted(path for top in _TOPS for path in (ROOT / top).rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def template(node: ast.expr) -> str | None:
    """Return a text as the source has it, with `...` for what is filled in; None: no text stands there."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) or "..." for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (template(left) or "...") + (template(right) or "...")
        case ast.IfExp(body=body):
            return template(body)
    return None


def cell(text: object) -> str:
    """Return a text as one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(*rows: tuple[object, ...]) -> str:
    """Return a Markdown table whose first row is its head."""
    head, *body = rows
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines) + "\n"
