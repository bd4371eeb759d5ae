"""The dimensions that a Keras model leaves open: workers with sequences of other lengths have to trace one step.

Input((None, 4))   batch float64[2, 3, 4]    traced for [None, 3, 4]       by this worker alone
[None, None, 4]    where others may have other lengths
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.function.arguments import Leaf, Opens, Shape


def declared_lengths(model: Any) -> Opens:
    """Return what opens, of the leaves of a batch, the dimensions that the model's inputs and outputs leave open.

    Args:
        model: a Keras model; of one whose inputs are not declared nothing is opened.
    """
    inputs, outputs = _shapes(model, "inputs"), _shapes(model, "outputs")

    def opened(leaves: Sequence[Leaf], paths: Sequence[str]) -> list[Leaf]:
        found = list(leaves)
        for part, shapes in (("x", inputs), ("y", outputs), ("sample_weight", outputs)):
            at = [i for i, path in enumerate(paths) if path.partition("/")[0] == part]
            if len(at) == len(shapes):
                for i, shape in zip(at, shapes, strict=True):
                    found[i] = _opened(leaves[i], shape)
        return found

    return opened


def _shapes(model: Any, which: str) -> list[Shape]:
    try:
        tensors = tensorflow().nest.flatten(getattr(model, which))
        return [tuple(tensor.shape) for tensor in tensors]
    except (AttributeError, ValueError, TypeError):  # a model of one's own, or one that was not built
        return []


def _opened(leaf: Leaf, declared: Shape) -> Leaf:
    """Return a leaf with the open dimensions of what is declared; labels may have fewer dimensions than outputs."""
    if leaf.shape is None or declared is None or len(leaf.shape) > len(declared):
        return leaf
    return leaf._replace(
        shape=tuple(None if told is None else size for size, told in zip(leaf.shape, declared, strict=False))
    )
