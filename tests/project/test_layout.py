"""The shape of the code base: layers, file lengths, and what may not stand in a file."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx
import pytest

from tests.support.paths import ROOT

SOURCES = ("autograph_rewrite", "strategies", "tools", "configs", "tests", "benchmarks", "examples")
MAPPED = {"strategies", "tools", "configs"}  # trees that are installed below autograph_rewrite
MAX_LINES = 400
MAX_MODULES = 15
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
# What users call names each setting: constructors of the public surface, verbs, and a graph's way to add a node.
PUBLIC = {
    "api.py:rewrite",
    "views.py:bisect",
    "views.py:reduce",
    "views.py:report",
    "views.py:verify",
    "inspect/dump.py:dump",
    "ir/graph.py:Graph.add",
    "item.py:GraphItem.__init__",
    "runtime/function/function.py:DistributedFunction.__init__",
    "runtime/bisect/bisect.py:bisect",
    "runtime/profile.py:profile",
    "runtime/reduce/reduce.py:reduce",
    "runtime/verify/verify.py:verify",
}

# A layer may import the earlier ones; parts of one layer may import each other, but not in a circle.
LAYERS = (
    {"errors"},
    {"requires", "notebook"},
    {"ir"},
    {"diagnostics", "certify", "codecs"},
    {"config", "item"},
    {"cluster", "load", "analysis"},
    {"plan", "normalize"},
    {"resolve"},
    {"passes", "strategies", "configs"},
    {"compile"},
    {"cost"},
    {"runtime", "inspect"},
    {"api", "views"},
    {"tools"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# A strategy decides and a pass edits; neither may know the other.
STRANGERS = {("strategies", "passes"), ("passes", "strategies")}
# A certificate trusts nothing that made the rewrite, so it knows nothing of it.
NOTHING_OF = ("item", "load", "normalize", "analysis", "resolve", "passes", "strategies", "configs")
STRANGERS |= {("certify", part) for part in NOTHING_OF}
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
    packages: tuple[str, str] = ("", "")  # the folders of both: of the importer's, and of what it imports


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


def folder_of(name: str, modules: Mapping[str, Path]) -> str:
    """Return the package that a module, or something defined in one, is in; a file on the top stands for itself."""
    while name not in modules:
        name = name.rpartition(".")[0]
    folder = name.rpartition(".")[0]
    return name if modules[name].name == "__init__.py" or folder == "autograph_rewrite" else folder


def all_imports() -> list[Import]:
    """Return every import of one folder of the package by another."""
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
                    packages = folder_of(module_name(path), modules), folder_of(name, modules)
                    found.append(Import(importer, imported, where, when_called, packages))
    return found


def imports_between_parts() -> list[Import]:
    """Return every import of one part by another, over the whole package."""
    return [found for found in all_imports() if found.imported != found.importer]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of names that import each other in circles."""
    graph: networkx.DiGraph[str] = networkx.DiGraph(edge for edge in edges if edge[0] != edge[1])
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


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


def test_no_sub_packages_import_each_other_in_a_circle() -> None:
    assert circles(found.packages for found in all_imports() if not found.when_called) == []


def test_the_search_for_circles_sees_one_through_three_packages() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "d")]) == [["a", "b", "c"]]


def test_no_folder_holds_more_modules_than_a_reader_can_overlook() -> None:
    modules = Counter(path.parent for path in python_files("autograph_rewrite", "strategies", "tools"))
    assert {str(folder.relative_to(ROOT)): n for folder, n in modules.items() if n > MAX_MODULES} == {}


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


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function below a node with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{prefix}{node.name}" if is_function or isinstance(node, ast.ClassDef) else ""
        if is_function:
            yield name, node
        yield from functions_of(node, f"{name}." if name else prefix)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many values a function is given, but for the object that it is a method of."""
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + bool(given.vararg) + bool(given.kwarg)


def test_functions_fit_on_a_screen_and_take_few_values() -> None:
    broken, met = [], set()
    for path in python_files("autograph_rewrite", "strategies", "tools"):
        for name, function in functions_of(parse(path)):
            where = f"{path.relative_to(ROOT)}:{name}".removeprefix("autograph_rewrite/")
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            count = parameters_of(function)
            met |= {where} if count > MAX_PARAMETERS else set()
            if lines > MAX_FUNCTION_LINES or (count > MAX_PARAMETERS and where not in PUBLIC):
                broken.append(f"{where}: {lines} lines, {count} parameters")
    assert broken == []
    assert met == PUBLIC  # none is exempt that need not be


def test_the_check_of_functions_counts_nested_ones_and_every_kind_of_parameter() -> None:
    tree = ast.parse("class A:\n    def f(self, a, /, b, *c, d, **e):\n        def g(): pass")
    assert [(name, parameters_of(function)) for name, function in functions_of(tree)] == [("A.f", 5), ("A.f.g", 0)]


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


def test_no_file_names_a_machine_or_a_package_index() -> None:
    # Spelt in pieces, because this file is searched too.
    forbidden = re.compile("|".join(["/tmp/" + r"v\b", "/wor" + "k/", "index" + "-url", "pypi" + r"\.org"]))
    files = [path for top in (*SOURCES, "docs", ".ci") for path in (ROOT / top).rglob("*")]
    texts = [path for path in (*files, *ROOT.iterdir()) if is_text(path) and path.name != ".git"]
    assert [str(p.relative_to(ROOT)) for p in texts if forbidden.search(p.read_text(encoding="utf-8"))] == []


def is_text(path: Path) -> bool:
    binary = {".pb", ".binpb", ".gz", ".npz", ".pyc", ".png", ".ar", ".keras"}
    return path.is_file() and path.suffix not in binary and "__pycache__" not in path.parts
