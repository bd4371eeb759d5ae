"""Describe sent values: their element type and bytes, and whether their shape can change between steps.

All verbs count the bytes for one number of examples, which plans state:

    sizes_of: 64 examples, 2 replicas     dw: partial(sum)[8, 1] float   32 B
                                          rows: split(0)[3 b] int32      3 * 32 * 4 B
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES, Sizes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.plan.plan import Plan

NARROW = frozenset((dtypes.HALF, dtypes.BFLOAT16))
COLLECTIVE_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF, dtypes.INT32, dtypes.INT64, dtypes.BFLOAT16))
GATHER_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF, dtypes.INT32, dtypes.INT64))
REAL_PARTS = {dtypes.COMPLEX64: dtypes.FLOAT, dtypes.COMPLEX128: dtypes.DOUBLE}
WIDER = {
    **dict.fromkeys((dtypes.BOOL, dtypes.INT8, dtypes.UINT8, dtypes.INT16, dtypes.UINT16), dtypes.INT32),
    **dict.fromkeys((dtypes.UINT32, dtypes.UINT64), dtypes.INT64),
}
"""A type that collectives know, and that holds each number of the type; 64 bits wrap around alike."""


def wire_type(dtype: int, op: str) -> int:
    """Return the type in which a value is combined."""
    if op in ("all", "any"):
        return dtypes.INT32
    return dtypes.FLOAT if dtype in NARROW else dtype


def can_be_sent(dtype: int, op: str) -> bool:
    """Return whether collectives can carry a type as it is, or converted.

    Args:
        dtype: number of TensorFlow's type.
        op: how its values will be combined, or "gather".
    """
    return dtype in COLLECTIVE_TYPES or dtype in WIDER or (dtype in REAL_PARTS and op in ("sum", "gather"))


def may_change_inside(fact: Fact) -> bool:
    """Return whether a dimension other than the split one may differ between steps."""
    dims = fact.shape or (None,)
    return not all(isinstance(dim, int) for i, dim in enumerate(dims) if i != fact.placement.dim)


def may_change(fact: Fact) -> bool:
    """Return whether the shape of one instance may differ between steps."""
    return fact.shape is None or not all(isinstance(dim, int) for dim in fact.shape)


def are_in_order(devices: Sequence[str]) -> bool:
    """Return whether devices are in the order in which TensorFlow puts the members of a collective."""
    parsed = [parse(device) for device in devices]
    ordered = [(d.job or "", d.task, d.kind, d.index) for d in parsed]
    return ordered == sorted(ordered)


def can_gather_collectively(fact: Fact, per_example: int | None, devices: Sequence[str]) -> bool:
    """Return whether CollectiveGatherV2 can carry the value; it puts its members in the order of the devices.

    Args:
        per_example: rows for each example, where that is known.
        devices: of the members, in the order of replicas.
    """
    if not are_in_order(devices):
        return False
    return fact.dtype in GATHER_TYPES and fact.placement.dim == 0 and per_example is not None and fact.rank is not None


def sizes_of(plan: Plan, state: Propagation, batch: int | None = None) -> Sizes:
    """Return the sizes of the batch: from the graph, the caller, the plan, or an assumption, in this order.

    Args:
        plan: of the whole job, with its replicas and micro-batches.
        batch: examples of all replicas together, where the graph leaves that open.
    """
    examples = state.semantics.extent.units or batch or plan.batch or EXAMPLES * plan.replicas
    return Sizes(examples, plan.replicas, plan.microbatches)


def as_sent(fact: Fact) -> Fact:
    """Return the fact with the type in which the value is sent."""
    placement = fact.placement
    return fact._replace(dtype=wire_type(fact.dtype, placement.op)) if placement.is_partial else fact


def sent_bytes(state: Propagation, value: Value, sizes: Sizes) -> int:
    """Return the bytes of a value that one replica sends in a step: blocks of all micro-batches, or their sum.

    Args:
        sizes: numbers for the symbols of its shape.
    """
    fact = state.facts[value] if value in state.whole_inputs else state.source(value)
    return sizes.nbytes(as_sent(fact)) * (sizes.micro if fact.placement.is_split else 1)
