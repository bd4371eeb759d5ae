"""One op on given values, as a node of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node
from tests.rules.runner import deciding, number_of_input


def node_of(op: str, values: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> Node:
    """Return a node that reads a placeholder for each value."""
    graph = Graph()
    inputs = [
        graph.add("Placeholder", name=f"input_{i}", attrs={"dtype": number_of_input(value)}).output()
        for i, value in enumerate(values)
    ]
    return graph.add(op, inputs, name="op", attrs={**deciding(op, values), **attrs})
