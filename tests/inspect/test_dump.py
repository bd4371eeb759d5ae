"""Every format shows the same graph, or the part of it that was asked for."""

from __future__ import annotations

import json
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import networkx
import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect import dump
from autograph_rewrite.inspect.dump import FORMATS
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Node
from tests.support.golden_text import check_golden
from tests.support.small_items import mirrored, regression


@pytest.mark.parametrize("format", ["text", "table", "json", "dot", "graphml"])
def test_formats_are_as_they_were(format: str) -> None:
    check_golden(f"dump_regression.{format}.txt", ar.dump(regression(), format))


def test_the_text_of_a_rewritten_graph_is_as_it_was() -> None:
    check_golden("dump_mirrored.text.txt", ar.dump(mirrored()))


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"svg"}))
def test_every_source_gives_the_same(format: str, tmp_path: Path) -> None:
    item = regression()
    item.save(tmp_path / "item.ar")
    assert ar.dump(tmp_path / "item.ar", format) == ar.dump(str(tmp_path / "item.ar"), format)
    assert ar.dump(item.graph, format) == ar.dump(serde.to_bytes(item.graph), format)


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"op": "^MatMul$"}, ["y", "gradient"]),
        ({"op": "Apply"}, ["update"]),
        ({"name": "^w/"}, ["w/zeros", "w/Assign", "w/Momentum", "w/Momentum/zeros", "w/Momentum/Assign", "w/Read"]),
        ({"name": "^w/", "op": "Assign"}, ["w/Assign", "w/Momentum/Assign"]),
        ({"around": "loss", "depth": 1}, ["axes", "squares", "loss"]),
        ({"around": "loss:0", "depth": 0}, ["loss"]),
        ({"around": "train", "depth": 2, "op": "Const|Handle"}, ["w", "w/Momentum", "rate", "momentum"]),
        ({"device": "GPU"}, []),
    ],
)
def test_filters_choose_nodes(filters: dict[str, object], names: list[str]) -> None:
    shown = json.loads(ar.dump(regression(), "json", **filters))  # type: ignore[arg-type]
    assert [node["name"] for node in shown["nodes"]] == names
    text = ar.dump(regression(), **filters)  # type: ignore[arg-type]
    assert f"# {len(names)} of 18 nodes" in text
    assert sorted(re.findall(r"^%([^:\s]+)", text, re.MULTILINE)) == sorted(names)


def test_a_device_filter_matches_the_full_device() -> None:
    shown = json.loads(ar.dump(mirrored(), "json", device="CPU:1$"))
    assert {node["device"] for node in shown["nodes"]} == {"/device:CPU:1"}


def test_an_unknown_format_or_node_is_refused_with_the_closest() -> None:
    with pytest.raises(GraphError, match="closest names: table"):
        ar.dump(regression(), "tabel")
    with pytest.raises(GraphError, match="closest names: squares"):
        ar.dump(regression(), around="square")
    with pytest.raises(GraphError, match="no regular expression"):
        ar.dump(regression(), op="(")


def test_json_says_everything_that_text_says() -> None:
    data = json.loads(ar.dump(mirrored(), "json"))
    by_name = {node["name"]: node for node in data["nodes"]}
    reduce = by_name["replica_1/gradient/all_reduce"]
    assert reduce["pass"] == "lower-reshards"
    assert reduce["origin"] == "gradient"
    assert reduce["inputs"] == ["replica_1/gradient", "keys/size", "keys/group", "keys/instance"]
    assert reduce["attrs"]["merge_op"] == '"Add"'
    assert reduce["outputs"] == [{"dtype": "float32", "shape": None}]
    assert data["targets"] == ["train"]
    assert data["inputs"][0]["batch_axis"] == 0


def test_networkx_gets_every_edge() -> None:
    graph = mirrored().to_networkx()
    assert graph.number_of_nodes() == len(mirrored().graph)
    assert graph.nodes["loss"]["op"] == "AddN"
    kinds = [data["kind"] for _, _, data in graph.edges(data=True)]
    assert kinds.count("control") == 6
    assert networkx.is_directed_acyclic_graph(graph)
    back = networkx.parse_graphml(ar.dump(mirrored(), "graphml"), force_multigraph=True)
    assert back.number_of_edges() == graph.number_of_edges()


def test_dot_quotes_whatever_names_hold() -> None:
    item = regression()
    item.graph.insert(Node(item.graph, 'a"b\\c', "NoOp", "", {}, b""))
    assert '"a\\"b\\\\c" [label="NoOp\\na\\"b\\\\c"' in ar.dump(item, "dot")


def test_svg_without_graphviz_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GraphError, match="Graphviz"):
        ar.dump(regression(), "svg")


def fake_dot(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_svg_is_what_graphviz_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path, 'cat >/dev/null; echo "<svg/>"', monkeypatch)
    assert ar.dump(regression(), "svg") == "<svg/>\n"
    fake_dot(tmp_path, "cat >/dev/null; echo bad luck >&2; exit 1", monkeypatch)
    with pytest.raises(GraphError, match="Graphviz failed: bad luck"):
        ar.dump(regression(), "svg")


def test_svg_refuses_what_nobody_could_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setattr(dump, "LARGEST_PICTURE", 5)
    with pytest.raises(GraphError, match="18 nodes are too many to draw"):
        ar.dump(regression(), "svg")
    assert ar.dump(regression(), "svg", op="MatMul") == ""


class Page(HTMLParser):
    """Collects what a page loads from elsewhere, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_web_page_is_self_contained_and_no_value_can_break_out_of_it() -> None:
    item = regression()
    item.graph.add("NoOp", name="evil", attrs={"_note": "</script><script>alert(1)</script>"})
    text = ar.dump(item, "html")
    page = Page()
    page.feed(text)
    assert page.loads == []
    assert page.scripts == 1
    data = json.loads(re.search(r"const data = (.*);\n", text)[1])  # type: ignore[index]
    assert len(data["nodes"]) == 19


def test_a_table_of_a_large_graph_only_counts() -> None:
    item = regression()
    for i in range(300):
        item.graph.add("NoOp", name=f"n{i}")
    table = ar.dump(item, "table")
    assert re.search(r"^NoOp +302 +302$", table, re.MULTILINE)
    assert "\nname" not in table
    assert "\nname" in ar.dump(item, "table", name="^n1$")
