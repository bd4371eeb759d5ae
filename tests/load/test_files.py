"""Graph files: every kind reads the same graph, and a bad one is a GraphError that names the file."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from tests.support.normal_form import imported, run_steps, v1
from tests.support.paths import ROOT


class Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(np.ones((3, 2), np.float32), name="w")

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])])
    def train(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, self.w) - y) ** 2)
        self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
        return {"loss": loss}

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def predict(self, x: Any) -> Any:
        return {"y": tf.matmul(x, self.w)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one training graph in every format; `saved` holds w = 7."""
    directory = tmp_path_factory.mktemp("graphs")
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], "x")
        w = v1.get_variable("w", initializer=np.ones((3, 1), np.float32), use_resource=True)
        loss = tf.reduce_mean(tf.matmul(x, w), name="loss")
        v1.train.GradientDescentOptimizer(0.5).minimize(loss, name="train")
        table = v1.lookup.StaticHashTable(v1.lookup.KeyValueTensorInitializer([1], [2]), 0)
        tf.identity(table.lookup(tf.constant(1)), "looked_up")
        v1.global_variables_initializer()
        saver = v1.train.Saver()
        message = graph.as_graph_def(add_shapes=True)
        (directory / "g.pb").write_bytes(message.SerializeToString())
        (directory / "g.pbtxt").write_text(str(message))
        (directory / "text.pb").write_text(str(message))
        (directory / "empty.pb").write_bytes(b"")
        (directory / "noise.pb").write_bytes(bytes(range(256)))
        (directory / "g.onnx").write_bytes(b"x")
        with v1.Session() as session:
            session.run("init")
            session.run(w.assign(np.full((3, 1), 7.0)))
            saver.save(session, str(directory / "model"))
            info = v1.saved_model.build_tensor_info
            signature = v1.saved_model.build_signature_def({"features": info(x)}, {"L": info(loss)}, "train")
            builder = v1.saved_model.Builder(str(directory / "saved"))
            builder.add_meta_graph_and_variables(
                session, ["train"], {"step": signature, "other": signature}, main_op=v1.tables_initializer()
            )
            builder.save()
    (directory / "meta.pb").write_bytes((directory / "model.meta").read_bytes())
    module = Module()
    tf.saved_model.save(module, str(directory / "tf2"), {"train": module.train, "predict": module.predict})
    return directory


@pytest.mark.parametrize("name", ["g.pb", "g.pbtxt", "model.meta"])
def test_every_kind_of_file_reads_the_same_graph(files: Path, name: str) -> None:
    item = GraphItem.load(files / name, outputs=["loss"])
    assert item.targets == ("train",)
    assert item.init_op == "init"
    assert item.inputs["x"].batch_axis == 0
    assert item.outputs["loss"].tensor == "loss:0"
    assert item.variables["w"].initializer == "w/Assign"
    assert set(GraphItem.load(str(files / "g.pb")).graph.nodes) <= set(item.graph.nodes)  # .meta has more savers


def test_a_meta_graph_knows_trainability_and_keeps_its_saver_and_tables(files: Path) -> None:
    item = GraphItem.load(files / "model.meta")
    assert item.variables["w"].trainable is True
    assert {"save/Const", "save/control_dependency", "save/restore_all"} < set(item.keep)
    assert any(item.graph.node(name).op == "LookupTableImportV2" for name in item.keep)


def test_a_v1_saved_model_is_called_by_its_signature_and_initialised_from_its_variables(files: Path) -> None:
    item = GraphItem.load(files / "saved", signature="step", batch_inputs={"features": 0})
    assert item.inputs["features"].tensor == "x:0"
    assert item.outputs["L"].tensor == "loss:0"
    assert item.targets == ("train",)
    ((loss,),), variables = run_steps(item, [{"x:0": [[1.0, 2.0, 3.0]]}], fetches=[])
    np.testing.assert_allclose(loss, 42.0)
    np.testing.assert_allclose(variables["w"].ravel(), [6.5, 6.0, 5.5])
    graph = imported(item)
    with v1.Session(graph=graph) as session:
        session.run(item.init_op)
        assert session.run("looked_up:0") == 2


def test_a_tf2_saved_model_gives_each_signature_as_a_function(files: Path) -> None:
    item = GraphItem.load(files / "tf2", signature="train")
    assert {name: info.batch_axis for name, info in item.inputs.items()} == {"x": 0, "y": 0}
    assert list(item.outputs) == ["loss"]
    assert [v.shape for v in item.variables.values()] == [(3, 2)]
    assert "AssignSubVariableOp" in {node.op for node in normalise(item).graph}
    assert list(GraphItem.load(files / "tf2" / "saved_model.pb", signature="predict").outputs) == ["y"]
    assert list(GraphItem.load(files / "tf2").outputs) == ["loss"], "the signature named train is the default"


BAD: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "missing": ("nothing.pb", {}, "no such file", ""),
    "empty": ("empty.pb", {}, "empty", ""),
    "noise": ("noise.pb", {}, "not a GraphDef", "truncated"),
    "text as binary": ("text.pb", {}, "the file holds text", ".pbtxt"),
    "meta graph as graph": ("meta.pb", {}, "is a MetaGraphDef", ".meta"),
    "unknown kind": ("g.onnx", {}, "unknown kind of file '.onnx'", "SavedModel"),
    "directory without model": (".", {}, "holds no saved_model.pb", ""),
    "unknown v1 signature": ("saved", {"signature": "stp"}, "no signature 'stp'", "'other', 'step'"),
    "unknown tf2 signature": ("tf2", {"signature": "trian"}, "no signature 'trian'", "'predict', 'train'"),
    "signature of a plain graph": ("g.pb", {"signature": "train"}, "only a SavedModel has signatures", ""),
    "unknown output": ("g.pb", {"outputs": ["los"]}, "output 'los'", "loss"),
    "unknown train op": ("g.pbtxt", {"train_op": "trian"}, "train_op 'trian'", "train"),
    "unknown batch": ("model.meta", {"batch_inputs": {"q": 0}}, "batch input 'q'", "x"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_or_name_is_a_graph_error_that_names_the_file(files: Path, name: str) -> None:
    file, arguments, problem, hint = BAD[name]
    with pytest.raises(GraphError) as caught:
        GraphItem.load(files / file, **arguments)
    assert problem in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert str(files) in (caught.value.where or "")


@pytest.mark.parametrize("name", ["g.pb", "model.meta", "saved/saved_model.pb"])
def test_a_damaged_file_loads_or_is_a_graph_error_and_nothing_else(files: Path, tmp_path: Path, name: str) -> None:
    chance = random.Random(name)
    intact = (files / name).read_bytes()
    target = tmp_path / Path(name).name
    refused: list[str] = []
    for trial in range(120):
        damaged = bytearray(intact)
        if trial % 2:
            damaged = damaged[: chance.randrange(len(damaged))]
        else:
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        target.write_bytes(damaged)
        try:
            GraphItem.load(target)
        except GraphError as error:
            refused.append(error.where or "")
    assert len(refused) > 60
    assert all(str(tmp_path) in where for where in refused)


def test_graph_files_are_read_without_tensorflow(files: Path) -> None:
    code = (
        "import sys\nfrom autograph_rewrite.item import GraphItem\n"
        "for name in sys.argv[2:]: GraphItem.load(f'{sys.argv[1]}/{name}', outputs=['loss'])\n"
        "assert 'tensorflow' not in sys.modules, 'TensorFlow was imported'"
    )
    run = [sys.executable, "-c", code, str(files), "g.pb", "g.pbtxt", "model.meta", "saved"]
    subprocess.run(run, check=True, timeout=60, cwd=ROOT)


def test_a_graph_def_named_meta_is_refused(files: Path, tmp_path: Path) -> None:
    (tmp_path / "g.meta").write_bytes((files / "g.pb").read_bytes())
    with pytest.raises(GraphError, match="MetaGraphDef"):
        GraphItem.load(tmp_path / "g.meta")


def _saved_step(path: Path, *, registered: bool) -> None:
    """Write a .meta with moving averages behind the step, a layer's statistic and a metric beside it."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 3], "x")
        w = v1.get_variable("w", initializer=np.ones([3, 1]), use_resource=True)
        mean = v1.get_variable("mean", initializer=np.zeros([3]), use_resource=True, trainable=False)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w)), name="loss")
        update = mean.assign_add(tf.reduce_mean(x, 0), name="statistic", read_value=False)
        if registered:
            v1.add_to_collection("update_ops", update)
        v1.metrics.mean(loss, name="metric")
        average = v1.train.ExponentialMovingAverage(0.9)
        with tf.control_dependencies([v1.train.AdamOptimizer(0.1).minimize(loss)]):
            tf.group(average.apply([w]), name="train_step")
        v1.group(v1.global_variables_initializer(), v1.local_variables_initializer(), name="init_all")
        v1.train.export_meta_graph(str(path), graph=graph)


@pytest.mark.parametrize("registered", [True, False])
def test_a_metagraph_without_names_keeps_what_its_step_updates_and_says_what_it_leaves_out(
    tmp_path: Path, registered: bool
) -> None:
    _saved_step(tmp_path / "m.meta", registered=registered)
    with pytest.warns(UserWarning, match="leaves out .*'metric/update_op'") as seen:
        item = GraphItem.load(tmp_path / "m.meta")
    assert set(item.targets) == ({"train_step", "statistic"} if registered else {"train_step"})
    assert ("'statistic'" in str(seen[0].message).partition("leaves out")[2]) is not registered
    item.save(tmp_path / "m.ar")
    for one in (item, GraphItem.load(tmp_path / "m.ar")):
        report = ar.rewrite(one, {"devices": ["CPU:0", "CPU:1"]}).report
        assert "metric/update_op" in {note.node for note in report.notes}


def test_a_metagraph_may_be_given_as_an_object(tmp_path: Path) -> None:
    _saved_step(tmp_path / "m.meta", registered=True)
    message = v1.MetaGraphDef.FromString((tmp_path / "m.meta").read_bytes())
    with pytest.warns(UserWarning, match="leaves out"):
        item, loaded = GraphItem.from_graph(message), GraphItem.load(tmp_path / "m.meta")
    assert item.targets == loaded.targets
    assert item.variables == loaded.variables
    assert item.graph_bytes == loaded.graph_bytes
