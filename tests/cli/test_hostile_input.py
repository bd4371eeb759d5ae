"""What is meant ill is refused in words, in time, without a trace; nothing of it reaches the terminal as it is."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.diagnostics.limits import VARIABLE
from autograph_rewrite.tools.cli import main
from tests.support.small_items import regression

Refused = Callable[..., str]
DEEP = b"node { name: 'x' op: 'NoOp' attr { key: 'a' value { " + b"func { attr { key: 'a' value { " * 5000


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "good.ar"
    regression().save(str(path))
    return str(path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command line that must be refused, and return what it says."""

    def run(*words: str) -> str:
        try:
            code: object = main(words)
        except SystemExit as ended:
            code = ended.code
        found = capsys.readouterr()
        assert code == 2, found
        assert "Traceback" not in found.err
        assert "\x1b" not in found.out + found.err
        return found.err

    return run


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DEEP, "nested too deeply"),
        (bytes(2**20), "no text has zero bytes"),
        (b"node { " + b"a" * 2**20, "has no field named"),
    ],
    ids=["deep", "zeros", "one word"],
)
def test_texts_that_are_no_graph_are_refused_in_few_words(
    tmp_path: Path, refused: Refused, data: bytes, words: str
) -> None:
    (tmp_path / "g.pbtxt").write_bytes(data)
    said = refused("inspect", str(tmp_path / "g.pbtxt"))
    assert words in said
    assert len(said) < 1000


def test_an_array_that_says_it_is_huge_takes_no_memory(tmp_path: Path, graph: str, refused: Refused) -> None:
    written = io.BytesIO()
    np.lib.format.write_array_header_1_0(written, {"descr": "<f4", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(graph) as good, zipfile.ZipFile(tmp_path / "bad.ar", "w") as bad:
        manifest = json.loads(good.read("manifest.json"))
        capture = {"node": "x", "name": "x", "dtype": "float32", "file": "huge.npy"}
        manifest["function"] = {"inputs": [], "outputs": [], "captures": [capture]}
        bad.writestr("manifest.json", json.dumps(manifest))
        bad.writestr("graph.pb", good.read("graph.pb"))
        bad.writestr("huge.npy", written.getvalue())
    assert "memory" in refused("inspect", str(tmp_path / "bad.ar"))


def test_a_configuration_of_unknown_keys_is_refused_at_once(tmp_path: Path, graph: str, refused: Refused) -> None:
    (tmp_path / "c.yaml").write_text("".join(f"k{number}: 1\n" for number in range(20_000)))
    began = time.process_time()
    assert "has 20000 problems" in refused("plan", graph, "--config", str(tmp_path / "c.yaml"))
    assert time.process_time() - began < 5


def test_a_number_of_hundreds_of_digits_is_no_number(graph: str, refused: Refused) -> None:
    assert "is no number of examples" in refused("simulate", graph, "--config", "all_reduce", "--batch", "9" * 400)


@pytest.mark.parametrize(
    "line", [["\x1b[2J"], ["inspect", "--\x1b[2J"], ["inspect", "a", "\x1b[2J"], ["completion", "\x1b"]]
)
def test_complaints_about_a_command_line_show_its_control_characters(line: list[str], refused: Refused) -> None:
    assert "\\x1b" in refused(*line)


LONG = 70_000


def long_named(where: str) -> tf.compat.v1.GraphDef:
    """Return a graph with a name that nobody has written."""
    made = tf.compat.v1.GraphDef()
    node = made.node.add(name="x", op="Placeholder")
    node.attr["dtype"].type = 1
    if where == "function":
        made.library.function.add().signature.name = "\n" * LONG
    elif where == "body":
        function = made.library.function.add()
        function.signature.name = "f"
        function.node_def.add(name="\n" * LONG, op="NoOp")
    elif where == "input":
        node.op = "Identity"
        node.input.append("a" * LONG)
    else:
        setattr(node, where, "\n" * LONG)
    return made


@pytest.mark.parametrize("where", ["name", "device", "function", "body", "op", "input"])
def test_a_name_of_thousands_of_letters_is_refused_in_few_words(where: str, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "long.pb"
    path.write_bytes(long_named(where).SerializeToString())
    assert len(refused("inspect", str(path)).encode()) < 4000


def test_a_longer_name_is_read_where_somebody_says_so(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.pb"
    path.write_bytes(long_named("name").SerializeToString().replace(b"\n" * LONG, b"a" * LONG))
    hint = refused("dump", str(path)).partition("hint ")[2]
    assert hint.startswith(f'{VARIABLE}="name={LONG}"')
    monkeypatch.setenv(VARIABLE, f"name={LONG}")
    assert main(["dump", str(path)]) == 0
    assert "a" * LONG in capsys.readouterr().out


def test_the_full_form_of_a_gigabyte_of_one_value_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every element was written out: 128 MiB took 24 GiB."""
    with tf.Graph().as_default() as graph:
        tf.compat.v1.placeholder(tf.float32, [None], "x")
        tf.constant(0.1, shape=[1 << 13, 1 << 14], name="c")
    (tmp_path / "splat.pb").write_bytes(graph.as_graph_def().SerializeToString())
    assert main(["dump", "--full", str(tmp_path / "splat.pb")]) == 0
    text = capsys.readouterr().out
    assert "value=float32[8192,16384] splat 0.1" in text
    (tmp_path / "splat.txt").write_text(text, encoding="utf-8")
    assert main(["dump", "--full", str(tmp_path / "splat.txt")]) == 0
    assert capsys.readouterr().out == text
