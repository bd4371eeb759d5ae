"""Tensor lists that a rewrite has made: elements come out as they were put in, with their placement.

EmptyTensorList ──► PushBack(%y of micro-batch 0) ──► PushBack(%y of 1) ──► GetItem(1), Stack or Concat
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograph_rewrite.certify.kernels import NoKernelError

Data = Callable[[Any], Any]
"""Makes data of what is held."""


@dataclass(frozen=True, eq=False)
class Kept:
    """A list, with what is held of each element."""

    items: tuple[Any, ...] = ()


def _empty(items: Sequence[Any], data: Data) -> Any:
    return Kept()


def _pushed(items: Sequence[Any], data: Data) -> Any:
    return Kept((*_list(items).items, items[1]))


def _item(items: Sequence[Any], data: Data) -> Any:
    elements, at = _list(items).items, int(data(items[1]))
    if not 0 <= at < len(elements):
        raise IndexError(f"there is no element {at} of {len(elements)}")
    return elements[at]


def _stacked(items: Sequence[Any], data: Data) -> Any:
    return np.stack([data(one) for one in _list(items).items])


def _joined(items: Sequence[Any], data: Data) -> Any:
    return np.concatenate([data(one) for one in _list(items).items])


def _list(items: Sequence[Any]) -> Kept:
    if not isinstance(items[0], Kept):
        raise NoKernelError("a list of the original")
    return items[0]


LISTS: Mapping[str, Callable[[Sequence[Any], Data], Any]] = {
    "EmptyTensorList": _empty,
    "TensorListPushBack": _pushed,
    "TensorListGetItem": _item,
    "TensorListStack": _stacked,
    "TensorListConcatV2": _joined,
}
"""By op, from what is held of the operands to what is held of the result."""
