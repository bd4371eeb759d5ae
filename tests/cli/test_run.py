"""`run` executes a user's script as Python would, with the configuration in the environment; `verify` checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.config import presets, user_code
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan import selected
from autograph_rewrite.tools import cli
from autograph_rewrite.tools.launcher.script import CONFIG_VARIABLE
from tests.support.small_items import regression

SCRIPT = """\
import json, os, sys
import helper
path = os.environ["AUTOGRAPH_REWRITE_CONFIG"]
print(json.dumps([__name__, sys.argv, path, helper.VALUE]))
"""


def run(line: str) -> int:
    return cli.main(line.split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a configuration, a script and a module that the script imports."""
    monkeypatch.chdir(tmp_path)
    for name in (CONFIG_VARIABLE, selected.ANSWERED, user_code.VARIABLE):
        monkeypatch.setenv(name, "")  # and it is as before when the test has ended
    (tmp_path / "config.yaml").write_text("devices: [CPU:0, CPU:1]\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("VALUE = 7\n")
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return tmp_path


def test_a_script_sees_its_arguments_its_folder_and_the_configuration(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run --config config.yaml scripts/train.py --steps 3 --json") == 0
    name, argv, config, value = json.loads(capsys.readouterr().out)
    assert name == "__main__"
    assert argv == ["scripts/train.py", "--steps", "3", "--json"]
    assert config == str(folder / "config.yaml")
    assert value == 7


def test_the_process_is_as_it_was_afterwards(folder: Path) -> None:
    before = sys.argv, sys.path[:], dict(os.environ)
    run("run --config config.yaml scripts/train.py")
    assert (sys.argv, sys.path, dict(os.environ)) == before


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("import autograph_rewrite as ar; raise ar.GraphError('odd graph')", 2, "GraphError: odd graph"),
    ],
)
def test_the_exit_code_is_the_script_s(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str, code: int, message: str
) -> None:
    Path("s.py").write_text(source)
    assert run("run --config config.yaml s.py") == code
    assert message in capsys.readouterr().err


def test_a_traceback_starts_in_the_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    run("run --config config.yaml s.py")
    err = capsys.readouterr().err
    assert "s.py" in err
    assert "verb_run" not in err
    assert "runpy" not in err


def test_a_wrong_configuration_stops_before_the_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.py").write_text("open('ran', 'w')")
    Path("bad.yaml").write_text("devices: [CPU:0]\nstratgy: {}\n")
    assert run("run --config bad.yaml s.py") == 2
    assert "bad.yaml:2" in capsys.readouterr().err
    assert run("run --config config.yaml ghost.py") == 2
    assert "ghost.py" in capsys.readouterr().err
    assert not Path("ran").exists()


@dataclass(frozen=True)
class FakeReport:
    """What `ar.verify` returns, as far as the verb cares."""

    ok: bool
    max_error: float = 0.5
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "worst: w"

    def data(self) -> dict[str, Any]:
        return {"ok": self.ok, "max_error": self.max_error}


@pytest.mark.parametrize("ok", [True, False])
def test_verify_exits_with_the_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool
) -> None:
    regression().save("item.ar")
    seen: dict[str, Any] = {}

    def verify(item: Any, config: Any, **options: Any) -> FakeReport:
        seen.update(options, targets=item.targets)
        return FakeReport(ok)

    monkeypatch.setattr(ar, "verify", verify)
    code = run("verify item.ar --config config.yaml --steps 5 --seed 9 --rtol 1e-3 --batch 7")
    assert code == (0 if ok else 1)
    assert capsys.readouterr().out == "worst: w\n"
    assert seen == {"steps": 5, "seed": 9, "rtol": 1e-3, "batch": 7, "targets": ("train",)}
    run("verify item.ar --config config.yaml --json")
    assert json.loads(capsys.readouterr().out) == {"ok": ok, "max_error": 0.5}


@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_verify_needs_a_step(folder: Path, steps: str) -> None:
    with pytest.raises(SystemExit) as end:
        run(f"verify item.ar --config config.yaml --steps={steps}")
    assert end.value.code == 2


REWRITES = """\
import autograph_rewrite as ar
new = ar.rewrite(ar.GraphItem.load("item.ar"){})
print(new.report.plan.replicas, new.report.plan.timeout_seconds)
"""
OWN_CONFIG = ", {'devices': ['CPU:0'] * 3}"


@pytest.mark.parametrize(
    ("source", "printed", "told"),
    [
        (REWRITES.format(""), "2 60.0", "the configuration is {folder}/config.yaml, which --config gave"),
        (REWRITES.format(OWN_CONFIG), "3 60.0", "one of its own, so '{folder}/config.yaml', which --config gave, is"),
        (
            REWRITES.format(", 'own.yaml'"),
            "2 5.0",
            "'own.yaml', so '{folder}/config.yaml', which --config gave, is not",
        ),
        (REWRITES.format(", 'config.yaml'"), "2 60.0", ""),
        (
            "print('hello')",
            "hello",
            "never called ar.distribute or ar.rewrite, so it was not distributed as {folder}/con",
        ),
        ("print('hello'); raise SystemExit", "hello", "s.py never called ar.distribute or ar.rewrite"),
        ("print('hello'); raise SystemExit(3)", "hello", ""),
    ],
)
def test_a_script_trains_under_the_configuration_of_the_command_or_a_word_says_why_not(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str, printed: str, told: str
) -> None:
    regression().save("item.ar")
    Path("own.yaml").write_text("devices: [CPU:0, CPU:1]\nstrategy: {variables: mirrored}\ntimeout_seconds: 5\n")
    Path("s.py").write_text(source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("run --config config.yaml s.py")
    out, err = capsys.readouterr()
    assert out == f"{printed}\n"
    said = err + "".join(f"autograph_rewrite: {one.message}" for one in caught)
    assert said.count("autograph_rewrite:") == (1 if not caught else 2) * bool(told)
    assert told.format(folder=folder) in said


def test_without_any_configuration_the_error_says_how_to_give_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration.*\n.*autograph-rewrite run --config"):
        ar.rewrite(regression())


def test_the_name_of_a_shipped_configuration_stands_for_its_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "all_reduce_mirrored" in presets.names()
    assert Config.load("all_reduce_mirrored") == Config.load("configs/all_reduce_mirrored.yaml")
    assert Config.load("all_reduce_mirrored").mode == "mirrored"
    Path("all_reduce_mirrored").write_text("devices: [CPU:7]")  # what is here comes first
    assert Config.load("all_reduce_mirrored").devices == ("/device:CPU:7",)
    with pytest.raises(ConfigError, match=r"no file 'all_reduse'.*\n.*did you mean 'all_reduce'"):
        Config.load("all_reduse")
    Path("s.py").write_text("import os; print(os.path.isfile(os.environ['AUTOGRAPH_REWRITE_CONFIG']))")
    assert run("run --config all_reduce s.py") == 0
    assert capsys.readouterr().out == "True\n"


BUILDER = """\
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from autograph_rewrite.strategies import STRATEGIES
class Mine:
    build = STRATEGIES["AllReduce"].build
"""


@pytest.mark.parametrize("verb", ["plan", "rewrite", "simulate", "run"])
def test_every_verb_runs_code_of_a_configuration_only_if_it_is_allowed(folder: Path, verb: str) -> None:
    regression().save("item.ar")
    Path("own.py").write_text(BUILDER)
    Path("own.yaml").write_text("devices: [CPU:0, CPU:1]\nstrategy: {name: 'own.py:Mine'}\n")
    Path("s.py").write_text(REWRITES.format(""))
    rest = {"run": "s.py", "rewrite": "item.ar -o new.ar"}.get(verb, "item.ar")
    assert run(f"{verb} --config own.yaml {rest}") == 2
    assert not Path("ran").exists()
    assert run(f"{verb} --config own.yaml --allow-code {rest}") == 0
    assert Path("ran").exists()


def test_a_program_that_starts_tensorflow_first_has_the_devices_of_the_configuration(
    folder: Path, fresh_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    Path("two.yaml").write_text("devices: [CPU:0, CPU:1]\nstrategy: {variables: mirrored}\n")
    Path("s.py").write_text("import tensorflow as tf; print(tf.config.list_logical_devices('CPU')[-1].name)")
    line = "run --config two.yaml s.py"
    done = fresh_python(f"from autograph_rewrite.tools import cli; cli.main({line.split()})")
    assert done.stdout == "/device:CPU:1\n", done.stderr[-2000:]
