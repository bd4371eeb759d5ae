"""Replicas train to the values of one device: losses, outputs, variables, slots, metrics after three steps."""

from __future__ import annotations

import pytest

from tests.matrix.cases import MatrixCase, cases_builders, cases_builders_full, cases_full, cases_pairwise
from tests.matrix.run import distributed, relative_error, run_case, truth
from tests.matrix.summary import record
from tests.matrix.table import lines
from tests.support.covering import covering
from tests.zoo import ZOO, Options

COVER = cases_pairwise()
REST = cases_full()[len(COVER) :]


@pytest.mark.parametrize("case", COVER, ids=str)
def test_training_equals_one_device(case: MatrixCase, request: pytest.FixtureRequest):
    check(case, request)


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=str)
def test_training_equals_one_device_in_every_combination(case: MatrixCase, request: pytest.FixtureRequest):
    check(case, request)


@pytest.mark.timeout(600)  # four replicas of a transformer, cut at random, take minutes on a busy machine
@pytest.mark.parametrize("case", cases_builders(), ids=str)
def test_training_under_every_strategy_equals_one_device(case: MatrixCase) -> None:
    check_numbers(case)


@pytest.mark.full
@pytest.mark.parametrize("case", cases_builders_full(), ids=str)
def test_training_under_every_strategy_with_every_optimizer_equals_one_device(case: MatrixCase) -> None:
    check_numbers(case)


def check_numbers(case: MatrixCase) -> None:
    result = run_case(case)

    assert result.ok, result.explain()


def check(case: MatrixCase, request: pytest.FixtureRequest) -> None:
    result = run_case(case)
    record(request, result)

    assert result.ok, result.explain()
    assert {name: each for name, each in result.exchanges.items() if not each.once} == {}
    assert result.exchanges
    assert result.notes == ()


@pytest.mark.parametrize("name", ["mlp", "language_model", "function_sparse"])
def test_each_optimizer_reads_gradients_that_were_exchanged_once_and_raw(name: str):
    exchanged_alike(name)


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_each_optimizer_reads_gradients_that_were_exchanged_once_and_raw_in_every_model(name: str):
    exchanged_alike(name)


def exchanged_alike(name: str) -> None:
    """An optimizer that read `lr * g` and `g * g` from two reductions would need more of them than SGD does."""
    found = {line.optimizer: line.in_all for line in lines([ZOO[name]])}

    assert found == dict.fromkeys(found, found["sgd"])


@pytest.mark.parametrize("name", ["mlp", "language_model"])
def test_shared_variables_let_all_replicas_live_on_one_device(name: str):
    sizes = (12, 7, 2)
    config = {"devices": ["CPU:0"] * 3, "strategy": {"name": "AllReduce", "variables": "shared"}}
    trace, _ = distributed(ZOO[name].build(optimizer="adam"), config, sizes)

    expected = truth(name, Options(optimizer="adam"), sizes)
    for variable, value in expected.variables.items():
        assert relative_error(trace.variables[variable], value, 1e-6) < 1e-9, variable


@pytest.mark.parametrize(
    ("name", "variables"), covering(("mlp", "language_model", "transformer"), ("mirrored", "shared"))
)
def test_ref_variables_train_to_the_values_of_one_device(name: str, variables: str):
    sizes = (12, 7, 2)
    options = Options(optimizer="momentum", ref_variables=True)
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": variables}}
    trace, _ = distributed(ZOO[name].build(options), config, sizes)

    for variable, value in truth(name, options, sizes).variables.items():
        assert relative_error(trace.variables[variable], value, 1e-6) < 1e-9, variable
