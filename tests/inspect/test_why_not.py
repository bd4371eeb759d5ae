"""`why-not` says what a strategy makes of a variable, with the reasons of the code that decides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.inspect.why import why_not
from autograph_rewrite.tools import cli
from tests.support.golden_text import check_golden
from tests.support.small_items import regression

MANY = {"devices": [f"CPU:{i}" for i in range(8)]}
STRATEGIES = ("AllReduce", "PS", "PartitionedPS", "PartitionedAR", "Parallax", "FSDP", "model")


def answer(variable: str, strategy: str, config: dict[str, Any] | None = None) -> Any:
    """Return the answer for the regression, whose weights have 3 rows."""
    return why_not(regression(), variable, strategy, ar.Config.of(config) if config else None)


@pytest.mark.filterwarnings("ignore:autograph_rewrite. settings without an effect")
def test_the_answers_are_as_they_were() -> None:
    check_golden("why_not.txt", "".join(str(answer("w", strategy)) for strategy in STRATEGIES))


@pytest.mark.filterwarnings("ignore:autograph_rewrite. settings without an effect")
@pytest.mark.parametrize(
    ("strategy", "config", "because"),
    [
        ("FSDP", MANY, r"no axis is as long as there are replicas \(8\): its shape is \[3, 1\]"),
        ("AllReduce", None, "keeps every variable with every replica"),
        ("Parallax", None, "only looked up by row"),
        ("PS", None, "puts whole variables on servers"),
    ],
)
def test_a_variable_that_stays_whole_has_the_reason_of_its_builder(
    strategy: str, config: dict[str, Any] | None, because: str
) -> None:
    found = answer("w", strategy, config)
    assert len(found.exchanged) == 1
    assert "whole" in found.lives
    assert re.search(because, found.because)


def test_a_slot_follows_its_variable_and_a_stranger_is_refused_with_the_closest() -> None:
    assert "slot of 'w'" in answer("w/Momentum", "FSDP").because
    with pytest.raises(GraphError, match="closest names: w/Momentum"):
        answer("w/Momentun", "FSDP")
    with pytest.raises(ConfigError, match="closest names: FSDP"):
        answer("w", "FSPD")


def test_a_dimension_that_cannot_be_cut_says_why() -> None:
    found = answer("w", "model")
    assert "along dimension 0" in found.lives
    assert "dimension 1" in found.because


def test_the_verb_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regression().save(tmp_path / "old.ar")
    assert cli.main(["why-not", str(tmp_path / "old.ar"), "w", "FSDP", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["lives"].startswith("split(0) in 2 shards of 2, 1")
    assert said["because"] is None
