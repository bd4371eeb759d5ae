"""Each verb on a small graph: what it prints, what it writes, and that a failure writes nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.tools import cli
from tests.support.small_items import mirrored, regression

CONFIG = "devices: [CPU:0, CPU:1]\nstrategy: {name: AllReduce, variables: mirrored}\n"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a graph in two forms, a rewritten one and a configuration."""
    monkeypatch.chdir(tmp_path)
    item = regression()
    item.save("item.ar")
    Path("graph.pb").write_bytes(serde.to_bytes(item.graph))
    mirrored().save("mirrored.ar")
    Path("config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs a command line and returns exit code, output and error output."""

    def run(line: str, *more: str) -> tuple[int, str, str]:
        code = cli.main([*line.split(), *more])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


READING_VERBS = [
    "inspect item.ar",
    "dump item.ar",
    "diff item.ar mirrored.ar",
    "plan item.ar --config config.yaml",
    "why mirrored.ar loss",
    "comm mirrored.ar",
]


@pytest.mark.parametrize("line", READING_VERBS)
def test_reading_verbs_print_and_write_nothing(call: Call, folder: Path, line: str) -> None:
    before = files(folder)
    code, out, err = call(line)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) > 1
    assert files(folder) == before


@pytest.mark.parametrize("line", READING_VERBS)
def test_reading_verbs_print_json(call: Call, line: str) -> None:
    code, out, _ = call(line, "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize("line", READING_VERBS)
def test_a_missing_file_is_bad_input(call: Call, line: str) -> None:
    code, out, err = call(line.replace("item.ar", "ghost.ar").replace("mirrored.ar", "ghost.ar"))
    assert (code, out) == (2, "")
    assert "there is no such file" in err
    assert "ghost.ar" in err


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff\xff", b"PK\x03\x04broken"])
def test_a_corrupt_file_is_bad_input(call: Call, folder: Path, content: bytes) -> None:
    (folder / "broken.pb").write_bytes(content)
    code, out, err = call("inspect broken.pb --json")
    assert code == 2
    assert json.loads(out)["error"]["type"] == "GraphError"
    assert "broken.pb" in err


def test_names_complete_a_raw_graph(call: Call) -> None:
    _, out, _ = call(
        "inspect graph.pb --train-op update --output loss --output y --batch-input x=0 --init-op init --json"
    )
    data = json.loads(out)
    assert data["targets"] == ["update"]
    assert [output["name"] for output in data["outputs"]] == ["loss", "y"]
    assert data["inputs"][0]["batch_axis"] == 0
    _, out, _ = call("inspect graph.pb --batch-input x=none --json")
    assert json.loads(out)["inputs"][0]["batch_axis"] is None


def test_a_wrong_name_is_bad_input_with_the_closest(call: Call) -> None:
    code, _, err = call("inspect graph.pb --train-op trian")
    assert code == 2
    assert "trian" in err
    assert "train" in err.replace("trian", "")


@pytest.mark.parametrize("option", ["--batch-input x", "--batch-input x=first", "--depth many", "--format tabel"])
def test_a_malformed_option_is_bad_usage(call: Call, option: str) -> None:
    with pytest.raises(SystemExit) as end:
        call(f"dump graph.pb {option}")
    assert end.value.code == 2


def test_dump_filters_and_writes(call: Call, folder: Path) -> None:
    _, out, _ = call("dump item.ar --op MatMul --name ^y")
    assert out.splitlines()[-1].startswith("%y: float32 = MatMul(")
    _, out, _ = call("dump item.ar --around loss --depth 1 --format dot -o part.dot")
    assert out == ""
    assert (folder / "part.dot").read_text().startswith("digraph")
    assert os.stat(folder / "part.dot").st_mode & 0o600 == 0o600


def test_dump_into_a_missing_folder_is_bad_input(call: Call) -> None:
    code, _, err = call("dump item.ar -o no/such/file.txt")
    assert code == 2
    assert "cannot write 'no/such/file.txt'" in err


def test_diff_can_tell_by_its_exit_code(call: Call) -> None:
    assert call("diff item.ar graph.pb --exit-code") == (0, "no differences\n", "")
    assert call("diff item.ar mirrored.ar --exit-code")[0] == 1
    assert call("diff item.ar mirrored.ar")[0] == 0


def test_plan_is_written_and_used_by_rewrite(call: Call, folder: Path) -> None:
    code, out, _ = call("plan item.ar --config config.yaml -o plan.yaml")
    assert code == 0
    assert re.fullmatch(
        r"plan\.yaml: \d+ reshards for 2 replicas \(mirrored\); each member hands over .* examples\n", out
    )
    assert Plan.load("plan.yaml").edges
    assert call("rewrite item.ar --plan plan.yaml -o a.pb")[0] == 0
    assert call("rewrite item.ar --config config.yaml -o b.pb")[0] == 0
    assert (folder / "a.pb").read_bytes() == (folder / "b.pb").read_bytes()


def test_a_plan_of_another_graph_is_refused(call: Call, folder: Path) -> None:
    call("plan item.ar --config config.yaml -o plan.yaml")
    item = regression()
    item.graph.add("Neg", [item.graph.value("squares")], name="loss2")
    item.save(folder / "other.ar")
    Path("plan.yaml").write_text(Path("plan.yaml").read_text().replace("gradient", "no_such_value"))
    code, _, err = call("rewrite item.ar --plan plan.yaml -o out.ar")
    assert code == 2
    assert "plan.yaml" in err
    assert not (folder / "out.ar").exists()


@pytest.mark.parametrize("out", ["new.ar", "new.pb", "new.pbtxt"])
def test_rewrite_writes_a_sound_graph_in_the_form_of_its_name(call: Call, folder: Path, out: str) -> None:
    code, text, err = call(f"rewrite item.ar --config config.yaml -o {out}")
    assert (code, err) == (0, "")
    assert text.startswith(f"{out}:\n18 nodes -> ")
    new = GraphItem.load(folder / out, outputs=["loss"])
    check_expanded(new.graph_bytes, regression(), ("CPU:0", "CPU:1"))


def test_rewrite_keeps_what_every_pass_left_behind(call: Call, folder: Path) -> None:
    call("rewrite item.ar --config config.yaml -o new.pb --dump-dir passes --plan-out plan.yaml")
    names = sorted(path.name for path in (folder / "passes").iterdir())
    stems = sorted({name.partition(".")[0] for name in names})
    assert names == sorted(f"{stem}.{kind}" for stem in stems for kind in ("json", "pb", "txt"))
    assert [stem[:2] for stem in stems] == [f"{i:02}" for i in range(1, len(stems) + 1)]
    assert stems[-1].endswith("_expand")
    assert (folder / "passes" / f"{stems[-1]}.pb").read_bytes() == (folder / "new.pb").read_bytes()
    reshard = next(stem for stem in stems if stem.endswith("_insert-reshards"))
    assert " each" in (folder / "passes" / f"{reshard}.txt").read_text()
    propagated = next(stem for stem in stems if stem.endswith("_propagate"))
    assert "@ partial(sum)" in (folder / "passes" / f"{propagated}.txt").read_text()
    folded = serde.from_bytes((folder / "passes" / f"{reshard}.pb").read_bytes())
    assert any(node.attr("_autograph_span") == b"each" for node in folded)
    assert json.loads((folder / "passes" / f"{reshard}.json").read_text())["pass"] == "insert-reshards"
    assert Plan.load("plan.yaml").edges
    assert {name for name in files(folder) if name.startswith(".")} == set()


def test_rewrite_prints_what_each_pass_changes(call: Call) -> None:
    _, out, _ = call("rewrite item.ar --config config.yaml -o new.pb --print-changed")
    assert re.search(r"^== after insert-reshards: \d+ of \d+ nodes changed$", out, re.MULTILINE)
    assert re.search(r"^\+ %.* each  # insert-reshards for x$", out, re.MULTILINE)
    _, out, err = call("rewrite item.ar --config config.yaml -o new.pb --print-changed --json")
    assert json.loads(out)["replicas"] == 2
    assert "== after insert-reshards" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rewrite item.ar --config typo.yaml -o new.ar --dump-dir D", "bucket_byte"),
        ("rewrite item.ar --config none.yaml -o new.ar --dump-dir D", "none.yaml"),
        ("rewrite item.ar --config twice.yaml -o new.ar --dump-dir D", "CPU:0"),
        ("rewrite cut.pb --config config.yaml -o new.ar --dump-dir D", "cut.pb"),
        ("rewrite constant.ar --config config.yaml -o new.ar --dump-dir D", "batch"),
        ("rewrite item.ar --config config.yaml -o new.xyz --dump-dir D", "name it .ar or .pb or .pbtxt"),
        ("rewrite item.ar --config config.yaml -o no/new.ar --dump-dir D", "cannot write 'no/new.ar'"),
        ("rewrite item.ar --config config.yaml -o new.ar --plan-out no/p.yaml", "cannot write 'no/p.yaml'"),
        ("plan item.ar --config typo.yaml -o new.yaml", "bucket_byte"),
        ("plan item.ar --config config.yaml -o new.xyz", "name it"),
    ],
)
def test_a_failure_is_bad_input_and_writes_nothing(call: Call, folder: Path, line: str, message: str) -> None:
    Path("typo.yaml").write_text("devices: [CPU:0, CPU:1]\nstrategy: {name: AllReduce, bucket_byte: 4}\n")
    Path("twice.yaml").write_text("devices: [CPU:0, CPU:0]\nstrategy: {name: AllReduce, variables: mirrored}\n")
    Path("cut.pb").write_bytes(Path("graph.pb").read_bytes()[:-7])
    item = regression()
    item.graph.node("gradient").set_inputs([item.graph.value("w/Read")] * 2)
    item.save("constant.ar")
    before = files(folder)
    code, _, err = call(line)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert files(folder) == before


def test_an_error_in_a_pass_leaves_no_snapshot(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(item: Any, config: Any, *, observers: Any, **options: Any) -> Any:
        for observe in observers:
            observe.keep("reshard", item.graph, {})
        raise PassError("the pass refuses")

    monkeypatch.setattr(ar, "rewrite", failing)
    before = files(folder)
    code, _, err = call("rewrite item.ar --config config.yaml -o new.ar --dump-dir D")
    assert code == 2
    assert "the pass refuses" in err
    assert files(folder) == before


def test_an_old_result_survives_a_failure(call: Call, folder: Path) -> None:
    Path("new.ar").write_text("old")
    assert call("rewrite item.ar --config ghost.yaml -o new.ar")[0] == 2
    assert (folder / "new.ar").read_text() == "old"


def test_why_and_comm_read_a_plan_for_lines_and_sizes(call: Call) -> None:
    call("rewrite item.ar --config config.yaml -o new.ar --plan-out plan.yaml")
    code, out, _ = call("why new.ar replica_0/gradient/all_reduce --plan plan.yaml")
    assert code == 0
    assert re.search(r"^plan\.yaml:\d+: gradient partial\(sum\) -> replicated by collective_reduce", out, re.MULTILINE)
    _, out, _ = call("comm new.ar --plan plan.yaml --json")
    exchanges = json.loads(out)["exchanges"]
    assert [(one["value"], one["bytes"], one["owner"]) for one in exchanges] == [
        ("gradient", 12, "w"),
        ("loss", 4, "step"),
    ]
    assert [one["order"] for one in exchanges] == [0, 1]
    code, _, err = call("why new.ar ghost")
    assert code == 2
    assert "no node 'ghost'" in err


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_verbs_do_not_import_tensorflow(
    workers: int, folder: Path, fresh_python: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers:  # in a pod that is part of a job
        addresses = [f"127.0.0.1:{1 + task}" for task in range(workers)]
        task = {"type": "worker", "index": 1}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": addresses}, "task": task}))
    lines = [line.split() for line in READING_VERBS]
    lines.append(["rewrite", "item.ar", "--config", "config.yaml", "-o", "new.pb"])
    lines.append(["report", "item.ar", "--config", "config.yaml"])
    code = (
        "import sys; from autograph_rewrite.tools.cli import main\n"
        f"for line in {lines}: assert main(line) == 0, line\n"
        "print('tensorflow' in sys.modules, file=sys.stderr)"
    )
    ran = fresh_python(code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines()[-1] == "False"


def test_report_writes_one_page(call: Call, folder: Path) -> None:
    code, out, err = call("report item.ar --config config.yaml -o page.html")
    assert (code, err) == (0, "")
    assert out.startswith("page.html: ")
    assert Path("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(call("report mirrored.ar --json")[1])["out"] == "report.html"
    assert files(folder) >= {"page.html", "report.html"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("report item.ar -o page.txt", "name it .html"),
        ("report item.ar -o nowhere/page.html", "cannot write 'nowhere/page.html'"),
        ("report item.ar --config missing.yaml -o page.html", "missing.yaml"),
        ("report mirrored.ar --config config.yaml -o page.html", "distributed already"),
    ],
)
def test_a_report_that_cannot_be_made_leaves_no_file(call: Call, folder: Path, line: str, told: str) -> None:
    before = files(folder)
    code, _, err = call(line)
    assert code == 2
    assert told in err
    assert files(folder) == before
