"""Compare in every step, inside its graph, the inputs that all workers must have in common.

    worker 0   rate 0.01, x of length 5, w written   ──► digest ──┐  with the size of its part,
    worker 1   rate 0.02, x of length 5              ──► digest ──┴─ through the graph: an error on all

Variables count if something else than the step has written them: where nobody did, they are equal.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.runtime.consensus.all_reduce_session import Array
from autograph_rewrite.training_graph import TrainingGraph

_FEW = 6
"""How many elements are told one by one."""
_CONTAINERS = ("resource", "variant")


def digest_of(given: Mapping[str, str]) -> Array:
    """Return the digest of what has to be equal: zeros for nothing."""
    if not given:
        return np.zeros(DIGEST, np.int32)
    text = "\0".join(f"{key}\0{given[key]}" for key in sorted(given))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=4 * DIGEST).digest(), np.int32)


def agree(table: Array) -> bool:
    """Return whether all workers have sent the same digest: their rows are sizes and digests."""
    return bool((table[:, 1:] == table[0, 1:]).all())


def described(value: Any) -> str:
    """Return a text that differs where type, shape or contents do."""
    array = np.asarray(value)
    form = f"{array.dtype.name}{list(array.shape)}"
    if array.size <= _FEW:
        text = repr(array.tolist())
        return text if array.dtype.kind in "fiub" and not array.ndim else f"{form} {text}"
    is_text = array.dtype.kind in "OSU"
    data = repr(array.tolist()).encode() if is_text else array.tobytes()
    return f"{form} #{zlib.crc32(data):08x}"


def written_between(name: str) -> str:
    """Return what a variable is called that was written from Python."""
    return f"variable '{name}', written between steps"


class Inputs:
    """What is the same in all workers of the inputs of one graph.

    Args:
        item: a rewritten one.
        key: what finds the value of an input in what a step is given, by the name of its tensor; None if nothing does.
    """

    def __init__(self, item: TrainingGraph, key: Callable[[str], Hashable | None]) -> None:
        self._whole: list[tuple[str, Any]] = []
        self._open: list[tuple[str, Any, tuple[int, ...]]] = []
        ragged = {one.name: one.ragged for one in item.report.plan.batch_inputs} if item.report is not None else {}
        for info in item.inputs.values():
            found = key(info.tensor)
            if found is None:
                continue
            if info.batch_axis is None:
                self._whole.append((f"'{info.name}'", found))
            elif info.shape is not None:
                free = (info.batch_axis, *ragged.get(info.name, ()))
                dims = tuple(d for d, size in enumerate(info.shape) if size is None and d not in free)
                self._open += [(info.name, found, dims)] if dims else []

    def given(self, values: Any) -> dict[str, str]:
        """Return what a step is given, by name.

        Args:
            values: a mapping, or a sequence, of values by key.
        """
        has = values.__contains__ if isinstance(values, Mapping) else lambda key: True
        said = {
            name: described(values[key])
            for name, key in self._whole
            if has(key) and getattr(getattr(values[key], "dtype", None), "name", "") not in _CONTAINERS
        }
        for name, key, dims in self._open:
            if has(key):
                shape = np.shape(values[key])
                said |= {f"the length of dimension {dim} of '{name}'": str(shape[dim]) for dim in dims}
        return said
