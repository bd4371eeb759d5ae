"""Our own file holds an item whole: graph, signature, values; the same bytes for the same item; no pickle."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.analysis import propagate as propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.passes import propagate
from tests.zoo import ZOO

Spec = tf.TensorSpec


def same(left: GraphItem, right: GraphItem) -> bool:
    names = ("graph_bytes", "inputs", "outputs", "targets", "init_op", "variables", "keep")
    return all(getattr(left, name) == getattr(right, name) for name in names)


def zoo_item(name: str = "mlp") -> GraphItem:
    built = ZOO[name].build()
    return GraphItem.from_graph(built.graph, train_op=built.train_op, outputs=built.outputs, init_op=built.init_op)


def function_item() -> GraphItem:
    v = tf.Variable([1.0, np.nan], dtype=tf.float64, name="v")
    half = tf.Variable(np.ones(3), dtype=tf.bfloat16, name="half", trainable=False)
    text = tf.Variable([["a", "bb\0"]], name="text")
    table = tf.constant(np.arange(400.0).reshape(20, 20))

    def step(x: Any) -> Any:
        v.assign_add(x[:2])
        return tf.reduce_sum(x) * table[0] + tf.cast(half[0], x.dtype), text.read_value()

    return GraphItem.from_function(step, Spec([None], tf.float64))


@pytest.mark.parametrize("name", ["mlp", "gru_v2", "cond_v1"])
def test_an_item_comes_back_equal(tmp_path: Path, name: str) -> None:
    item = zoo_item(name)
    item.save(tmp_path / "item.ar")
    assert same(GraphItem.load(tmp_path / "item.ar"), item)


def test_equal_items_give_equal_bytes_and_nothing_is_pickled(tmp_path: Path) -> None:
    item = function_item()
    item.save(tmp_path / "a.ar")
    GraphItem.load(tmp_path / "a.ar").save(tmp_path / "b.ar")
    assert (tmp_path / "a.ar").read_bytes() == (tmp_path / "b.ar").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.ar") as archive:
        for name in archive.namelist():
            assert name.endswith((".pb", ".json", ".npy"))
            if name.endswith(".npy"):
                with archive.open(name) as file:
                    np.load(file, allow_pickle=False)


def test_captured_values_come_back_whatever_their_type(tmp_path: Path) -> None:
    item = function_item()
    item.save(tmp_path / "item.ar")
    loaded = GraphItem.load(tmp_path / "item.ar")
    assert same(loaded, item)
    captures = {capture.node: capture for capture in loaded.binding.captures}
    for capture in item.binding.captures:
        holder = capture.variable if capture.variable is not None else capture.value
        found = captures[capture.node]
        assert found.name == capture.name
        assert found.value.tolist() == holder.numpy().tolist() or capture.name == "v"
    live = loaded.binding.restore(trainable=["v"])
    assert [c.node for c in live.captures] == [c.node for c in item.binding.captures]
    restored = {c.name: c.variable for c in live.captures if c.name}
    assert restored["v"].trainable
    assert not restored["half"].trainable
    assert restored["half"].dtype == tf.bfloat16
    assert restored["text"].numpy().tolist() == [[b"a", b"bb\0"]]


def test_names_that_are_given_replace_those_of_the_file(tmp_path: Path) -> None:
    zoo_item().save(tmp_path / "item.ar")
    item = GraphItem.load(tmp_path / "item.ar", outputs=["accuracy"], batch_inputs={"x": 0}, train_op="init")
    assert list(item.outputs) == ["accuracy"]
    assert {name: info.batch_axis for name, info in item.inputs.items()} == {"x": 0, "y": None}
    assert item.targets == ("init",)
    with pytest.raises(GraphError, match="output 'nope'"):
        GraphItem.load(tmp_path / "item.ar", outputs=["nope"])


def test_a_captured_table_cannot_be_saved_and_nothing_is_written(tmp_path: Path) -> None:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
    item = GraphItem.from_function(lambda x: table.lookup(x), Spec([None], tf.int32))
    with pytest.raises(GraphError, match="cannot be saved"):
        item.save(tmp_path / "item.ar")
    with pytest.raises(GraphError, match="cannot write"):
        zoo_item().save(tmp_path / "no" / "such" / "directory.ar")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_or_foreign_archive_is_a_graph_error(tmp_path: Path) -> None:
    path = tmp_path / "item.ar"
    zoo_item().save(path)
    intact = path.read_bytes()
    for size in (0, 10, len(intact) // 2, len(intact) - 1):
        path.write_bytes(intact[:size])
        with pytest.raises(GraphError) as caught:
            GraphItem.load(path)
        assert str(path) in (caught.value.where or "")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
    with pytest.raises(GraphError, match="not a saved GraphItem"):
        GraphItem.load(path)


def test_a_file_of_a_newer_release_says_so(tmp_path: Path) -> None:
    path = tmp_path / "item.ar"
    zoo_item().save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(parts["manifest.json"]) | {"version": 99}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (parts | {"manifest.json": json.dumps(manifest).encode()}).items():
            archive.writestr(name, data)
    with pytest.raises(GraphError, match="version 99"):
        GraphItem.load(path)


def rewritten(tmp_path: Path) -> Path:
    path = tmp_path / "new.ar"
    ar.rewrite(zoo_item(), {"devices": ["CPU:0", "CPU:1"]}).save(path)
    return path


def with_placements(path: Path, text: str | None) -> None:
    """Write an archive anew, with other placements or with none."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist() if name != "placements.json"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**parts, **({} if text is None else {"placements.json": text.encode()})}.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"strategy": {"variables": "mirrored"}},
        {"microbatches": 2},
        {"microbatches": 2, "accumulation": {"form": "loop"}},
    ],
    ids=["shared", "mirrored", "micro-batches", "loop"],
)
def test_a_rewritten_graph_keeps_the_placements_of_its_values(tmp_path: Path, more: dict[str, Any]) -> None:
    new = ar.rewrite(zoo_item(), {"devices": ["CPU:0", "CPU:1"], **more})
    new.save(tmp_path / "new.ar")
    again = GraphItem.load(tmp_path / "new.ar")
    kinds = {stated.placement.kind for stated in again.placements.values()}
    assert kinds == {"replicated", "split", "partial", "local"}
    assert again.placements == new.placements
    assert {name.partition(":")[0] for name in again.placements} <= again.graph.nodes.keys()
    blocks = [name for name in again.placements if name.endswith("x/block")]
    assert {str(again.placements[name]) for name in blocks} == {"split(0) each"}
    for full in (False, True):
        text = ar.dump(again, full=full)
        assert text == ar.dump(new, full=full)
        (tmp_path / "new.txt").write_text(text)
    assert GraphItem.load(tmp_path / "new.txt").placements == new.placements


def test_placements_are_shown_without_being_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rewritten(tmp_path)

    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is propagated")

    monkeypatch.setattr(propagation, "propagate", broken)
    monkeypatch.setattr(propagate, "propagate", broken)
    nodes = {node["name"]: node for node in json.loads(ar.dump(path, "json"))["nodes"]}
    assert nodes["x"]["outputs"][0]["placement"] == "replicated -> split(0) once"
    assert "%x: float64[?,4] @ replicated -> split(0) once = Placeholder()" in ar.dump(path)


def test_a_file_without_placements_is_read(tmp_path: Path) -> None:
    path = rewritten(tmp_path)
    with_placements(path, None)
    assert GraphItem.load(path).placements == {}
    assert " @ split" not in ar.dump(path)


def test_an_original_states_no_placements(tmp_path: Path) -> None:
    zoo_item().save(tmp_path / "item.ar")
    assert "placements.json" not in zipfile.ZipFile(tmp_path / "item.ar").namelist()
    assert GraphItem.load(tmp_path / "item.ar").placements == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"splt(0)": ["x"]}', "'splt\\(0\\)' is no placement"),
        ('{"split(0) each]": ["x"]}', "']' after a placement means nothing"),
        ('{"split(0)": 3}', "corrupt or truncated"),
        ('["split(0)"]', "corrupt or truncated"),
        ("{", "corrupt or truncated"),
    ],
)
def test_placements_that_cannot_be_read_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = rewritten(tmp_path)
    with_placements(path, text)
    with pytest.raises(GraphError, match=problem) as caught:
        GraphItem.load(path)
    assert str(path) in str(caught.value)
