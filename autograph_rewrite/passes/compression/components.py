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
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.passes.canonicalize.variable_policies import ComponentOf, Components
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable, auxiliary_name


def keep_components(rewrite: Rewrite, components: Components) -> None:
    """Add what is kept of each variable with components.

    Args:
        components: of the variables.
    """
    for one in components.variables:
        if one.component in rewrite.state.transfers:
            _keep(rewrite, one)


def _keep(rewrite: Rewrite, one: ComponentOf) -> None:
    name, total, near = one.policy.variable, one.component.inputs[0], one.component.output()
    shape, dtype = tuple(size or 0 for size in rewrite.item.variables[name].shape or ()), total.dtype
    kept = AuxiliaryVariable(rewrite, auxiliary_name(name, "component"), shape, dtype, near=near)
    seen = AuxiliaryVariable(rewrite, auxiliary_name(name, "total"), shape, dtype, near=near)
    build = FoldedBuilder.of(rewrite, near)
    same = build.op("Equal", total, seen.before, what="unchanged")
    if shape:
        axes = rewrite.const(list(range(len(shape))), np.int32, name=f"{build.name}/axes", near=near)
        same = build.op("All", same, axes, what="all_unchanged")
    mine = build.op("SelectV2", same, kept.before, _share(rewrite, build, one, total), what="mine")
    one.component.set_input(0, mine)
    written = one.update.inputs[1]
    kept.becomes(one.kept, one.kept)
    seen.becomes(written, one.kept)


def _share(rewrite: Rewrite, build: FoldedBuilder, one: ComponentOf, total: Value) -> Value:
    """Return what a replica has of a value that was written from outside."""
    if one.policy.aggregation != "sum":
        return total
    count = rewrite.const(rewrite.plan.replicas, dtypes.numpy_dtype(total.dtype), name=f"{build.name}/n", near=total)
    op = "TruncateDiv" if total.dtype in dtypes.INTEGER else "RealDiv"
    return build.op(op, total, count, what="share")


def _run(rewrite: Rewrite) -> None:
    """Keep each replica's component of a variable from step to step, unless somebody has written the variable."""
    keep_components(rewrite, rewrite.get(Components))


def _has_components(rewrite: Rewrite) -> bool:
    return rewrite.has(Components) and bool(rewrite.get(Components).variables)


KEEP_COMPONENTS = Pass("keep-components", _run, _has_components, (Homes,))
