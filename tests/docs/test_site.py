"""The site: its navigation is that of the front page, links leave docs/ for the right place, broken ones are found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from autograph_rewrite.tools.dev.site import navigation, on_page_markdown, site_paths, site_problems, weight
from tests.docs.blocks import DOCS, OWN
from tests.support.paths import ROOT


def test_the_navigation_has_every_page_once() -> None:
    nav = navigation((DOCS / "README.md").read_text(encoding="utf-8"))
    pages = [target for section in nav[1:] for pages in section.values() for page in pages for target in page.values()]
    assert sorted(pages) == sorted(set(pages))
    assert {str(page.relative_to(DOCS)) for page in OWN} - {"README.md"} <= set(pages)
    assert "project/changelog.md" in pages


def moved(text: str, page: str) -> str:
    return on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={}))


def test_links_out_of_docs_become_links_of_the_site() -> None:
    assert moved("[a](../../examples/job.py)", "how_to/a.md") == "[a](../examples/job.py)"
    assert moved("[a](../README.md#b)", "a.md") == "[a](project/readme.md#b)"
    assert moved("[a](docs/jobs.md#b)", "project/readme.md") == "[a](../jobs.md#b)"
    assert moved("[a](https://b.c/d)", "a.md") == "[a](https://b.c/d)"
    assert moved("```python run\nx\n```", "a.md") == "```python\nx\n```"
    assert all((ROOT / path).is_file() for path in site_paths())


def test_the_search_finds_guides_before_details_and_lists_last() -> None:
    assert weight("hangs.md") > weight("jobs.md") > weight("reference/settings.md") > weight("architecture.md")
    assert max(map(weight, ("corpus.md", "accelerators_zoo.md", "project/changelog.md"))) < weight("architecture.md")


def test_broken_links_and_what_is_loaded_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a><h2 id="here">', encoding="utf-8")
    (tmp_path / "b.html").write_text('<h2 id="there"><a href="https://x.y/z">x</a>', encoding="utf-8")
    assert site_problems(tmp_path) == []
    bad = '<a href="b.html#nowhere"></a><a href="c.html"></a><script src="https://cdn.x/y.js"></script>'
    (tmp_path / "a.html").write_text(bad, encoding="utf-8")
    assert site_problems(tmp_path) == [
        "a.html loads https://cdn.x/y.js",
        "a.html links to b.html#nowhere, which is not there",
        "a.html links to c.html, which is not there",
    ]
