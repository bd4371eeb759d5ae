"""The shape of the code base: layers, file lengths, and what may not stand in a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("autograph_rewrite", "strategies", "tools", "configs", "tests", "benchmarks", "examples")
MAPPED = {"strategies", "tools", "configs"}  # trees that are installed below autograph_rewrite
MAX_LINES = 400

# A layer may import the earlier ones; parts of one layer may import each other, but not in a circle.
LAYERS = (
    {"errors"},
    {"requires"},
    {"ir"},
    {"item"},
    {"load", "analysis", "plan"},
    {"passes", "strategies", "configs", "certify"},
    {"cost"},
    {"runtime", "inspect"},
    {"api"},
    {"tools"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# A strategy decides and a pass edits; neither may know the other.
STRANGERS = {("strategies", "passes"), ("passes", "strategies")}
# A certificate trusts nothing that made the rewrite, so it knows nothing of it.
STRANGERS |= {("certify", part) for part in ("item", "load", "analysis", "passes", "strategies", "configs")}
STRANGERS |= {(part, "certify") for part in ("passes", "strategies", "configs")}
# `GraphItem` is the facade: its methods reach up, when they are called, to what loads, runs and shows graphs.
REACHES_UP_WHEN_CALLED = {("item", "load"), ("item", "runtime"), ("item", "inspect"), ("strategies", "cost")}


@dataclass(frozen=True)
class Import:
    """One import of one part of the package by another."""

    importer: str
    imported: str
    where: str
    when_called: bool


def python_files(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """Return the installed name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    return name if parts[0] == "autograph_rewrite" else f"autograph_rewrite.{name}"


def part_of(module: str) -> str | None:
    """Return the part of the package that a module is in; None for the package itself and for strangers."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[0] == "autograph_rewrite" else None


def names_in(node: ast.stmt, package: str) -> list[str]:
    """Return the dotted names that an import statement of a module in `package` imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            parents = package.split(".")
            above = parents[: len(parents) - level + 1] if level else []
            base = ".".join([*above, *filter(None, [module])])
            return [f"{base}.{alias.name}" for alias in names]  # `from package import part` imports a part
        case _:
            return []


def walk_imports(body: list[ast.stmt], *, when_called: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the import statements below `body`, each with whether it runs only inside a function.

    What stands under `if TYPE_CHECKING` never runs, so it is left out.
    """
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, when_called
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from walk_imports(node.orelse, when_called=when_called)
        else:
            inside = when_called or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from walk_imports(getattr(node, field, []), when_called=inside)


def imports_between_parts() -> list[Import]:
    """Return every import of one part by another, over the whole package."""
    found = []
    for path in python_files("autograph_rewrite", "strategies", "tools", "configs"):
        importer = part_of(module_name(path))
        if importer is None:
            continue  # the package's own __init__ names modules lazily, as strings
        package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
        for node, when_called in walk_imports(parse(path).body):
            for imported in map(part_of, names_in(node, package)):
                if imported in RANK and imported != importer:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append(Import(importer, imported, where, when_called))
    return found


def breaks_layering(found: Import) -> bool:
    pair = (found.importer, found.imported)
    if pair in STRANGERS:
        return True
    if found.when_called and pair in REACHES_UP_WHEN_CALLED:
        return False
    return RANK[found.imported] > RANK[found.importer]


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {part_of(module_name(path)) for path in python_files("autograph_rewrite", "strategies", "tools")}
    assert parts - {None} <= set(RANK)


def test_no_part_imports_a_later_layer() -> None:
    broken = [
        f"{found.where}: {found.importer} imports {found.imported}"
        for found in imports_between_parts()
        if breaks_layering(found)
    ]
    assert broken == []


def test_parts_of_one_layer_do_not_import_in_a_circle() -> None:
    edges = {
        (found.importer, found.imported)
        for found in imports_between_parts()
        if RANK[found.imported] == RANK[found.importer] and not found.when_called
    }
    remaining = {part for edge in edges for part in edge}
    while free := {part for part in remaining if not any(a == part and b in remaining for a, b in edges)}:
        remaining -= free
    assert remaining == set()


def test_the_layer_check_sees_an_import_that_goes_up() -> None:
    source = "def f():\n    try:\n        from ..api import rewrite\n    except E:\n        pass"
    ((node, when_called),) = walk_imports(ast.parse(source).body)
    assert when_called
    assert names_in(node, "autograph_rewrite.ir") == ["autograph_rewrite.api.rewrite"]
    assert breaks_layering(Import("ir", "api", "ir/x.py:1", when_called=True))
    assert not breaks_layering(Import("item", "load", "item.py:1", when_called=True))
    assert breaks_layering(Import("item", "load", "item.py:1", when_called=False))


def test_the_mapped_trees_are_imported_under_their_installed_names() -> None:
    """`import tools` works from the checkout only, and would load a module a second time."""
    broken = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(*SOURCES)
        for node, _ in walk_imports(parse(path).body)
        if any(name.split(".")[0] in MAPPED for name in names_in(node, "somewhere"))
    ]
    assert broken == []


@pytest.mark.parametrize("top", SOURCES)
def test_files_are_short_enough_to_be_read_at_once(top: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(top)}
    too_long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n >= MAX_LINES}
    assert {name: n for name, n in too_long.items() if not name.endswith("_pb2.py")} == {}


def test_every_package_directory_is_a_package() -> None:
    """`find_packages` leaves out a directory without __init__.py, and the wheel would lack it."""
    folders = {path.parent for path in python_files("autograph_rewrite", "strategies", "tools", "configs")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files(*SOURCES)
        if not path.name.endswith("_pb2.py") and not ast.get_docstring(parse(path))
    ]
    assert silent == []


def test_no_file_names_a_machine_or_a_package_index() -> None:
    # Spelt in pieces, because this file is searched too.
    forbidden = re.compile("|".join(["/tmp/" + r"v\b", "/wor" + "k/", "index" + "-url", "pypi" + r"\.org"]))
    files = [path for top in (*SOURCES, "docs", ".ci") for path in (ROOT / top).rglob("*")]
    texts = [path for path in (*files, *ROOT.iterdir()) if is_text(path)]
    assert [str(p.relative_to(ROOT)) for p in texts if forbidden.search(p.read_text(encoding="utf-8"))] == []


def is_text(path: Path) -> bool:
    binary = {".pb", ".binpb", ".gz", ".npz", ".pyc", ".png", ".ar", ".keras"}
    return path.is_file() and path.suffix not in binary and "__pycache__" not in path.parts
