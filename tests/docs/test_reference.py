"""The generated pages have everything that the code has, and pages quote only messages that the code can raise."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

import autograph_rewrite
from autograph_rewrite.config.config import Config
from autograph_rewrite.passes.pass_pipeline import PIPELINE
from autograph_rewrite.strategies import STRATEGIES
from autograph_rewrite.tools.cli import VERBS
from autograph_rewrite.tools.dev.reference import (
    PAGES,
    messages,
    pages,
    presets_page,
    settings_page,
    strategies_page,
    verbs_page,
)
from autograph_rewrite.tools.dev.site import sections
from autograph_rewrite.tools.dev.strategy_pages import FOLDER, drawn, measured, picture, with_tables
from tests.docs.blocks import DOCS, OWN, prose
from tests.support.paths import CONFIGS

WORDS = {"Use": 1150, "Internals": 2000}
"""What a page may have: a guide is read in five minutes, what goes into detail in eight."""


@cache
def made() -> dict[str, str]:
    return pages()


def test_every_verb_option_setting_preset_and_strategy_is_listed() -> None:
    verbs, settings, presets = verbs_page(), settings_page(), presets_page()
    assert [verb for verb in VERBS if f"\n## {verb}\n" not in verbs] == []
    assert "`--config CONFIG`" in verbs
    schema = Config.json_schema()
    every = [*schema["properties"], *(key for one in schema["$defs"].values() for key in one["properties"])]
    assert [key for key in every if f"| `{key}` |" not in settings] == []
    assert [path.stem for path in CONFIGS if f"\n## {path.stem}\n" not in presets] == []
    assert [name for name in STRATEGIES if f"[`{name}`]" not in strategies_page()] == []
    assert set(PAGES) == set(STRATEGIES)
    assert "with several stages per device" in settings
    assert [one.name for one in PIPELINE if f"| `{one.name}` | {one.summary} |" not in made()["passes.md"]] == []
    assert [name for name in autograph_rewrite.__all__ if f".{name}\n" not in made()["api.md"]] == []


def test_no_table_of_a_generated_page_is_broken() -> None:
    for name, text in made().items():
        width = 0
        for line in text.splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert not (width and cells) or cells == width, f"{name}: {line}"
            width = cells


@cache
def told() -> frozenset[str]:
    return frozenset(one.text for one in messages())


QUOTED = re.findall(r"^> (.+)$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("quoted", QUOTED)
def test_every_message_that_is_explained_is_one_of_the_code(quoted: str) -> None:
    assert quoted in told()


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_the_tables_and_pictures_of_strategies_are_those_that_were_measured(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, measured()) == text, "run python -m autograph_rewrite.tools.dev.strategy_pages"
    for name in drawn():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == picture(name, measured()["presets"][name])


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.stem)
def test_a_guide_is_read_in_five_minutes_and_no_page_is_a_book(page: Path) -> None:
    words = [line for line in prose(page).splitlines() if not line.startswith("|")]
    section = sections().get(str(page.relative_to(DOCS)), "Home")
    assert len(" ".join(words).split()) <= WORDS.get(section, 1950)


def test_what_was_measured_says_on_which_machine() -> None:
    assert "cores" in measured()["machine"]
    json.dumps(measured())
