"""The matrix covers what it says it covers, and its comparison can tell right from wrong."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tests.matrix.cases import BATCHES, REPLICAS, VARIABLES, MatrixCase, cases_full, cases_pairwise
from tests.matrix.cover import pairwise
from tests.matrix.run import Result, relative_error
from tests.matrix.summary import table
from tests.zoo import ZOO, optimizers_for


def test_every_allowed_pair_of_values_meets_in_some_row():
    factors = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": range(4)}
    rows = pairwise(factors, lambda row: not (row.get("a") == 1 and row.get("b") == "x"))

    for left, right in combinations(factors, 2):
        met = {(row[left], row[right]) for row in rows}
        wanted = {(a, b) for a in factors[left] for b in factors[right]}
        assert met == wanted - ({(1, "x")} if (left, right) == ("a", "b") else set())
    assert len(rows) < 3 * 3 * 2 * 4 / 3


def test_a_pair_that_only_breaks_a_constraint_through_a_third_value_is_left_out():
    rows = pairwise({"a": (1, 2), "b": (1, 2), "c": (1,)}, lambda row: row.get("b") != 2 or row.get("c") != 1)

    assert {row["b"] for row in rows} == {1}


def test_the_cover_is_the_same_every_time_and_no_larger_than_promised():
    assert cases_pairwise() == cases_pairwise()
    assert len(set(cases_pairwise())) == len(cases_pairwise()) <= 130
    assert len(set(cases_full())) == len(cases_full()) <= 400
    assert cases_full()[: len(cases_pairwise())] == cases_pairwise()


@pytest.mark.parametrize("model", ZOO)
def test_the_cover_runs_each_model_in_every_way(model: str):
    mine = [case for case in cases_pairwise() if case.model == model]

    assert {case.replicas for case in mine} == set(REPLICAS)
    assert {case.variables for case in mine} == set(VARIABLES)
    assert {case.batches for case in mine} == set(BATCHES)
    assert {case.reduction for case in mine} == {"mean", "sum"}
    assert {case.static for case in mine} == {False, True}
    assert "float32" in {case.dtype for case in mine}


@pytest.mark.parametrize("model", ZOO)
def test_the_full_matrix_runs_every_optimizer_on_every_model_mirrored_and_shared(model: str):
    found = {(case.optimizer, case.variables) for case in cases_full() if case.model == model}

    assert found == {(o, v) for o in optimizers_for(ZOO[model].kind) for v in VARIABLES}


def test_sparse_gradients_meet_every_optimizer_in_the_cover():
    sparse = {
        (ZOO[case.model].kind == "graph", case.optimizer)
        for case in cases_pairwise()
        if ZOO[case.model].family == "sparse"
    }

    assert sparse == {(True, o) for o in optimizers_for("graph")} | {(False, o) for o in optimizers_for("keras")}


def test_no_case_has_a_static_batch_that_changes_or_is_below_the_number_of_replicas():
    static = [case for case in cases_full() if case.static]

    assert not [case for case in static if len(set(case.sizes)) > 1 or min(case.sizes) < case.replicas]


@pytest.mark.parametrize(
    ("actual", "wrong"),
    [
        (np.array([1.0, 2.0]), False),
        (np.array([1.0, 2.0 + 1e-7]), True),
        (np.array([1.0, np.nan]), True),
        (np.array([1.0]), True),
        (np.array([1.0, 2.0], np.float32), True),
    ],
)
def test_a_wrong_value_shape_or_type_is_an_error(actual: np.ndarray, wrong: bool):
    assert (relative_error(actual, np.array([1.0, 2.0]), 1e-6) > 1e-9) == wrong


def test_integers_are_equal_or_infinitely_wrong():
    assert relative_error(np.array([3]), np.array([3]), 1e-6) == 0
    assert relative_error(np.array([3]), np.array([4]), 1e-6) == float("inf")


def test_a_failure_names_the_worst_value_first_and_the_table_counts_it():
    case = cases_pairwise()[0]
    result = Result(case, {"w": 1e-3, "step 0 loss:0": 2e-3, "b": 0.0}, {}, (), 1.5)
    row = {
        "model": case.model,
        "dtype": case.dtype,
        "error": result.max_error,
        "seconds": 1.5,
        "ok": result.ok,
    }

    assert not result.ok
    assert result.explain().splitlines()[1:] == ["  step 0 loss:0: 2.00e-03", "  w: 1.00e-03"]
    assert "2.0e-03" in table([{**row, "worst": f"{case}: {result.worst}"}])
    assert isinstance(case, MatrixCase)
