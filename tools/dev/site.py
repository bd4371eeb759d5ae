"""Hook into mkdocs: add generated pages and pages from outside of docs/, and check the built site.

`mkdocs.yml` lists this file among its hooks. Links in docs/ are those of the repository, so that pages can also be read
there; links to files outside of docs/ are turned into links of the site here.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from autograph_rewrite.tools.dev.reference import pages

ROOT = Path(__file__).parents[2]
PROJECT = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "LICENSE": "project/LICENSE.txt",
}
BESIDE = ("configs/*.yaml", "examples/*.py", "examples/*.sh", "examples/*/*.yaml")
WEIGHTS = {"Home": 3.0, "Use": 3.0, "In detail": 2.0, "Reference": 1.0, "Internals": 0.5}
"""Weights of search hits by the section of their page; guides rank above tables."""
LISTS = ("corpus", "ops", "zoo", "changelog", "messages", "readme")
"""Pages of the reference that list every name, and so would rank above the pages that explain the name."""
_LINK = re.compile(r"(\]\()([^)\s#]+)")
_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\)", re.MULTILINE)
_FENCE = re.compile(r"^(\s*```)(\w+) [^\n`]+$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Set the navigation from the front page: its headings are the sections, the links of its tables the pages."""
    config.nav = navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    return config


def navigation(front: str) -> list[dict[str, Any]]:
    """Return the navigation of a front page, in the format of mkdocs."""
    nav: list[dict[str, Any]] = [{"Home": "README.md"}]
    for section in front.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        rows = [(name, PROJECT.get(target.removeprefix("../"), target)) for name, target in _ROW.findall(body)]
        if rows:
            nav.append({title: [{name: target} for name, target in rows if target.endswith(".md")]})
    return nav


def on_files(files: Any, *, config: Any) -> Any:
    """Add the generated pages, and the linked files outside of docs/."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for path, target in site_paths().items():
        files.append(File.generated(config, target, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def site_paths() -> dict[str, str]:
    """Return the path in the site of each file outside of docs/."""
    beside = (str(path.relative_to(ROOT)) for pattern in BESIDE for path in ROOT.glob(pattern))
    return {**PROJECT, **{path: path for path in beside}}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links of the site, drop options of fences, set the search weight."""
    outside = site_paths()
    origin = {target: path for path, target in PROJECT.items()}
    uri = page.file.src_uri
    source = origin.get(uri, f"docs/{uri}")
    page.meta["search"] = {"boost": weight(uri)}

    def moved(match: re.Match[str]) -> str:
        if urlsplit(match[2]).scheme:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = outside.get(path, path.removeprefix("docs/"))
        return match[1] + posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return _FENCE.sub(r"\1\2", _LINK.sub(moved, markdown))


@cache
def sections() -> dict[str, str]:
    """Return the section of each page."""
    sections = navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    pages = [(name, part) for section in sections for name, part in section.items()]
    listed = [(name, page) for name, part in pages for page in (part if isinstance(part, list) else [{name: part}])]
    return {target: name for name, page in listed for target in page.values()}


def weight(uri: str) -> float:
    """Return the weight of a page in the search."""
    listing = any(name in uri for name in LISTS)
    return 0.1 if listing else WEIGHTS[sections().get(uri, "Internals")]


def on_post_build(*, config: Any) -> None:
    """Check the built site: every link has a target, and no page loads anything from other hosts."""
    from mkdocs.exceptions import PluginError

    problems = site_problems(Path(config.site_dir))
    if problems:
        raise PluginError("\n".join(problems))


class _Links(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the links, files and anchors of a tag."""
        said = {key: value for key, value in attrs if value}
        self.ids |= {said[key] for key in ("id", "name") if key in said}
        if tag == "a" and "href" in said:
            self.links.add(said["href"])
        elif tag == "link" and said.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.add(said.get("href", ""))
        elif "src" in said:
            self.loads.add(said["src"])


def site_problems(site: Path) -> list[str]:
    """Return the broken links of a built site, and the files that its pages load from other hosts."""
    found = {path.resolve(): _Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    problems = []
    for path, page in sorted(found.items()):
        if path.name == "404.html":  # its links are relative to the root of the server
            continue
        name = path.relative_to(site.resolve())
        problems += [f"{name} loads {url}" for url in sorted(page.loads) if urlsplit(url).netloc]
        for url in sorted(page.links | page.loads):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            if not target.exists() or (place and target in found and place not in found[target].ids):
                problems.append(f"{name} links to {url}, which is not there")
    return problems
