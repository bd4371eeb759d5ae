"""The terminal: mistyped words, `-` for standard streams, colours, the line of progress, completion, quick help."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autograph_rewrite.config import presets
from autograph_rewrite.diagnostics.progress_line import EVERY, ProgressLine, progress_on, stage
from autograph_rewrite.item import GraphItem
from autograph_rewrite.tools import cli, output_pipes
from autograph_rewrite.tools.output_pipes import painted
from autograph_rewrite.tools.verbs.completion import SHELLS
from tests.support.small_items import regression

Command = Callable[..., tuple[int, bytes, str]]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    """Return a graph as an archive has it."""
    regression().save(tmp_path / "item.ar")
    return (tmp_path / "item.ar").read_bytes()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    """Return a function that runs a command line on standard input; it gives code, output and error output."""

    def run(*words: str, given: bytes = b"") -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        code = cli.main(words)
        found = capsysbinary.readouterr()
        return code, found.out, found.err.decode()

    return run


def python(code: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, timeout=60, text=True, check=False)


MISTYPED = {
    "verfy g.pb": "there is no verb 'verfy': did you mean 'verify'?",
    "plan g.pb --confg C": "there is no option '--confg': did you mean '--config'?",
    "rewrite g.pb --print-change=1 --otput X": "there is no option '--otput': did you mean '--output'?",
    "launch --logdir D script.py": "there is no option '--logdir': did you mean '--log-dir'?",
}


@pytest.mark.parametrize("line", MISTYPED)
def test_a_mistyped_word_names_the_one_that_was_meant(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2
    assert MISTYPED[line] in capsys.readouterr().err


def test_the_options_of_a_script_are_its_own() -> None:
    assert cli.parse(["run", "--config", "c.yaml", "script.py", "--confg", "x"]).args == ["--confg", "x"]


@pytest.mark.parametrize("form", [".ar", ".pb", ".txt", ".pbtxt"])
def test_a_graph_comes_from_standard_input_in_every_form(
    command: Command, tmp_path: Path, archive: bytes, form: str
) -> None:
    source, target = tmp_path / "item.ar", tmp_path / f"graph{form}"
    if form == ".txt":
        assert cli.main(["dump", str(source), "--full", "-o", str(target)]) == 0
    elif form != ".ar":
        assert cli.main(["rewrite", str(source), "--config", "all_reduce", "-o", str(target)]) == 0
    else:
        target = source
    command("inspect", str(target))  # what was printed up to here goes
    direct = command("dump", str(target), "--json")
    assert command("dump", "-", "--json", given=target.read_bytes()) == direct
    assert direct[0] == 0


@pytest.mark.parametrize("given", [b"", b"garbage\n", b"PK\x03\x04nothing"])
def test_an_error_names_standard_input_and_no_temporary_file(command: Command, given: bytes) -> None:
    code, _, told = command("inspect", "-", given=given)
    assert code == 2
    assert "standard input" in told
    assert "/tmp" not in told


def test_a_rewritten_graph_goes_to_standard_output_alone(command: Command, archive: bytes, tmp_path: Path) -> None:
    words = ["rewrite", "-", "--config", "all_reduce_mirrored", "-o", "-", "--print-changed"]
    code, written, told = command(*words, given=archive)
    assert code == 0
    (tmp_path / "new.ar").write_bytes(written)
    assert "gradient/all_reduce" in " ".join(GraphItem.load(tmp_path / "new.ar").graph.nodes)
    assert "2 replicas" in told


def test_a_plan_that_goes_to_standard_output_is_read_again(command: Command, archive: bytes, tmp_path: Path) -> None:
    _, written, _ = command("plan", "-", "--config", "all_reduce", "-o", "-", given=archive)
    (tmp_path / "plan.yaml").write_bytes(written)
    graph, plan = str(tmp_path / "item.ar"), str(tmp_path / "plan.yaml")
    assert cli.main(["explain", graph, "--plan", plan]) == 0


def test_json_and_a_result_do_not_share_standard_output(tmp_path: Path, archive: bytes) -> None:
    assert cli.main(["plan", str(tmp_path / "item.ar"), "--config", "all_reduce", "-o", "-", "--json"]) == 2


def test_lines_are_painted_behind_the_escapes_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    with output_pipes.patient_output():
        print("ok: \x1b[31mname")
    assert stream.getvalue() == "\x1b[32mok:\x1b[0m \\x1b[31mname\n"


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_nothing_is_painted_where_colours_are_unwanted(
    monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    with output_pipes.patient_output():
        print("ok: all is well")
    assert stream.getvalue() == "ok: all is well\n"


def test_each_line_of_a_text_is_painted_by_its_own_beginning() -> None:
    assert painted("a\nMISMATCH: b\n") == "a\n\x1b[31mMISMATCH:\x1b[0m b\n"


def test_progress_is_shown_on_a_terminal_and_goes_before_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autograph_rewrite.diagnostics.progress_line.FIRST_SHOWN", 0.0)
    stream = Terminal()
    with progress_on(stream) as line:
        assert line is not None
        stage("pass %s", "a\x1b[2J\nb")
        wait_for(lambda: "pass a?[2J?b" in stream.getvalue())
        line.clear()
        assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_progress_is_lines_elsewhere_and_only_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with progress_on(stream):
        stage("quick")
        time.sleep(3 * EVERY)
    assert stream.getvalue() == ""
    monkeypatch.setattr("autograph_rewrite.diagnostics.progress_line.FIRST_SHOWN", 0.0)
    monkeypatch.setattr("autograph_rewrite.diagnostics.progress_line.FIRST_LINE", 0.0)
    with progress_on(stream):
        stage("slow")
        wait_for(lambda: "slow\n" in stream.getvalue())
    assert stream.getvalue().startswith("... 0 s: slow\n")


def test_stages_are_silent_again_when_progress_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    with progress_on(io.StringIO()) as line:
        assert isinstance(line, ProgressLine)
    stage("nobody hears it")
    assert not caplog.records


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_control_c_ends_a_verb_with_one_line_and_no_file(tmp_path: Path, archive: bytes) -> None:
    code = (
        "import os, signal, sys\n"
        "from autograph_rewrite.passes.base import pass_manager\n"
        "from autograph_rewrite.tools import cli\n"
        "def interrupted(*_, **__): os.kill(os.getpid(), signal.SIGINT)\n"
        "pass_manager._run = interrupted\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    before = set(tmp_path.iterdir())
    words = ["rewrite", "item.ar", "--config", "all_reduce", "-o", "new.ar", "--dump-dir", "passes"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, timeout=60, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_verbs_options_and_configurations(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in cli.VERBS)
    assert all(name in script for name in presets.names())
    assert "print-changed" in script


def test_bash_completes_a_verb_an_option_and_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("autograph-rewrite", *words))
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _autograph_rewrite; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        ended = subprocess.run(
            [bash, "-c", f"{script}\n{ask}"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return ended.stdout.split()

    (tmp_path / "graph.pb").touch()
    assert completed("bis") == ["bisect"]
    assert completed("rewrite", "gr") == ["graph.pb"]
    assert completed("rewrite", "graph.pb", "--print-c") == ["--print-changed"]
    assert completed("plan", "graph.pb", "--config", "fs") == ["fsdp"]
    assert completed("dump", "graph.pb", "--format", "graph") == ["graphml", "graph.pb"]


def test_help_imports_nothing_that_takes_long() -> None:
    """Numpy, pydantic and networkx take longer than all of --help; TensorFlow takes seconds."""
    code = (
        "import contextlib, io, json, sys\n"
        "from autograph_rewrite.tools import cli\n"
        "found, heavy = {}, ('tensorflow', 'numpy', 'pydantic', 'networkx', 'rich')\n"
        "for verb in (None, *cli.VERBS):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        cli.main(['--help'] if verb is None else [verb, '--help'])\n"
        "    found[verb] = [name for name in heavy if name in sys.modules]\n"
        "print(json.dumps(found))\n"
    )
    ended = python(code)
    assert {verb: names for verb, names in json.loads(ended.stdout).items() if names} == {}


def test_the_batch_that_help_names_is_the_one_that_is_assumed() -> None:
    from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES

    assert f"else {EXAMPLES} for each" in cli.parser_of("plan").format_help().replace("\n", " ").replace("  ", "")
