"""The arguments of several steps in one call (`steps_per_run`): each step takes a row of those that are stacked.

step(x [3, 8, 4], y [3, 8], rate [])      three steps on batches of 8, with one rate
step(iterator)                            as many steps as steps_per_run says, each on the next element
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.errors import GraphError
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.function.arguments import COMPOSITES, Arguments, Flat, Leaf


def one_of_several(
    flat: Flat, paths: Sequence[str], arguments: Arguments, made_for: Sequence[Leaf] | None, most: int
) -> tuple[Flat, list[bool]]:
    """Return the arguments with the leaves that one step has, and for each tensor whether its rows are the steps'.

    Args:
        flat: what the call was given.
        paths: of its leaves.
        arguments: says which of them hold examples.
        made_for: the leaves of one step where specs were given; None: whatever holds examples has rows.
        most: how many steps one call does.

    Raises:
        GraphError: the arguments do not have equally many rows, too many or none, or cannot be cut into rows.
    """
    has = [
        _has_rows(leaf, arguments.axis(path, leaf) is not None, made_for[i] if made_for is not None else None)
        for i, (leaf, path) in enumerate(zip(flat.leaves, paths, strict=True))
    ]
    stacked = [(path, leaf.shape) for leaf, path, rows in zip(flat.leaves, paths, has, strict=True) if rows]
    counts = {path: shape[0] for path, shape in stacked if shape and shape[0] is not None}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"'{path}' {size}" for path, size in counts.items())
        raise GraphError(
            f"the steps of a call are the rows of its arguments, and these have different numbers: {listed}",
            hint="stack the batches of up to steps_per_run steps: [steps, batch, ...]; batch_inputs={name: None} says "
            "that an argument is the same in every step",
        )
    for path, size in counts.items():
        if not 1 <= size <= most:
            raise GraphError(f"'{path}' has rows for {size} steps, and steps_per_run is {most}")
    leaves = [_row(leaf) if rows else leaf for leaf, rows in zip(flat.leaves, has, strict=True)]
    return flat._replace(leaves=leaves), _of_tensors(flat, paths, has)


def _row(leaf: Leaf) -> Leaf:
    return leaf._replace(shape=leaf.shape[1:] if leaf.shape else leaf.shape)


def _has_rows(leaf: Leaf, holds_examples: bool, made_for: Leaf | None) -> bool:
    if leaf.dtype is None or not leaf.shape:
        return False
    if made_for is not None:
        return made_for.shape is not None and len(leaf.shape) == len(made_for.shape) + 1
    return holds_examples


def _of_tensors(flat: Flat, paths: Sequence[str], has: Sequence[bool]) -> list[bool]:
    """Return for each tensor, parts of composite arguments among them, whether it has rows.

    Raises:
        GraphError: an argument is sparse or ragged.
    """
    found: list[bool] = []
    values = iter(flat.values)
    for leaf, path, rows in zip(flat.leaves, paths, has, strict=True):
        if leaf.dtype is not None:
            next(values)
            found.append(rows)
            continue
        kind = type(leaf.static).__name__
        if kind in COMPOSITES:
            hint = "give an iterator over a dataset, or set steps_per_run to 1"
            raise GraphError(f"'{path}' is given as {kind}, of which several cannot be stacked", hint=hint)
        if hasattr(leaf.static, "_to_components"):
            found += [False] * len(tensorflow().nest.flatten(next(values), expand_composites=True))
    return found
