"""What is run alone waits for all members of a collective, and of several micro-batches for the first one only."""

from __future__ import annotations

import pytest

from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import EACH, MICRO, Mesh
from autograph_rewrite.ir.verify.whole_runs import runs_are_whole
from autograph_rewrite.passes.emit.instances import wait_for_members
from tests.ir.verify.test_whole_runs import all_reduce, once


@pytest.mark.parametrize("micro", [1, 2])
def test_a_run_of_the_first_value_needs_the_members_of_its_micro_batch_alone(micro: int) -> None:
    graph, mesh = Graph(), Mesh.of(2, micro)
    total = all_reduce(graph, EACH)
    root, other = once(graph, total), once(graph, total, name="other")
    assert len(list(runs_are_whole(graph, mesh, [root]))) == 1

    wait_for_members(graph, micro)

    assert list(runs_are_whole(graph, mesh, [root, other])) == []
    waits = root if micro == 1 else root.inputs[0].node
    assert waits.controls == (total,)
    assert waits.span == (root.span if micro == 1 else {MICRO})
    assert other.inputs == root.inputs, "all readers of a value share what waits"
