"""`bisect` on the command line: exit codes, text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autograph_rewrite.tools import cli
from tests.support.small_items import regression

CONFIG = "devices: [CPU:0, CPU:1]\nstrategy: {name: AllReduce, variables: mirrored}\n"
WRONG = '''
def move(rewrite):
    """Add one to the gradient."""
    gradient = rewrite.graph.nodes["gradient"].output()
    ones = rewrite.graph.add("OnesLike", [gradient], name="gradient/ones").output()
    rewrite.replace(gradient, rewrite.graph.add("AddV2", [gradient, ones], name="gradient/moved").output())
    ones.node.set_input(0, gradient)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder with a graph, a configuration, and one that names a wrong pass."""
    monkeypatch.chdir(tmp_path)
    regression().save("item.ar")
    Path("config.yaml").write_text(CONFIG)
    Path("wrong.py").write_text(WRONG)
    Path("wrong.yaml").write_text(f"{CONFIG}passes: [{{file: wrong.py:move, after: propagate}}]\n")


def test_a_good_rewrite_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bisect", "item.ar", "--config", "config.yaml"]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


def test_a_wrong_pass_of_a_configuration_is_exit_code_1_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bisect", "item.ar", "--config", "wrong.yaml", "--allow-code"]
    assert cli.main(line) == 1
    assert "first pass: move" in capsys.readouterr().out
    assert cli.main([*line, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["pass"]) == (False, "move")
    (edge,) = data["divergences"][0]["edges"]
    assert (edge["expected"], edge["made_by"]) == ("gradient:0", "move")


def test_a_configuration_that_may_not_run_its_code_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bisect", "item.ar", "--config", "wrong.yaml"]) == 2
    assert "ConfigError" in capsys.readouterr().err


def test_reduce_writes_a_text_that_fails_by_the_command_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["reduce", "item.ar", "--config", "wrong.yaml", "--allow-code", "-o", "small.txt"]
    assert cli.main([*line, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["after"] < data["before"]
    assert cli.main(data["command"].split()[1:]) == 1
    capsys.readouterr()
    assert cli.main(["reduce", "item.ar", "--config", "config.yaml"]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


def test_verify_says_which_commands_to_run_next(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["item.ar", "--config", "wrong.yaml", "--allow-code", "--steps", "2"]
    assert cli.main(["verify", *line]) == 1
    printed = capsys.readouterr().out
    options = "item.ar --config wrong.yaml --steps 2 --seed 0 --rtol 1e-05 --allow-code"
    assert f"next: autograph-rewrite bisect {options}: the first pass" in printed
    assert f"next: autograph-rewrite reduce {options}: a graph of a few nodes" in printed
    assert cli.main(["bisect", *line]) == 1


def test_verify_has_nothing_to_try_next_where_all_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "item.ar", "--config", "config.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next"] == []
