"""What is read before an update stays before it, also where what lay between them need not be waited for."""

from __future__ import annotations

import pytest

from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.traversal import ancestors
from tests.seeded_mistakes.draws import Draw
from tests.support.rewriting import run_pipeline


@pytest.mark.parametrize(("config", "behind"), [("micro_one", "assign-devices"), ("loop_one", "roll-loop")])
def test_an_update_that_waits_for_gradients_comes_behind_what_they_need_read(config: str, behind: str) -> None:
    draw, seen = Draw("ordered_updates", "own", config), list[str]()

    def look(name: str, graph: Graph) -> None:
        if name in ("order-accesses", behind):
            update, read = graph.nodes["AssignSubVariableOp"], graph.nodes["matmul/ReadVariableOp"]
            assert read in ancestors([update]), name
            seen.append(name)

    run_pipeline(draw.flat, draw.plan, observers=[look])
    assert seen == ["order-accesses", behind]
