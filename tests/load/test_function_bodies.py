"""Nodes in the bodies of functions are checked as those of graphs are: attributes, operands, results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.types.dtypes import FLOAT, INT32
from autograph_rewrite.ir.types.protos import proto
from tests.support.small_items import regression


def with_function(made: Any) -> bytes:
    """A graph whose library has f(a: float, b: int32) = (o: a + neg(a), p: b)."""
    graph = proto("GraphDef").FromString(serde.to_bytes(regression().graph))
    function = graph.library.function.add()
    function.signature.name = "f"
    for name, dtype in (("a", FLOAT), ("b", INT32)):
        function.signature.input_arg.add(name=name, type=dtype)
    for name, dtype in (("o", FLOAT), ("p", INT32)):
        function.signature.output_arg.add(name=name, type=dtype)
    for name, op, reads in (("n", "Neg", ["a"]), ("s", "AddV2", ["a", "n:y:0", "^b", "^n"]), ("z", "NoOp", ["^s"])):
        node = function.node_def.add(name=name, op=op, input=reads)
        if reads[0] == "a":
            node.attr["T"].type = FLOAT
    function.ret["o"], function.ret["p"] = "s:z:0", "b"
    made(function)
    data: bytes = graph.SerializeToString()
    return data


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.node_def[0].input.append("a"), "'n' of the function 'f' reads 2 values, a Neg takes 1"),
        (lambda f: operand(f, "b"), "operand 0 of 's' of the function 'f', 'b', is int32 instead of float32"),
        (lambda f: operand(f, "x"), "'s' of the function 'f' reads 'x', which its body does not have"),
        (lambda f: operand(f, "n:y:1"), "reads 'n:y:1', which its body does not have"),
        (lambda f: operand(f, "n:yy:0"), "reads 'n:yy:0', which its body does not have"),
        (lambda f: operand(f, "n:y:-1"), "reads 'n:y:-1', which its body does not have"),
        (lambda f: f.node_def[2].input.append("^x"), "'z' of the function 'f' waits for 'x'"),
        (lambda f: setattr(f.node_def[2], "name", "n"), "two nodes or arguments of the function 'f' are named 'n'"),
        (lambda f: setattr(f.node_def[2], "op", ""), "a node of the function 'f' has no name or no op"),
        (lambda f: f.ret.pop("p"), "'f' does not say what its result 'p' is"),
        (lambda f: f.ret.update(p="s:z:0"), "result 'p' of the function 'f', 's:z:0', is float32 instead of int32"),
        (lambda f: f.ret.update(p="q"), "the function 'f' reads 'q', which its body does not have"),
    ],
)
def test_operands_of_the_nodes_of_functions_are_checked(damage: Callable[[Any], object], words: str) -> None:
    ar.GraphItem.from_graph(with_function(lambda _: None), train_op="train")
    with pytest.raises(GraphError, match=re.escape(words)):
        ar.GraphItem.from_graph(with_function(damage), train_op="train")


def operand(function: Any, text: str) -> None:
    function.node_def[1].input[0] = text


def test_what_only_the_caller_of_a_function_knows_is_left_to_it() -> None:
    def any_type(function: Any) -> None:
        function.signature.attr.add(name="T", type="type")
        for arg in (function.signature.input_arg[0], function.signature.output_arg[0]):
            arg.type, arg.type_attr = 0, "T"
        for node in function.node_def[:2]:
            node.attr["T"].placeholder = "T"

    ar.GraphItem.from_graph(with_function(any_type), train_op="train")


def test_a_function_that_is_called_by_its_name_gives_what_it_declares() -> None:
    graph = proto("GraphDef").FromString(with_function(lambda _: None))
    graph.node.add(name="called", op="f", input=["x", "axes"])
    reader = graph.node.add(name="reader", op="Neg", input=["called:1"])
    reader.attr["T"].type = INT32
    ar.GraphItem.from_graph(graph.SerializeToString(), train_op="train")
    reader.attr["T"].type = FLOAT
    with pytest.raises(GraphError, match="operand 0 of 'reader', 'called:1', is int32 instead of float32"):
        ar.GraphItem.from_graph(graph.SerializeToString(), train_op="train")
