"""The table of traits: its ops exist, its words are asked for, and what is asked for stands in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain

import pytest

from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ops.traits import _TRAITS, _words, has, operands, ops_with, traits
from tests.support.paths import ROOT

QUERIES = ("has", "ops_with", "operands")


def asked() -> Iterator[str]:
    """Yield the traits that the package asks for."""
    for path in chain.from_iterable((ROOT / top).rglob("*.py") for top in ("autograph_rewrite", "strategies", "tools")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in QUERIES:
                words = node.args if node.func.id == "ops_with" else node.args[1:]
                yield from (word.value for word in words if isinstance(word, ast.Constant))


def test_every_op_of_a_trait_is_one_of_tensorflows_and_has_two_inputs_where_it_names_the_second() -> None:
    for trait in traits():
        for op in ops_with(trait):
            found = find_op(op)
            assert found is not None, f"{trait}: {op}"
            assert all(index < len(found.inputs) for index in operands(op, trait)), f"{trait}: {op}"


def test_no_op_stands_twice_in_a_trait() -> None:
    assert [trait for trait in traits() if len(set(words := list(_words(trait)))) < len(words)] == []


def test_the_package_asks_for_traits_of_the_table_and_each_of_them_is_asked_for_or_a_part_of_another() -> None:
    asks = set(asked())
    assert asks <= set(traits())
    parts = {word for trait in traits() for word in _TRAITS[trait].split()}
    assert set(traits()) <= asks | parts


def test_an_unknown_trait_is_an_error() -> None:
    for query in (lambda: has("MatMul", "no_such"), lambda: ops_with("no_such"), lambda: operands("MatMul", "no_such")):
        with pytest.raises(LookupError, match="no_such"):
            query()


@pytest.mark.parametrize(
    ("trait", "those", "others"),
    [
        ("forwards", "Identity StopGradient PreventGradient Snapshot", "Cast Reshape Merge"),
        ("forwards_handle", "Identity RefIdentity Enter Exit Merge NextIteration", "ReadVariableOp"),
        ("routes", "Switch RefSwitch Merge Exit", "Identity LoopCond"),
        ("writes", "ResourceApplyAdam ResourceScatterNdUpdate ApplyAdam ResourceApplyMyOwn", "ReadVariableOp Apply"),
        ("writes", "ResourceCountUpTo AssignSubVariableOp", "ResourceAccumulatorApplyGradient"),
        ("reads", "ReadVariableOp ResourceGather", "VariableShape VarIsInitializedOp"),
        ("of_the_program", "PrintV2 TFRecordReaderV2 EagerPyFunc MyQueueOp", "MyPrint MatMul"),
    ],
)
def test_ops_have_their_traits(trait: str, those: str, others: str) -> None:
    assert all(has(op, trait) for op in those.split())
    assert not any(has(op, trait) for op in others.split())


def test_an_op_may_have_one_of_several_traits_and_operands_that_a_trait_is_about() -> None:
    assert has("Rank", "reads", "measures")
    assert not has("MatMul", "reads", "measures")
    assert operands("StatelessRandomBinomial", "random_parameters") == (2, 3)
    assert operands("MatMul", "random_parameters") == ()
