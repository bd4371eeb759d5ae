"""Fetch by original name: assemble a value from its instances, or read a variable before or after the run.

    blocks ─► concatenated     contributions ─► added     variable ─► read before the run, a reference behind it

A v1 Session fetches a resource variable by a read that is not ordered with the step; as it has no inputs, it runs
before the updates. For a reference variable it returns the buffer itself, which holds the value after the run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.errors import RewriteError
from autograph_rewrite.ops.facts.placement import Placement
from autograph_rewrite.passes.emit.tensor_map import View
from autograph_rewrite.training_graph import TensorInfo, Variable

_COMBINE = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "all": np.logical_and,
    "any": np.logical_or,
}


class Fetch(NamedTuple):
    """The assembly of one original fetch.

    Attributes:
        view: how the values of the elements combine; None for operations, which have no value.
        variable: the variable whose value it is, read separately; empty where the elements give the value.
        late: whether the variable is read after the run, else before it.
    """

    elements: tuple[Any, ...]
    view: View | None = None
    variable: str = ""
    late: bool = False


def name_of(thing: Any) -> str:
    """Return the name of a fetch or feed; a variable stands for its value, an assignment for the value after it.

    Raises:
        RewriteError: it has no name.
    """
    if isinstance(thing, str):
        return thing
    if isinstance(thing, TensorInfo):
        return thing.tensor
    handle = getattr(thing, "handle", None)
    if handle is not None and hasattr(handle, "op") and thing.op is not handle.op:
        thing = thing.graph.as_graph_element(thing)
    name = getattr(thing, "name", None)
    if not isinstance(name, str):
        raise RewriteError(
            f"cannot fetch or feed a {type(thing).__name__}", hint="use a name, a tf.Tensor or a tf.Operation"
        )
    return name


def variable_of(variables: Mapping[str, Variable], tensor: str) -> tuple[str, bool]:
    """Return the variable whose value an original tensor is, empty if there is none, and whether it is read late."""
    node, _, output = tensor.partition(":")
    if output not in ("", "0"):
        return "", False
    for name, variable in variables.items():
        if node in variable.aliases:
            return name, True
        its_value = (name, variable.handle, f"{name}/Read/ReadVariableOp")
        if node in its_value and not (variable.aliases or variable.captured):
            return name, False
    return "", False


def assemble(view: View | None, got: Sequence[Any]) -> Any:
    """Return the value of an original tensor from those of its instances; None without a view."""
    if view is None:
        return None
    for placement, groups in view.joins:
        got = [_together([got[i] for i in group], placement) for group in groups]
    if view.segments and len(got) > 1:
        return _in_order(got, view.placement.dim, view.segments)
    return _together(got, view.placement)


def _together(got: Sequence[Any], placement: Placement) -> Any:
    """Return the full value from the parts of a value with this placement."""
    if len(got) == 1 or not placement.differs:
        return got[0]
    if placement.is_split:
        return np.concatenate(got, axis=placement.dim)
    return functools.reduce(_COMBINE[placement.op], got)


def _in_order(blocks: Sequence[Any], dim: int, segments: Sequence[int]) -> Any:
    """Return the rows of all blocks, with the first segments of all blocks before the second ones."""
    ends = np.cumsum(segments)[:-1]
    parts = [np.split(block, ends * (block.shape[dim] // sum(segments)), dim) for block in blocks]
    return np.concatenate([part for segment in zip(*parts, strict=True) for part in segment], axis=dim)
