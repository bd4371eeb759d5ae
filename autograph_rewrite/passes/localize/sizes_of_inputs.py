"""Take the sizes of activations from inputs, where all micro-batches need what is made of nothing but those sizes.

    before   mask ──► Reshape(mask, Shape(logits)) ──► sum of all ──► each        it waits for the logits
    after    mask ──► Reshape(mask, [rows of x, 5]) ──► sum of all ──► each       it needs no variable, and comes first

Stages and loops of micro-batches have no place at which all may wait for activations. Losses that leave classes out,
layers that make masks of what they are given, and gradients, which begin with ones, only ask how large one is.
"""

from __future__ import annotations

import math

import numpy as np

from autograph_rewrite.analysis.barriers import late_nodes
from autograph_rewrite.analysis.batch_groups import BatchGroups, batch_groups
from autograph_rewrite.analysis.networks import reachable
from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import replace_outputs
from autograph_rewrite.ir.traversal import ancestors, users
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import touching_nodes
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym
from autograph_rewrite.ops.rules.base import Slice
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.localize.gather_for_outputs import cannot_wait


def take_sizes_from_inputs(state: Propagation) -> bool:
    """Rewrite what reads the sizes of activations in front of a meeting; return whether anything does."""
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
    groups = batch_groups(state) if readers else None
    return any([_read_inputs(state, node, _inputs_of(state, groups, node.inputs[0])) for node in readers])


def _inputs_of(state: Propagation, groups: BatchGroups | None, value: Value) -> list[Value]:
    """Return the inputs that have as many examples as a value, the one with the fewest bytes first: it may travel."""
    known = tuple(state.whole_inputs) if groups is None else groups.within(groups.joined(groups.masks.get(value, 0)))

    def nbytes(value: Value) -> int:
        fact = state.facts[value]
        return dtypes.width(fact.dtype) * math.prod(size for size in fact.shape or () if isinstance(size, int))

    return sorted(known, key=nbytes)


def _computed_of_variables(state: Propagation) -> set[Node]:
    """Return what is computed from variables, or waits for what is, but for what asks for sizes alone."""

    def computed(node: Node) -> list[Node]:
        waiting = node._control_users
        return [user for user in users(node) if user in waiting or not has(user.op, "reads_size")]

    return set(reachable(touching_nodes(state.order), computed))


def _meets(state: Propagation, node: Node) -> bool:
    """Return whether a node makes contributions to a sum of all examples, or reads or makes what all have together."""
    made = state.transfers[node]
    if made.decompose or any(fact.placement.is_partial for fact in made.outputs):
        return True
    uses = (use for value in node.read_outputs for use in value.uses if use.node in state.transfers)
    if any(isinstance(state.transfers[use.node].operand_reshards.get(use.index), Slice) for use in uses):
        return True
    wanted = (node.inputs[index] for index, want in made.operand_reshards.items() if want == REPLICATED)
    return any(state.facts[value].placement.differs and not state.facts[value].is_local for value in wanted)


def _read_inputs(state: Propagation, node: Node, inputs: list[Value]) -> bool:
    """Let a node take sizes from inputs; return whether they have them."""
    dims = state.facts[node.inputs[0]].shape
    build, kind = Builder.at(node), node.output_dtypes[0]
    sizes = kind if node.op == "Shape" else dtypes.INT32
    if dims is None:
        return False
    known = [source for dim in dims if (source := _source(state, inputs, dim)) is not None]
    if len(known) < len(dims):
        return False
    entries = [_entry(build, source, sizes, f"size_{i}") for i, source in enumerate(known)]
    made = build.op("Pack", *entries, what="sizes", N=len(entries), axis=0) if entries else None
    if node.op == "Shape":
        made = made or build.const(np.zeros(0), kind, "sizes")
    else:
        filling = build.const(int(node.op == "OnesLike"), kind, "filling")
        made = filling if made is None else build.op("Fill", made, filling, what="filled")
    replace_outputs(state.graph, node, {0: made})
    return True


def _source(state: Propagation, inputs: list[Value], dim: Dim) -> tuple[Value | None, int, int] | None:
    """Return an input, its dimension, and how often that makes a size; a number of its own has no input."""
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
    """Take sizes of activations from inputs, where all micro-batches need what is made of them alone."""
    if take_sizes_from_inputs(rewrite.state):
        rewrite.put(revise(rewrite.state))


SIZES_OF_INPUTS = Pass("sizes-of-inputs", _run, cannot_wait, (Propagation,), (Propagation,))
