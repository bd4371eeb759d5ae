"""Contracts of tensor arrays and stacks: one per replica, and a read gives what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
EMPTY = Claim("replicated", zero=True)


def judge_containers(nodes: Sequence[Seen]) -> tuple[Seen, str] | None:
    """Return the first node that reads or writes something else than its container holds, and what is wrong."""
    held: dict[Key, Claim] = {}
    for seen in nodes:
        if seen.node.op not in WRITES:
            continue
        index = WRITES[seen.node.op]
        element, key = _element(seen, seen.operands[index]), key_of(seen.node.inputs[0])
        if element.dim < 0:
            return seen, f"input {index} is split(0), where elements lie"
        before = held.get(key, element)
        joined = _joined(before, element) or _joined(element, before)
        if joined is None:
            return seen, f"it puts in what is {said(element)}, where others put in what is {said(before)}"
        held[key] = joined
    for seen in nodes:
        problem = _judge(seen, held.get(key_of(seen.node.inputs[0]), EMPTY) if seen.node.inputs else EMPTY)
        if problem:
            return seen, problem
    return None


def key_of(handle: Value) -> Key:
    """Return which container a handle means; all gradients of one array for one source share one."""
    made = variable_ops.handle_node(handle)
    if made.op.startswith("TensorArrayGrad"):
        return (str(made.attr("source")), *key_of(made.inputs[0]))
    return (made.name,)


def _element(seen: Seen, claim: Claim) -> Claim:
    """Return what is claimed of one element of what is put in; of its shape, only how many rows a block has."""
    dim, op = claim.dim, seen.node.op
    if claim.kind == "split":
        dim -= op == "TensorArrayScatterV3" or (op == "TensorArraySplitV3" and not dim)
    return claim._replace(dim=dim, shape=(_rows(claim),))


def _rows(claim: Claim) -> Dim:
    at = claim.dim
    return claim.shape[at] if claim.kind == "split" and claim.shape is not None and at < len(claim.shape) else None


def _joined(one: Claim, other: Claim) -> Claim | None:
    """Return what holds of both; zeros are contributions to a sum as well."""
    if one[:3] == other[:3]:
        if one.kind == "local" and one.value != other.value:
            return None
        shape, value = (a if a == b else None for a, b in ((one.shape, other.shape), (one.value, other.value)))
        return one._replace(shape=shape, value=value, zero=one.zero and other.zero)
    adds = one.zero and one.kind == "replicated" and (other.kind, other.op) == ("partial", "sum")
    return other._replace(zero=False) if adds else None


def _judge(seen: Seen, held: Claim) -> str | None:
    op, node = seen.node.op, seen.node
    for i, claim in enumerate(seen.operands):
        if i and i != WRITES.get(op) and claim.differs and not _is_flow(node, i):
            return f"input {i} is {said(claim)}, and has to be whole"
    if op in MAKERS or op in OTHERS:
        wrong = next((claim for claim in seen.results if claim.differs), None)
        return f"a result is claimed {said(wrong)}" if wrong else None
    expected = held._replace(dim=held.dim + (op == "TensorArrayGatherV3" and held.kind == "split"))
    if op == "TensorArrayConcatV3" and expected.kind == "split" and not expected.dim:
        return "blocks of its elements would lie between each other"
    if op in WRITES and op != "StackPushV2":  # what comes out is a number that only orders the operations
        expected = Claim("partial", 0, "sum") if expected.differs else Claim("replicated")
    claim = seen.results[0]
    if claim[:3] != expected[:3] and not (claim.kind == "partial" and claim.zero and not expected.differs):
        return f"result 0 is claimed {said(claim)}, and its container holds what makes it {said(expected)}"
    if claim.kind == "local" and claim.value != expected.value:
        return f"result 0 is claimed to be {claim.value}, and its container holds {expected.value}"
    rows, there = _rows(claim), (held.shape or (None,))[0]
    if None not in (rows, there) and rows != there and not is_own(rows):
        return f"result 0 is claimed to have {rows} rows, and its container holds {there}"
    if claim.zero and op in READS and not held.zero:
        return "result 0 is claimed to be zero, and its container holds something else"
    return None


def _is_flow(node: Node, index: int) -> bool:
    return node.op.startswith("TensorArray") and index == len(node.inputs) - 1
