"""Orders of accesses, prints, draws and tables survive a rewrite, however late some node is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.training_graph import EncodedGraph
from tests.orders import programs
from tests.orders.programs import CONFIGURATIONS, Program, difference, run, with_delays

RUNS = 2


@pytest.mark.parametrize("seed", range(len(CONFIGURATIONS)))
def test_a_program_gives_and_prints_the_same_when_some_of_its_nodes_are_late(seed: int) -> None:
    found = programs.outcome(seed, RUNS)
    assert found.verdict == "equal", found


def test_a_lost_edge_between_two_accesses_is_seen(tmp_path: Path) -> None:
    seen = 0
    for seed in range(6):
        program = Program(seed, tmp_path / "printed")
        graph = program.build()
        outputs = [f"out_{i}" for i in range(len(program.outputs))]
        item = ar.GraphItem.from_graph(graph, train_op="train", outputs=outputs, init_op="init")
        expected = run(item, program.printed)
        late, alive = with_delays(_without_order(item), 1)
        found = run(late, program.printed)
        del alive
        seen += bool(difference(expected, found))
    assert seen >= 4, seen


def _without_order(item: Any) -> Any:
    graph = item.graph_def
    for node in graph.node:
        if node.op in ("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "PrintV2"):
            kept = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend(kept)
    return replace(item, source=EncodedGraph(graph.SerializeToString()))
