"""Contracts of tensor arrays and stacks: one per replica, and a read gives what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autograph_rewrite.certify.seen import Seen, is_own, said
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.claims import Claim, Dim
from autograph_rewrite.ir.graph import Node, Value

MAKERS = frozenset(("TensorArrayV3", "TensorArrayGradV3", "TensorArrayGradWithShape", "StackV2"))
WRITES: Mapping[str, int] = {
    "TensorArrayWriteV3": 2, "TensorArrayScatterV3": 2, "TensorArraySplitV3": 1, "StackPushV2": 1,
}  # fmt: skip
"""The operand that is put in."""
READS = frozenset(("TensorArrayReadV3", "TensorArrayGatherV3", "TensorArrayConcatV3", "StackPopV2"))
OTHERS = frozenset(("TensorArraySizeV3", "TensorArrayCloseV3", "StackCloseV2"))
OPS = MAKERS | set(WRITES) | READS | OTHERS

Key = tuple[str, ...]


class Element(NamedTuple):
    """What a container holds: the placement of its elements, whether all are zero, and how many rows a block has."""

    placement: Claim
    zero: bool
    rows: Dim = None


def judge_containers(nodes: Sequence[Seen]) -> tuple[Seen, str] | None:
    """Return the first node that reads or writes something else than its container holds, and what is wrong."""
    held: dict[Key, Element] = {}
    for seen in nodes:
        if seen.node.op not in WRITES:
            continue
        index = WRITES[seen.node.op]
        element = _put(seen, seen.operands[index])
        if isinstance(element, str):
            return seen, f"input {index} {element}"
        key = key_of(seen.node.inputs[0])
        before = held.get(key)
        joined = element if before is None else _joined(before, element)
        if joined is None:
            return seen, f"it puts in what is {said(element.placement)}, where others put in what is " + said(
                before.placement if before else element.placement
            )
        held[key] = joined
    for seen in nodes:
        problem = _judge(seen, held.get(key_of(seen.node.inputs[0])) if seen.node.inputs else None)
        if problem:
            return seen, problem
    return None


def key_of(handle: Value) -> Key:
    """Return which container a handle means; all gradients of one array for one source share one."""
    made = variable_ops.handle_node(handle)
    if made.op.startswith("TensorArrayGrad"):
        return (str(made.attr("source")), *key_of(made.inputs[0]))
    return (made.name,)


def _put(seen: Seen, claim: Claim) -> Element | str:
    """Return an element of what is put in; or what is wrong."""
    dim = claim.dim
    if seen.node.op == "TensorArrayScatterV3" and claim.kind == "split":
        dim -= 1
    if dim < 0 or (seen.node.op == "TensorArraySplitV3" and claim.kind == "split" and not dim):
        return "is split(0), where elements lie"
    return Element(Claim(claim.kind, dim, claim.op, None, claim.value), claim.zero, _rows(claim))


def _rows(claim: Claim) -> Dim:
    if claim.kind != "split" or claim.shape is None or claim.dim >= len(claim.shape):
        return None
    return claim.shape[claim.dim]


def _joined(one: Element, other: Element) -> Element | None:
    """Return what holds of both; zeros are contributions to a sum as well."""
    a, b = one.placement, other.placement
    if a[:3] == b[:3]:
        value = a.value if a.value == b.value else None
        if a.kind == "local" and value is None:
            return None
        rows = one.rows if one.rows == other.rows else None
        return Element(a._replace(value=value), one.zero and other.zero, rows)
    for some, more in ((one, b), (other, a)):
        if some.zero and some.placement.kind == "replicated" and more.kind == "partial" and more.op == "sum":
            return Element(more, False)
    return None


def _judge(seen: Seen, element: Element | None) -> str | None:
    op, node = seen.node.op, seen.node
    parameters = [i for i in range(1, len(seen.operands)) if i != WRITES.get(op) and not _is_flow(node, i)]
    for i in parameters:
        if seen.operands[i].differs:
            return f"input {i} is {said(seen.operands[i])}, and has to be whole"
    if op in MAKERS:
        wrong = next((claim for claim in seen.results if claim.differs), None)
        return f"a new container is claimed {said(wrong)}" if wrong else None
    if op in OTHERS:
        return "result 0 is claimed " + said(seen.results[0]) if seen.results and seen.results[0].differs else None
    element = element or Element(Claim("replicated"), True)
    expected = element.placement
    if op == "TensorArrayGatherV3" and expected.kind == "split":
        expected = expected._replace(dim=expected.dim + 1)
    if op == "TensorArrayConcatV3" and expected.kind == "split" and not expected.dim:
        return "blocks of its elements would lie between each other"
    if op in WRITES and op != "StackPushV2":  # what comes out is a number that only orders the operations
        expected = Claim("partial", 0, "sum") if expected.differs else Claim("replicated")
    claim = seen.results[0]
    if claim[:3] != expected[:3] and not (claim.kind == "partial" and claim.zero and not expected.differs):
        return f"result 0 is claimed {said(claim)}, and its container holds what makes it {said(expected)}"
    if claim.kind == "local" and claim.value != expected.value:
        return f"result 0 is claimed to be {claim.value}, and its container holds {expected.value}"
    rows = _rows(claim)
    if None not in (rows, element.rows) and rows != element.rows and not is_own(rows):
        return f"result 0 is claimed to have {rows} rows, and its container holds {element.rows}"
    if claim.zero and op in READS and not element.zero:
        return "result 0 is claimed to be zero, and its container holds something else"
    return None


def _is_flow(node: Node, index: int) -> bool:
    return node.op.startswith("TensorArray") and index == len(node.inputs) - 1
