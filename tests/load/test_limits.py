"""Damaged and hostile files: refused in words, in time that is linear in their size, with little memory."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.diagnostics.limits import VARIABLE
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.load import files

v1 = tf.compat.v1
FLOAT, INT32, INT64 = 1, 3, 9
TWO = {"devices": ["CPU:0", "CPU:1"]}
MEMORY = 2**28


def graph_def() -> Any:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], "x")
        w = v1.get_variable("w", [3, 1], use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w)), name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    return graph.as_graph_def()


def constant(graph: Any, name: str, dtype: int, shape: list[int], **values: Any) -> None:
    node = graph.node.add(name=name, op="Const")
    node.attr["dtype"].type = node.attr["value"].tensor.dtype = dtype
    node.attr["value"].tensor.tensor_shape.SetInParent()
    for size in shape:
        node.attr["value"].tensor.tensor_shape.dim.add(size=size)
    for key, value in values.items():
        getattr(node.attr["value"].tensor, key).append(value)


def needing(op: str, inputs: list[str], types: dict[str, int], **numbers: int) -> Any:
    """A step that waits for a node of huge numbers."""
    graph = graph_def()
    constant(graph, "zero", INT64, [], int64_val=0)
    constant(graph, "one", INT64, [], int64_val=1)
    constant(graph, "huge", INT64, [], int64_val=2**31)
    constant(graph, "huges", INT64, [1], int64_val=2**31)
    constant(graph, "last", INT32, [1], int_val=2**31 - 1)
    constant(graph, "ones", INT64, [1], int64_val=1)
    node = graph.node.add(name="big", op=op, input=inputs)
    for key, dtype in types.items():
        node.attr[key].type = dtype
    for key, number in numbers.items():
        node.attr[key].i = number
    next(node for node in graph.node if node.name == "train").input.append("^big")
    return graph


def calls(node: Any, function: str) -> None:
    node.attr["Tin"].list.type.append(FLOAT)
    node.attr["Tout"].list.type.append(FLOAT)
    node.attr["f"].func.name = function


def function_bomb(levels: int) -> Any:
    """Functions of which each calls the next one twice."""
    graph = graph_def()
    for level in range(levels):
        function, is_last = graph.library.function.add(), level == levels - 1
        function.signature.name = f"bomb{level}"
        function.signature.input_arg.add(name="a", type=FLOAT)
        function.signature.output_arg.add(name="o", type=FLOAT)
        for name, source in (("n1", "a"), ("n2", "n1:y:0" if is_last else "n1:output:0")):
            node = function.node_def.add(name=name, op="Neg" if is_last else "PartitionedCall", input=[source])
            if is_last:
                node.attr["T"].type = FLOAT
            else:
                calls(node, f"bomb{level + 1}")
        function.ret["o"] = "n2:y:0" if is_last else "n2:output:0"
    calls(graph.node.add(name="bomb", op="PartitionedCall", input=["x"]), "bomb0")
    next(node for node in graph.node if node.name == "train").input.append("^bomb")
    return graph


def rewritten(graph: Any) -> ar.GraphItem:
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"])
    return ar.rewrite(item, TWO)


def peak_of(run: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(("Fill", ["huges", "zero"], {"T": INT64, "index_type": INT64}), id="Fill"),
        pytest.param(("Range", ["zero", "huge", "one"], {"Tidx": INT64}), id="Range"),
    ],
)
def test_numbers_that_only_the_run_needs_take_no_memory(made: tuple[str, list[str], dict[str, int]]) -> None:
    assert peak_of(lambda: rewritten(needing(*made))) < MEMORY


def test_positions_far_away_take_no_memory() -> None:
    assert peak_of(lambda: rewritten(needing("DynamicStitch", ["last", "ones"], {"T": INT64}, N=1))) < MEMORY


def test_a_constant_of_one_repeated_value_takes_no_memory() -> None:
    graph = graph_def()
    constant(graph, "big", FLOAT, [700_000_000], float_val=0.5)
    next(node for node in graph.node if node.name == "train").input.append("^big")
    assert peak_of(lambda: rewritten(graph)) < MEMORY
    found = decode(graph.node[-1].attr["value"].SerializeToString())
    assert found.shape == (700_000_000,)
    assert found[-1] == np.float32(0.5)


def test_a_constant_of_two_values_is_not_written_out_without_measure() -> None:
    graph = graph_def()
    constant(graph, "big", FLOAT, [2**31], float_val=0.5)
    graph.node[-1].attr["value"].tensor.float_val.append(1.5)
    next(node for node in graph.node if node.name == "train").input.append("^big")
    with pytest.raises(GraphError, match="a tensor of 2,147,483,648 elements states 2 of them"):
        rewritten(graph)


def test_large_arrays_that_few_bytes_stand_for_are_not_kept() -> None:
    def peak(count: int) -> int:
        graphs = [graph_def() for _ in range(count)]
        for number, graph in enumerate(graphs):
            constant(graph, "big", FLOAT, [2**22], float_val=number)
            graph.node[-1].attr["value"].tensor.float_val.append(1.5)
        raws = [graph.node[-1].attr["value"].SerializeToString() for graph in graphs]
        return peak_of(lambda: [decode(raw).shape for raw in raws])

    assert peak(8) < 2 * peak(1)


@pytest.mark.parametrize(
    ("op", "inputs", "numbers"), [("Split", ["last", "x"], {"num_split": 2**31}), ("AddN", ["x"] * 3, {"N": 2**31})]
)
def test_more_operands_than_a_node_can_have_are_refused(op: str, inputs: list[str], numbers: dict[str, int]) -> None:
    with pytest.raises(ar.RewriteError, match=r"= 2,147,483,648: it cannot have that many"):
        rewritten(needing(op, inputs, {"T": FLOAT}, **numbers))


def test_calls_within_calls_are_counted_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphError, match=r"the functions that 'bomb' calls come to 33,554,430 nodes"):
        rewritten(function_bomb(24))
    assert rewritten(function_bomb(4)).report.nodes_after > 0
    monkeypatch.setenv(VARIABLE, "expanded=10")
    with pytest.raises(GraphError, match="at most 10 can be rewritten"):
        rewritten(function_bomb(4))


@pytest.mark.parametrize("data", [bytes(3_000_000), b"\x0a" + b"\xff" * 1_000_000], ids=["zeros", "ones"])
def test_bytes_that_are_no_graph_are_refused_at_once(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "g.pb"
    path.write_bytes(data)
    began = time.process_time()
    with pytest.raises(GraphError, match="not a GraphDef"):
        ar.GraphItem.load(str(path), train_op="train")
    assert time.process_time() - began < 5


def test_unknown_fields_are_kept_in_linear_time() -> None:
    many = wire.delimited(100, b"x") * 300_000
    began = time.process_time()
    graph = ar.GraphItem.from_graph(graph_def().SerializeToString() + many, train_op="train").graph
    assert graph.rest.endswith(many)
    assert time.process_time() - began < 10


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("fifo.pb", "fifo.yaml"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(GraphError, match="no file, but a device or a pipe"):
        ar.GraphItem.load(str(tmp_path / "fifo.pb"), train_op="train")
    with pytest.raises(ConfigError, match="no file, but a device or a pipe"):
        ar.Config.of(str(tmp_path / "fifo.yaml"))


def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.ar"
    ar.GraphItem.from_graph(graph_def(), train_op="train", outputs=["loss"]).save(str(path))
    return path


def bundle(path: Path, **members: str) -> None:
    with zipfile.ZipFile(path.parent / "good.ar") as source, zipfile.ZipFile(path, "w") as target:
        for member in source.namelist():
            target.writestr(member, members.get(member.partition(".")[0], source.read(member)))


@pytest.mark.parametrize("manifest", ["[]", "null", '"text"', "[" * 100_000, json.dumps({"format": files.FORMAT})])
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, manifest: str) -> None:
    good(tmp_path)
    bundle(tmp_path / "bad.ar", manifest=manifest)
    with pytest.raises(GraphError, match=r"corrupt|not a saved GraphItem"):
        ar.GraphItem.load(str(tmp_path / "bad.ar"))


@pytest.mark.parametrize(("local", "central", "value"), [(6, 8, 1), (8, 10, 99)], ids=["encrypted", "method 99"])
def test_an_archive_of_another_kind_is_refused(tmp_path: Path, local: int, central: int, value: int) -> None:
    data = bytearray(good(tmp_path).read_bytes())
    for mark, offset in ((b"PK\3\4", local), (b"PK\1\2", central)):
        at = data.find(mark)
        while at >= 0:
            data[at + offset : at + offset + 2] = struct.pack("<H", value)
            at = data.find(mark, at + 4)
    (tmp_path / "bad.ar").write_bytes(data)
    with pytest.raises(GraphError, match=r"cannot be read|corrupt"):
        ar.GraphItem.load(str(tmp_path / "bad.ar"))


def test_what_grows_beyond_measure_when_it_is_unpacked_is_refused(tmp_path: Path) -> None:
    good(tmp_path)
    path = tmp_path / "bomb.ar"
    with zipfile.ZipFile(tmp_path / "good.ar") as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("manifest.json", source.read("manifest.json"))
        target.writestr("graph.pb", bytes(2**25))
    with pytest.raises(GraphError, match=r"'graph\.pb' would take 33,554,432 bytes, \d+ times what the file holds"):
        ar.GraphItem.load(str(path))


def test_a_cluster_of_thousands_is_planned_in_linear_time() -> None:
    item = ar.GraphItem.from_graph(graph_def(), train_op="train", outputs=["loss"])

    def seconds(workers: int) -> float:
        hosts = [f"10.0.{i // 250}.{i % 250}:2222" for i in range(workers)]
        began = time.process_time()
        ar.build_plan(item, {"devices": ["CPU:0"], "cluster": {"workers": hosts}})
        return time.process_time() - began

    seconds(100)
    assert seconds(8000) < 10 * seconds(1600) + 1
