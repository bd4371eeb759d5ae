"""Bytes of tensors and of variables: one rule for unknown dimensions, and for types without a fixed size."""

from __future__ import annotations

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.training_graph import Variable


def variable(dtype: str, *shape: int | None) -> Variable:
    return Variable("v", "v", dtype, shape)


def test_the_bytes_of_a_tensor_are_not_known_where_a_dimension_is_not() -> None:
    assert dtypes.nbytes(dtypes.FLOAT, (2, 3)) == 24
    assert dtypes.nbytes(dtypes.FLOAT, ()) == 4
    assert dtypes.nbytes(dtypes.FLOAT, (2, None)) is None
    assert dtypes.nbytes(dtypes.FLOAT, None) is None


def test_an_unknown_dimension_of_a_variable_counts_as_one_and_an_empty_one_as_none() -> None:
    assert variable("float32", 2, None).nbytes == 8
    assert variable("float32", 2, 0).nbytes == 0


def test_what_has_no_fixed_size_counts_as_no_bytes_whether_or_not_its_type_is_known() -> None:
    assert variable("string", 5).nbytes == variable("a type of next year", 5).nbytes == 0
