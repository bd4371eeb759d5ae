"""Components of variables: what each replica has of one, kept beside it from step to step.

    before   component = Identity(ReadVariableOp(v))                                each: to be its own
    after    component = v == what the last step wrote ? kept : share of v
             step's end: kept := component behind all updates;  what the last step wrote := v

So what anybody else writes (an initial value, a checkpoint, Python) becomes the components of the next step: of a sum,
total / n each (an integer loses what does not divide); of the others, the same value. TensorFlow does that when it
assigns or restores a variable `ON_READ`.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.base.context import Context
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize.variable_policies import ComponentOf, Components
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable, auxiliary_name


def keep_components(context: Context, components: Components) -> None:
    """Add what is kept of each variable with components.

    Args:
        context: the rewrite, which learns of it.
        components: of the variables.
    """
    for one in components.variables:
        if one.component in context.state.transfers:
            _keep(context, one)


def _keep(context: Context, one: ComponentOf) -> None:
    name, total, near = one.policy.variable, one.component.inputs[0], one.component.output()
    shape, dtype = tuple(size or 0 for size in context.owners[name].shape or ()), total.dtype
    kept = AuxiliaryVariable(context, auxiliary_name(name, "component"), shape, dtype, near=near)
    seen = AuxiliaryVariable(context, auxiliary_name(name, "total"), shape, dtype, near=near)
    build = Builder.of(context, near)
    same = build.op("Equal", total, seen.before, what="unchanged")
    if shape:
        axes = context.const(list(range(len(shape))), np.int32, name=f"{build.name}/axes", near=near)
        same = build.op("All", same, axes, what="all_unchanged")
    mine = build.op("SelectV2", same, kept.before, _share(context, build, one, total), what="mine")
    one.component.set_input(0, mine)
    written = one.update.inputs[1]
    kept.becomes(one.kept, one.kept)
    seen.becomes(written, one.kept)


def _share(context: Context, build: Builder, one: ComponentOf, total: Value) -> Value:
    """Return what a replica has of a value that was written from outside."""
    if one.policy.aggregation != "sum":
        return total
    count = context.const(context.plan.replicas, dtypes.numpy_dtype(total.dtype), name=f"{build.name}/n", near=total)
    op = "TruncateDiv" if total.dtype in dtypes.INTEGER else "RealDiv"
    return build.op(op, total, count, what="share")


def _run(rewrite: Rewrite) -> None:
    """Keep each replica's component of a variable from step to step, unless somebody has written the variable."""
    keep_components(rewrite.get(Context), rewrite.get(Components))


def _has_components(rewrite: Rewrite) -> bool:
    return rewrite.has(Components) and bool(rewrite.get(Components).variables)


KEEP_COMPONENTS = Pass("keep-components", _run, _has_components, (Context,))
