"""Share one predicate between all replicas: a rounding difference would send them down different branches.

    before   %p each ──► Switch each
    after    %p each ──► Identity (replica 0's) once ──► Identity each ──► Switch each

Whether a variable has a value is asked of each replica's own copy, so there all have to say yes: in the branch taken,
each replica reads its copy.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Span, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.base.context import Context, Site


def common_predicate(context: Context, value: Value) -> Value:
    """Return the predicate that every replica uses instead of its own.

    Each still waits for what its own waits for: the branches may write what is written before.
    """
    name = f"{value.node.name}/predicate"
    once = _of_all(context, value, name) if _asks_for_a_value(value) else _of_first(context, value, name)
    each = context.add("Identity", [once], Site(f"{name}/each", value.node.span, value.node))
    each.add_control(value.node)
    return each.output()


def _of_first(context: Context, value: Value, name: str) -> Value:
    return context.add("Identity", [value], Site(name, Span.ONCE, value.node)).output()


def _of_all(context: Context, value: Value, name: str) -> Value:
    flags = Builder.of(context, value, name).gather("Pack", value, what="all", axis=0)
    attrs = {"dtype": dtypes.INT32, "value": np.int32(0)}
    axis = context.add("Const", [], Site(f"{name}/axis", Span.ONCE, value.node), attrs=attrs)
    axis.add_control(flags.node)  # in the loop of the flags
    return context.add("All", [flags, axis.output()], Site(name, Span.ONCE, value.node)).output()


def _asks_for_a_value(value: Value) -> bool:
    """Return whether a condition says that a variable has a value."""
    while value.node.op == "Identity":
        value = value.node.inputs[0]
    return value.node.op == "VarIsInitializedOp"
