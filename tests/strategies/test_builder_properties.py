"""Properties of every builder: whatever the shapes and the cluster, its plan fits, covers and balances."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autograph_rewrite.config.config import Config
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types.dtypes import FLOAT
from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import check
from autograph_rewrite.strategies import STRATEGIES, named_builder
from autograph_rewrite.strategies.builder import shard_sizes, smallest_divisor, smallest_non_divisor
from autograph_rewrite.training_graph import TensorInfo, Variable
from tests.support.small_items import const, variable

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6)
CLUSTERS = st.sampled_from(
    [
        {"devices": ["CPU:0", "CPU:1"]},
        {"devices": ["GPU:0", "GPU:1", "GPU:2"]},
        {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1", "c:1"]}},
        {"devices": ["GPU:0", "GPU:1"], "cluster": {"workers": ["a:1", "b:1"], "ps": ["c:1", "d:1"]}},
    ]
)
SINGLE = [name for name in STRATEGIES if name not in ("Auto", "Pipeline")]


def item_of(shapes: list[tuple[int, ...]]) -> GraphItem:
    """An item in which each of some variables is read, and updated."""
    graph = Graph()
    rate = const(graph, "rate", 0.1)
    reads, updates, variables = [], [], {}
    for i, shape in enumerate(shapes):
        handle = variable(graph, f"v{i}", shape)
        read = graph.add("ReadVariableOp", [handle], name=f"v{i}/Read", attrs={"dtype": FLOAT}).output()
        reads.append(graph.add("L2Loss", [read], name=f"v{i}/loss").output())
        updates.append(graph.add("ResourceApplyGradientDescent", [handle, rate, read], name=f"v{i}/update"))
        variables[f"v{i}"] = Variable(f"v{i}", f"v{i}", "float32", shape, trainable=True)
    graph.add("AddN", reads, name="loss")
    graph.add("NoOp", name="train", controls=updates)
    return GraphItem(graph, {}, {"loss": TensorInfo("loss", "loss:0", "float32", ())}, ("train",), None, variables)


def built(name: str, shapes: list[tuple[int, ...]], cluster: dict[str, Any]) -> tuple[GraphItem, Plan]:
    item, config = item_of(shapes), Config.of({**cluster, "strategy": {"name": name}})
    return item, named_builder(config).build(item, config)


@pytest.mark.parametrize("name", SINGLE)
@settings(max_examples=25)
@given(shapes=SHAPES, cluster=CLUSTERS)
def test_a_plan_fits_round_trips_and_does_not_depend_on_the_call(
    name: str, shapes: list[tuple[int, ...]], cluster: dict[str, Any]
) -> None:
    item, plan = built(name, shapes, cluster)
    assert [str(found) for found in check(plan, item) if "not available yet" not in str(found)] == []
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_proto(plan.to_proto()) == plan
    assert built(name, shapes, cluster)[1] == plan
    assert [request.name for request in plan.variables] == list(item.variables)


@settings(max_examples=50)
@given(shapes=SHAPES)
def test_no_server_is_ahead_of_another_by_more_than_the_heaviest_variable(shapes: list[tuple[int, ...]]) -> None:
    cluster = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1"], "ps": ["b:1", "c:1", "d:1"]}}
    item, plan = built("PSLoadBalancing", shapes, cluster)
    load = {f"/job:ps/replica:0/task:{task}/device:CPU:0": 0 for task in range(3)}
    for request in plan.variables:
        load[request.servers[0]] += item.variables[request.name].nbytes
    assert max(load.values()) - min(load.values()) <= max(one.nbytes for one in item.variables.values())


@given(size=st.integers(1, 5000), count=st.integers(1, 300))
def test_shards_make_up_the_whole_and_differ_by_one_at_most(size: int, count: int) -> None:
    sizes = shard_sizes(size, count)
    assert len(sizes) == count
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(size=st.integers(0, 5000))
def test_the_numbers_of_shards_are_the_smallest_that_they_say(size: int) -> None:
    divisor, other = smallest_divisor(size), smallest_non_divisor(size)
    if size >= 2:
        assert size % divisor == 0
        assert all(size % smaller for smaller in range(2, divisor))
        assert other == size or size % other
        assert all(size % smaller == 0 for smaller in range(2, min(other, size)))
    else:
        assert divisor == other == 1
