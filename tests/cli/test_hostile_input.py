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
