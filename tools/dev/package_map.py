"""Generate the map of sub-packages in docs/architecture.md: each with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
_MAP = re.compile(r"(<!-- map:[^>]*-->\n).*?(<!-- end of the map -->)", re.DOTALL)


def packages() -> list[Path]:
    """Return every sub-package, and the modules that are in none, in the order of their names."""
    tops = [ROOT / "autograph_rewrite", ROOT / "strategies", ROOT / "tools"]
    inits = [path for top in tops for path in top.rglob("__init__.py")]
    modules = [path for path in tops[0].glob("*.py") if path.name != "__init__.py"]
    return sorted([path for path in inits if path.parent != tops[0]] + modules)


def name_of(path: Path) -> str:
    """Return the name of a sub-package or module in the map: its path below the package."""
    path = path.parent if path.name == "__init__.py" else path
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[1:] if parts[0] == "autograph_rewrite" else parts)


def package_map() -> str:
    """Return the table."""
    rows = [f"| `{name_of(path)}` | {_sentence(path)} |" for path in sorted(packages(), key=name_of)]
    return "\n".join(["| sub-package | what it is for |", "| --- | --- |", *rows, ""])


def with_map(page: str) -> str:
    """Return the page with the current table between its marks."""
    return _MAP.sub(lambda match: match[1] + package_map() + match[2], page)


def _sentence(path: Path) -> str:
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    return text.replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
