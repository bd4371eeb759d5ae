"""GraphDef bytes survive the IR exactly, and what is no GraphDef is refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tensorflow as tf

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import EACH, PerInstance
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.protos import proto

v1 = tf.compat.v1


def training_graph() -> bytes:
    """A small Adam step with a while loop, a cond, a function call, control edges, devices and colocation."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        with tf.device("/device:CPU:0"):
            w = v1.get_variable("w", [4, 3], use_resource=True)
        y = tf.matmul(x, w)
        with v1.colocate_with(y.op), tf.control_dependencies([v1.assert_positive(tf.shape(x)[0])]):
            y = tf.cond(tf.reduce_sum(y) > 0, lambda: y, lambda: -y)
        _, total = tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + tf.reduce_sum(y)), [0, tf.constant(0.0)])
        loss = total + tf.function(lambda a: a * 2.0)(tf.reduce_mean(y))
        v1.train.AdamOptimizer(0.1).minimize(loss, name="train")
        v1.global_variables_initializer()
    data: bytes = graph.as_graph_def().SerializeToString(deterministic=True)
    return data


def node_def(name: str, op: str, *inputs: str) -> bytes:
    return wire.write_node(name.encode(), op.encode(), [text.encode() for text in inputs], b"", b"")


def test_a_real_training_graph_survives_byte_for_byte() -> None:
    data = training_graph()
    graph = serde.from_bytes(data)
    assert len(graph) > 100
    assert graph.library, "the graph is meant to have functions"
    assert serde.to_bytes(graph) == data


def test_a_clone_is_the_same_bytes() -> None:
    data = training_graph()
    assert serde.to_bytes(serde.from_bytes(data).clone()) == data


def test_fields_that_are_not_interpreted_survive() -> None:
    full = proto("GraphDef")()
    node = full.node.add(name="a", op="NoOp")
    node.experimental_debug_info.original_node_names.append("somewhere")
    node.experimental_type.type_id = 3
    full.version = 7
    full.versions.producer = 2000
    full.library.function.add().signature.name = "f"
    data = full.SerializeToString(deterministic=True) + b"\xf8\x7f\x05"  # field 2047, which no TensorFlow knows
    node_with_unknown_field = node_def("b", "NoOp")[2:] + b"\xf8\x7f\x01"
    data += wire.delimited(wire.NODE, node_with_unknown_field)

    again = serde.to_bytes(serde.from_bytes(data))

    assert proto("GraphDef").FromString(again) == proto("GraphDef").FromString(data)
    assert b"\xf8\x7f\x05" in again
    assert b"\xf8\x7f\x01" in again
    assert serde.to_bytes(serde.from_bytes(again)) == again


def test_two_libraries_merge_as_protobuf_merges_them() -> None:
    first, second = proto("GraphDef")(), proto("GraphDef")()
    first.library.function.add().signature.name = "f"
    second.library.function.add().signature.name = "g"
    data = first.SerializeToString() + second.SerializeToString()
    again = proto("GraphDef").FromString(serde.to_bytes(serde.from_bytes(data)))
    assert [f.signature.name for f in again.library.function] == ["f", "g"]


def test_attributes_longer_than_one_length_byte_survive() -> None:
    with tf.Graph().as_default() as graph:
        tf.constant(list(range(500)), name="a" * 200)
        op = v1.get_default_graph().get_operations()[0]
        op._set_attr("_" + "k" * 300, v1.AttrValue(s=b"v" * 300))
        op._set_attr("_" + "k" * 200, v1.AttrValue(s=b""))
    data = graph.as_graph_def().SerializeToString(deterministic=True)
    node = serde.from_bytes(data).node("a" * 200)
    assert node.attr("_" + "k" * 300) == b"v" * 300
    assert serde.to_bytes(serde.from_bytes(data)) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (node_def("a", "NoOp") + node_def("a", "NoOp"), "two nodes are named 'a'"),
        (node_def("a", "Identity", "ghost"), "'a' reads 'ghost'"),
        (node_def("a", "Identity", "^ghost"), "'a' waits for 'ghost'"),
        (node_def("a", "Identity", ""), "'a' reads ''"),
        (node_def("a", "NoOp") + node_def("b", "Identity", "a:²"), "'b' reads 'a:²'"),
        (node_def("a", "NoOp") + node_def("b", "Identity", "a:99999999999"), "'b' reads 'a:99999999999'"),
        (node_def("", "NoOp"), "no name"),
        (node_def("a", ""), "no op"),
        (b"\xff\xff\xff", "not a GraphDef"),
        (b"PK\x03\x04 this is a zip file", "not a GraphDef"),
        (wire.delimited(wire.NODE, b"\x0a\x02\xff\xfe"), "not a GraphDef"),
    ],
)
def test_a_malformed_graph_is_refused_with_its_culprit(data: bytes, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        serde.from_bytes(data)


def test_bytes_cut_anywhere_inside_a_node_are_refused() -> None:
    data = training_graph()
    ends = {0}
    for *_, stop in wire.fields(data):
        ends.add(stop)
    inside = [cut for cut in range(1, len(data), 41) if cut not in ends]
    assert len(inside) > 100
    for cut in inside:
        with pytest.raises(GraphError):
            serde.from_bytes(data[:cut])


def test_a_graph_over_two_gib_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serde, "TWO_GIB", 1000)
    with pytest.raises(GraphError, match="more than 2 GiB"):
        serde.to_bytes(serde.from_bytes(training_graph()))


def test_a_folded_graph_is_not_a_graphdef() -> None:
    graph = Graph()
    graph.add("Const", name="c", attrs={"value": 1.0, "dtype": 1}, span=EACH)
    with pytest.raises(GraphError, match="'c' runs on each replica"):
        serde.to_bytes(graph)
    graph = Graph()
    node = graph.add("Const", name="c", attrs={"value": 1.0, "dtype": 1})
    node.set_raw_attr("value", PerInstance((b"", b"")))
    with pytest.raises(GraphError, match="'c'"):
        serde.to_bytes(graph)


def test_reading_a_graph_does_not_import_tensorflow(tmp_path: object) -> None:
    code = (
        "import sys; from autograph_rewrite.ir.format import serde;"
        "g = serde.from_bytes(sys.stdin.buffer.read()); [n.outputs for n in g]; serde.to_bytes(g);"
        "print(len(g), 'tensorflow' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=training_graph(), capture_output=True, check=True)
    count, imported = ran.stdout.split()
    assert int(count) > 100
    assert imported == b"False"
