"""How often nodes run: side effects as often as in the original, and per replica whatever differs between replicas."""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.certify.baseline import Baseline
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.graph import Node, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import get_op

OF_REPLICA = ("TensorArray", "Stack", "CheckNumerics", "Assert")
"""What each replica has of its own, and no other sees; and what only looks at its values."""
OFTEN = {Span.ONCE: "once", Span.REPLICA: "once on each replica", Span.EACH: "on each replica"}


def spans(baseline: Baseline, nodes: Iterable[Node]) -> None:
    """Check that what has an effect runs as often as the original's, and what differs runs on each replica.

    Raises:
        VerifyError: one does not.
    """
    for node in nodes:
        found = baseline.match(node)
        if found is None:
            continue
        claims = [baseline.claims.values.get(found.output(i).name) for i in range(len(found.output_dtypes))]
        differs = (
            any(claim is not None and claim.differs for claim in claims) and found.name not in baseline.claims.folded
        )
        if differs and node.span is Span.ONCE:
            raise VerifyError(f"'{node.name}' runs once, but each replica holds a value of its own", node=node)
        if differs and node.span is Span.REPLICA:
            raise VerifyError(f"'{node.name}' runs once for all micro-batches, which differ", node=node)
        _check_writes(node)
        op = get_op(node.op)
        if differs or node.span is Span.ONCE or not op.is_stateful:
            continue
        handles = [kind for kind in node.input_dtypes if kind == dtypes.RESOURCE]
        if not handles and node.op not in ("VarHandleOp", "NoOp") and not node.op.startswith(OF_REPLICA):
            raise VerifyError(f"'{node.name}' ({node.op}) has an effect, and runs on each replica", node=node)


def _check_writes(node: Node) -> None:
    """Check that a write runs as often as there are copies of what it writes.

    Raises:
        VerifyError: it does not.
    """
    for handle in variable_ops.written(node):
        if handle.span is not node.span:
            copies = "one copy" if handle.span is Span.ONCE else "a copy on each"
            raise VerifyError(
                f"'{node.name}' runs {OFTEN[node.span]}, and there is {copies} of '{handle.name}'", node=node
            )
