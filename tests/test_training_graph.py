"""A training graph is a value; an item is one with methods, and stays an item whatever is made of it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

import autograph_rewrite as ar
from autograph_rewrite.ir.format import serde
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load import files
from autograph_rewrite.training_graph import EncodedGraph, TrainingGraph
from tests.support.small_items import regression

TWO = {"devices": ["CPU:0", "CPU:1"]}


def bare(item: GraphItem) -> TrainingGraph:
    """Return an item without its methods."""
    return TrainingGraph(*(getattr(item, one.name) for one in fields(item)))


def test_an_item_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        regression().init_op = None  # type: ignore[misc]


def test_copies_of_encoded_bytes_decode_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    original = serde.from_bytes
    monkeypatch.setattr(serde, "from_bytes", lambda data: decoded.append(data) or original(data))
    first = TrainingGraph(EncodedGraph(regression().graph_bytes))
    second = replace(first, targets=("train",))
    assert decoded == []
    assert second.graph is first.graph
    assert len(decoded) == 1


def test_bytes_are_not_encoded_again() -> None:
    data = regression().graph_bytes
    item = TrainingGraph(EncodedGraph(data))
    assert item.graph.node("loss").op == "Sum"
    assert replace(item, targets=("train",)).graph_bytes is data


def test_a_first_line_decodes_nothing() -> None:
    item = replace(regression(), source=EncodedGraph(regression().graph_bytes))
    assert str(item).startswith("2 variables; inputs x")
    assert len(item.graph) == 18
    assert str(item).startswith("18 nodes, 2 variables; inputs x")


def test_equal_graphs_are_two_values() -> None:
    assert regression() != regression()
    assert len({regression(), regression()}) == 2


def test_what_is_made_of_an_item_is_an_item(tmp_path: Path) -> None:
    item = regression()
    assert GraphItem.of(item) is item
    new = ar.rewrite(item, TWO)
    assert type(new) is type(replace(new, report=None)) is GraphItem
    new.save(tmp_path / "new.ar")
    assert type(GraphItem.load(tmp_path / "new.ar")) is GraphItem


def test_the_parts_below_pass_on_what_has_no_methods(tmp_path: Path) -> None:
    plain = bare(regression())
    files.save(plain, tmp_path / "plain.ar")
    assert type(files.load(tmp_path / "plain.ar")) is TrainingGraph
    as_item = GraphItem.of(plain)
    assert all(getattr(as_item, one.name) is getattr(plain, one.name) for one in fields(plain))


def test_users_get_an_item_also_for_what_a_builder_was_given() -> None:
    assert type(ar.rewrite(bare(regression()), TWO)) is GraphItem
    assert ar.dump(bare(regression())) == ar.dump(regression())
    assert ar.build_plan(bare(regression()), TWO) == ar.build_plan(regression(), TWO)
