"""The frame around the verbs: how errors, interrupts and closed pipes end, and as which exit code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.tools import cli, output_pipes
from autograph_rewrite.tools.cli import of_the_graph
from tests.support.small_items import regression


class FakeVerb:
    """A verb whose `run` does what the test says."""

    def __init__(self, run: Callable[[argparse.Namespace], int]) -> None:
        self.run = run

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("graph")


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the command line with one fake verb, `inspect`."""

    def run_main(run: Callable[[argparse.Namespace], int], *argv: str) -> int:
        monkeypatch.setattr(cli, "available_verbs", lambda: ["inspect"])
        monkeypatch.setattr(cli, "load_verb", lambda verb: FakeVerb(run))
        return cli.main(argv)

    return run_main


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_what_the_verb_returns(call: Callable[..., int], code: int) -> None:
    assert call(lambda args: code, "inspect", "g.pb") == code


def test_every_verb_knows_json(call: Callable[..., int]) -> None:
    assert call(lambda args: int(args.json), "inspect", "g.pb", "--json") == 1


def test_bad_usage_is_code_2(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        call(lambda args: 0, "inspekt")
    assert end.value.code == 2
    assert "there is no verb 'inspekt': did you mean 'inspect'?" in capsys.readouterr().err


def test_a_rewrite_error_is_code_2_and_a_message_without_traceback(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError("unknown key 'stratgy'", where="c.yaml:3", hint="did you mean 'strategy'?")
    assert call(raising(error), "inspect", "g.pb", "--json") == 2
    printed = capsys.readouterr()
    assert printed.err == f"ConfigError: {error}\n"
    assert json.loads(printed.out) == {
        "error": {
            "type": "ConfigError",
            "problem": "unknown key 'stratgy'",
            "where": "c.yaml:3",
            "node": None,
            "hint": "did you mean 'strategy'?",
        }
    }


def test_a_file_that_is_not_there_is_code_2(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(raising(FileNotFoundError(2, "No such file", "g.pb")), "inspect", "g.pb") == 2
    assert capsys.readouterr().err == "FileNotFoundError: [Errno 2] No such file: 'g.pb'\n"


def test_a_missing_tensorflow_is_code_2_and_says_how_to_install_it(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    error = ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
    assert call(raising(error), "inspect", "g.pb") == 2
    assert "autograph-rewrite[cpu]" in capsys.readouterr().err


def test_a_bug_shows_its_traceback(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(raising(ZeroDivisionError("oops")), "inspect", "g.pb") == 2
    printed = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in printed
    assert "this is a bug" in printed


def test_control_c_is_code_130(call: Callable[..., int]) -> None:
    assert call(raising(KeyboardInterrupt()), "inspect", "g.pb") == 130


def test_control_c_while_a_verb_is_imported_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(verb: str) -> FakeVerb:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_verb", load)
    assert cli.main(["inspect", "g.pb"]) == 130


@pytest.mark.parametrize("text", ["\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "a\rb", "\x7f", "\x00"])
def test_control_characters_of_names_are_printed_as_escapes(capfd: pytest.CaptureFixture[str], text: str) -> None:
    with output_pipes.patient_output():
        print("\tname", text)
        print(text, file=sys.stderr)
    out, err = capfd.readouterr()
    assert out == f"\tname {text.encode('unicode_escape').decode()}\n"
    assert err == f"{text.encode('unicode_escape').decode()}\n"


def test_a_closed_pipe_is_no_error() -> None:
    """`autograph-rewrite dump g.pb | head -1` ends quietly."""
    code = (
        "import sys\n"
        "from autograph_rewrite.tools import cli\n"
        "class Dump:\n"
        "    def add_arguments(self, parser): pass\n"
        "    def run(self, args):\n"
        "        for i in range(100000): print('a line of the dump', i)\n"
        "        return 0\n"
        "cli.available_verbs = lambda: ['dump']\n"
        "cli.load_verb = lambda verb: Dump()\n"
        "sys.exit(cli.main(['dump']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=30)) == ("", 0)


@pytest.mark.parametrize("code", [0, 1])
def test_what_is_to_be_written_is_written_though_nobody_reads_what_is_printed(tmp_path: Path, code: int) -> None:
    """`autograph-rewrite rewrite ... -o OUT --print-changed | head -1` writes OUT, and its exit code is its own."""
    source = (
        "import sys, pathlib\n"
        "from autograph_rewrite.tools import cli\n"
        "class Rewrite:\n"
        "    def add_arguments(self, parser): pass\n"
        "    def run(self, args):\n"
        "        for i in range(100000): print('a line', i)\n"
        "        print('lines', file=sys.stderr)\n"
        "        pathlib.Path('out').touch()\n"
        f"        return {code}\n"
        "cli.available_verbs = lambda: ['rewrite']\n"
        "cli.load_verb = lambda verb: Rewrite()\n"
        "sys.exit(cli.main(['rewrite']))\n"
    )
    line = [sys.executable, "-c", source]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=30) == code
    assert (tmp_path / "out").exists()


def test_every_verb_module_is_on_offer_and_follows_the_protocol() -> None:
    folder = Path(cli.__file__).parent / "verbs"
    modules = {path.stem.replace("_", "-") for path in folder.rglob("*.py")} - {"--init--", "common-arguments"}
    assert modules == set(cli.available_verbs())
    for verb in modules:
        cli.load_verb(verb).add_arguments(argparse.ArgumentParser())
        assert callable(cli.load_verb(verb).run)


def test_tests_run_on_four_virtual_devices() -> None:
    tf = pytest.importorskip("tensorflow")
    assert len(tf.config.list_logical_devices("CPU")) == 4


def test_a_graph_that_tensorflow_refuses_too_is_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = regression()
    (tmp_path / "good.pb").write_bytes(item.graph_bytes)
    graph = item.graph.clone()
    graph.nodes["y"].set_attr("transpose_a", True)
    graph.nodes["x"].set_attr("shape", (4, 3))
    (tmp_path / "bad.pb").write_bytes(serde.to_bytes(graph))
    bug = ZeroDivisionError("oops")

    def blamed(name: str) -> Exception:
        return of_the_graph(bug, cli.parse(["inspect", str(tmp_path / name), "--train-op", "train"]))

    assert blamed("good.pb") is bug
    assert str(blamed("bad.pb")).startswith("TensorFlow cannot load this graph: Dimensions must be equal")


def test_help_lists_every_verb_in_a_group_with_an_example_of_it() -> None:
    assert sorted(verb for group in cli.GROUPS.values() for verb in group) == sorted(cli.VERBS)
    assert {verb: example.split()[0] for verb, example in cli.EXAMPLES.items()} == {verb: verb for verb in cli.VERBS}
    for verb, example in cli.EXAMPLES.items():
        if verb not in cli.SCRIPTS:  # theirs are the script's own
            assert cli.parse(example.split()).verb == verb


def test_log_lines_of_tensorflow_wait_until_something_goes_wrong(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom autograph_rewrite.tools.output_pipes import quiet_tensorflow\n"
        "with quiet_tensorflow() as show:\n"
        "    os.write(2, b'I0000 00:00:1.0 7 port.cc:1] on\\nE0000 00:00:1.0 7 a.cc:1] bad\\n')\n"
        "    print('told', file=sys.stderr)\n"
        "    if sys.argv[1:]:\n        import time; time.sleep(0.3); show()\n"
    )
    said = [
        subprocess.run([sys.executable, "-c", program, *more], capture_output=True, text=True, timeout=60).stderr
        for more in ([], ["wrong"])
    ]
    assert ["bad" in text and "told" in text for text in said] == [True, True]
    assert ["port.cc" in text for text in said] == [False, True]
