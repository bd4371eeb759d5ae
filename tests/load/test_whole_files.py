"""Files are read only if they end, and written whole, where a link leads, with the mode that they have."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.diagnostics.files import UnfitFileError, read_whole, replacing, write_whole
from autograph_rewrite.diagnostics.limits import VARIABLE, limit
from autograph_rewrite.errors import ConfigError, GraphError, PlanError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.protos import proto
from tests.support.small_items import regression


def test_pipes_sockets_devices_and_folders_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pb")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.pb"))
        for path in (tmp_path / "pipe.pb", tmp_path, Path("/dev/zero")):
            with pytest.raises(UnfitFileError, match="this is no file"):
                read_whole(path)
        with pytest.raises(OSError, match="No such device"):
            read_whole(tmp_path / "socket.pb")
        with pytest.raises(GraphError, match="cannot be read"):
            ar.GraphItem.load(str(tmp_path / "socket.pb"))
    with pytest.raises(PlanError, match="a device or a pipe"):
        ar.Plan.load(str(tmp_path / "pipe.pb"))


def test_a_pipe_in_a_saved_model_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "saved_model.pb")
    with pytest.raises(GraphError, match="a device or a pipe"):
        ar.GraphItem.load(str(tmp_path))


def test_a_link_stays_and_what_it_leads_to_keeps_its_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "models" / "7.pb", tmp_path / "g.pb"
    real.parent.mkdir()
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (real.read_bytes(), real.stat().st_mode & 0o777) == (b"new", 0o640)
    assert [path.name for path in real.parent.iterdir()] == ["7.pb"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "g.pb"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("g.pb", b"old")]


def test_items_and_plans_are_written_through_links(tmp_path: Path) -> None:
    for name in ("i.ar", "p.yaml"):
        (tmp_path / f"real_{name}").touch()
        (tmp_path / name).symlink_to(tmp_path / f"real_{name}")
    item = regression()
    item.save(str(tmp_path / "i.ar"))
    ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"]}).save(tmp_path / "p.yaml")
    assert all((tmp_path / name).is_symlink() for name in ("i.ar", "p.yaml"))
    assert (tmp_path / "real_i.ar").stat().st_size > 100 < (tmp_path / "real_p.yaml").stat().st_size


def test_limits_are_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.pb"
    item = regression()
    path.write_bytes(item.graph_bytes)
    monkeypatch.setenv(VARIABLE, "bytes=100")
    with pytest.raises(GraphError, match="more than 100"):
        ar.GraphItem.load(str(path))
    monkeypatch.setenv(VARIABLE, f"bytes=100000, nodes={len(item.graph) - 1}")
    with pytest.raises(GraphError, match=f"{len(item.graph)} nodes, more than"):
        ar.GraphItem.load(str(path), train_op="train")
    assert limit("depth", {VARIABLE: "depth=7"}) == 7
    for wrong in ("depth", "depth=-1", "dept=3"):
        with pytest.raises(ConfigError, match="sets no limit"):
            limit("bytes", {VARIABLE: wrong})


def test_operands_that_do_not_fit_their_op_are_refused(tmp_path: Path) -> None:
    def refused(edit: str, words: str) -> None:
        graph: Graph = regression().graph.clone()
        node = graph.nodes["y"]
        if edit == "one too few":
            node.set_inputs(node.inputs[:1])
        elif edit == "another type":
            node.set_input(1, graph.value("axes:0"))
        else:
            node.drop_attr("T")
        (tmp_path / "g.pb").write_bytes(serde.to_bytes(graph))
        with pytest.raises(GraphError, match=words):
            ar.GraphItem.load(str(tmp_path / "g.pb"), train_op="train")

    refused("one too few", "'y' reads 1 values, a MatMul takes 2")
    refused("another type", r"operand 1 of 'y', 'axes', is int32 instead of float32")
    refused("no attribute", "'y' has no attribute 'T'")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda node: node.attr.pop("value"), "'c' of the function 'f' has no attribute 'value', which a Const needs"),
        (lambda node: node.attr["value"].Clear(), "attribute 'value' of 'c' of the function 'f' is no tensor"),
        (
            lambda node: setattr(node.attr["dtype"], "s", b"x"),
            "attribute 'dtype' of 'c' of the function 'f' is no type",
        ),
    ],
)
def test_attributes_of_the_nodes_of_functions_are_checked(
    tmp_path: Path, damage: Callable[[Any], object], words: str
) -> None:
    """TensorFlow imports such a graph, and refuses it only when the function is called."""
    graph = proto("GraphDef").FromString(serde.to_bytes(regression().graph))
    function = graph.library.function.add()
    function.signature.name = "f"
    node = function.node_def.add(name="c", op="Const")
    node.attr["dtype"].type = node.attr["value"].tensor.dtype = 1
    (tmp_path / "g.pb").write_bytes(graph.SerializeToString())
    ar.GraphItem.load(str(tmp_path / "g.pb"), train_op="train")
    damage(node)
    (tmp_path / "g.pb").write_bytes(graph.SerializeToString())
    with pytest.raises(GraphError, match=words):
        ar.GraphItem.load(str(tmp_path / "g.pb"), train_op="train")


def test_unknown_fields_of_a_node_are_kept_in_linear_time() -> None:
    many = wire.delimited(100, b"x") * 200_000
    name, op = wire.delimited(wire.NAME, b"a"), wire.delimited(wire.OP, b"NoOp")
    assert wire.read_node(name + op + many).rest == many


def test_an_output_far_behind_the_last_is_refused_before_it_is_made() -> None:
    def node(name: bytes, op: bytes, *fields: bytes) -> bytes:
        return wire.delimited(
            wire.NODE, wire.delimited(wire.NAME, name) + wire.delimited(wire.OP, op) + b"".join(fields)
        )

    data = node(b"a", b"NoOp") + node(b"b", b"Identity", wire.delimited(wire.INPUT, b"a:99999"))
    with pytest.raises(GraphError, match="reads 'a:99999', which 'a' does not give"):
        serde.from_bytes(data)


@pytest.mark.parametrize("name", ["../../secret.txt", "/etc/hostname", "link.txt"])
def test_assets_outside_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "assets").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "assets" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "assets" / "inside.txt").write_text("words")

    def load(asset: str) -> None:
        message = proto("SavedModel")()
        meta = message.meta_graphs.add()
        meta.graph_def.node.add(name="train", op="NoOp")
        meta.asset_file_def.add(filename=asset)
        (folder / "saved_model.pb").write_bytes(message.SerializeToString())
        ar.GraphItem.load(str(folder), train_op="train")

    with pytest.raises(GraphError, match="lies outside of the SavedModel's folder"):
        load(name)
    load("inside.txt")
