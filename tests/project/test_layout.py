"""The shape of the code base: layers, circles, and what may not stand in a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx

from tests.support.paths import ROOT

SOURCES = ("autograph_rewrite", "strategies", "tools", "configs", "tests", "benchmarks", "examples")
MAPPED = {"strategies", "tools", "configs"}  # trees that are installed below autograph_rewrite

# A layer may import the earlier ones; parts of one layer may import each other, but not in a circle.
LAYERS = (
    {"ops"},
    {"errors"},
    {"requires", "notebook", "tf_private"},
    {"ir"},
    {"ops.rules"},
    {"diagnostics", "certify", "codecs", "ir.verify"},
    {"config", "training_graph"},
    {"cluster", "load", "analysis"},
    {"plan", "normalize"},
    {"resolve"},
    {"passes", "strategies", "configs"},
    {"compile"},
    {"cost"},
    {"runtime", "inspect", "check"},
    {"api", "views", "item"},
    {"tools"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# A strategy decides and a pass edits; neither may know the other.
STRANGERS = {("strategies", "passes"), ("passes", "strategies")}
# A certificate trusts nothing that made the rewrite, so it knows nothing of it.
NOTHING_OF = ("ops", "ops.rules", "training_graph", "load", "normalize", "analysis", "resolve", "passes")
NOTHING_OF += ("strategies", "configs")
STRANGERS |= {("certify", part) for part in NOTHING_OF}
STRANGERS |= {(part, "certify") for part in ("passes", "strategies", "configs")}
# `Auto` asks the cost model, and the cost model compiles what strategies have planned: one of both has to wait until it
# is called.
REACHES_UP_WHEN_CALLED = {("strategies", "cost")}


@dataclass(frozen=True)
class Import:
    """One import of one part of the package by another."""

    importer: str
    imported: str
    where: str
    when_called: bool
    modules: tuple[str, str] = ("", "")  # both, by their names
    packages: tuple[str, str] = ("", "")  # the folders of both


def python_files(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


@cache
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
    if len(names) < 2 or names[0] != "autograph_rewrite":
        return None
    if names[1] == "ops" and len(names) > 2 and names[2] != "traits":
        return "ops.rules"  # rules read a graph; traits are asked by the graph's own functions
    if names[1:3] == ["ir", "verify"]:
        return "ir.verify"  # they ask the rules which shapes follow
    return "tools" if names[1] == "__main__" else names[1]  # it starts the command line


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


def module_of(name: str, modules: Mapping[str, Path]) -> str:
    """Return the module that a dotted name means: it, or the one that defines it."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def folder_of(name: str, modules: Mapping[str, Path]) -> str:
    """Return the package that a module is in; a file on the top stands for itself."""
    folder = name.rpartition(".")[0]
    return name if modules[name].name == "__init__.py" or folder == "autograph_rewrite" else folder


@cache
def all_imports() -> list[Import]:
    """Return every import of one module of the package by another."""
    found = []
    paths = python_files("autograph_rewrite", "strategies", "tools", "configs")
    modules = {module_name(path): path for path in paths}
    for path in paths:
        importer = part_of(module_name(path))
        if importer is None:
            continue  # the package's own __init__ names modules lazily, as strings
        package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
        for node, when_called in walk_imports(parse(path).body):
            for name in names_in(node, package):
                imported = part_of(name)
                if imported in RANK:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    pair = module_name(path), module_of(name, modules)
                    packages = folder_of(pair[0], modules), folder_of(pair[1], modules)
                    found.append(Import(importer, imported, where, when_called, pair, packages))
    return found


def imports_between_parts() -> list[Import]:
    """Return every import of one part by another, over the whole package."""
    return [found for found in all_imports() if found.imported != found.importer]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of names that import each other in circles."""
    graph: networkx.DiGraph[str] = networkx.DiGraph(edge for edge in edges if edge[0] != edge[1])
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def is_named_exception(found: Import) -> bool:
    return found.when_called and (found.importer, found.imported) in REACHES_UP_WHEN_CALLED


def breaks_layering(found: Import) -> bool:
    if (found.importer, found.imported) in STRANGERS:
        return True
    return RANK[found.imported] > RANK[found.importer] and not is_named_exception(found)


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


def test_nothing_imports_itself_in_a_circle_also_when_it_is_called() -> None:
    """An import inside a function hides a circle from Python, not from whoever has to read all of it at once."""
    counted = [found for found in all_imports() if not is_named_exception(found)]
    assert circles(found.packages for found in counted) == []
    assert circles(found.modules for found in counted) == []


def test_the_named_exception_reaches_up_only_when_it_is_called() -> None:
    pairs = {(found.importer, found.imported) for found in all_imports() if is_named_exception(found)}
    assert pairs == REACHES_UP_WHEN_CALLED
    assert circles(found.packages for found in all_imports() if not found.when_called) == []


def test_the_search_for_circles_sees_one_through_three_packages() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "d")]) == [["a", "b", "c"]]


def test_what_decides_and_what_analyses_is_given_no_rewrite_to_edit() -> None:
    given = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in python_files("autograph_rewrite/analysis", "autograph_rewrite/resolve")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation) in ("Rewrite", "Context")
    ]
    assert given == []


def test_the_layer_check_sees_an_import_that_goes_up() -> None:
    source = "def f():\n    try:\n        from ..api import rewrite\n    except E:\n        pass"
    ((node, when_called),) = walk_imports(ast.parse(source).body)
    assert when_called
    assert names_in(node, "autograph_rewrite.ir") == ["autograph_rewrite.api.rewrite"]
    assert breaks_layering(Import("ir", "api", "ir/x.py:1", when_called=True))
    assert not breaks_layering(Import("strategies", "cost", "auto.py:1", when_called=True))
    assert breaks_layering(Import("strategies", "cost", "auto.py:1", when_called=False))


def test_the_mapped_trees_are_imported_under_their_installed_names() -> None:
    """`import tools` works from the checkout only, and would load a module a second time."""
    broken = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(*SOURCES)
        for node, _ in walk_imports(parse(path).body)
        if any(name.split(".")[0] in MAPPED for name in names_in(node, "somewhere"))
    ]
    assert broken == []


def test_every_package_directory_is_a_package() -> None:
    """`find_packages` leaves out a directory without __init__.py, and the wheel would lack it."""
    folders = {path.parent for path in python_files("autograph_rewrite", "strategies", "tools", "configs")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path.relative_to(ROOT)) for path in python_files(*SOURCES) if not ast.get_docstring(parse(path))]
    assert silent == []


def test_families_of_rules_are_compared_by_checked_names_only() -> None:
    """A family is called as its module; one that is written as text outlives the module's name without a word."""
    broken = []
    for path in python_files("autograph_rewrite/analysis", "autograph_rewrite/resolve", "autograph_rewrite/passes"):
        tree = parse(path)
        checked = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign) and "families(" in ast.unparse(node.value)
            for name in node.targets
            for target in ast.walk(name)
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("rule.family"):
                broken += [f"{path}:{node.lineno}" for one in node.comparators if ast.unparse(one) not in checked]
    assert broken == []


def test_private_names_of_tensorflow_stand_in_one_module() -> None:
    paths = python_files("autograph_rewrite", "strategies", "tools", "examples")
    found = [path for path in paths if re.search(r"(?:from|import) tensorflow\.python", path.read_text())]
    assert [path.name for path in found] == ["tf_private.py"]


def test_no_file_names_a_machine_or_a_package_index() -> None:
    # Spelt in pieces, because this file is searched too.
    forbidden = re.compile("|".join(["/tmp/" + r"v\b", "/wor" + "k/", "index" + "-url", "pypi" + r"\.org"]))
    files = [path for top in (*SOURCES, "docs", ".ci") for path in (ROOT / top).rglob("*")]
    texts = [path for path in (*files, *ROOT.iterdir()) if is_text(path) and path.name != ".git"]
    assert [str(p.relative_to(ROOT)) for p in texts if forbidden.search(p.read_text(encoding="utf-8"))] == []


def is_text(path: Path) -> bool:
    binary = {".pb", ".binpb", ".gz", ".npz", ".pyc", ".png", ".ar", ".keras", ".xz"}
    return path.is_file() and path.suffix not in binary and "__pycache__" not in path.parts


MAKES_NODES = (
    "autograph_rewrite/ir/",
    "autograph_rewrite/load/",
    "autograph_rewrite/normalize/lowering.py",  # copies of a function's nodes
)


def test_only_the_builder_copies_the_parser_and_loaders_make_nodes() -> None:
    made = re.compile(r"\bgraph\.(add|insert)\(")
    found = [str(path.relative_to(ROOT)) for path in python_files(*SOURCES[:3]) if made.search(path.read_text())]
    assert [name for name in found if not name.startswith(MAKES_NODES)] == []
