"""What a user gets wrong about the placements of a configuration is named, before anything is traced or cut."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.load.files import from_printed

GRAPH = """
# output loss = %loss
# target %train
%x: float32[?,4] = Placeholder()
%up: resource = VarHandleOp() {dtype=float32, shape=[4,8], shared_name="up"}
%odd: resource = VarHandleOp() {dtype=float32, shape=[8,5], shared_name="odd"}
%up/read: float32[4,8] = ReadVariableOp(%up)
%odd/read: float32[8,5] = ReadVariableOp(%odd)
%h = MatMul(%x, %up/read)
%y = MatMul(%h, %odd/read)
%axes: int32[2] = Const() {value=[0, 1]}
%loss = Sum(%y, %axes)
%dodd = MatMul(%h, %y) {transpose_a=true}
%train = AssignSubVariableOp(%odd, %dodd)
"""
STRICT = {"semantics": {"strict": True}}


def refused(model: Any, sharding: dict[str, Any], problem: str, **more: Any) -> None:
    devices = [f"CPU:{i}" for i in range(4 if model == [2, 2] else 2)]
    config = {"devices": devices, "mesh": {"model": model}, "sharding": [{"match": "up", **sharding}], **more}
    with pytest.raises(ConfigError, match=problem):
        ar.build_plan(from_printed(GRAPH, {}), config)


@pytest.mark.parametrize(
    ("sharding", "problem"),
    [
        ({"split": [2]}, "'up' has 2 dimensions, and split names 1"),
        ({"split": [4, 2], "strict": True}, "the parts of 'up' are 8, and a replica has 2 devices"),
        ({"split": [1, 3]}, "the parts of 'up' are 3, and a replica has 2 devices"),
        ({"split": [1, 1]}, "the parts of 'up' are 1, and a replica has 2 devices"),
        ({"split": [3, 2], "strict": True}, r"dimension 0 of 'up' \(4\) is not divisible by 3"),
        ({"split": [1, 16]}, r"dimension 1 of 'up' \(8\) is too small for 16 parts"),
        ({"split": [1, 0]}, r"split\[1\] must be a number of parts"),
        ({"device": 2}, "there is no logical device 2 for 'up': a replica has 2"),
        ({"assign": 2}, "there is no logical device 2 for 'up': a replica has 2"),
        ({"device": -1}, "device must be at least 0"),
        ({"device": 0, "replicate": True}, "exactly one of split, axes, replicate and device, not 2"),
        ({}, "must say exactly one of split, axes, replicate and device"),
        ({"match": "up9", "split": [1, 2]}, "no variable's or tensor's whole name matches 'up9'.*did you mean"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_with_its_reason(sharding: dict[str, Any], problem: str) -> None:
    refused(2, sharding, problem)


@pytest.mark.parametrize(
    ("sharding", "problem"),
    [
        ({"axes": [0, 2]}, "there is no axis 2 for 'up': mesh.model has 2"),
        ({"axes": [1, 1]}, "an axis cuts two dimensions of 'up'"),
        ({"axes": [-1, -1]}, "no axis cuts 'up'"),
        ({"axes": [0]}, "'up' has 2 dimensions, and axes names 1"),
        ({"split": [1, 2]}, "the parts of 'up' are 2, and a replica has 4 devices"),
        ({"split": [1, 4], "axes": [0, 1]}, "must say exactly one of split, axes, replicate and device"),
    ],
)
def test_axes_that_cannot_be_are_refused_with_their_reason(sharding: dict[str, Any], problem: str) -> None:
    refused([2, 2], sharding, problem)


def test_uneven_blocks_are_refused_under_strict() -> None:
    refused(2, {"match": "odd", "split": [1, 2]}, r"dimension 1 of 'odd' \(5\) is not divisible by 2", **STRICT)
    refused(2, {"split": [3, 1]}, r"dimension 0 of 'up' \(4\) is not divisible by 3", **STRICT)


def test_an_entry_that_matches_nothing_is_an_error_or_a_note_where_it_is_optional() -> None:
    refused(2, {"match": "q", "split": [2]}, r"sharding\[0\].match: no variable's or tensor's whole name matches 'q'")
    entries = [{"match": "q", "split": [2], "optional": True}, {"match": "up", "split": [1, 2]}]
    config = {"devices": ["CPU:0", "CPU:1"], "mesh": {"model": 2}, "sharding": entries}
    notes = ar.build_plan(from_printed(GRAPH, {}), config).notes
    assert any("sharding[0] places nothing: no name matches 'q'" in note for note in notes)


def test_a_pattern_of_a_variable_does_not_mean_what_an_optimizer_keeps_of_another_rank() -> None:
    """Adafactor's sums of rows and columns have the name of the variable that they are of."""
    x, y = np.ones((4, 3)), np.ones((4, 2))
    found = []
    for config in (None, {"devices": ["CPU:0", "CPU:1"], "mesh": {"model": 2}, "sharding": [WIDE]}):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4, dtype="float64"), keras.layers.Dense(2, dtype="float64")])
        model.build((None, 3))
        model.compile(keras.optimizers.Adafactor(0.01), "mse")
        model = model if config is None else ar.distribute(model, config)
        model.fit(x, y, epochs=2, verbose=0)
        found.append([weight.numpy() for weight in model.weights])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-9)


WIDE = {"match": ".*kernel", "split": [1, 2]}
