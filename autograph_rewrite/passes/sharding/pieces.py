"""Find the pieces of variables that were cut, once or axis by axis.

    w [4, 6]    axis 0: rows 2 2       w/part_0, w/part_1
                axis 1: columns 3 3    w/part_0/part_0, w/part_0/part_1, w/part_1/part_0, w/part_1/part_1

Each axis of a mesh cuts the pieces of the axis before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autograph_rewrite.plan.parts.residence import Sharded, shard_name
from autograph_rewrite.training_graph import Shards, Variable


def pieces_of(variable: Variable) -> Iterator[Variable]:
    """Yield the variables that a graph has for one that may be cut: the smallest pieces, or itself."""
    if variable.shards is None:
        yield variable
        return
    for piece in _cut_once(variable, variable.shards):
        yield from pieces_of(piece)


def _cut_once(variable: Variable, shards: Shards) -> Iterator[Variable]:
    cut, first = Sharded(shards.axis, shards.sizes), 0
    for k, within in enumerate(shards.within or (None,) * len(shards.sizes)):
        handles = shards.handles[first : first + (1 if within is None else within.count)]
        first += len(handles)
        again = None if within is None else replace(within, handles=handles)
        shape = cut.shape(variable.shape or (), k)
        yield replace(variable, name=shard_name(variable.name, k), handle=handles[0], shape=shape, shards=again)


def shard_variables(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the variables of the graph itself: the pieces of those that were cut, and the others."""
    return {piece.name: piece for variable in variables.values() for piece in pieces_of(variable)}


def in_pieces(variables: Mapping[str, Variable], pieces: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return variables whose pieces may have been cut again.

    Args:
        variables: before that.
        pieces: the result of `shard_variables`, in which some are cut since.
    """
    return {name: _joined(one, pieces) for name, one in variables.items()}


def _joined(variable: Variable, pieces: Mapping[str, Variable]) -> Variable:
    if variable.shards is None:
        return pieces[variable.name]
    parts = [_joined(piece, pieces) for piece in _cut_once(variable, variable.shards)]
    handles = tuple(handle for part in parts for handle in (part.shards.handles if part.shards else (part.handle,)))
    within = tuple(part.shards and replace(part.shards, handles=(), devices=()) for part in parts)
    shards = replace(variable.shards, handles=handles, within=within if any(within) else ())
    return replace(variable, handle=handles[0], shards=shards)


@dataclass(frozen=True)
class WholeVariables:
    """The item's variables as callers know them: a variable in shards is one of them."""

    variables: Mapping[str, Variable]
