"""Regenerate the shipped registry of GPU kernels from the GPU build of TensorFlow; no GPU is needed.

Run as `python -m autograph_rewrite.tools.dev.make_kernels` after an upgrade, in an environment that has `tensorflow`
(not `tensorflow-cpu`, which registers hardly any GPU kernel). Kernels that differ only in types share a row:

    AddV2   GPU   T=float32,float16,int64               -
    AddV2   GPU   T=int32                               x,y,z        operands and results in host memory
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autograph_rewrite import tf_private
from autograph_rewrite.ir.types import dtypes

KINDS = ("GPU", "DEFAULT")
"""Device types of kernels that a GPU may run: GPU kernels, and those for any device without a kernel for its type."""
FEWEST = 2_000
"""The least number of GPU kernels in the GPU build; the CPU build has a few hundred."""

Types = frozenset[str]
Constraints = tuple[tuple[str, Types], ...]
Key = tuple[str, str, str, str, str]


def rows(kernels: Iterable[Any], name_of: Mapping[int, str]) -> list[str]:
    """Return the registry as sorted lines of tab-separated fields.

    Args:
        kernels: KernelDefs of all devices.
        name_of: element types by number.
    """
    merged: dict[Key, set[Constraints]] = {}
    for kernel in kernels:
        if kernel.device_type not in KINDS or kernel.label.startswith("Mkl"):
            continue
        key = (
            kernel.op,
            kernel.device_type,
            ",".join(sorted(kernel.host_memory_arg)) or "-",
            str(kernel.priority),
            kernel.label or "-",
        )
        allowed = ((one.name, frozenset(_values(one.allowed_values.list, name_of))) for one in kernel.constraint)
        merged.setdefault(key, set()).add(tuple(sorted(allowed)))
    return sorted(
        "\t".join((op, device, _said(constraints), *rest))
        for (op, device, *rest), found in merged.items()
        for constraints in _joined(found)
    )


def _values(allowed: Any, name_of: Mapping[int, str]) -> Iterator[str]:
    """Yield the values that a constraint allows: mostly types, sometimes texts, numbers or booleans."""
    yield from (name_of[number] for number in allowed.type)
    yield from (text.decode() for text in allowed.s)
    yield from (str(number) for number in allowed.i)
    yield from (str(one).lower() for one in allowed.b)


def _joined(found: set[Constraints]) -> Iterator[Constraints]:
    """Merge constraints that differ only in the values of one attribute."""
    left = found
    for attr in sorted({name for constraints in found for name, _ in constraints}):
        groups: dict[Constraints, set[str]] = {}
        for constraints in left:
            rest = tuple(pair for pair in constraints if pair[0] != attr)
            own = [types for name, types in constraints if name == attr]
            if own:
                groups.setdefault(rest, set()).update(own[0])
        without = {constraints for constraints in left if all(name != attr for name, _ in constraints)}
        left = without | {tuple(sorted((*rest, (attr, frozenset(own))))) for rest, own in groups.items()}
    yield from left


def _said(constraints: Constraints) -> str:
    return " ".join(f"{name}={','.join(sorted(types))}" for name, types in constraints) or "-"


def main() -> None:
    """Write the file next to `ir/types/kernels.py`."""
    import tensorflow as tf
    from tensorflow.core.framework import types_pb2

    found = tf_private.registered_kernels().kernel
    count = sum(kernel.device_type == "GPU" for kernel in found)
    if count < FEWEST:
        sys.exit(f"this TensorFlow registers {count} GPU kernels: install `tensorflow`, not `tensorflow-cpu`")
    numbers = types_pb2.DataType.items()
    name_of = {number: dtypes.NAMES.get(number, name.removeprefix("DT_").lower()) for name, number in numbers}
    lines = [
        f"# tensorflow {tf.__version__}",
        "# op\tdevice\ttypes\thost memory\tpriority\tlabel",
        *rows(found, name_of),
    ]
    (Path(dtypes.__file__).parent / "tensorflow_gpu_kernels.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
