"""The graphs of the zoo under policies that need no names, two each: the variables of the graph without them."""

from __future__ import annotations

import numpy as np
import pytest

import autograph_rewrite as ar
from tests.support.training import train
from tests.zoo import GRAPHS, Case

POLICIES = ("sqrt", "hierarchical", "every:1", "save_matmuls")
KEPT = {"language_model", "lstm_v2", "lstm_v1", "gru_v2", "gru_v1", "cond_v2", "cond_v1", "mlp"}
"""All or much of them is in loops and branches, or is read at once."""
EXACT = {"float64": 1e-12, "float32": 1e-5}
"""In float32 TensorFlow may fuse one of two copies and not the other."""


@pytest.mark.parametrize(
    ("case", "policies"),
    [(case, POLICIES[at % 2 :: 2]) for at, case in enumerate(GRAPHS)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_the_zoo_trains_as_it_did(case: Case, policies: tuple[str, ...]) -> None:
    built = case.build(dtype=case.dtypes[0])
    item, tolerance = built.item(), EXACT[case.dtypes[0]]
    feeds = [{name.partition(":")[0]: value for name, value in built.feeds(i, 6).items()} for i in range(2)]
    expected = train(item, feeds)
    for policy in policies:
        new = ar.rewrite(item, {"devices": ["CPU:0"], "remat": {"policy": policy}})
        assert case.name in KEPT or new.report.recomputed.segments
        got = train(new, feeds)
        for name, value in expected.variables.items():
            np.testing.assert_allclose(got.variables[name], value, tolerance, tolerance, err_msg=f"{policy}: {name}")
