"""docs/architecture.md is true of today's tree: its map has every sub-package, its glossary only names that exist."""

from __future__ import annotations

import re

from autograph_rewrite.ir.mesh import Select
from autograph_rewrite.ops.facts import placement
from autograph_rewrite.tools.dev.package_map import PAGE, name_of, package_map, packages, with_map
from tests.project.test_docs import DOCS, definitions
from tests.project.test_layout import RANK

TEXT = PAGE.read_text(encoding="utf-8")
SPAN = re.compile(r"`([^`]+)`")


def glossary(text: str) -> dict[str, tuple[str, ...]]:
    """Return the terms of a page's glossary, each with the names of the code that it stands for."""
    section = text.partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][2:]
    return {cells[0].strip(): tuple(SPAN.findall(cells[1])) for cells in rows}


def unknown(text: str) -> list[str]:
    """Return the terms of a glossary that name nothing, or what the code does not have."""
    names, _ = definitions()
    return [term for term, found in glossary(text).items() if not found or not names.issuperset(found)]


def test_the_map_is_that_of_the_tree() -> None:
    assert with_map(TEXT) == TEXT, "run python -m autograph_rewrite.tools.dev.package_map"
    assert package_map() in TEXT


def test_the_map_has_every_sub_package_and_what_it_is_for() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", package_map(), re.MULTILINE))
    assert list(rows) == sorted(name_of(path) for path in packages())
    assert {"passes/reshard", "strategies", "tools/verbs", "compile.py"} <= set(rows)
    assert [name for name, sentence in rows.items() if not sentence.endswith((".", ")"))] == []


def test_every_term_of_the_glossary_names_code_that_exists() -> None:
    assert len(glossary(TEXT)) > 40
    assert unknown(TEXT) == []


def test_a_term_that_names_nothing_is_found() -> None:
    assert unknown(TEXT.replace("`ir.mesh.Span`", "`ir.mesh.Spam`")) == ["span"]
    assert unknown(TEXT.replace("`ir.mesh.Span`", "spans")) == ["span"]


def test_the_glossary_has_every_placement_span_and_selector() -> None:
    words = set(re.findall(r"\w+", TEXT.partition("\n## Glossary\n")[2].partition("\n## ")[0]))
    kinds = {value.kind for value in vars(placement).values() if isinstance(value, placement.Placement)}
    assert kinds | {"split"} <= words
    assert {"ONCE", "PER_REPLICA", "EACH", *(one.name for one in Select)} <= words


def test_the_figure_of_the_layers_has_them_all_in_their_order() -> None:
    texts = re.findall(
        r'<text x="[\d.]+" y="([\d.]+)">([\w.]+)</text>', (DOCS / "layers.svg").read_text(encoding="utf-8")
    )
    height = {name: float(y) for y, name in texts}
    assert set(height) == set(RANK) - {"configs"}
    wrong = [
        (one, other) for one in height for other in height if RANK[one] < RANK[other] and height[one] < height[other]
    ]
    assert wrong == []
