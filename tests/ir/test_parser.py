"""What the printed form of a graph says can be read back: whole from the full form, typed from what people write."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite import GraphError
from autograph_rewrite.inspect.dump import dump
from autograph_rewrite.ir.format import literals, printer, serde
from autograph_rewrite.ir.format.parser import parse
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import FunctionName, encode
from tests.ir.test_printer import FOLDED, folded
from tests.support.rank_jobs import item_of

v1 = tf.compat.v1


def test_the_short_form_gives_the_same_text_again() -> None:
    without_provenance = [line.partition("  #")[0] for line in FOLDED.splitlines()]
    assert printer.render(parse(FOLDED, replicas=2)).splitlines() == without_provenance


def test_the_full_form_gives_the_same_graph_again() -> None:
    graph = folded()
    graph.node("x").rest = b"\x3a\x02\x0a\x00"
    graph.versions = b"\x08\x01"
    again = parse(printer.render(graph, full=True))
    assert printer.render(again, full=True) == printer.render(graph, full=True)
    assert printer.render(again) == FOLDED
    assert [node.rest for node in again] == [node.rest for node in graph]
    assert (again.versions, again.node("x").span) == (graph.versions, EACH)
    assert again.node("sum").selects == {0: Select.ALL}


def traced() -> bytes:
    with tf.Graph().as_default() as original:
        x = v1.placeholder(tf.float32, [None, 4])
        values, indices = tf.nn.top_k(tf.nn.dropout(x, 0.5, seed=3), 2)
        tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * tf.reduce_sum(values)), [0, tf.constant(1.0)])
        v1.disable_control_flow_v2()
        v1.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
        v1.enable_control_flow_v2()
        tf.gather(tf.constant(np.arange(200, dtype=np.float64)), indices)
        tf.constant([1.5, np.inf, np.nan], tf.bfloat16)
        tf.constant([1.5, -np.inf, np.nan])
        tf.strings.join([tf.constant(["a", "b\n\x00"]), tf.constant(b"\xff")])
        tf.split(x, [1, 3], 1)
        tf.unstack(tf.constant([[1 + 2j], [3 - 1j]]))
    return bytes(original.as_graph_def(add_shapes=True).SerializeToString(deterministic=True))


def test_a_graph_of_tensorflow_comes_back_whole_and_runs() -> None:
    graph = serde.from_bytes(traced())
    full = printer.render(graph, full=True)
    again = parse(full)
    assert printer.render(again, full=True) == full
    assert printer.render(again) == printer.render(graph)
    assert (again.library, again.versions) == (graph.library, graph.versions)
    for node in graph:
        for key, raw in node.attrs.items():
            assert literals.are_alike(again.node(node.name).attrs[key], raw), (node.name, key)
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(v1.GraphDef.FromString(serde.to_bytes(again)), name="")


ELEMENTS: dict[str, tuple[complex, ...]] = {
    **dict.fromkeys(("float16", "float32", "float64"), (0.1, -0.0, float("inf"), -3.0)),
    **dict.fromkeys(("int8", "int64"), (7, -3)),
    "uint64": (7,),
    "bool": (True, False),
    "complex64": (1 - 2j,),
}


@pytest.mark.parametrize(("dtype", "value"), [(dtype, value) for dtype, values in ELEMENTS.items() for value in values])
def test_one_element_for_a_gigabyte_is_written_and_read_as_one(dtype: str, value: complex) -> None:
    element = np.asarray(value).astype(dtype)
    raw = encode("tensor", np.broadcast_to(element, (1 << 15, 1 << 15)))
    text = literals.write(raw)
    assert text.startswith(f"{dtype}[32768,32768] splat "), text
    assert literals.Literals(text).value(None) == raw


@pytest.mark.parametrize(
    "text", ["float32[2] splat", "float32[2] splat [1.0]", 'float32[2] splat b64"AAAA"', "splat 1"]
)
def test_what_is_no_element_cannot_stand_for_all(text: str) -> None:
    with pytest.raises((GraphError, ValueError)):
        literals.Literals(text).value(None)


def test_what_the_short_form_leaves_out_is_inferred_from_operands_and_results() -> None:
    graph = parse("""
        # a training step, as one would write it
        %x: float32[?,3] = Placeholder()  # split
        %w: resource = VarHandleOp() {dtype=float32, shape=[3,1], shared_name="w"}
        %read: float32 = ReadVariableOp(%w)
        %y = MatMul(%x, %read) {transpose_b=false} @CPU:1
        %parts: (float32, float32) = Split(%axis, %y)
        %axis: int32[] = Const() {value=1}
        %both: float32 = AddN(%parts, %parts:1)
        %as_int: int32 = Cast(%both)
        %print = NoOp() ^both ^as_int
        anchor output loss = %both
    """)
    kinds = {"T": "type", "N": "int", "num_split": "int", "DstT": "type", "SrcT": "type"}
    wanted = {"y": {"T": 1}, "parts": {"T": 1, "num_split": 2}, "both": {"N": 2}, "as_int": {"SrcT": 1, "DstT": 3}}
    for name, attrs in wanted.items():
        for key, value in attrs.items():
            assert graph.node(name).attrs[key] == encode(kinds[key], value), (name, key)
    assert graph.node("y").device == "/device:CPU:1"
    assert [node.name for node in graph.node("print").controls] == ["both", "as_int"]
    assert graph.anchors["output loss"] is graph.value("both")
    serde.to_bytes(graph)


def test_a_loop_whose_merge_reads_what_stands_below_it_is_read() -> None:
    with tf.Graph().as_default() as original:
        v1.disable_control_flow_v2()
        v1.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
        v1.enable_control_flow_v2()
    graph = serde.from_bytes(original.as_graph_def().SerializeToString())
    assert printer.render(parse(printer.render(graph))) == printer.render(graph)


@pytest.mark.parametrize("name", ["lstm_v1", "cond_v2", "transformer"])
def test_programs_of_the_zoo_come_back_from_a_dump(name: str) -> None:
    item = item_of(name)
    full = dump(item, full=True)
    assert full.startswith("# ")
    assert printer.render(parse(full), full=True) == printer.render(item.graph, full=True)


def test_only_text_can_be_full() -> None:
    with pytest.raises(GraphError, match="only text"):
        dump(item_of("mlp"), "json", full=True)


def test_a_hostile_name_is_quoted_and_comes_back() -> None:
    graph = Graph()
    name = 'a" b) {x=1}\n%evil = NoOp()'
    first = graph.insert(Node(graph, name, "NoOp", "", {}, b""))
    graph.add("NoOp", name="second", controls=[first])
    again = parse(printer.render(graph, full=True))
    assert list(again.nodes) == [name, "second"]


@pytest.mark.parametrize(
    "raw",
    [
        encode("int", -5),
        encode("float", 0.1),
        encode("float", float("inf")),
        encode("bool", False),
        encode("string", 'say "x"\n'),
        encode("string", b"\xff\x00"),
        encode("type", dtypes.BFLOAT16),
        encode("type", 101),
        encode("shape", (None, 3)),
        encode("shape", None),
        encode("shape", ()),
        encode("list(int)", ()),
        encode("list(float)", (0.5, 2.0)),
        encode("list(type)", (1, 3)),
        encode("list(shape)", ((2,), None)),
        encode("list(string)", ("a", "b")),
        encode("func", FunctionName("body", (("T", encode("type", 1)),))),
        encode("tensor", np.float32([[0.1], [3e38]])),
        encode("tensor", np.array(-0.0)),
        encode("tensor", np.arange(1000)),
        encode("tensor", np.array([True, False])),
        encode("tensor", np.zeros((0, 3), np.int32)),
        encode("tensor", np.array([1 + 2j])),
        encode("tensor", np.frombuffer(b"\x01\x00\xc0\x7f", np.float32)),
        b"",
        b"\x12\xff",
        PerInstance((encode("int", 1), encode("int", 2))),
    ],
    ids=lambda raw: literals.write(raw)[:30],
)
def test_every_value_is_read_as_it_was_written(raw: bytes | PerInstance) -> None:
    again = literals.Literals(literals.write(raw)).value(None)
    assert again == raw or literals.are_alike(again, raw)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("%x: float32 Const()", "this is no node"),
        ("x = Const()", "this is no line of a graph"),
        ("%a = NoOp() extra", "'extra' is not understood"),
        ("%a = NoOp(b)", "is no operand"),
        ("%a = NoOp(all(%b)", "is no operand"),
        ("%a: float33 = Const() {value=1}", "'float33' is no element type"),
        ("%a: float32[x] = Placeholder()", "'x' is no dimension"),
        ("%a: float32[2] = Const() {value=[1]}", "has 2 elements, not 1"),
        ("%a: float32[200] = Const() {value=[0.0, ... #12345678]}", "is no element of a constant"),
        ("%a = Const() {value=1}", "does not say its type"),
        ("%a = Neg(%b)", "no line makes '%b'"),
        ("%a = NoOp() ^b", "no line makes '%b'"),
        ("%a = NoOp() {key}", "'=' is wanted"),
        ("%a = NoOp() {key=}", "a value is wanted|is no value"),
        ("%a = NoOp()\n%a = NoOp()", "two lines make '%a'"),
        ("function f: 3 nodes #12345678", "this is no line"),
        ("anchor loss = %a", "no node 'a'"),
        ("%a = AddN()", "lacks its attribute 'T'"),
        ("%a: float32 = AddN(all(%b))\n%b: float32 = Const() {value=1}", "give its attributes N"),
        ('library = b64"x"', "cannot be read"),
    ],
)
def test_a_mistake_names_the_line(line: str, problem: str) -> None:
    with pytest.raises(GraphError, match=problem) as caught:
        parse("%fine = NoOp()\n" + line, name="case.txt")
    assert caught.value.where in ("case.txt:2", "case.txt:3")


def test_a_shape_that_a_line_states_is_kept_beside_the_node() -> None:
    graph = parse("%x: bool[?] = Placeholder()\n%at: int64[?,1] = Where(%x)\n%other: int64 = Where(%x)")
    assert graph.nodes["at"].attr("_output_shapes") == ((None, 1),)
    assert "_output_shapes" not in graph.nodes["x"].attrs
    assert "_output_shapes" not in graph.nodes["other"].attrs
    assert "%at: int64[?,1] = Where(%x)" in printer.render(graph)


def test_a_logical_constant_may_state_its_type_in_front() -> None:
    graph = parse("%yes: bool = Const() {value=true}")
    assert graph.nodes["yes"].attr("value") == np.True_
