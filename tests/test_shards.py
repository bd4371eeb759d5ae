"""The arithmetic of shards, and what a configuration asks of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan import check
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.parts import VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.shards import Cut, axis_of, cut_of
from autograph_rewrite.strategies import builder_for
from autograph_rewrite.strategies.shards import shard_sizes
from tests.small_items import regression


@pytest.mark.parametrize(
    ("extent", "shards", "sizes"),
    [(10, 4, (3, 3, 2, 2)), (11, 4, (3, 3, 3, 2)), (4, 4, (1, 1, 1, 1)), (3, 4, (1, 1, 1, 0)), (12, 3, (4, 4, 4))],
)
def test_the_first_shards_are_the_longer_ones(extent: int, shards: int, sizes: tuple[int, ...]):
    assert shard_sizes(extent, shards) == sizes


@given(st.integers(0, 1000), st.integers(1, 50))
def test_shards_are_all_of_the_axis_one_after_the_other(extent: int, shards: int):
    cut = Cut(0, shard_sizes(extent, shards))

    assert cut.extent == extent
    assert [end - start for start, end in zip(cut.offsets, (*cut.offsets[1:], extent), strict=True)] == list(cut.sizes)


def test_a_shard_has_the_shape_of_the_whole_on_the_other_axes():
    assert Cut(1, (3, 2)).shape((4, 5, 6), 1) == (4, 2, 6)


def test_a_placement_is_read_as_it_is_written():
    assert axis_of("split(2)") == 2
    assert axis_of("replicated") is None
    assert axis_of("split()") is None
    assert cut_of(VariableRequest("w", "split(1)", sizes=(2, 2))) == Cut(1, (2, 2))


def plan_for(*partitions: dict[str, Any]) -> Plan:
    config = Config.of({"devices": ["CPU:0"], "variables": list(partitions)})
    return builder_for(config).build(regression(), config)


def test_a_configuration_becomes_a_placement_with_sizes():
    plan = plan_for({"match": "w", "partition": {"axis": 0, "shards": 2}})

    request = plan.variables[0]
    assert (request.name, request.placement, request.sizes) == ("w", "split(0)", (2, 1))
    assert check.check(plan, regression()) == []
    assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize("partition", [{"shards": 1}, {"shards": 4}, {"axis": 2, "shards": 2}, {}])
def test_shards_that_a_variable_cannot_have_are_refused(partition: dict[str, int]):
    with pytest.raises(ConfigError, match="partition"):
        plan_for({"match": "w", "partition": partition})
