"""What `inspect` shows of a training graph, and what it warns of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

import autograph_rewrite as ar
from autograph_rewrite.inspect.summary import summarise
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.item import GraphItem
from autograph_rewrite.training_graph import TensorInfo
from tests.support.golden_text import check_golden
from tests.support.small_items import FLOAT, const, mirrored, regression


def test_the_summary_is_as_it_was() -> None:
    check_golden("summary_regression.txt", str(summarise(regression())))


def test_variables_know_their_updates_and_slots() -> None:
    w, slot = summarise(regression()).variables
    assert (w.updates, w.slots, w.slot_of) == (("ResourceApplyMomentum",), ("w/Momentum",), None)
    assert (slot.updates, slot.slots, slot.slot_of) == (("ResourceApplyMomentum",), (), "w")
    assert w.bytes == 12


def test_two_handles_of_one_variable_are_one_variable() -> None:
    item = regression()
    attrs = {"dtype": FLOAT, "shape": (3, 1), "shared_name": "w"}
    again = item.graph.add("VarHandleOp", name="again", attrs=attrs).output()
    update = item.graph.add("AssignAddVariableOp", [again, const(item.graph, "one", 1.0)], name="bump")
    item.graph.node("train").add_control(update)
    assert summarise(item).variables[0].updates == ("ResourceApplyMomentum", "AssignAddVariableOp")


def test_a_sound_item_has_no_warning() -> None:
    assert summarise(regression()).warnings == ()


def without_batch(item: GraphItem) -> GraphItem:
    return replace(item, inputs={"x": TensorInfo("x", "x:0", "float32", (8, 3))})


def without_train_op(item: GraphItem) -> GraphItem:
    return replace(item, targets=())


def without_update(item: GraphItem) -> GraphItem:
    item.graph.node("train").remove_control(item.graph.node("update"))
    return item


def unknown_rank(item: GraphItem) -> GraphItem:
    return replace(item, inputs={"x": TensorInfo("x", "x:0", "float32", None, 0)})


def without_initializer(item: GraphItem) -> GraphItem:
    return replace(item, variables={"w": replace(item.variables["w"], initializer=None)})


def unknown_op(item: GraphItem) -> GraphItem:
    item.graph.insert(Node(item.graph, "mine", "NoSuchOp", "", {}, b""))
    return item


def unseeded(item: GraphItem) -> GraphItem:
    shape = const(item.graph, "shape", [2], 3)
    noise = item.graph.add("RandomUniform", [shape], name="noise", attrs={"dtype": FLOAT})
    item.graph.node("train").add_control(noise)
    return item


def malformed(item: GraphItem) -> GraphItem:
    item.graph.node("y").drop_attr("T")
    return item


def distributed(item: GraphItem) -> GraphItem:
    return mirrored()


@pytest.mark.parametrize(
    ("spoil", "warning"),
    [
        (without_batch, "no input has a batch axis"),
        (without_train_op, "no train op is known"),
        (without_update, "the step updates no variable"),
        (without_update, "trainable, but not updated by the step: 'w'"),
        (unknown_rank, "the rank of input 'x' is unknown"),
        (without_initializer, "no initializer found for 'w'"),
        (unknown_op, "unknown ops: 'NoSuchOp'"),
        (unseeded, "random ops without a seed, different in each run: 'noise'"),
        (malformed, "malformed attributes at 'y'"),
        (distributed, "it seems to be distributed"),
    ],
)
def test_each_warning_names_its_culprit(spoil: Callable[[GraphItem], GraphItem], warning: str) -> None:
    warnings = summarise(spoil(regression())).warnings
    assert any(warning in text for text in warnings), warnings


def test_data_is_plain_and_complete() -> None:
    data = json.loads(json.dumps(summarise(regression()).data()))
    assert data["variables"][0]["slots"] == ["w/Momentum"]
    assert data["inputs"][0]["shape"] == [None, 3]
    assert data["ops"]["Const"] == 5
    assert data["nodes"] == 18


def test_the_placements_of_a_rewritten_graph_are_counted() -> None:
    new = ar.rewrite(regression(), {"devices": ["CPU:0", "CPU:1"]})
    found = summarise(new)
    assert found.data()["placements"]["partial(sum) -> replicated each"] == 4  # loss and gradient of two replicas
    assert "partial(sum) -> replicated each" in str(found)
    assert "placements" not in summarise(regression()).data()
