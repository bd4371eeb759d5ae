"""Bad input is refused by a typed error that names the culprit, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.zoo import ZOO, Built

v1 = tf.compat.v1
TWO = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}


@pytest.fixture(scope="module")
def mlp() -> Built:
    return ZOO["mlp"].build()


@pytest.fixture(scope="module")
def with_function() -> Built:
    return ZOO["cond_v2"].build()


def wrap(built: Built, graph: Any = None, **changes: Any) -> ar.GraphItem:
    named: dict[str, Any] = {
        "train_op": built.train_op,
        "outputs": list(built.outputs),
        "init_op": built.init_op,
        "batch_inputs": dict(built.batch_inputs),
        **changes,
    }
    return ar.GraphItem.from_graph(built.graph if graph is None else graph, **named)


def test_an_op_that_tensorflow_does_not_have_is_named_with_its_node(mlp: Built):
    graph_def = mlp.graph.as_graph_def()
    next(node for node in graph_def.node if node.op == "MatMul").op = "MatMull"

    with pytest.raises(ar.GraphError, match="MatMull"):
        ar.rewrite(wrap(mlp, graph_def), TWO)


def test_a_function_that_is_not_in_the_library_is_named(with_function: Built):
    graph_def = with_function.graph.as_graph_def()
    branch = next(
        node for node in graph_def.node if "then_branch" in node.attr
    )  # gradients leave some that nobody calls
    missing = branch.attr["then_branch"].func.name
    there = [function for function in graph_def.library.function if function.signature.name != missing]
    del graph_def.library.function[:]
    graph_def.library.function.extend(there)

    with pytest.raises(ar.GraphError, match=missing):
        ar.rewrite(wrap(with_function, graph_def), TWO)


def test_an_input_that_does_not_exist_is_named(mlp: Built):
    graph_def = mlp.graph.as_graph_def()
    next(node for node in graph_def.node if node.op == "MatMul").input[0] = "nowhere"

    with pytest.raises(ar.GraphError, match="nowhere"):
        ar.rewrite(wrap(mlp, graph_def), TWO)


def test_a_node_that_is_there_twice_is_named(mlp: Built):
    graph_def = mlp.graph.as_graph_def()
    graph_def.node.append(graph_def.node[3])

    with pytest.raises(ar.GraphError, match=graph_def.node[3].name):
        ar.rewrite(wrap(mlp, graph_def), TWO)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"train_op": "trian"}, "trian"),
        ({"outputs": ["los:0"]}, "los"),
        ({"outputs": ["loss:3"]}, "loss:3"),
        ({"init_op": "initialise"}, "initialise"),
        ({"batch_inputs": {"images": 0}}, "images"),
        ({"batch_inputs": {"x": 2}}, "x"),
        ({"batch_inputs": {"x": -3}}, "x"),
    ],
    ids=lambda value: str(value),
)
def test_a_name_that_the_graph_does_not_have_is_named(mlp: Built, changes: dict[str, Any], culprit: str):
    with pytest.raises(ar.GraphError, match=culprit):
        wrap(mlp, **changes)


def test_a_batch_of_unknown_rank_is_named():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, None, name="shapeless")
        w = v1.get_variable("w", initializer=1.0)
        loss = tf.reduce_mean(x * w, name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        v1.variables_initializer(v1.global_variables(), name="init")

    for batch_inputs in (None, {"shapeless": 0}):
        with pytest.raises(ar.GraphError, match="shapeless"):
            rewrite_named(graph, batch_inputs)


def rewrite_named(graph: Any, batch_inputs: dict[str, int] | None) -> None:
    item = ar.GraphItem.from_graph(
        graph, train_op="train", outputs=["loss:0"], init_op="init", batch_inputs=batch_inputs
    )
    ar.rewrite(item, TWO)


def test_a_static_batch_with_fewer_examples_than_replicas_is_refused():
    built = ZOO["mlp"].build(batch=1)

    with pytest.raises(ar.GraphError, match="1 examples, fewer than the 2 replicas"):
        ar.rewrite(wrap(built), TWO)


def test_batches_of_different_sizes_are_refused_when_they_are_fed(mlp: Built):
    new = ar.rewrite(wrap(mlp), TWO)
    feed = {**mlp.feeds(0, 8), "y:0": mlp.feeds(0, 6)["y:0"]}

    with new.session() as session:
        session.run(new.init_op)
        with pytest.raises(ar.GraphError, match="8"):
            session.run(["loss", "train"], feed_dict=feed)


@pytest.mark.parametrize("culprit", ["GPU:7", "CUP:1", "CPU:x"])
def test_a_device_that_does_not_exist_is_named(mlp: Built, culprit: str):
    with pytest.raises((ar.ClusterError, ar.PlanError, ar.ConfigError), match=culprit):
        start(mlp, {**TWO, "devices": ["CPU:0", culprit]})


@pytest.mark.parametrize("culprit", ["CPU:99", "GPU:7"])
def test_a_device_that_the_running_process_does_not_have_is_named(culprit: str):
    built = ZOO["function_dense"].build()
    with pytest.raises(ar.ClusterError, match=culprit):
        ar.distribute(built.step, {**TWO, "devices": ["CPU:0", culprit]}, *built.specs)


def start(built: Built, config: dict[str, Any]) -> None:
    new = ar.rewrite(wrap(built), config)
    with new.session() as session:
        session.run(new.init_op)


def test_two_mirrored_replicas_on_one_device_are_refused(mlp: Built):
    with pytest.raises((ar.PlanError, ar.ConfigError), match="CPU:1"):
        ar.rewrite(wrap(mlp), {**TWO, "devices": ["CPU:0", "CPU:1", "CPU:1"]})


@pytest.mark.parametrize(
    ("config", "culprit"),
    [
        ({"device": ["CPU:0"]}, "device"),
        ({**TWO, "strategy": {"name": "AllReduce", "bucket_byte": 4}}, "bucket_byte"),
        ({**TWO, "strategy": {"name": "AllReduced"}}, "AllReduced"),
        ({**TWO, "strategy": {"name": "AllReduce", "variables": "mirored"}}, "mirored"),
        ({**TWO, "timeout_seconds": "soon"}, "timeout_seconds"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_mistake_is_named(mlp: Built, config: dict[str, Any], culprit: str):
    with pytest.raises(ar.ConfigError, match=culprit):
        ar.rewrite(wrap(mlp), config)


def truncated(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flipped(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data[:64]) + data[64:]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("cut.pb", truncated),
        ("noise.pb", flipped),
        ("empty.pb", lambda data: b""),
        ("text.pb", lambda data: b"this is not a graph\n"),
        ("cut.meta", truncated),
        ("cut.ar", truncated),
        ("noise.pbtxt", lambda data: b"node { name: 'a' op: \n"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_written(
    name: str,
    damage: Callable[[bytes], bytes],
    mlp: Built,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / name
    path.write_bytes(damage(mlp.graph.as_graph_def().SerializeToString()))

    with pytest.raises(ar.GraphError, match=name):
        ar.GraphItem.load(path)
    assert_the_command_refuses(path, name, tmp_path, capsys)


def test_a_file_that_does_not_exist_is_named_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ar.GraphError, match=r"absent\.pb"):
        ar.GraphItem.load(tmp_path / "absent.pb")
    assert_the_command_refuses(tmp_path / "absent.pb", "absent.pb", tmp_path, capsys)


def test_the_command_refuses_a_graph_that_cannot_be_distributed_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    graph = tf.Graph()
    with graph.as_default():
        tf.constant(1.0, name="alone")
    path = tmp_path / "constant.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())

    assert_the_command_refuses(path, "", tmp_path, capsys)


def assert_the_command_refuses(path: Path, culprit: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autograph_rewrite.tools.cli import main

    config = folder / "config.yaml"
    config.write_text("devices: [CPU:0, CPU:1]\nstrategy: {name: AllReduce}\n")
    before = sorted(folder.iterdir())

    code = main(["rewrite", str(path), "--config", str(config), "-o", str(folder / "out.pb")])

    captured = capsys.readouterr()
    assert code == 2
    assert culprit in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err
    assert sorted(folder.iterdir()) == before
