"""Where variables live: what a plan says of it, the arithmetic of shards, and what a configuration asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan import verify
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.residence import (
    REPLICATED,
    OnServer,
    Residence,
    Sharded,
    placed,
    residence_of,
    split_axis,
)
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies import builder_for
from autograph_rewrite.strategies.builder import shard_sizes
from tests.support.small_items import regression

PS = "/job:ps/task:0/device:CPU:0"
FSDP = Sharded(1, (2, 2), (PS, "/device:CPU:0"), stage=3)


@pytest.mark.parametrize(
    ("extent", "shards", "sizes"),
    [(10, 4, (3, 3, 2, 2)), (11, 4, (3, 3, 3, 2)), (4, 4, (1, 1, 1, 1)), (3, 4, (1, 1, 1, 0)), (12, 3, (4, 4, 4))],
)
def test_the_first_shards_are_the_longer_ones(extent: int, shards: int, sizes: tuple[int, ...]):
    assert shard_sizes(extent, shards) == sizes


@given(st.integers(0, 1000), st.integers(1, 50))
def test_shards_are_all_of_the_axis_one_after_the_other(extent: int, shards: int):
    cut = Sharded(0, shard_sizes(extent, shards))

    assert cut.extent == extent
    assert [end - start for start, end in zip(cut.offsets, (*cut.offsets[1:], extent), strict=True)] == list(cut.sizes)


def test_a_shard_has_the_shape_of_the_whole_on_the_other_axes():
    assert Sharded(1, (3, 2)).shape((4, 5, 6), 1) == (4, 2, 6)


def test_a_placement_is_read_as_it_is_written():
    assert split_axis("split(2)") == 2
    assert split_axis("replicated") is None
    assert split_axis("split()") is None
    assert residence_of(VariableRequest("w", "split(1)", sizes=(2, 2))) == Sharded(1, (2, 2))


@pytest.mark.parametrize(
    ("asked", "residence"),
    [
        (VariableRequest("w"), REPLICATED),
        (VariableRequest("w", "single", servers=("/job:ps/task:0/device:CPU:0",)), OnServer(PS)),
        (VariableRequest("w", "split(0)", sizes=(2, 1)), Sharded(0, (2, 1))),
        (VariableRequest("w", "split(1)", servers=(PS, "/device:CPU:0"), sizes=(2, 2), stage=3), FSDP),
    ],
)
def test_a_request_says_where_a_variable_lives_and_a_residence_writes_it(asked: VariableRequest, residence: Residence):
    assert residence_of(asked) == residence
    assert placed(VariableRequest("w"), residence) == asked


def test_servers_hold_what_lives_on_them_and_not_what_is_split_over_replicas():
    assert OnServer(PS).is_on_server
    assert Sharded(0, (2, 1), (PS, PS)).is_on_server
    assert not any(one.is_on_server for one in (FSDP, REPLICATED, Sharded(0, (2, 1))))
    assert (FSDP.of_shard(0), Sharded(0, (2, 1)).of_shard(1)) == (OnServer(PS), REPLICATED)


def test_a_plan_knows_where_each_variable_and_each_shard_lives():
    requests = (VariableRequest("w", "split(0)", servers=(PS, PS), sizes=(2, 1)), VariableRequest("b"))
    plan = replace(plan_for({"match": "w"}), variables=requests)
    assert plan.residences == {"w": Sharded(0, (2, 1), (PS, PS)), "b": REPLICATED}
    assert plan.homes == {"w/part_0": PS, "w/part_1": PS}


def plan_for(*partitions: dict[str, Any]) -> Plan:
    config = Config.of({"devices": ["CPU:0"], "variables": list(partitions)})
    return builder_for(config).build(regression(), config)


def test_a_configuration_becomes_a_placement_with_sizes():
    plan = plan_for({"match": "w", "partition": {"axis": 0, "shards": 2}})

    request = plan.variables[0]
    assert (request.name, request.placement, request.sizes) == ("w", "split(0)", (2, 1))
    assert verify.check(plan, regression()) == []
    assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize("partition", [{"shards": 1}, {"shards": 4}, {"axis": 2, "shards": 2}, {}])
def test_shards_that_a_variable_cannot_have_are_refused(partition: dict[str, int]):
    with pytest.raises(ConfigError, match="partition"):
        plan_for({"match": "w", "partition": partition})
