"""Reads many variables in one call: one call costs less than one for each.

    handles on a CPU ──► one variant, packed once ──► function ──► values, and stacks of values
    other handles    ─────────────────────────────►

An argument costs a call about half a microsecond, so those of a CPU are given as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.dtypes import RESOURCE, VARIANT
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.native import call_by_name, function_def, read_nodes


class Reader:
    """Reads the same variables again and again.

    Args:
        handles: of the variables.
        types: of the variables, as TensorFlow's enum.
        stacks: which variables (by position) are read as the rows of one tensor: of one type, shape and CPU each.
    """

    def __init__(self, handles: Sequence[Any], types: Sequence[int], stacks: Sequence[Sequence[int]] = ()) -> None:
        stacked = {index for rows in stacks for index in rows}
        single = [index for index in range(len(handles)) if index not in stacked]
        by_device: dict[str, list[int]] = {}
        for index, handle in enumerate(handles):
            by_device.setdefault(handle.device if "CPU" in handle.device else "", []).append(index)
        elsewhere = by_device.pop("", [])
        self._arguments: list[Any] = []
        nodes: list[bytes] = []
        values: dict[int, str] = {}
        for number, (device, those) in enumerate(by_device.items()):
            self._arguments.append(_packed([handles[index] for index in those], device))
            nodes.append(_unpacking(f"get{number}", f"a{number}", len(those), device))
            handed = [(f"get{number}:components:{at}", types[index]) for at, index in enumerate(those)]
            node, found = read_nodes.read_together(f"read{number}", handed, device=device)
            nodes.append(node)
            values |= dict(zip(those, found, strict=True))
        first = len(self._arguments)
        self._arguments += [handles[index] for index in elsewhere]
        own = [(f"a{first + at}", types[index]) for at, index in enumerate(elsewhere)]
        more, found = read_nodes.read_each("each", own)
        values |= dict(zip(elsewhere, found, strict=True))
        results = [values[index] for index in single]
        for number, rows in enumerate(stacks):
            which = [values[index] for index in rows]
            node, result = read_nodes.stack(f"stack{number}", which, types[rows[0]], handles[rows[0]].device)
            nodes.append(node)
            results.append(result)
        given = [VARIANT] * first + [RESOURCE] * len(elsewhere)
        made = [*(types[index] for index in single), *(types[rows[0]] for rows in stacks)]
        name = call_by_name.new_name("read")
        self._call = call_by_name.Call(function_def.of_nodes(name, given, [*nodes, *more], results, made))

    def __call__(self) -> list[Any]:
        """Return the values of those that are read by themselves, in order, and then the stacks."""
        return self._call(self._arguments)


def _packed(handles: Sequence[Any], device: str) -> Any:
    """Return one tensor that holds handles."""
    tf = tensorflow()
    with tf.device(device):
        return tf.raw_ops.OptionalFromValue(components=list(handles))


def _unpacking(name: str, argument: str, count: int, device: str) -> bytes:
    attrs = {
        "output_types": encode("list(type)", [RESOURCE] * count),
        "output_shapes": encode("list(shape)", [()] * count),
    }
    return read_nodes.encoded(name, "OptionalGetValue", [argument], attrs, device)
