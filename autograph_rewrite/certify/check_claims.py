"""Checks the claims of all nodes: by the factors of their ops, by contracts of routes and containers, or by running.

    x: split(0)   w: replicated   ──MatMul "mk,kn->mn|k"──►   split(0)      m is cut, and the result has it
    x: split(1)   w: split(0)     ──MatMul "mk,kn->mn|k"──►   partial(sum)  k is cut, and summed over
    x: split(1)   w: replicated   ──MatMul──►                 refused: input 1 has k, and is whole
    x: split(0)                   ──Slice──►                  run on samples (`run_blocks`)

Nothing here chooses a placement: the check says whether a claimed one is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autograph_rewrite.certify import local_indices
from autograph_rewrite.certify.along_model import is_along_model, judge_reshard
from autograph_rewrite.certify.baseline import has_shards
from autograph_rewrite.certify.factors import factors_of, judge
from autograph_rewrite.certify.kernels import KERNELS
from autograph_rewrite.certify.run_blocks import judge_by_running
from autograph_rewrite.certify.samples import TooLargeError
from autograph_rewrite.certify.seen import (
    BATCH,
    BLOCK,
    Seen,
    is_local,
    is_named_after,
    is_own,
    line_up,
    product,
    said,
    see,
    whole,
)
from autograph_rewrite.certify.table import TABLE, text_of
from autograph_rewrite.certify.windows import judge_windows, reads_windows
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.claims import SEGMENTS, Claim, Claims, Dim, sizes_of_shards
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import RESHARD, SHARD_ALIKE

# Contracts of tensor arrays and stacks: each replica has one, and a read gives a written value.


MAKERS = frozenset(("TensorArrayV3", "TensorArrayGradV3", "TensorArrayGradWithShape", "StackV2"))
WRITES: Mapping[str, int] = {
    "TensorArrayWriteV3": 2, "TensorArrayScatterV3": 2, "TensorArraySplitV3": 1, "StackPushV2": 1,
}  # fmt: skip
"""The position of the operand that is put in."""
READS = frozenset(("TensorArrayReadV3", "TensorArrayGatherV3", "TensorArrayConcatV3", "StackPopV2"))
OTHERS = frozenset(("TensorArraySizeV3", "TensorArrayCloseV3", "StackCloseV2"))
OF_CONTAINERS = MAKERS | set(WRITES) | READS | OTHERS

Key = tuple[str, ...]
EMPTY = Claim("replicated", zero=True)


def judge_containers(nodes: Sequence[Seen]) -> tuple[Seen, str] | None:
    """Return the first node whose claims do not fit its container, and the problem."""
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
    """Return a key of a handle's container; all gradients of one array for one source share one."""
    made = variable_ops.handle_node(handle)
    if made.op.startswith("TensorArrayGrad"):
        return (str(made.attr("source")), *key_of(made.inputs[0]))
    return (made.name,)


def _element(seen: Seen, claim: Claim) -> Claim:
    """Return the claim of one element of a written value; its shape has only the rows of a block."""
    dim, op = claim.dim, seen.node.op
    if claim.kind == "split":
        dim -= op == "TensorArrayScatterV3" or (op == "TensorArraySplitV3" and not dim)
    return claim._replace(dim=dim, shape=(_rows(claim),))


def _rows(claim: Claim) -> Dim:
    at = claim.dim
    return claim.shape[at] if claim.kind == "split" and claim.shape is not None and at < len(claim.shape) else None


def _joined(one: Claim, other: Claim) -> Claim | None:
    """Return a claim that holds for both values, or None; zeros are also contributions to a sum."""
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
    if op in WRITES and op != "StackPushV2":  # the result is the flow, a number that only orders the operations
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


KEEP = frozenset(
    (
        "Identity", "StopGradient", "PreventGradient", "Snapshot", "DeepCopy", "Copy", "CopyHost", "Enter", "RefEnter",
        "Exit", "RefExit", "NextIteration", "RefNextIteration", "RefIdentity", RESHARD, SHARD_ALIKE,
    )
)  # fmt: skip
"""Ops that forward their first operand unchanged."""
OF_BLOCK = frozenset(("of block", "statistics"))
"""The kinds of marked nodes that treat a block as the whole batch, where the configuration allows it."""

OF_EACH = ("batch_norm", "local_sgd", "values of each")
"""Prefixes of the texts in `Claims.inexact` that allow varying values."""


def check_claims(nodes: Sequence[Node], claims: Claims) -> list[str]:
    """Check that the claims of every node's results follow from those of its operands; return what is not covered.

    Raises:
        VerifyError: a claim is wrong; with the node, its op, the operand and the placement.
    """
    judged: dict[Any, str | None] = {}
    containers: list[Seen] = []
    left_out: list[str] = []
    for node in nodes:
        seen = see(node, claims)
        if node.op in OF_CONTAINERS:
            if _segments(_cut_sizes((*seen.operands, *seen.results))):
                raise _refusal(node, "it holds blocks with segments, of which it knows nothing")
            containers.append(seen)
            continue
        if local_indices.why_in_block(node) == local_indices.LOCAL_INDICES:
            wrong = local_indices.judge_local_indices(node, claims)
        elif reads_windows(node, claims):
            wrong = judge_windows(seen, claims)
        else:
            folded = node.name in claims.folded
            key = (*_key(seen), folded)
            if key not in judged:
                try:
                    judged[key] = judge_node(seen, folded=folded)
                except TooLargeError:
                    judged[key] = None
                    left_out.append(f"'{node.name}' ({node.op}), which is too large to be run on samples")
            wrong = judged[key]
        if wrong:
            raise _refusal(node, wrong)
    if (found := judge_containers(containers)) is not None:
        raise _refusal(found[0].node, found[1])
    apart = (node for node in nodes if local_indices.why_in_block(node) == local_indices.ROWS_APART)
    return [*left_out, *(f"'{node.name}', which counts the rows of its block" for node in apart)]


def _refusal(node: Node, problem: str) -> VerifyError:
    return VerifyError(f"the placement of '{node.name}' ({node.op}) is wrong: {problem}", node=node)


def _key(seen: Seen) -> tuple[Any, ...]:
    """Return the key of a verdict: nodes with equal keys are judged once."""
    node = seen.node
    named = any(is_named_after(dim, node, i) for i, claim in enumerate(seen.results) for dim in claim.shape or ())
    alone = node.op == "Const" or local_indices.why_in_block(node) == local_indices.BLOCKWISE or named
    own = node.name if alone else ""
    attrs = tuple([item for item in node.attrs.items() if item[0][0] != "_" or item[0] == local_indices.MARK])
    return node.op, own, attrs, seen.operands, seen.results, seen.guessed, tuple(node.input_dtypes), node.output_dtypes


def judge_node(seen: Seen, *, folded: bool = False) -> str | None:
    """Return the problem with the claims of one node, or None.

    Args:
        folded: propagation knows its value to be constant, from sizes of the whole.

    Raises:
        TooLargeError: the node has to be run, and its values are too large for that.
    """
    node = seen.node
    runs = node.op in KERNELS and node.op not in TABLE
    if not runs and (lost := _lose_segments(seen)) is not None:
        return lost
    if any(text.startswith(OF_EACH) for text in seen.inexact) and _is_of_block(seen):
        return None
    if local_indices.why_in_block(node) == local_indices.BLOCKWISE:
        return local_indices.judge_blockwise(seen)
    if local_indices.why_in_block(node) == local_indices.ROWS_APART:
        return None  # its rows are numbered within a block; its results are not covered
    if node.op == "BroadcastGradientArgs":
        return _judge_axes(seen, folded=folded)
    if (special := SPECIAL.get(node.op)) is not None:
        return special(seen)
    if is_along_model(node):
        return judge_reshard(seen)
    if node.op in KEEP:
        return _kept(seen, 0, 0)
    if node.inputs and variable_ops.is_handle(node.inputs[0]) and seen.operands[0].kind == "split":
        return _of_shards(seen)
    if node.op == "GatherV2" and has_shards(seen.operands[0]) and seen.results[0].kind == "partial":
        return _found_in_shards(seen)
    if not node.inputs and node.output_dtypes[:1] == (dtypes.RESOURCE,) and seen.results[0].kind == "split":
        return _in_shards(node, seen.results[0], seen.batch)
    if not node.inputs and node.op not in TABLE:
        wrong = next((claim for claim in seen.results if claim.differs or claim.zero), None)
        return f"it reads nothing, and is claimed {said(wrong)}" if wrong else None
    if any(claim.value is not None or claim.kind == "local" for claim in seen.results):
        return _judge_sizes(seen, folded=folded)
    if runs and any(claim.differs or claim.zero for claim in (*seen.operands, *seen.results)):
        return judge_by_running(seen)
    if node.op == "FusedBatchNormGradV3" and node.inputs[5].node.op == "FusedBatchNormV3":
        kept = seen.operands[5]._replace(kind="replicated")  # the forward kernel kept it for this gradient of its block
        seen = replace(seen, operands=(*seen.operands[:5], kept))
    text = text_of(seen)
    return judge(seen, None if text is None else factors_of(seen, text))


def _of_shards(seen: Seen) -> str | None:
    """Return the problem with a use of a variable in shards."""
    node, held = seen.node, seen.operands[0]
    if node.op == "VarIsInitializedOp":
        made = seen.results[0]
        return None if made[:3] == ("partial", 0, "all") else f"result 0 is claimed {said(made)}, of shards one by one"
    if node.op == "ReadVariableOp":
        return _kept(seen, 0, 0)
    if node.op == "ResourceGather":
        return _found_in_shards(seen)
    dense = variable_ops.dense_inputs(node) if variable_ops.is_update(node) else []
    if not dense and not variable_ops.updates_rows(node):
        return "it has to read or write all of a variable, or rows of it, which is in shards"
    columns = variable_ops.rows_argument(node.op) if held.dim else None
    rows = (held.shape or ())[held.dim : held.dim + 1]
    for index, claim in enumerate(seen.operands):
        if index == columns and claim.shape:  # the given rows must be split into the same columns as the variable
            at = len(claim.shape) + held.dim - len(held.shape or ())
            if (claim.kind, claim.dim) != ("split", at) or claim.shape[at : at + 1] != rows:
                return f"input {index} is {said(claim)} of {claim.shape}, and the variable {said(held)} of {held.shape}"
        elif index in dense or variable_ops.is_handle(node.inputs[index]):
            mine = (claim.shape or ())[held.dim : held.dim + 1]
            if claim[:3] != held[:3] or mine != rows or None in mine:
                return f"input {index} is {said(claim)} of {claim.shape}, and the variable {said(held)} of {held.shape}"
        elif claim.kind != "replicated":
            return f"input {index} is {said(claim)}, and all shards have to be updated with the same"
    return None


def _found_in_shards(seen: Seen) -> str | None:
    """Return the problem with a look-up in shards: each replica gives the rows that it has, else zeros."""
    node, table, made = seen.node, seen.operands[0], seen.results[0]
    if table.dim:  # columns: every replica has a part of each row
        return None if made.kind == "split" else f"result 0 is claimed {said(made)}, and has some columns of each row"
    if (node.op == "GatherV2" and seen.ints(2) != (0,)) or node.attr("batch_dims", 0):
        return "it does not look up rows"
    if seen.operands[1].kind != "replicated":
        return f"input 1 is {said(seen.operands[1])}, and every replica has to look for all rows"
    return None if made[:3] == ("partial", 0, "sum") else f"result 0 is claimed {said(made)}, of rows that others have"


def _in_shards(node: Node, claim: Claim, units: int | None) -> str | None:
    """Return the problem with the claimed shards of a variable's handle.

    Args:
        units: of all blocks along the axis together, where that is known.
    """
    size = (claim.shape or ())[claim.dim] if claim.dim < len(claim.shape or ()) else None
    sizes = sizes_of_shards(size[1][0]) if isinstance(size, tuple) and size[0] == 1 and len(size[1]) == 1 else ()
    is_counted = isinstance(size, tuple) and size[1] == (BLOCK,) and units is not None
    if not sizes and not is_counted:
        return f"the variable is claimed {said(claim)}, and nothing says of which sizes"
    stated, whole = node.attrs.get("shape") and node.attr("shape"), list(claim.shape or ())
    whole[claim.dim] = sum(sizes) or (size[0] * (units or 0) if isinstance(size, tuple) else 0)
    if node.op == "VarHandleOp" and tuple(whole) != stated:
        return f"its shards {sizes} make a variable of the shape {tuple(whole)}, and it has {stated}"
    return None


def _judge_sizes(seen: Seen, *, folded: bool) -> str | None:
    for index, claim in enumerate(seen.results):
        local = any(is_local(entry) for entry in claim.value or ())
        if claim.kind not in ("local", "replicated") or local != (claim.kind == "local"):
            return f"result {index} is claimed {said(claim)}, and is {claim.value}"
    if seen.node.op in HANDED_ON:
        return _handed_on(seen)
    if seen.node.op not in KERNELS:
        return "nothing says how it makes sizes"
    return judge_by_running(seen.reading_whole() if folded else seen)


def _measured(seen: Seen) -> str | None:
    """Return the problem with the claim of a size: it must be that of the operand's instance."""
    for index, made in enumerate(seen.results):
        shape = seen.operands[index].shape
        if made.value is None:
            if seen.operands[index].kind == "split":
                return f"input {index} is split, and of result {index} nothing is known"
            continue
        if made.kind != ("local" if any(map(is_local, made.value)) else "replicated"):
            return f"result {index} is claimed {said(made)}, and is {made.value}"
        if seen.node.op == "TensorListElementShape" or shape is None:
            continue
        right = (len(shape),) if seen.node.op == "Rank" else (product(shape),) if seen.node.op == "Size" else shape
        if len(right) != len(made.value) or any(a not in (None, b) for a, b in zip(made.value, right, strict=True)):
            return f"result {index} is claimed to be {made.value}, of an operand of shape {shape}"
    return None


HANDED_ON = {"TensorListPushBack": (0, 1), "TensorListPopBack": (0,), "TensorListGetItem": (0,)}
"""Ops on lists of sizes, with the operands that hold sizes."""


def _handed_on(seen: Seen) -> str | None:
    """Return the problem with an op on a list of sizes: all elements of the list must be equal."""
    sources = [seen.operands[i] for i in HANDED_ON[seen.node.op]]
    for index, source in enumerate(sources):
        is_empty = source.kind == "any" and not source.zero and len(sources) > 1
        for made in seen.results:
            if not is_empty and (source.kind != made.kind or source.value != made.value):
                return f"it is claimed to be {made.value}, of {source.value} (input {index})"
    return None


def _segments(dims: Iterable[Dim]) -> set[str]:
    """Return the symbols of blocks with segments in some sizes."""
    factors = (factor for dim in dims if isinstance(dim, tuple) for factor in dim[1])
    return {factor for factor in factors if factor.startswith(SEGMENTS)}


def _cut_sizes(claims: Iterable[Claim]) -> list[Dim]:
    return [dim for claim in claims if claim.kind == "split" for dim in (claim.shape or ())[claim.dim : claim.dim + 1]]


def _lose_segments(seen: Seen) -> str | None:
    """Return the problem with a result whose segments differ from those of the operands' blocks."""
    cut = [claim for claim in seen.operands if claim.kind == "split"]
    read = [_segments(_cut_sizes((claim,))) for claim in cut]
    if not cut:
        read = [_segments(claim.value or ()) for claim in seen.operands if claim.kind == "local"]
    for index, claim in enumerate(seen.results):
        made = _segments(_cut_sizes((claim,)))
        if claim.kind == "split" and (made or any(read)) and any(one != made for one in read or [set()]):
            return f"result {index} is claimed {said(claim)}, with blocks of {claim.shape} that nobody has read"
    return None


def _is_of_block(seen: Seen) -> bool:
    """Return whether a node has varying values, or treats its block as the whole batch."""
    own = any(claim.kind == "partial" and claim.op == "own" for claim in (*seen.operands, *seen.results))
    return own or local_indices.kind_of(seen.node) in OF_BLOCK


def _kept(seen: Seen, operand: int, result: int) -> str | None:
    """Return the problem with the claim of a result that forwards an operand."""
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
    """Return the problem with a Merge: each operand must have the result's claim; empty containers and zeros do."""
    made, which = seen.results
    if which.differs or any(entry is not None for entry in which.value or ()):
        return f"which path was taken is claimed {said(which)}, and {which.value}"
    for i, read in enumerate(seen.operands):
        if (read.kind == "any" and made.kind != "local") or read.kind == "unknown":
            continue
        adds = (read.kind, made.kind, made.op, read.zero) == ("replicated", "partial", "sum", True)
        if read[:3] != made[:3] and not adds and read.kind != "any":
            return f"input {i} is {said(read)}, and result 0 claimed {said(made)}"
        if made.zero and not read.zero:
            return f"result 0 is claimed to be zero, and input {i} is not"
        if made.value is not None and read.kind != "any" and not _says(read.value, made.value):
            return f"input {i} is {read.value}, and result 0 claimed {made.value}"
    return None


def _says(value: Sequence[Any] | None, claimed: Sequence[Any]) -> bool:
    pairs = zip(value or (), claimed, strict=False)
    return value is not None and len(value) == len(claimed) and all(b in (None, a) for a, b in pairs)


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


def _judge_axes(seen: Seen, *, folded: bool) -> str | None:
    """Return the problem with the axes that a broadcast's gradient is claimed to name: [B, T, 8] and [B, U, 1].

    TensorFlow's kernel also names dimensions that are 1 on both sides. For the whole value it does not matter whether
    these are summed, but it does for a block without rows; a constant names none of them.
    """
    for index, claim in enumerate((*seen.operands, *seen.results)):
        if claim.differs and (index >= 2 or claim.kind != "local"):
            return f"it reads and makes what is the same everywhere, and one is {said(claim)}"
    shapes = [[whole(dim, seen.batch) for dim in claim.value or ()] for claim in seen.operands]
    is_known = all(claim.value is not None for claim in seen.operands)
    rank = max(map(len, shapes))
    left, right = ([*[1] * (rank - len(shape)), *shape] for shape in shapes)
    for claim, mine, others in zip(seen.results, (left, right), (right, left), strict=True):
        axes = (frozenset(claim.value), frozenset(claim.value)) if claim.value is not None else claim.axes
        if axes is None:
            continue
        if not is_known:
            return f"it is claimed to name {sorted(map(str, axes[1]))}, and a shape is not known"
        sure, possible = axes
        names_ones = not folded and not (mine == others and None not in mine)
        for axis, (size, other) in enumerate(zip(mine, others, strict=True)):
            if axis in sure and size != 1:
                return f"it is claimed to name {axis}, where {size} is not known to be stretched to {other}"
            if axis in possible:
                continue
            if not (other == 1 or (isinstance(size, int) and size != 1) or line_up(size, other, BATCH)):
                return f"it is claimed not to name {axis}, where {size} may be stretched to {other}"
            if names_ones and all(not isinstance(one, int) or one == 1 for one in (size, other)):
                return f"it is claimed not to name {axis}, where {size} and {other} may both be 1"
    return None


SPECIAL: Mapping[str, Callable[[Seen], str | None]] = {
    "Const": _constant,
    "IdentityN": _each_kept,
    **dict.fromkeys(("Switch", "RefSwitch"), _switch),
    **dict.fromkeys(("Merge", "RefMerge"), _merge),
    "TensorListLength": _length,
    **dict.fromkeys(("Shape", "ShapeN", "Size", "Rank", "VariableShape", "TensorListElementShape"), _measured),
}
"""Ops that forward operands, and ops whose results depend on no data."""
