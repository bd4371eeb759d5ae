"""What tests and benchmarks name is there, in strings and in imports within functions: nothing else notices a move."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

MODULE = re.compile(r"from (tests(?:\.\w+)+) import|-m (tests(?:\.\w+)+)")
FILE = re.compile(r"\btests(?:/\w+)+\.(?:py|txt)\b")


def test_modules_and_files_of_tests_that_a_text_names_exist() -> None:
    texts = [*ROOT.glob("tests/**/*.py"), ROOT / "Makefile", ROOT / ".ci/run"]
    named: set[str] = set()
    for path in texts:
        text = path.read_text(encoding="utf-8")
        modules = (one or other for one, other in MODULE.findall(text))
        named |= {module.replace(".", "/") for module in modules} | set(FILE.findall(text))
    assert len(named) > 100
    missing = {name for name in named if not any((ROOT / form).exists() for form in (name, f"{name}.py"))}
    assert not missing


@cache
def names_in(path: Path) -> set[str]:
    """Return the names that a module has when it is imported: what it defines, assigns or imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return names | {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


@cache
def file_of(module: str) -> Path | None:
    """Return the file of a module of this repository."""
    parts = module.split(".")
    if parts[:1] == ["autograph_rewrite"] and parts[1:2] and parts[1] in ("strategies", "tools", "configs"):
        parts = parts[1:]
    path = ROOT.joinpath(*parts)
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((one for one in found if one.exists()), None)


def test_every_name_that_tests_and_benchmarks_import_is_defined() -> None:
    missing = []
    for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "autograph_rewrite":
                continue
            source = file_of(node.module or "")
            known = names_in(source) if source is not None else set()
            for alias in node.names:
                if alias.name not in known and file_of(f"{node.module}.{alias.name}") is None:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}")
    assert missing == []
