"""The shipped op registry says what TensorFlow says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autograph_rewrite import tf_private
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.types import opdefs
from autograph_rewrite.ir.types.attrs import encode


def test_the_shipped_registry_is_that_of_the_installed_tensorflow() -> None:
    import gzip

    from autograph_rewrite.ir.types import protos
    from autograph_rewrite.tools.dev.make_protos import op_registry

    shipped = {op.name: op for op in protos.proto("OpList").FromString(gzip.decompress(_shipped_file())).op}
    installed = protos.proto("OpList").FromString(op_registry()).op
    differing = [op.name for op in installed if op.name in shipped and shipped[op.name] != op]
    missing = [op.name for op in installed if op.name not in shipped]
    assert not differing
    assert len(missing) < 200, "the registry is of another TensorFlow: run make_protos"


def _shipped_file() -> bytes:
    from pathlib import Path

    return Path(opdefs.__file__).with_name("tensorflow_ops.binpb.gz").read_bytes()


def test_an_unknown_op_is_looked_up_again_once_tensorflow_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from autograph_rewrite.ir.types.protos import proto

    assert opdefs.find_op("MyCustomOp") is None
    declared = proto("OpDef")(name="MyCustomOp")
    declared.output_arg.add(name="y", type=1)
    monkeypatch.setattr(opdefs, "_from_running_tensorflow", lambda name: declared if name == "MyCustomOp" else None)
    found = opdefs.find_op("MyCustomOp")
    assert found is not None
    assert found.outputs[0].dtype == 1


def test_an_op_of_a_loaded_library_is_found_in_the_running_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tensorflow as tf

    assert tf.__version__
    monkeypatch.setattr(opdefs, "_shipped", dict)
    opdefs._known.cache_clear()
    try:
        found = opdefs.find_op("MatMul")
        assert found is not None
        assert [arg.name for arg in found.inputs] == ["a", "b"]
    finally:
        opdefs._known.cache_clear()


def test_an_unknown_op_names_itself_and_its_node() -> None:
    graph = Graph()
    node = graph.insert(Node(graph, "mine", "MyOtherOp", "", {}, b""))
    with pytest.raises(GraphError, match="unknown op 'MyOtherOp'") as caught:
        _ = node.output_dtypes
    assert caught.value.node_name == "mine"


def test_a_missing_type_attribute_names_itself() -> None:
    graph = Graph()
    node = graph.insert(Node(graph, "c", "Const", "", {}, b""))
    with pytest.raises(GraphError, match="lacks its attribute 'dtype'"):
        _ = node.output_dtypes


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("Const", {"dtype": encode("string", "x")}),
        ("AddN", {"T": encode("type", 1), "N": encode("string", "x")}),
        ("AddN", {"T": b"", "N": encode("int", 2)}),
        ("AddN", {"T": b"\xff", "N": encode("int", 2)}),
        ("IdentityN", {"T": encode("int", 2)}),
    ],
)
def test_an_attribute_of_the_wrong_kind_is_a_graph_error(op: str, attrs: dict[str, bytes]) -> None:
    graph = Graph()
    node = graph.insert(Node(graph, "n", op, "", dict(attrs), b""))
    with pytest.raises(GraphError, match="malformed") as caught:
        _ = node.input_dtypes, node.output_dtypes
    assert caught.value.node_name == "n"


def test_the_registry_loads_in_a_fraction_of_a_second_without_tensorflow() -> None:
    code = (
        "import sys, time; t = time.process_time();"
        "from autograph_rewrite.ir.types.opdefs import find_op; find_op('MatMul');"
        "print(time.process_time() - t, 'tensorflow' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    seconds, imported = ran.stdout.split()
    assert float(seconds) < 1
    assert imported == "False"


def test_attributes_of_a_later_tensorflow_are_left_out_where_they_have_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tensorflow as tf

    with tf.Graph().as_default() as built:
        tf.gather_nd(tf.zeros((2, 2)), [[0]])
        tf.gather_nd(tf.zeros((2, 2)), [[5]], bad_indices_policy="IGNORE")
    graph, older = built.as_graph_def(), tf_private.registered_op("GatherNd")
    default, other = (node for node in graph.node if node.op == "GatherNd")
    assert "bad_indices_policy" in default.attr
    lacking = type(older).FromString(older.SerializeToString())
    del lacking.attr[[attr.name for attr in older.attr].index("bad_indices_policy")]
    monkeypatch.setattr(tf_private, "registered_op", lambda name: lacking)
    opdefs._newer_attrs.cache_clear()
    try:
        opdefs.drop_newer_attrs(graph)
    finally:
        opdefs._newer_attrs.cache_clear()
    assert "bad_indices_policy" not in default.attr
    assert other.attr["bad_indices_policy"].s == b"IGNORE"


def test_an_op_is_pure_that_is_known_and_has_no_state() -> None:
    assert all(map(opdefs.is_pure, ("MatMul", "NoOp", "Identity")))
    assert not any(map(opdefs.is_pure, ("RandomUniform", "ReadVariableOp", "AssignVariableOp", "NoSuchOp")))
