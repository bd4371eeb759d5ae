"""Add variables: one per member of an exchange, zero at the start, written by the step that reads them.

    residual = VarHandleOp (a placeholder in a function)  each      initial: residual := 0      in the init op
    before = ReadVariableOp(residual)                     each
    update: residual := after                             each      runs with the targets that use the compressed value

They are not in the original, so a rewritten item lists them apart from its variables, in `state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.traversal import marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site
from autograph_rewrite.passes.canonicalize.variable_policies import ComponentOf, Components
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import shape_of, static_shape
from autograph_rewrite.training_graph import Variable

SCOPE = "autograph_state"


def auxiliary_name(owner: str, what: str) -> str:
    """Return the name of an added variable that is kept for another one."""
    return f"{owner}/autograph_{what}"


class AuxiliaryVariable:
    """One added variable.

    Args:
        name: its wanted name (`auxiliary_name`).
        shape: of one member's value as it is kept.
        used: its shape in the step; None: the same.
        near: the value that it is for; gives its span and its loop.
    """

    def __init__(
        self,
        rewrite: Rewrite,
        name: str,
        shape: Sequence[int],
        dtype: int,
        *,
        near: Value,
        used: Sequence[int] | None = None,
    ) -> None:
        self._rewrite, self._near, self._dtype = rewrite, near, dtype
        self.shape = tuple(shape)
        self.name = rewrite.graph.unique_name(name)
        if rewrite.captures:
            attrs: dict[str, object] = {"dtype": dtypes.RESOURCE, "shape": ()}
            self.handle = self._add("Placeholder", (), self.name, attrs)
        else:
            attrs = {"dtype": dtype, "shape": self.shape, "shared_name": self.name}
            self.handle = self._add("VarHandleOp", (), self.name, attrs)
        read = self._add("ReadVariableOp", (self.handle,), f"{self.name}/read", {"dtype": dtype})
        self._used = tuple(used if used is not None else shape)
        self.before = self._reshaped(read, self._used)
        self.update: Node | None = None
        self.result: Value | None = None
        rewrite.added.append(self)

    def _add(self, op: str, inputs: Sequence[Value], name: str, attrs: dict[str, object] | None = None) -> Value:
        near = self._near.node
        return self._rewrite.add(op, inputs, Site(name, near.span, near), attrs=attrs).output()

    def _reshaped(self, value: Value, shape: tuple[int, ...]) -> Value:
        if self._used == self.shape:
            return value
        dims = self._rewrite.const(shape, np.int32, name=f"{self.name}/shape", near=self._near)
        return self._add("Reshape", (value, dims), f"{self.name}/reshaped")

    def becomes(self, after: Value, result: Value) -> None:
        """Let the step that uses `result` write `after`."""
        self.update = self._assign(self._reshaped(after, self.shape), f"{self.name}/update")
        self.result = result

    def _assign(self, value: Value, name: str) -> Node:
        near, inputs = self._near.node, [self.handle, value]
        attrs = {"dtype": self._dtype}
        return self._rewrite.add("AssignVariableOp", inputs, Site(name, near.span, near), attrs=attrs)

    def initialiser(self) -> Node:
        """Return a node that sets it to zero on all replicas."""
        rewrite, name = self._rewrite, f"{self.name}/initial"
        dims = rewrite.const(self.shape, np.int32, name=f"{name}/shape", near=self._near)
        zero = rewrite.const(0, dtypes.numpy_dtype(self._dtype), name=f"{name}/zero", near=self._near)
        zeros = self._add("Fill", (dims, zero), f"{name}/zeros")
        write = self._assign(zeros, f"{name}/assign")
        return Builder(rewrite.graph, name, self._near.node, span=ONCE).node("NoOp", controls=[write])

    def described(self, initializer: str | None) -> Variable:
        """Return it as a variable of the item."""
        return Variable(
            self.name,
            self.handle.node.name,
            dtypes.dtype_name(self._dtype),
            self.shape,
            trainable=False,
            initializer=initializer,
            captured=self._rewrite.captures,
        )


def residual_of(rewrite: Rewrite, value: Value, fact: Fact, edge: EdgePlan) -> AuxiliaryVariable:
    """Add the residual of a gradient for error feedback, in the shape of the variable.

    Args:
        value: the gradient of each member.
        edge: its owner gives shape and name.
    """
    kept, used = shape_of(fact, rewrite.item.variables.get(edge.owner)), static_shape(fact)
    wide = wire_types.wire_type(fact.dtype, "sum")
    return AuxiliaryVariable(rewrite, auxiliary_name(edge.owner, "residual"), kept, wide, near=value, used=used)


def _declare(rewrite: Rewrite) -> None:
    """Declare the variables that passes have added, such as the residuals of compressors.

    The item's targets update them, and its init op resets them.
    """
    if not rewrite.added:
        return
    item = rewrite.item
    _update_with_targets(rewrite)
    state: dict[str, Variable] = {}
    keep = list(item.keep)
    for added in rewrite.added:
        initialiser = None if rewrite.captures else added.initialiser()
        if initialiser is not None:
            keep.append(initialiser.name)
            if item.init_op is not None:
                rewrite.graph.nodes[item.init_op].add_control(initialiser)
        state[added.name] = added.described(initialiser.name if initialiser is not None else None)
    rewrite.item = replace(item, state=state, keep=tuple(keep))


def _update_with_targets(rewrite: Rewrite) -> None:
    """Let each target wait for the updates of the added variables whose results it uses."""
    marks: dict[Node, int] = {}
    for i, added in enumerate(rewrite.added):
        if added.result is not None:
            marks[added.result.node] = marks.get(added.result.node, 0) | 1 << i
    before = marks_before(topological_order(rewrite.graph), marks)
    together: dict[int, Node] = {}
    for target in rewrite.targets:
        mask = before[target] | marks.get(target, 0)
        if mask and mask not in together:
            updates = [added.update for i, added in enumerate(rewrite.added) if mask >> i & 1 and added.update]
            build = Builder(rewrite.graph, f"{SCOPE}/update", span=updates[0].span)
            together[mask] = build.node("NoOp", controls=updates)
        if mask:
            target.add_control(together[mask])


DECLARE_STATE = Pass("declare-state", _declare, needs=(Homes,))


# Keep the component that each replica has of a variable from step to step.
#
#     before   component = Identity(ReadVariableOp(v))                                each: to be its own
#     after    component = v == what the last step wrote ? kept : share of v
#              step's end: kept := component behind all updates;  what the last step wrote := v
#
# So a value that is written from outside (an initial value, a checkpoint, Python) becomes the components of the next
# step: for a sum, total / n each (an integer loses the remainder); else the value itself. TensorFlow does the same when
# it assigns or restores an `ON_READ` variable.


def _keep_components(rewrite: Rewrite) -> None:
    """Keep each replica's component of a variable from step to step, unless the variable was written from outside."""
    for one in rewrite.get(Components).variables:
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
    """Return a replica's component of a value that was written from outside."""
    if one.policy.aggregation != "sum":
        return total
    count = rewrite.const(rewrite.plan.replicas, dtypes.numpy_dtype(total.dtype), name=f"{build.name}/n", near=total)
    op = "TruncateDiv" if total.dtype in dtypes.INTEGER else "RealDiv"
    return build.op(op, total, count, what="share")


def _has_components(rewrite: Rewrite) -> bool:
    return rewrite.has(Components) and bool(rewrite.get(Components).variables)


KEEP_COMPONENTS = Pass("keep-components", _keep_components, _has_components, (Homes,))
