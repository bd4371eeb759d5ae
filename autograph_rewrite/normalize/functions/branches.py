"""`If` and `Case` become Switch and Merge.

    pred ──► Switch ──true──► then body ──► Merge ──► results
                └──false──► else body ──┘

Only one side of a Switch is alive, and everything that depends on the other side is skipped. A node without inputs
would always run, so it waits for its branch's pivot, an Identity of the predicate that is alive only with the branch.
A Case is a chain of such decisions, the last branch standing for every other index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.shapes.recorded import record_shapes
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import FunctionName
from autograph_rewrite.normalize.functions.bodies import Body, Entry, is_invariant
from autograph_rewrite.normalize.functions.lowering import Lowering
from autograph_rewrite.ops.traits import has


def lower_branches(state: Lowering, node: Node, pivot: Node | None) -> None:
    """Replace an If or Case by its branches, in place.

    Args:
        state: the lowering under way.
        pivot: node that is alive in each iteration of the loop around; None: there is none.
    """
    selector, *arguments = node.inputs
    # Everything in a branch depends on the selector. A loop constant is alive in the iteration that is not
    # taken, so it is tied to the iteration first.
    tie = [pivot] if pivot is not None and is_invariant(selector) else []
    selector = ordered(node, selector, (*node.controls, *tie))
    if has(node.op, "conditionals"):
        predicates = [boolean(node, selector)]
        functions = [node.attr("then_branch"), node.attr("else_branch")]
        parts = ["then", "else"]
    else:
        functions = list(node.attr("branches"))
        predicates = [_equals(node, selector, i) for i in range(len(functions) - 1)]
        parts = [f"branch_{i}" for i in range(len(functions))]
    bodies, pivots = _branches(state, node, predicates, functions, parts, arguments)
    _merge(state, node, bodies, pivots, predicates)


def ordered(node: Node, value: Value, controls: Sequence[Node]) -> Value:
    """Return `value`, but only after `controls`.

    Args:
        node: which is lowered; it names the new one.
        value: passed on.
        controls: what to wait for.
    """
    if not controls:
        return value
    return Builder.at(node).op("Identity", value, what="start", controls=controls)


def boolean(node: Node, value: Value) -> Value:
    """Return the truth of a value, as If and While define it for other types than bool.

    Args:
        node: which is lowered; it names the new one.
        value: a condition of any type.
    """
    if dtypes.base(value.dtype) == dtypes.BOOL:
        return value
    return Builder.at(node).op("ToBool", value, what="to_bool")


def _equals(node: Node, selector: Value, index: int) -> Value:
    # Made from the selector itself, the constant is alive where the Case is: no pivot is needed.
    build = Builder.at(node)
    zero = build.node("ZerosLike", selector, what=f"zero_{index}")
    number = build.node("Const", what=f"index_{index}", controls=[zero], dtype=dtypes.INT32, value=np.int32(index))
    return build.op("Equal", selector, number.output(), what=f"is_{index}")


def _branches(
    state: Lowering,
    node: Node,
    predicates: Sequence[Value],
    functions: Sequence[FunctionName],
    parts: Sequence[str],
    arguments: Sequence[Value],
) -> tuple[list[Body], list[Node]]:
    """Copy every branch behind its Switches; predicate i decides between branch i and the later ones."""
    build = Builder.at(node)
    bodies: list[Body] = []
    pivots: list[Node] = []
    remaining = list(arguments)
    gate: Value | None = None  # alive when no earlier branch was taken
    for i, predicate in enumerate(predicates):
        decision = _switch(node, f"switch_{i}", gate if gate is not None else predicate, predicate)
        pivot = build.node("Identity", decision.output(1), what=f"{parts[i]}_pivot")
        switches = [_switch(node, f"switch_{i}_{k}", value, predicate) for k, value in enumerate(remaining)]
        taken = [switch.output(1) for switch in switches]
        bodies.append(state.body(node, functions[i], parts[i], taken, Entry(pivot=pivot)))
        pivots.append(pivot)
        remaining = [switch.output(0) for switch in switches]
        gate = decision.output(0)
    assert gate is not None
    pivot = build.node("Identity", gate, what=f"{parts[-1]}_pivot")
    bodies.append(state.body(node, functions[-1], parts[-1], remaining, Entry(pivot=pivot)))
    return bodies, [*pivots, pivot]


def _switch(node: Node, name: str, value: Value, predicate: Value) -> Node:
    return Builder.at(node).node("Switch", value, predicate, what=name, T=dtypes.base(value.dtype))


def _merge(
    state: Lowering, node: Node, bodies: Sequence[Body], pivots: Sequence[Node], predicates: Sequence[Value]
) -> None:
    """Join the branches: the results, and one node that says that the branch taken has run its effects."""
    build = Builder.at(node)
    shapes = node.attr("_output_shapes") or node.attr("output_shapes") or ()
    results: list[Value] = []
    for i, dtype in enumerate(node.output_dtypes):
        values = [body.returns[i] for body in reversed(bodies)]  # else, then: value_index is the predicate
        merge = build.node("Merge", *values, what=f"merge_{i}", T=dtype, N=len(values))
        if i < len(shapes):  # the gradient adds outputs later, without always saying their shapes
            record_shapes(merge, [shapes[i], ()])
        if len(predicates) == 1:
            state.predicates[merge] = predicates[0]
        results.append(merge.output())
    effects = [effect for body in bodies for effect in body.effects]
    executed: list[Node] = []
    if effects or not results:
        alive = [pivot.output() for pivot in reversed(pivots)]
        executed = [build.node("Merge", *alive, what="executed", controls=effects)]
    results = [state.gated(node, i, value, executed if effects else []) for i, value in enumerate(results)]
    state.finish(node, results, executed if effects else [], executed or [value.node for value in results])
