"""Loops: what they add up is reduced once, behind them."""

from __future__ import annotations

import pytest

import autograph_rewrite as ar
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.normalize.normalize import normalise
from tests.zoo import ZOO

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce"}}


@pytest.mark.parametrize("name", ["lstm_v1", "lstm_v2", "gru_v1", "gru_v2"])
def test_nothing_is_exchanged_inside_the_loops_of_recurrent_networks(name: str) -> None:
    built = ZOO[name].build(optimizer="adam")
    item = ar.GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs),
    )
    graph = normalise(item).graph
    looped = {node.name for node in frames_of(topological_order(graph))}
    edges = ar.build_plan(item, CONFIG).edges
    exchanged = {edge.node for edge in edges if edge.lowering in ("add_n", "fold", "concat")}

    assert looped
    assert exchanged
    assert exchanged & looped == set()
