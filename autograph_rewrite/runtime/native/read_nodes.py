"""Nodes of a function that read variables: one by one, or all of a device by one node, some as the rows of a tensor.

    any handle            ──► ReadVariableOp
    handles on one device ──► _ReadVariablesOp ──► values
                                               └─► Pack ──► one tensor of those of one type and shape

A node takes about a microsecond, and so does making a tensor object of each result of a function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import encode

Handles = Sequence[tuple[str, int]]
"""References to handles of variables, as a function's nodes spell them, with the types of the variables."""


def read_each(prefix: str, handles: Handles, controls: Iterable[str] = ()) -> tuple[list[bytes], list[str]]:
    """Return nodes that read one variable each, and references to the values.

    Args:
        prefix: of their names.
        handles: of the variables.
        controls: nodes that are to have run.
    """
    waits = [f"^{name}" for name in controls]
    nodes = [
        encoded(f"{prefix}{i}", "ReadVariableOp", [handle, *waits], {"dtype": encode("type", dtype)})
        for i, (handle, dtype) in enumerate(handles)
    ]
    return nodes, [f"{prefix}{i}:value:0" for i in range(len(nodes))]


def read_together(
    name: str, handles: Handles, controls: Iterable[str] = (), device: str = ""
) -> tuple[bytes, list[str]]:
    """Return one node that reads variables of one device, and references to the values.

    Args:
        controls: nodes that are to have run.
        device: "": that of the handles.
    """
    types = [dtype for _, dtype in handles]
    attrs = {"N": encode("int", len(types)), "dtypes": encode("list(type)", types)}
    inputs = [*(handle for handle, _ in handles), *(f"^{control}" for control in controls)]
    return encoded(name, "_ReadVariablesOp", inputs, attrs, device), [f"{name}:values:{i}" for i in range(len(types))]


def share_buffers(prefix: str, handles: Sequence[str], controls: Iterable[str] = ()) -> list[tuple[str, bytes]]:
    """Return nodes behind which reads share a variable's buffer again, and their names.

    An op that updates rows lets all later reads copy the whole variable, so that it need not look who has its buffer.

    Args:
        handles: references to handles of variables.
        controls: nodes that are to have run.
    """
    waits = [f"^{name}" for name in controls]
    names = [f"{prefix}{i}" for i in range(len(handles))]
    return [
        (name, encoded(name, "DisableCopyOnRead", [handle, *waits], {}))
        for name, handle in zip(names, handles, strict=True)
    ]


def stack(name: str, values: Sequence[str], dtype: int, device: str = "") -> tuple[bytes, str]:
    """Return a node that makes values of one type and shape the rows of a tensor, and a reference to it.

    Args:
        values: references to them.
        dtype: of the values, as TensorFlow's enum.
        device: "": TensorFlow chooses.
    """
    attrs = {"N": encode("int", len(values)), "T": encode("type", dtype), "axis": encode("int", 0)}
    return encoded(name, "Pack", values, attrs, device), f"{name}:output:0"


def encoded(name: str, op: str, inputs: Iterable[str], attrs: Mapping[str, bytes], device: str = "") -> bytes:
    """Return a node, as a `node` field of GraphDef.

    Args:
        op: its type.
        inputs: as a function's nodes spell them.
        attrs: encoded, by name.
        device: "": TensorFlow chooses.
    """
    listed = [text.encode() for text in inputs]
    return wire.write_node(name.encode(), op.encode(), listed, device.encode(), wire.write_attrs(attrs))
