"""Take sizes of activations from inputs, where micro-batches wait for a value that depends on these sizes only.

    before   mask ──► Reshape(mask, Shape(logits)) ──► sum of all ──► each        it waits for the logits
    after    mask ──► Reshape(mask, [rows of x, 5]) ──► sum of all ──► each       it needs no variable, and comes first

Stages and loops of micro-batches cannot have a barrier. Losses that leave classes out, layers that compute masks of
their inputs, and gradients, which begin with ones, only need the size of an activation.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.analysis.barriers import late_nodes
from autograph_rewrite.analysis.batch_groups import BatchGroups, batch_groups
from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import replace_outputs
from autograph_rewrite.ir.traversal import ancestors, reachable, users
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import touching_nodes
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym
from autograph_rewrite.ops.rules.base import Slice
from autograph_rewrite.ops.rules.elementwise import shape_broadcast, shape_same
from autograph_rewrite.ops.rules.marked import make_whole
from autograph_rewrite.ops.rules.table import rule_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite


def cannot_wait(rewrite: Rewrite) -> bool:
    """Return whether micro-batches cannot wait for each other in the middle of a step."""
    return rewrite.plan.pipeline is not None or rewrite.plan.looped


def take_sizes_from_inputs(state: Propagation) -> bool:
    """Rewrite the nodes that read sizes of activations before a barrier; return whether there are any."""
    late, computed = late_nodes(state.order), _computed_of_variables(state)
    meetings = [node for node in state.order if node in late and node not in computed and _meets(state, node)]
    needed = ancestors(meetings) if meetings else set()
    readers = [
        node
        for node in state.order
        if node in needed
        and node not in state.looped
        and node.op in ("Shape", "OnesLike", "ZerosLike")
        and node.inputs[0].node in computed
    ]
    if not readers:
        return False
    sizes = _InputSizes(state, computed, batch_groups(state))
    return any([sizes.give(node) for node in readers])


def _computed_of_variables(state: Propagation) -> set[Node]:
    """Return the nodes that are computed from variables or wait for them, other than through sizes."""

    def computed(node: Node) -> list[Node]:
        waiting = node._control_users
        return [user for user in users(node) if user in waiting or not has(user.op, "reads_size")]

    return set(reachable(touching_nodes(state.order), computed))


def _meets(state: Propagation, node: Node) -> bool:
    """Return whether a node contributes to a sum over all examples, or reads or computes a value of all examples."""
    made = state.transfers[node]
    if made.decompose or any(fact.placement.is_partial for fact in made.outputs):
        return True
    uses = (use for value in node.read_outputs for use in value.uses if use.node in state.transfers)
    if any(isinstance(state.transfers[use.node].operand_reshards.get(use.index), Slice) for use in uses):
        return True
    wanted = (node.inputs[index] for index, want in made.operand_reshards.items() if want == REPLICATED)
    return any(state.facts[value].placement.differs and not state.facts[value].is_local for value in wanted)


@dataclass
class _InputSizes:
    """Takes sizes from values that need no variable.

    Attributes:
        state: placements, with the graph that is edited.
        computed: nodes that are computed from variables.
        groups: inputs with the same number of examples; None: all inputs have the same.
    """

    state: Propagation
    computed: Collection[Node]
    groups: BatchGroups | None

    def give(self, node: Node) -> bool:
        """Let a node take the size of its operand from inputs; return whether that is possible."""
        build, kind = Builder.at(node), node.output_dtypes[0]
        made = self._shape(build, node.inputs[0], kind if node.op == "Shape" else dtypes.INT32, "size")
        if made is None:
            return False
        if node.op != "Shape":
            made = build.op("Fill", made, build.const(int(node.op == "OnesLike"), kind, "filling"), what="filled")
        replace_outputs(self.state.graph, node, {0: made})
        return True

    def _shape(self, build: Builder, value: Value, dtype: int, what: str) -> Value | None:
        """Return the shape of a value, computed from inputs, or from operands that broadcast; None if unknown."""
        if value.node not in self.computed:
            return build.op("Shape", value, what=f"{what}/shape", out_type=dtype)
        dims, inputs = self.state.facts[value].shape, self._inputs(value)
        known = [_source(self.state, inputs, dim) for dim in dims or ()]
        if dims is not None and None not in known:
            entries = [_entry(build, one, dtype, f"{what}_{i}") for i, one in enumerate(known) if one is not None]
            if not entries:
                return build.const(np.zeros(0), dtype, f"{what}s")
            return build.op("Pack", *entries, what=f"{what}s", N=len(entries), axis=0)
        rule = rule_of(value.node.op)
        if rule is None or rule.shape not in (shape_same, shape_broadcast):
            return None
        operands = value.node.inputs if rule.shape is shape_broadcast else value.node.inputs[value.index :][:1]
        made: Value | None = None
        for i, operand in enumerate(operands):
            one = self._shape(build, operand, dtype, f"{what}_of_{i}")
            if one is None:
                return None
            made = one if made is None else build.op("BroadcastArgs", made, one, what=f"{what}/broadcast")
        return made

    def _inputs(self, value: Value) -> list[Value]:
        """Return the inputs with as many examples as a value, the one with the fewest bytes first: it may be sent."""
        state, groups = self.state, self.groups
        known = tuple(state.whole_inputs)
        if groups is not None:
            known = groups.within(groups.joined(groups.masks.get(value, 0)))

        def nbytes(value: Value) -> int:
            fact = state.facts[value]
            return dtypes.width(fact.dtype) * math.prod(size for size in fact.shape or () if isinstance(size, int))

        return sorted(known, key=nbytes)


def _source(state: Propagation, inputs: list[Value], dim: Dim) -> tuple[Value | None, int, int] | None:
    """Return an input, its dimension, and the factor from that to a size; a static size has no input."""
    if isinstance(dim, int):
        return None, 0, dim
    if not isinstance(dim, Sym):
        return None
    for value in inputs:
        for axis, size in enumerate(state.facts[value].shape or ()):
            if isinstance(size, Sym) and size.factors == dim.factors and dim.coef % size.coef == 0:
                return value, axis, dim.coef // size.coef
    return None


def _entry(build: Builder, source: tuple[Value | None, int, int], dtype: int, what: str) -> Value:
    value, axis, times = source
    if value is None:
        return build.const(times, dtype, what)
    shape = build.op("Shape", value, what=f"{what}/shape", out_type=dtype)
    bounds = [build.const([at], dtypes.INT32, f"{what}/{name}") for at, name in ((axis, "from"), (axis + 1, "to"))]
    by = build.const([1], dtypes.INT32, f"{what}/by")
    size = build.op("StridedSlice", shape, *bounds, by, what=what, shrink_axis_mask=1)
    return size if times == 1 else build.op("Mul", size, build.const(times, dtype, f"{what}/times"), what=f"{what}/all")


def _run(rewrite: Rewrite) -> None:
    """Take sizes of activations from inputs, where micro-batches wait for a value that depends on these sizes only."""
    if take_sizes_from_inputs(rewrite.state):
        rewrite.put(revise(rewrite.state))


SIZES_OF_INPUTS = Pass("sizes-of-inputs", _run, cannot_wait, (Propagation,), (Propagation,))


# Compute values that only outputs need on the gathered batch, instead of at a barrier between micro-batches.
#
#     before   h each ──► mean of all ──► h - mean each ──► sum of all ──► output        nothing may wait in the middle
#     after    h each ──► all of h ──► mean, h - mean, sum ──► output                    once, behind all micro-batches
#
# Stages and loops of micro-batches cannot have a barrier. A value that is only an output, such as a standard deviation,
# needs none, as no update waits for it. The cost is to keep `h` of all micro-batches.


def _gather_for_outputs(rewrite: Rewrite) -> None:
    """Compute values that only outputs need on the gathered batch, instead of at a barrier between micro-batches."""
    state = rewrite.state
    needed, late = ancestors(rewrite.targets), late_nodes(state.order)
    behind: set[Node] = set()
    marked = 0
    for node in state.order:
        if node not in late or node in needed or node in state.looped:
            continue
        if not any(value.node in behind for value in node.inputs):
            if any(_reads_all(state, node, index) for index in range(len(node.inputs))):
                behind.add(node)
            continue
        behind.add(node)
        if any(fact.placement.differs for fact in state.transfers[node].outputs):
            marked += make_whole(node)
    if marked:
        rewrite.put(revise(state))


def _reads_all(state: Propagation, node: Node, index: int) -> bool:
    """Return whether a node reads the whole of a value that is spread over micro-batches."""
    value = node.inputs[index]
    if state.transfers[node].operand_reshards.get(index) == REPLICATED and state.facts[value].placement.differs:
        return True
    return value in state.reduced


GATHER_FOR_OUTPUTS = Pass("gather-for-outputs", _gather_for_outputs, cannot_wait, (Propagation,), (Propagation,))
