"""Tells which ops a GPU can run, for which types, and which operands its kernel keeps in host memory.

    AddV2(float32)  GPU kernel; operands and result in the device's memory
    AddV2(int32)    GPU kernel in name: it computes on the host, on operands in host memory
    Unique(string)  no kernel: the op runs on the CPU

`tools.dev.make_kernels` writes the shipped table from the registry of TensorFlow's GPU build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ir.types.opdefs import Arg, default_attr, find_op, get_op

ALWAYS_ON_HOST = frozenset((dtypes.STRING, dtypes.RESOURCE))
"""Types that no device memory can hold."""
_LABEL = "_kernel"


@dataclass(frozen=True)
class Registration:
    """One row of the table.

    Attributes:
        device: "GPU", or "DEFAULT" for devices without a specific kernel.
        allowed: values of each attribute: type numbers, or texts.
        host: names of the operands and results in host memory.
        priority: TensorFlow uses the highest of those that fit.
        label: if not empty, a node has to ask for it.
    """

    device: str
    allowed: Mapping[str, frozenset[object]]
    host: frozenset[str]
    priority: int
    label: str


@dataclass(frozen=True)
class Kernel:
    """The kernel with which a GPU runs a node.

    Attributes:
        inputs: whether each operand is in host memory.
        outputs: whether each result is in host memory.
    """

    device: str
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]

    @property
    def on_host(self) -> bool:
        """Whether it uses host memory only, and so computes on the host although its device is a GPU."""
        return all(self.inputs) and all(self.outputs)


@cache
def registry() -> Mapping[str, tuple[Registration, ...]]:
    """Return the registered kernels by op: "GPU" before "DEFAULT", then the highest priority first."""
    found: dict[str, list[Registration]] = {}
    for line in Path(__file__).with_name("tensorflow_gpu_kernels.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        op, device, allowed, host, priority, label = line.split("\t")
        row = Registration(device, dict(_allowed(allowed)), _names(host), int(priority), "" if label == "-" else label)
        found.setdefault(op, []).append(row)
    return {
        op: tuple(sorted(rows, key=lambda row: (row.device, row.priority), reverse=True)) for op, rows in found.items()
    }


def _names(text: str) -> frozenset[str]:
    return frozenset(() if text == "-" else text.split(","))


def _allowed(text: str) -> Iterator[tuple[str, frozenset[object]]]:
    for part in () if text == "-" else text.split(" "):
        name, _, values = part.partition("=")
        yield name, frozenset(dtypes.NUMBERS.get(value, value) for value in values.split(","))


def find_kernel(op: str, attrs: Mapping[str, Any]) -> Kernel | None:
    """Return the kernel with which a GPU runs a node; None where the node has to run on the CPU.

    Args:
        attrs: raw values; only those that decide types or choose a kernel count.
    """
    rows = registry().get(op)
    declared = find_op(op)
    if rows is None or declared is None:
        return None
    deciding = {*declared.type_attrs, _LABEL, *(name for row in rows for name in row.allowed)}
    return _kernel(op, tuple((name, attrs[name]) for name in sorted(deciding) if isinstance(attrs.get(name), bytes)))


@cache
def _kernel(op: str, raws: tuple[tuple[str, bytes], ...]) -> Kernel | None:
    attrs = dict(raws)
    label = _value(op, attrs, _LABEL) or ""
    for row in registry()[op]:
        if row.label == label and all(_fits(_value(op, attrs, name), values) for name, values in row.allowed.items()):
            declared = get_op(op)
            return Kernel(
                row.device,
                tuple(_in_host_memory(declared.inputs, op, attrs, row.host)),
                tuple(_in_host_memory(declared.outputs, op, attrs, row.host)),
            )
    return None


def _value(op: str, attrs: Mapping[str, bytes], name: str) -> Any:
    raw = attrs.get(name)
    if raw is None and not name.startswith("_"):
        raw = default_attr(op, name)
    found = None if raw is None else decode(raw)
    return found.decode() if isinstance(found, bytes) else found


def _fits(value: Any, allowed: frozenset[object]) -> bool:
    if isinstance(value, tuple):
        return all(one in allowed for one in value)
    return value in allowed or str(value).lower() in allowed


def _in_host_memory(args: tuple[Arg, ...], op: str, attrs: Mapping[str, bytes], host: frozenset[str]) -> Iterator[bool]:
    """Yield, for each tensor of the declared operands or results, whether it is in host memory."""
    for arg in args:
        if arg.type_list_attr:
            types = _value(op, attrs, arg.type_list_attr) or ()
        else:
            count = _value(op, attrs, arg.number_attr) if arg.number_attr else 1
            types = (arg.dtype or _value(op, attrs, arg.type_attr),) * count
        for dtype in types:
            if not isinstance(dtype, int):
                raise GraphError(f"a {op} node has a malformed attribute '{arg.type_attr or arg.type_list_attr}'")
            yield arg.name in host or dtypes.base(dtype) in ALWAYS_ON_HOST
