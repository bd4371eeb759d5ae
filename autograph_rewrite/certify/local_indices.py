"""Checks gathers by row indices that are relative to the local block.

    Range(0, b) ──► * T ──► + checked positions ──► Gather(block of b*T rows)
    Where(mask of b*T rows) ──► Gather(block of b*T rows)

The rewrite marks both ends. The certificate does not trust the mark: only marked nodes may read the indices, an example
must have as many rows as the indices assume, and the graph must check that every position is within these rows.
Positions that Where finds in a mask of as many rows are always within the block.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from autograph_rewrite.certify.seen import BLOCK, Seen, is_local, product, said, see
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.recorded_shapes import is_number
from autograph_rewrite.ir.traversal import traced_back

MARK = "_autograph_rule"
"""The attribute of marked nodes: a kind, and after a colon, for example, why a node stays in its block."""
BLOCKWISE, LOCAL_INDICES, ROWS_APART = "blockwise", "local indices", "rows apart"
READERS = frozenset(("Cast", "Reshape", "GatherNd", "DynamicStitch"))
"""Ops that may read positions in a block."""
COPIES = frozenset(("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "StopGradient"))
BETWEEN = COPIES | {"Mul", "AddV2"}
"""Ops that may be between indices and the look-up."""
ENDS = {"Gather": 1, "GatherV2": 1, "GatherNd": 1, "UnsortedSegmentSum": 1, "ScatterNd": 0}
"""Ops that look up by indices, and the position of the operand with the indices."""
ADDS_UP = frozenset(("UnsortedSegmentSum", "ScatterNd"))
EXAMPLES = (1, (BLOCK,))


def kind_of(node: Node) -> str:
    """Return the kind of a marked node; "" for a node that is not marked."""
    return bytes(node.attr(MARK, b"")).decode().partition(": ")[0]


def why_in_block(node: Node) -> str:
    """Return why a node stays in its block; "" where it does not."""
    return bytes(node.attr(MARK, b"")).decode().partition(": ")[2] if kind_of(node) == "in block" else ""


def judge_local_indices(node: Node, claims: Claims) -> str | None:
    """Return the problem with the claims of a node with local indices."""
    seen = see(node, claims)
    (made,) = seen.results
    if not any(claim.differs for claim in seen.operands):
        return f"its result is claimed {said(made)}" if made.kind != "replicated" else None
    if node.op == "Range":
        return _numbers(seen) or _stray(node, BETWEEN)
    if node.op == "Where":
        return _kept(seen) or _stray(node, COPIES)
    if node.op not in ENDS:
        return f"{node.op} looks nothing up"
    numbers = traced_back(node.inputs[ENDS[node.op]], COPIES).node
    is_kept = numbers.op == "Where" and why_in_block(numbers) == LOCAL_INDICES
    return _end(seen) or (_kept_of(seen, numbers, claims) if is_kept else _positions(seen, claims))


def _numbers(seen: Seen) -> str | None:
    (made,) = seen.results
    if seen.value(0) != (0,) or seen.value(2) != (1,) or seen.value(1) != (EXAMPLES,):
        return "it does not count the examples of the block"
    if (made.kind, made.dim, made.shape) != ("split", 0, (EXAMPLES,)):
        return f"its result is claimed {said(made)}, of {made.shape}"
    return None


def _kept(seen: Seen) -> str | None:
    mask, made = seen.operands[0], seen.results[0]
    if (mask.kind, mask.dim) != ("split", 0) or mask.shape is None or len(mask.shape) != 1:
        return f"its mask is {said(mask)}, and has to be a block of rows"
    if (made.kind, made.dim) != ("split", 0):
        return f"its result is claimed {said(made)}"
    return None


def _stray(numbers: Node, between: Collection[str]) -> str | None:
    """Return the problem with a reader of indices that is no part of the look-up."""
    pending, reached = [numbers], {numbers}
    while pending:
        for use in pending.pop().output().uses:
            if use.node.op in ("Shape", "Size") or (
                why_in_block(use.node) == LOCAL_INDICES and use.index == ENDS.get(use.node.op)
            ):
                continue
            if use.node.op not in between or (between is COPIES and use.index):
                return f"'{use.node.name}' ({use.node.op}) reads numbers of rows, which mean something in a block only"
            if use.node not in reached:
                reached.add(use.node)
                pending.append(use.node)
    return None


def _end(seen: Seen) -> str | None:
    at, (made,) = ENDS[seen.node.op], seen.results
    first, ids = seen.operands[1 - at], seen.operands[at]
    for index, claim in ((1 - at, first), (at, ids)):
        if (claim.kind, claim.dim) != ("split", 0):
            return f"input {index} is {said(claim)}, and has to be a block of rows"
    if first.shape is None or ids.shape is None or made.shape is None or not first.shape or not ids.shape:
        return "it is not known how many rows there are"
    rows = ids.shape[0]
    if seen.node.op in ("GatherNd", "ScatterNd") and ids.shape[-1] != 1:
        return f"it looks up by {ids.shape[-1]} numbers at a time"
    if seen.node.op in ADDS_UP:
        if first.shape[0] != ids.shape[0]:
            return f"there are {first.shape[0]} rows, and numbers for {ids.shape[0]}"
        rows = (seen.value(2) or (None,))[0]
    elif seen.node.op == "GatherV2" and (seen.ints(2) != (0,) or seen.node.attr("batch_dims", 0)):
        return "it does not look up rows"
    if (made.kind, made.dim) != ("split", 0) or rows is None or made.shape[0] != rows:
        return f"its result is claimed {said(made)} of {made.shape[0]}, and has {rows} rows"
    return None


def _kept_of(seen: Seen, mask: Node, claims: Claims) -> str | None:
    """Return the problem with a mask that has not as many rows as the block that is read or made."""
    counted = seen.value(2) if seen.node.op in ADDS_UP else seen.operands[0].shape
    rows = (see(mask, claims).operands[0].shape or (None,))[0]
    if not is_local(rows) or not counted or counted[0] != rows:
        return f"a mask of {rows} rows says which of {counted and counted[0]} there are"
    return None


def _positions(seen: Seen, claims: Claims) -> str | None:
    """Return the problem with indices that are not checked positions plus the first row of each example."""
    total = traced_back(seen.node.inputs[ENDS[seen.node.op]], COPIES)
    if total.node.op != "AddV2":
        return f"'{total.node.name}' does not add positions to where examples begin"
    positions, begins = total.node.inputs[0], traced_back(total.node.inputs[1], COPIES)
    if begins.node.op != "Mul" or why_in_block(begins.node.inputs[0].node) != LOCAL_INDICES:
        return f"'{begins.node.name}' does not tell where the examples of a block begin"
    stride = begins.node.inputs[1]
    (rows,) = claims.values[stride.name].value or (None,)
    counted = seen.value(2) if seen.node.op in ADDS_UP else seen.operands[0].shape
    if rows is None or not counted or product((rows, EXAMPLES)) != counted[0]:
        return f"examples are taken to have {rows} rows, and the block has {counted and counted[0]}"
    return None if _is_checked(positions, stride) else f"nothing checks that '{positions.name}' stay in their example"


def _is_checked(sum_: Value, stride: Value) -> bool:
    """Return whether a run fails if a position is not within the rows of an example."""
    if sum_.node.op != "AddV2":
        return False
    positions, nothing = sum_.node.inputs
    checked = traced_back(nothing, COPIES).node
    if checked.op != "CheckNumerics" or checked.inputs[0].node.op != "SelectV2":
        return False
    inside, fine, fault = checked.inputs[0].node.inputs
    if not (is_number(fine, 0.0) and is_number(fault, np.nan) and inside.node.op == "LogicalAnd"):
        return False
    low, high = (value.node for value in inside.node.inputs)
    begins = low.op == "GreaterEqual" and low.inputs[0] is positions and is_number(low.inputs[1], 0)
    return begins and high.op == "Less" and high.inputs[0] is positions and high.inputs[1] is stride


def judge_blockwise(seen: Seen) -> str | None:
    """Return the problem with the claims of a node of a blockwise look-up."""
    node = seen.node
    if node.op not in READERS | {"Where"}:
        return f"{node.op} is no part of a look-up"
    if node.op == "Where" and (stray := _stray_place(node)) is not None:
        return f"'{stray.name}' ({stray.op}) reads places in a block, which mean something there only"
    split = [claim.kind == "split" and claim.dim == 0 for claim in seen.operands]
    data = split[:1] if node.op == "Reshape" else split
    if not any(claim.differs for claim in seen.operands):
        wrong = next((claim for claim in seen.results if claim.kind != "replicated"), None)
    elif not all(data):
        index = data.index(False)
        return f"input {index} is {said(seen.operands[index])}, and the others are blocks"
    else:
        wrong = next((claim for claim in seen.results if (claim.kind, claim.dim) != ("split", 0)), None)
    return f"its result is claimed {said(wrong)}" if wrong else None


def _stray_place(node: Node) -> Node | None:
    """Return a reader of positions in a block that is no part of a look-up."""
    for use in node.output().uses:
        if use.node.op not in READERS or (use.node.op == "GatherNd" and use.index != 1):
            return use.node
    return None
