"""The tf.Variable behind a handle that a function has captured by itself, as optimizers of v1 do with their slots.

    tf.raw_ops.ResourceApplyAdagrad(var=w.handle, accum=slot.handle, ...)

TensorFlow notes a variable with a function that reads it; of one that only raw ops use, the function has the handle.
Who has that handle as its own is found among the objects that refer to it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any


def variables_of(handles: Iterable[Any]) -> dict[int, Any]:
    """Return the variables that have some handles, by the ids of the handles; other resources have none.

    Args:
        handles: eager tensors.
    """
    import tensorflow as tf

    wanted = {id(handle): handle for handle in handles if getattr(handle, "dtype", None) == tf.resource}
    if not wanted:
        return {}
    # An object may keep its attributes in a dictionary, which then refers to the handle in its stead.
    holders = gc.get_referrers(*wanted.values())
    dictionaries = [one for one in holders if isinstance(one, dict)]
    holders += gc.get_referrers(*dictionaries) if dictionaries else []
    found: dict[int, Any] = {}
    for one in holders:
        if isinstance(one, tf.Variable) and id(handle := getattr(one, "handle", None)) in wanted:
            found.setdefault(id(handle), one)
    return found
