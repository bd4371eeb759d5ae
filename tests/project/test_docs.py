"""The documentation is true: links lead somewhere, files and names exist. `tests/docs` runs its blocks."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from autograph_rewrite.tools.dev.reference import pages
from tests.docs.blocks import DOCS, OWN, PAGES, anchors, anchors_of, prose
from tests.support.paths import ROOT

PACKAGE = ROOT / "autograph_rewrite"
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"[\w*./-]+\.(py|md|proto|svg|json)")
USERS = {"train.py", "logs/profile.json"}
"""Files of a user that pages speak of."""
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def name_of(page: Path) -> str:
    """Return what a test of a page is called."""
    return str(page.relative_to(ROOT))


@cache
def generated() -> dict[Path, set[str]]:
    """Return the pages that exist on the site only, each with its anchors."""
    return {DOCS / "reference" / name: anchors_of(text) for name, text in pages().items()}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = (page.parent / target).resolve() if target else page
        made = generated().get(path)
        known = made if made is not None else anchors(path) if path.is_file() and path.suffix == ".md" else set()
        if (made is None and not path.exists()) or (anchor and anchor not in known):
            broken.append(link)
    assert broken == []


def test_the_index_lists_every_page() -> None:
    linked = set(LINK.findall((DOCS / "README.md").read_text(encoding="utf-8")))
    every = {str(page.relative_to(DOCS)) for page in OWN} | {str(page.relative_to(DOCS)) for page in generated()}
    assert every - {"README.md"} <= linked


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_every_picture_can_be_drawn(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().get("viewBox")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_a_place_on_somebodys_machine(page: Path) -> None:
    assert re.findall(r"/(?:tmp|home|root|Users|work)/\S*", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", OWN, ids=name_of)
def test_every_file_that_is_named_exists(page: Path) -> None:
    roots = (ROOT, PACKAGE, DOCS, page.parent)
    named = {span for span in SPAN.findall(prose(page)) if PATH.fullmatch(span)} - USERS
    assert sorted(span for span in named if not any(any(root.glob(span)) for root in roots)) == []


@cache
def definitions() -> tuple[frozenset[str], frozenset[str]]:
    """Return the dotted names that the package defines, and the names of its parts and classes.

    `passes.reshard.insert_reshards.Reshards.whole` is listed as that and as `Reshards.whole`.
    """
    names: set[str] = set()
    starts: set[str] = set()
    facade: set[str] = set()  # of what users have in hand, pages also name what it inherits
    sources = {path: path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    sources |= {path: path.relative_to(ROOT) for top in ("strategies", "tools") for path in (ROOT / top).rglob("*.py")}
    for path, relative in sources.items():
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        names |= {module, *(module.rsplit(".", i)[0] for i in range(module.count(".") + 1))}
        starts.add(module.partition(".")[0])
        for name, node in _defined(ast.parse(path.read_text(encoding="utf-8")).body):
            names.add(f"{module}.{name}")
            if not isinstance(node, ast.ClassDef):
                continue
            starts.add(name)
            facade |= {ast.unparse(base) for base in node.bases} if name == "GraphItem" else set()
            for member, _ in _defined(node.body):
                names |= {f"{module}.{name}.{member}", f"{name}.{member}"}
    names |= {f"GraphItem.{name.rpartition('.')[2]}" for name in names if name.rpartition(".")[0] in facade}
    return frozenset(names), frozenset(starts)


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield what statements define; of methods also the attributes that they set."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Assign(targets=targets):
                yield from ((t.id, node) for target in targets for t in ast.walk(target) if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield inner.attr, node


@cache
def settings() -> frozenset[str]:
    """Return the settings of a configuration as docs write them: `cluster.ps` is one, and no name of the code."""
    schema = json.loads((DOCS / "config.schema.json").read_text(encoding="utf-8"))
    return frozenset(
        f"{name}.{field}"
        for name, section in schema["properties"].items()
        for definition in re.findall(r"#/\$defs/(\w+)", json.dumps(section))
        for field in schema["$defs"][definition].get("properties", ())
    )


@pytest.mark.parametrize("page", OWN, ids=name_of)
def test_every_name_of_the_code_that_is_quoted_exists(page: Path) -> None:
    names, starts = definitions()
    quoted = {span.partition("(")[0] for span in SPAN.findall(prose(page))} - settings()
    ours = {name for name in quoted if DOTTED.fullmatch(name) and name.partition(".")[0] in starts}
    assert sorted(name for name in ours if name not in names and not PATH.fullmatch(name)) == []


def test_a_name_that_does_not_exist_would_be_found() -> None:
    names, starts = definitions()
    inserter = "passes.reshard.insert_reshards.Reshards"
    assert {"passes", "Reshards"} <= starts
    assert {"passes.reshard", f"{inserter}.whole", "Reshards.whole", "Select.ALL", "Node.span"} <= names
    assert "Reshards.whoel" not in names
    assert "cluster.ps" in settings() - names
