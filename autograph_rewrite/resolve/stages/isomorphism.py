"""Check that pipeline stages are isomorphic, each with variables of its own (required by the loop form).

    x ─► [ embed, layer_0 ] ─► [ layer_1 ] ─► [ layer_2, head ] ─► loss       layers: same ops, attributes, shapes

What stands before the common part of the first stage, and behind that of the last, belongs to nobody else and may be
anything. All others are compared with the second stage, from what they hand on back to what they are handed; constants
count as part of a layer, the seeds of random numbers do not. The first difference is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types.dtypes import dtype_name
from autograph_rewrite.ir.variable_ops import variable_dependent_nodes
from autograph_rewrite.ops.traits import has

HINT = "cut between layers that are alike"
SEEDS = frozenset(("seed", "seed2"))


class _Stage(NamedTuple):
    """One stage: its nodes, and the values that it sends to later ones, both in order."""

    number: int
    nodes: Sequence[Node]
    exits: Sequence[Value]
    inside: Collection[Node]


@dataclass
class _Matched:
    """What has been found to correspond, and the first difference."""

    pairs: dict[Value, Value] = field(default_factory=dict)
    difference: str = ""


def require_isomorphic_stages(state: Propagation, work: Sequence[Node], of: Mapping[Node, int], count: int) -> None:
    """Refuse stages that differ.

    Args:
        state: the placements of the original graph.
        work: its forward nodes, in order.
        of: their stages.
        count: how many stages there are.

    Raises:
        PlanError: two stages differ; the message says in what.
    """
    if count == 1:
        return
    learnt = variable_dependent_nodes(state.order)
    stages = [_stage(number, work, of, learnt) for number in range(count)]
    for stage in stages[:-1]:
        if not stage.exits:
            nothing = f"stage {stage.number} hands on nothing that a variable has gone into"
            _refuse(stage.number, stage.number + 1, nothing)
    if count == 2:
        first, last = stages
        _require_one(state, last, first, [(a, b) for b in first.exits for a in _made_by(last, b)], exact=False)
        return
    second = stages[1]
    for stage in stages[2:-1]:
        if len(stage.exits) != len(second.exits):
            handed = (", ".join(f"'{value.name}'" for value in one.exits) for one in (stage, second))
            _refuse(stage.number, 1, "the one hands on {}, the other {}".format(*handed))
        for mine, other in zip(second.exits, stage.exits, strict=True):
            _require_pair(state, second, stage, mine, other, exact=True)
    first, last = stages[0], stages[-1]
    _require_one(state, second, first, [(mine, other) for mine in second.exits for other in first.exits], exact=False)
    made = [(mine, _made_by(last, mine)) for mine in second.exits]
    _require_one(state, second, last, [(mine, other) for mine, found in made for other in found], exact=True)


def _stage(number: int, work: Sequence[Node], of: Mapping[Node, int], learnt: Collection[Node]) -> _Stage:
    nodes = [node for node in work if of[node] == number]
    exits = [
        value
        for node in nodes
        if node in learnt
        for value in node.read_outputs
        if any(of.get(use.node, number) > number for use in value.uses)
    ]
    return _Stage(number, nodes, exits, set(nodes))


def _made_by(stage: _Stage, like: Value) -> list[Value]:
    """Return what a stage makes by the same op, the last first."""
    return [node.output(like.index) for node in reversed(stage.nodes) if node.op == like.node.op]


def _require_one(
    state: Propagation, mine: _Stage, other: _Stage, pairs: Sequence[tuple[Value, Value]], *, exact: bool
) -> None:
    """Find a layer that both stages have: what one hands on besides, such as a loss of its own, may be missing."""
    matches = [_match(state, mine, other, a, b, exact=exact) for a, b in pairs]
    if not any(_is_complete(match, mine) for match in matches):
        _refuse_best(matches, mine, other)


def _require_pair(
    state: Propagation, mine: _Stage, other: _Stage, value: Value, candidate: Value, *, exact: bool
) -> None:
    difference = _match(state, mine, other, value, candidate, exact=exact).difference
    if difference:
        _refuse(other.number, mine.number, difference)


def _is_complete(match: _Matched, stage: _Stage) -> bool:
    """Return whether stages correspond, and not just in what they do to a value without any variable."""
    outside = (value for value in match.pairs if value.node not in stage.inside and not has(value.node.op, "constant"))
    return not match.difference and len(list(outside)) > 1


def _refuse_best(matches: Sequence[_Matched], *stages: _Stage) -> None:
    """Name the difference that is farthest away from where the comparison began."""
    early, late = sorted(stages, key=lambda stage: stage.number)
    if matches:
        best = max(matches, key=lambda match: len(match.pairs))
        _refuse(early.number, late.number, best.difference or "they have no layer with a variable in common")
    value = early.exits[0]
    what = f"there is no {value.node.op} in stage {late.number} like '{value.name}' of stage {early.number}"
    _refuse(early.number, late.number, what)


def _refuse(stage: int, other: int, difference: str) -> None:
    raise PlanError(
        f"stages {min(stage, other)} and {max(stage, other)} differ, and a loop takes stages that are alike: "
        f"{difference}",
        hint=HINT,
    )


def _match(state: Propagation, mine: _Stage, other: _Stage, first: Value, second: Value, *, exact: bool) -> _Matched:
    """Walk back from two values at once.

    Args:
        state: the placements.
        mine: the stage that is walked through completely.
        other: the one that is compared with it.
        first: of the former.
        second: of the latter.
        exact: what `mine` is handed, `other` must be handed too; else it may have made it.
    """
    found, pending = _Matched(), [(first, second, "")]
    while pending:
        a, b, reader = pending.pop()
        if a in found.pairs:
            if found.pairs[a] is not b:
                found.difference = (
                    f"'{a.name}' and '{found.pairs[a].name}' correspond, but not where '{b.name}' is read"
                )
                return found
            continue
        found.pairs[a] = b
        inner = a.node in mine.inside, b.node in other.inside
        found.difference = next(
            _differences(state, a, b, inner, exact=exact, seeded=reader.startswith("Stateless")), ""
        )
        if found.difference:
            return found
        if inner[0]:
            pending += zip(a.node.inputs, b.node.inputs, [a.node.op] * len(a.node.inputs), strict=True)
    return found


def _differences(
    state: Propagation, a: Value, b: Value, inner: tuple[bool, bool], *, exact: bool, seeded: bool
) -> Iterator[str]:
    """Yield in what two values differ, or the nodes that make them."""
    one, two = f"'{a.node.name}'", f"'{b.node.name}'"
    if inner[0] and not inner[1]:
        yield f"{one} is made by its stage, {two} in its place is handed to the other"
    if inner[1] and not inner[0] and exact:
        yield f"{one} is handed to its stage, {two} in its place is made by the other"
    if inner[0] and a.node.op != b.node.op:
        yield f"{one} is {a.node.op}, {two} in its place is {b.node.op}"
    if a.dtype != b.dtype:
        yield f"{one} is {dtype_name(a.dtype)}, {two} in its place is {dtype_name(b.dtype)}"
    shapes = [state.facts[value].shape if value in state.facts else None for value in (a, b)]
    if not _may_be_equal(*shapes):
        yield f"{one} has the shape {_written(shapes[0])}, {two} in its place {_written(shapes[1])}"
    if inner[0]:
        if len(a.node.inputs) != len(b.node.inputs) or a.index != b.index:
            yield f"{one} has {len(a.node.inputs)} inputs, {two} in its place {len(b.node.inputs)}"
        yield from _attributes(a.node, b.node)
    elif (
        has(a.node.op, "constant")
        and not seeded
        and (has(b.node.op, "constant") or exact)
        and not _equal_constants(a, b)
    ):
        yield f"the constants {one} and {two} in its place differ"


def _equal_constants(a: Value, b: Value) -> bool:
    return has(b.node.op, "constant") and np.array_equal(a.node.attr("value"), b.node.attr("value"))


def _may_be_equal(a: Sequence[object] | None, b: Sequence[object] | None) -> bool:
    """Return whether two shapes can be the same, as far as they are known."""
    if a is None or b is None:
        return True
    known = (pair for pair in zip(a, b, strict=False) if all(isinstance(size, int) for size in pair))
    return len(a) == len(b) and all(one == two for one, two in known)


def _written(shape: Sequence[object] | None) -> str:
    sizes = ("?" if shape is None else str(size) if isinstance(size, int) else "?" for size in shape or ())
    return f"[{', '.join(sizes)}]"


def _attributes(a: Node, b: Node) -> Iterator[str]:
    for key in sorted({*a.attrs, *b.attrs} - SEEDS):
        if key.startswith("_") or a.attrs.get(key) == b.attrs.get(key):
            continue
        one, two = a.attr(key), b.attr(key)
        if not (np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two):
            yield f"'{key}' of '{a.name}' is {_text(one)}, of '{b.name}' in its place {_text(two)}"


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
