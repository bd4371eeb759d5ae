"""The work of rows: of a table, a step touches what it names."""

from __future__ import annotations

import pytest

import autograph_rewrite as ar
from autograph_rewrite.load.files import from_printed

TEXT = """
# input %ids, batch axis 0
# target %train
%ids: int32[?] = Placeholder() {shape=[?]}
%w: resource = VarHandleOp() {dtype=float32, shape=[ROWS,32], shared_name="w"}
%a: resource = VarHandleOp() {dtype=float32, shape=[ROWS,32], shared_name="a"}
%g: float32[?,32] = ResourceGather(%w, %ids) {dtype=float32}
%u = Unique(%ids) {out_idx=int32}
%n: int32[1] = Shape(%u)
%zero: int32[1] = Const() {value=[0]}
%one: int32[1] = Const() {value=[1]}
%count: int32 = StridedSlice(%n, %zero, %one, %one) {shrink_axis_mask=1}
%rows = UnsortedSegmentSum(%g, %u:1, %count)
%rate: float32 = Const() {value=0.1}
%train = ResourceSparseApplyAdagrad(%w, %a, %rate, %rows, %u)
"""


def seconds_of_update(rows: int, batch: int) -> float:
    """Return how long the update takes in simulation, on one device of two."""
    item = from_printed(TEXT.replace("ROWS", str(rows)), {})
    config = {"devices": ["CPU:0", "CPU:1"]}
    events = ar.simulate(item, ar.build_plan(item, config), config, batch=batch).events
    return sum(event.seconds for event in events if event.name == "train")


def test_an_update_of_rows_takes_as_long_as_its_rows_whatever_the_table() -> None:
    assert seconds_of_update(1_000_000, 4096) == pytest.approx(seconds_of_update(100_000, 4096))
    assert seconds_of_update(1_000_000, 8192) == pytest.approx(2 * seconds_of_update(1_000_000, 4096), rel=0.05)


def test_ids_count_as_distinct_as_nobody_knows_how_many_are() -> None:
    """Four accesses to a row, of the table and of its slot, of a tenth of a microsecond each, on four cores."""
    assert seconds_of_update(1_000_000, 8192) == pytest.approx(8192 * 4 * 512 / 6e9 / 4, rel=0.1)


@pytest.mark.parametrize("shards", [2, 4])
def test_rows_of_a_table_on_several_servers_meet_at_the_first_which_hands_on_the_shares_of_others(shards: int) -> None:
    """Which rows there are is known only where all are: of so many servers, all but one get theirs later."""
    item, batch = from_printed(TEXT.replace("ROWS", "100000"), {}), 4096
    config = {
        "devices": ["CPU:0"],
        "cluster": {"workers": ["a:1", "b:1"], "ps": [f"c{i}:1" for i in range(shards)]},
        "strategy": {"name": "PS"},
        "variables": [{"match": "w", "partition": {"axis": 0, "shards": shards}}],
    }
    found = ar.simulate(item, ar.build_plan(item, config), config, batch=batch)
    links = {link.name: link.bytes for link in found.links}
    rows = batch * (32 * 4 + 4)
    gradients, lookups = batch * 32 * 4 + batch * 4, batch * 32 * 4
    assert links["job:ps/task:0 in"] == pytest.approx(gradients, rel=0.01)
    assert links["job:ps/task:0 out"] == pytest.approx(lookups / shards + rows * (shards - 1) / shards, rel=0.01)
    assert links["job:ps/task:1 in"] == pytest.approx(rows / shards, rel=0.01)
