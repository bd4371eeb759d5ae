"""The printed form of a graph as an item: what `dump --full` writes, or a hand-written case for one pass.

    # output loss = %loss
    # target %train
    %x: float32[?,3] = Placeholder()
    ...

The comments with which `dump` begins say what the outside knows; names that the caller gives go first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autograph_rewrite.ir.format.parser import read
from autograph_rewrite.load.signature.collections import Collected
from autograph_rewrite.load.sources.graphs import build_item
from autograph_rewrite.training_graph import TrainingGraph

_NODE = re.compile(r"\s*(%|anchor\s)")
_SIGNATURE = re.compile(
    r"#\s*(?P<kind>input|output|target|init)\s+(?:(?P<name>\S+)\s*=\s*)?%(?P<tensor>[^\s:,]+(?::\d+)?)"
    r"(?:.*,\s*batch axis (?P<axis>-?\d+))?"
)


def is_printed(text: str) -> bool:
    """Return whether a text is the printed form, and not a GraphDef in the text form of protobuf."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return _NODE.match(next(lines, "")) is not None


def from_printed(text: str, named: Mapping[str, Any], name: str = "text") -> TrainingGraph:
    """Read a graph, and the placements that are stated of its values.

    Args:
        text: as `ir.format.parser` reads it.
        named: train_op, outputs, init_op and batch_inputs, where the caller gives them.
        name: what errors call the text.

    Raises:
        GraphError: a line is wrong, or a name is not in the graph.
    """
    found = [match.groupdict() for line in text.splitlines() if (match := _SIGNATURE.match(line.strip()))]
    of = {kind: [one for one in found if one["kind"] == kind] for kind in ("input", "output", "target", "init")}
    said = {
        "train_op": [one["tensor"] for one in of["target"]] or None,
        "outputs": [one["tensor"] for one in of["output"]] or None,
        "init_op": of["init"][0]["tensor"] if of["init"] else None,
        "batch_inputs": {one["tensor"]: None if one["axis"] is None else int(one["axis"]) for one in of["input"]},
    }
    given = {key: value for key, value in named.items() if value is not None}
    graph, placements = read(text, name=name)
    item = build_item(graph, Collected(), **{**said, "batch_inputs": said["batch_inputs"] or None, **given})
    public = {_tensor(one["tensor"]): one["name"] for one in of["output"] if one["name"]}
    outputs = {public.get(info.tensor, key): info for key, info in item.outputs.items()}
    return replace(item, outputs=outputs, stated_placements=placements)


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"
