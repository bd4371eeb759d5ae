"""Compute a weight gradient once, of the global batch, where summing one large contribution per replica costs more.

    before   AddN(MatMul(x0^T, dy0), MatMul(x1^T, dy1))       writes three tensors as large as the weight
    after    MatMul(x^T, Concat(dy0, dy1))                    writes one, and copies a few rows

Where all replicas share one device they share its memory, too, and for large weights and few rows the additions cost
more than all the rest. Elsewhere replicas compute side by side, and contributions are what travels least.
"""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ops.facts.placement import PARTIAL, Fact
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.rules.base import WHOLE

LARGE = 256 * 1024
"""Bytes from which on a tensor leaves the caches."""
TYPICAL_BLOCK = 64
"""Stands in for the examples of a block where their number is not known."""


def compute_once(state: Propagation, replicas: int) -> int:
    """Mark the contractions that are cheaper once; return how many there are. The caller propagates again.

    Args:
        state: placements, with the values that are reduced.
        replicas: how many share one device.
    """
    if state.loops or state.cells:
        return 0
    chosen = [node for node in state.order if node.op == "MatMul" and _is_cheaper_once(state, node, replicas)]
    for node in chosen:
        node.set_raw_attr(WHOLE, encode("bool", True))
    return len(chosen)


def _is_cheaper_once(state: Propagation, node: Node, replicas: int) -> bool:
    value = node.output()
    if state.source(value).placement != PARTIAL or not _is_reduced(state, value):
        return False
    made = _bytes(state.source(value), None)
    if made is None or made < LARGE:
        return False
    joined = 0
    for operand in node.inputs:
        if operand not in state.whole_inputs:
            size = _bytes(state.facts[operand], TYPICAL_BLOCK)
            if size is None:
                return False
            joined += size * replicas
    return 2 * joined < replicas * made  # what is joined is read and written, a contribution is written and read


def _is_reduced(state: Propagation, value: Value) -> bool:
    """Return whether all uses of a value are sums over the replicas, directly or through identities."""
    if value in state.reduced:
        return True
    if not value._uses or any(node.op not in ("Identity", "IdentityN") for node, _ in value._uses):
        return False
    copies = [node.output(index) for node, index in value._uses]
    used = [copy for copy in copies if copy._uses]
    return bool(used) and all(_is_reduced(state, copy) for copy in used)


def _bytes(fact: Fact, block: int | None) -> int | None:
    return dtypes.nbytes(fact.dtype, [_size(dim, block) for dim in fact.shape or (None,)])


def _size(dim: Dim, block: int | None) -> int | None:
    if isinstance(dim, int) or dim is None:
        return dim
    return None if block is None else dim.coef * block ** len(dim.factors)
