"""BERT-base as a training graph, in as many layers as asked for: what rewriting is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

NAMES: dict[str, Any] = {
    "train_op": "train",
    "outputs": ["loss:0"],
    "init_op": "init",
    "batch_inputs": {"ids": 0, "y": 0},
}
"""What to tell `GraphItem` about the graph."""


def build(layers: int, *, tiny: bool) -> Any:
    """Return the training graph (tests/zoo), with Adam; `tiny` makes its tensors small, not its node count."""
    from tests.zoo import ZOO, Options, transformer

    shape = replace(transformer._SHAPES["large"], layers=layers)
    if tiny:
        shape = replace(shape, hidden=8, heads=2, inner=12, vocabulary=11, sequence=3)
    with patch.dict(transformer._SHAPES, large=shape):
        # Not `build`, which makes a graph of some options once and would not see another shape.
        return ZOO["transformer"].builder(Options(size="large", optimizer="adam", dtype="float32")).graph


def save(layers: Sequence[int], folder: str, *, tiny: bool) -> dict[str, int]:
    """Write the graph of each depth as `<layers>.pb` and `<layers>.ar`; return its number of nodes by depth."""
    import autograph_rewrite as ar

    nodes = {}
    for count in layers:
        graph = build(count, tiny=tiny)
        nodes[str(count)] = len(graph.get_operations())
        data = graph.as_graph_def(add_shapes=True).SerializeToString(deterministic=True)
        Path(folder, f"{count}.pb").write_bytes(data)
        ar.GraphItem.from_graph(graph, **NAMES).save(Path(folder, f"{count}.ar"))
    return nodes


def config(replicas: int, variables: str = "mirrored") -> dict[str, Any]:
    """Return the configuration of one process with so many replicas."""
    return {
        "devices": [f"CPU:{i}" for i in range(replicas)],
        "strategy": {"name": "AllReduce", "variables": variables},
    }
