"""Keys of collectives: equal in every process, distinct where they must be."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite.plan.parts import collective_keys
from tests.support.plan_items import TWO_DEVICES, reduce_edge


def everywhere(crosses: bool, logical: int) -> tuple[str, ...]:
    """Return the members of every collective of these tests."""
    return TWO_DEVICES


names = st.tuples(st.text(max_size=8), st.sampled_from(["", "indices", "values"]))


def test_a_group_key_follows_from_the_ordered_devices_however_they_are_spelt() -> None:
    key = collective_keys.group_key(["CPU:0", "CPU:1"])
    assert key == collective_keys.group_key(["/device:CPU:0", "/cpu:1"])
    assert key != collective_keys.group_key(["CPU:1", "CPU:0"])
    assert key != collective_keys.group_key(["CPU:0", "CPU:1", "CPU:2"])
    assert 0 < key < 2**31


def test_keys_are_the_same_in_another_process(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = (
        "from autograph_rewrite.plan.parts import collective_keys as keys\n"
        "print(keys.group_key(['CPU:0', 'CPU:1']), keys.instance_keys([('a', ''), ('b', 'values')]))"
    )
    group, instances = (
        collective_keys.group_key(["CPU:0", "CPU:1"]),
        collective_keys.instance_keys([("a", ""), ("b", "values")]),
    )
    assert fresh_python(code).stdout.strip() == f"{group} {instances}"


@given(st.lists(names))
def test_instance_keys_are_distinct_fit_int32_and_ignore_order(collectives: list[tuple[str, str]]) -> None:
    found = collective_keys.instance_keys(collectives)
    assert set(found) == set(collectives)
    assert len(set(found.values())) == len(found)
    assert all(0 < key < 2**31 for key in found.values())
    assert found == collective_keys.instance_keys(reversed(collectives))


def test_values_whose_hashes_meet_take_neighbouring_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_keys, "KEYS", 5)
    found = collective_keys.instance_keys([(name, "") for name in "abcd"])
    assert sorted(found.values()) == [1, 2, 3, 4]  # every key but 0, which means "no collective"


def test_collectives_are_ordered_as_they_come_and_a_bucket_is_one_collective() -> None:
    local = replace(reduce_edge("grad/count", "count"), lowering="slice")
    edges = [reduce_edge(bucket=1), local, reduce_edge("lone"), reduce_edge("grad/bias", bucket=1)]
    first, untouched, lone, second = collective_keys.with_keys(edges, everywhere)
    assert untouched == local
    assert (first.order, lone.order, second.order) == (0, 1, 0)
    assert first.instance_key == second.instance_key != lone.instance_key
    assert {first.group_key, lone.group_key} == {collective_keys.group_key(TWO_DEVICES)}


def test_one_value_converted_to_two_placements_has_two_keys() -> None:
    edges = [reduce_edge(), replace(reduce_edge(), to="split(0)")]
    first, second = collective_keys.with_keys(edges, everywhere)
    assert first.instance_key != second.instance_key


def test_roles_of_one_value_have_keys_of_their_own() -> None:
    edges = [replace(reduce_edge(), role=role) for role in ("indices", "values", "sizes")]
    assert len({edge.instance_key for edge in collective_keys.with_keys(edges, everywhere)}) == 3
