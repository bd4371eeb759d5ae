"""Check the claims of all nodes of a graph against the contracts of their ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.certify.contract_table import CONTRACTS
from autograph_rewrite.certify.contracts.axes import judge_axes
from autograph_rewrite.certify.contracts.factors import judge
from autograph_rewrite.certify.contracts.families.blockwise import MARK, judge_blockwise
from autograph_rewrite.certify.contracts.families.containers import OPS as OF_CONTAINERS
from autograph_rewrite.certify.contracts.families.containers import judge_containers
from autograph_rewrite.certify.contracts.families.local_indices import MARK as LOCAL_INDICES
from autograph_rewrite.certify.contracts.families.local_indices import judge_local_indices
from autograph_rewrite.certify.contracts.families.segments import have_segments, judge_pieces, lose_segments
from autograph_rewrite.certify.contracts.patterns import stated
from autograph_rewrite.certify.contracts.seen import Seen, is_named_after, is_own, said, see
from autograph_rewrite.certify.contracts.sizes import are_sizes, judge_sizes
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.claims import Claims, Dim
from autograph_rewrite.ir.graph import Node

KEEP = frozenset(
    (
        "Identity", "StopGradient", "PreventGradient", "Snapshot", "DeepCopy", "Copy", "CopyHost", "Enter", "RefEnter",
        "Exit", "RefExit", "NextIteration", "RefNextIteration", "RefIdentity",
    )
)  # fmt: skip
"""Ops that hand their first operand on as it is."""
LENGTHS = frozenset(("TensorListLength",))
"""Ops whose result is the same on every replica, whatever they look at."""
ROWS_APART = "_autograph_rows_apart"
"""Attribute of nodes whose rows are numbered within a block; what they make is not covered."""
OF_BLOCK = frozenset(("_of_block", "_block_statistics"))
"""Attributes of nodes that take a block for the whole batch, where the configuration says so."""

OF_EACH = ("batch_norm", "local_sgd", "values of each")
"""How the texts begin that say that replicas have values of their own."""
MARKS = OF_BLOCK | {MARK, LOCAL_INDICES, ROWS_APART}
"""Attributes of passes that a verdict depends on."""


def check_claims(nodes: Sequence[Node], claims: Claims) -> list[str]:
    """Check that every node makes what is claimed of it, out of what it is claimed to read; return what is not covered.

    Raises:
        VerifyError: one does not; with the node, its op, the operand and the placement.
    """
    judged: dict[Any, str | None] = {}
    containers: list[Seen] = []
    for node in nodes:
        seen = see(node, claims)
        if node.op in OF_CONTAINERS:
            if have_segments((*seen.operands, *seen.results)):
                raise _refusal(node, "it holds blocks with segments, of which it knows nothing")
            containers.append(seen)
            continue
        if node.attr(LOCAL_INDICES, False):
            if (wrong := judge_local_indices(node, claims)) is not None:
                raise _refusal(node, wrong)
            continue
        folded = node.name in claims.folded
        key = (*_key(seen), folded)
        if key not in judged:
            judged[key] = judge_node(seen, folded=folded)
        if judged[key]:
            raise _refusal(node, judged[key])
    found = judge_containers(containers)
    if found is not None:
        raise _refusal(found[0].node, found[1])
    return [f"'{node.name}', which counts the rows of its block" for node in nodes if ROWS_APART in node.attrs]


def _refusal(node: Node, problem: str | None) -> VerifyError:
    return VerifyError(f"the placement of '{node.name}' ({node.op}) is wrong: {problem}", node=node)


def _key(seen: Seen) -> tuple[Any, ...]:
    """Return what the verdict depends on."""
    node = seen.node
    named = any(is_named_after(dim, node, i) for i, claim in enumerate(seen.results) for dim in claim.shape or ())
    alone = node.op == "Const" or MARK in node.attrs or named
    own = node.name if alone else ""
    attrs = tuple([item for item in node.attrs.items() if item[0][0] != "_" or item[0] in MARKS])
    return node.op, own, attrs, seen.operands, seen.results, seen.guessed, tuple(node.input_dtypes), node.output_dtypes


def judge_node(seen: Seen, *, folded: bool = False) -> str | None:
    """Return what is wrong with the claims of one node, or None."""
    node = seen.node
    is_piece, verdict = judge_pieces(seen)
    if is_piece and (have_segments((*seen.operands, *seen.results)) or verdict is None):
        return verdict
    if (lost := lose_segments(seen)) is not None:
        return lost
    if any(text.startswith(("batch_norm", "local_sgd", "values of each")) for text in seen.inexact) and _is_of_block(
        seen
    ):
        return None
    if MARK in node.attrs:
        return judge_blockwise(seen)
    if ROWS_APART in node.attrs:
        return None
    if node.op == "BroadcastGradientArgs":
        return judge_axes(seen, folded=folded)
    if (special := SPECIAL.get(node.op)) is not None:
        return special(seen)
    if node.op in KEEP:
        return _kept(seen, 0, 0)
    if not node.inputs and node.op not in CONTRACTS:
        wrong = next((claim for claim in seen.results if claim.differs or claim.zero), None)
        return f"it reads nothing, and is claimed {said(wrong)}" if wrong else None
    if are_sizes(seen):
        return judge_sizes(seen, folded=folded)
    contract = CONTRACTS.get(node.op) or (stated(seen.stated) if seen.stated is not None else None)
    return judge(seen, contract(seen) if contract is not None else None)


def _is_of_block(seen: Seen) -> bool:
    """Return whether a node is about values that a block has of its own."""
    own = any(claim.kind == "partial" and claim.op == "own" for claim in (*seen.operands, *seen.results))
    return own or any(mark in seen.node.attrs for mark in OF_BLOCK)


def _kept(seen: Seen, operand: int, result: int) -> str | None:
    """Return how a result differs from an operand that is forwarded."""
    read, made = seen.operands[operand], seen.results[result]
    if read[:3] != made[:3]:
        return f"result {result} is claimed {said(made)}; input {operand} that it hands on is {said(read)}"
    if made.zero and not read.zero:
        return f"result {result} is claimed to be zero, and input {operand} is not"
    for what, old, new in (("shape", read.shape, made.shape), ("contents", read.value, made.value)):
        if new is None or old == new:
            continue
        if old is None and (what == "shape" and made.kind != "split"):
            continue
        pairs = zip(old, new, strict=True) if old is not None and len(old) == len(new) else None
        if pairs is None or any(None not in (a, b) and a != b and not _is_name(seen, b, result) for a, b in pairs):
            return f"the {what} of result {result} is claimed {new}, of {old}"
    return None


def _is_name(seen: Seen, dim: Dim, result: int) -> bool:
    return is_own(dim) or is_named_after(dim, seen.node, result)


def _each_kept(seen: Seen) -> str | None:
    return next((said for i in range(len(seen.results)) if (said := _kept(seen, i, i))), None)


def _switch(seen: Seen) -> str | None:
    if seen.operands[1].differs:
        return f"input 1 is {said(seen.operands[1])}, and all have to take one path"
    return _kept(seen, 0, 0) or _kept(seen, 0, 1)


def _merge(seen: Seen) -> str | None:
    """Whatever arrives has to be what is claimed; empty containers and zeros are."""
    made, which = seen.results
    if which.differs or any(entry is not None for entry in which.value or ()):
        return f"which path was taken is claimed {said(which)}, and {which.value}"
    for i, read in enumerate(seen.operands):
        if (read.kind == "any" and made.kind != "local") or read.kind == "unknown":
            continue
        fits = read[:3] == made[:3] or (read.kind, made.kind, made.op, read.zero) == (
            "replicated",
            "partial",
            "sum",
            True,
        )
        if not fits and read.kind != "any":
            return f"input {i} is {said(read)}, and result 0 claimed {said(made)}"
        if made.zero and not read.zero:
            return f"result 0 is claimed to be zero, and input {i} is not"
        if made.value is not None and read.kind != "any" and not _says(read.value, made.value):
            return f"input {i} is {read.value}, and result 0 claimed {made.value}"
    return None


def _says(value: Sequence[Any] | None, claimed: Sequence[Any]) -> bool:
    return (
        value is not None
        and len(value) == len(claimed)
        and all(b is None or a == b for a, b in zip(value, claimed, strict=True))
    )


def _constant(seen: Seen) -> str | None:
    made, content = seen.results[0], seen.node.attr("value")
    if made.kind != "replicated":
        return f"a constant is claimed {said(made)}"
    if not isinstance(content, np.ndarray):
        return "a constant that can't be read is claimed to be known" if made.zero or made.value else None
    if made.zero and content.any():
        return "it is claimed to be zero"
    if made.value is not None and made.value != tuple(content.ravel().tolist()):
        return f"it is claimed to be {made.value}"
    return f"it is claimed to have the shape {made.shape}" if made.shape not in (None, content.shape) else None


def _length(seen: Seen) -> str | None:
    return f"result 0 is claimed {said(seen.results[0])}" if seen.results[0].kind != "replicated" else None


SPECIAL: Mapping[str, Callable[[Seen], str | None]] = {
    "Const": _constant,
    "IdentityN": _each_kept,
    **dict.fromkeys(("Switch", "RefSwitch"), _switch),
    **dict.fromkeys(("Merge", "RefMerge"), _merge),
    **dict.fromkeys(LENGTHS, _length),
}
"""Ops that hand on what they read, and those that read nothing."""
