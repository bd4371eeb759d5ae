"""Places marked nodes, of which a pass knows more than the rule of the op: one attribute states it.

    whole                     it works on whole values: why, where the report shall say so
    pinned                    it runs once in each process, on whole values; its shape is what is recorded
    in block: rows apart      what it computes of a block belongs to that block: why; empty: it does not after all
    of block: own             it computes for its block as if that were the whole batch, or converts a varying value
    statistics                a batch normalisation, or its gradient, that works on its block only
    of each: id               each replica has its own from the start (`ir.types.replica_marks`)

In a chain that stays in its block, all operands are split or none: a node that reads both is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ops.facts.placement import Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import are_same, is_local
from autograph_rewrite.ops.rules.base import Op, Placed, others_whole, whole
from autograph_rewrite.ops.traits import has, operands

MARK = "_autograph_rule"
"""The attribute: a kind, and after a colon details."""
WHOLE, PINNED, IN_BLOCK, OF_BLOCK, STATISTICS, OF_EACH = (
    "whole", "pinned", "in block", "of block", "statistics", "of each",
)  # fmt: skip
BLOCKWISE, LOCAL_INDICES, ROWS_APART = "blockwise", "local indices", "rows apart"
"""Why a node stays in its block."""
OWN, OF_ONE, SUM, MEAN, AVERAGE, TOTAL = BLOCK_MARKS = ("own", "one", "sum", "mean", "average", "total")
"""Details of `OF_BLOCK`. `OWN` treats the block as the whole batch; so does `OF_ONE`, whatever its rule says of the
batch. The others convert a varying value: `SUM`, `MEAN` and `AVERAGE` combine the blocks that have examples (averages
of micro-batches may update one after another), `TOTAL` combines all replicas. Any other text is the placement of the
result, with the rows of its block: `split(0) 2*b` (`varying.let_out_as`)."""


def as_mark(kind: str, what: str = "") -> dict[str, bytes]:
    """Return the attribute that marks a node as of a kind."""
    return {MARK: encode("string", f"{kind}: {what}" if what else kind)}


def kind_of(node: Node | Op) -> str:
    """Return the kind of a marked node; "" for a node that is not marked."""
    return node.attr(MARK, b"").decode().partition(": ")[0]  # type: ignore[no-any-return]


def marked(node: Node | Op, kind: str) -> str | None:
    """Return the details of a node of a kind; None where it is of another kind, or of none."""
    found, _, what = node.attr(MARK, b"").decode().partition(": ")
    return what if found == kind else None


def mark(node: Node, kind: str, what: str = "") -> None:
    """Mark a node, instead of its present mark."""
    node.set_raw_attr(MARK, as_mark(kind, what)[MARK])


def make_whole(node: Node, why: str = "") -> bool:
    """Mark a node to work on whole values, unless its mark ties it to its block; return whether that is a change."""
    if kind_of(node) in (WHOLE, OF_BLOCK, OF_EACH) or why_in_block(node) in (BLOCKWISE, LOCAL_INDICES):
        return False
    mark(node, WHOLE, why)
    return True


def may_be_cut(node: Node) -> None:
    """Let a node that worked on whole values follow the rule of its op again."""
    if is_whole(node):
        node.drop_attr(MARK)


def is_whole(node: Node | Op) -> bool:
    """Return whether a node works on whole values, whatever its rule says."""
    return kind_of(node) == WHOLE


def keep_in_block(nodes: Iterable[Node], why: str) -> None:
    """Mark nodes to stay in their block; with an empty `why`, release them."""
    for node in nodes:
        if kind_of(node) in ("", IN_BLOCK):
            mark(node, IN_BLOCK, why)


def why_in_block(node: Node | Op) -> str:
    """Return why a node stays in its block; "" where it does not."""
    return marked(node, IN_BLOCK) or ""


def place_in_block(n: Op) -> Placed | None:
    """Place an op that stays in its block; None for any other op."""
    why = why_in_block(n)
    return _PLACERS[why](n) if why else None


# Marked ops that run on each block by itself although their results are no blocks of the global result.
#
#     block of ids ──► Where (in this shard) ──► rows of the shard ──► DynamicStitch ──► block of the rows
#
# Positions that are found in one block say nothing about the whole, but only that block uses them; the last op of the
# chain restores the order of the block.


def _place_blockwise(n: Op) -> Placed:
    """Leave each replica its block; if the first operand is not split by rows, work on whole values."""
    by_rows = [fact.placement == split(0) for fact in n.inputs]
    if not by_rows[0]:
        placed = whole(n)  # also for a split of columns, which a model axis may make
        return placed._replace(decompose=any(by_rows[1:]))  # no pass decomposes it, so it is an error
    if n.op != "Reshape" or n.rank(1) != 1:
        return Placed((split(0),) * len(n.output_dtypes))
    local = [i for i, entry in enumerate(n.value(1) or ()) if is_local(entry)]
    return Placed((split(local[0] if local else 0),))


# Marked ops whose row indices are relative to the local block: no index points outside its block.
#
#     block of positions + first row of each example, counted in the block ──► Gather(block of rows) ──► block
#     block of a mask ──► Where ──► Gather(block of rows) ──► the rows of the block that are kept
#
# The indices are valid only for rows of the same block (`passes.localize.localize_indices`). The gradient of this
# look-up adds up rows at the same indices, so it stays in the block, too.


def _place_local_indices(n: Op) -> Placed:
    """Leave each replica its block; if the inputs are not split, work on whole values."""
    made = _made(n)
    if made is None:
        placed = whole(n)
        cut = any(fact.placement.is_split for fact in n.inputs)
        return placed._replace(decompose=cut)  # no pass decomposes it, so it is an error
    kept = {i for i, fact in enumerate(n.inputs) if fact.placement.is_split} | set(operands(n.op, "given_size"))
    return Placed((made,), others_whole(n, *kept))


def _made(n: Op) -> Placement | None:
    """Return the placement of the result; None where the inputs are not blocks of the same rows."""
    if n.op == "Where":
        return split(0) if n.placement(0) == split(0) and n.rank(0) == 1 else None
    rows, numbers = n.inputs[:2]
    if n.op == "Range":
        limit = n.value(1)
        return split(0) if limit is not None and is_local(limit[0]) else None
    if not numbers.placement.is_split or numbers.placement.dim != 0 or rows.placement != split(0):
        return None
    if has(n.op, "adds_rows"):
        count = n.value(2)
        return split(0) if count and is_local(count[0]) else None
    return split(0)


# Marked pairs of ops that partition the rows of a batch and stitch them together again.
#
#     block of texts ──► StringSplitV2 ──► words, the row of each ──► RaggedTensorToTensor ──► block of rows of words
#
# Row numbers count rows of the block, and no other op may read them (`passes.localize.localize_indices`); words are
# blocks of words.


def _place_rows_apart(n: Op) -> Placed:
    """Leave each replica its rows if all inputs with rows are split by rows."""
    rows = _inputs_with_rows(n)
    blocks = [n.placement(i) == split(0) for i in rows]
    sizes = [n.inputs[i].split_size for i in rows]
    aligned = not has(n.op, "crosses") or all(are_same(size, sizes[0]) for size in sizes)
    if not all(blocks) or not aligned:
        placed = whole(n)
        return placed._replace(decompose=any(blocks) and n.op in ("SparseToDense", "RaggedTensorToTensor"))
    return Placed((split(0),) * len(n.output_dtypes), others_whole(n, *rows, *_sizes(n)))


def _inputs_with_rows(n: Op) -> tuple[int, ...]:
    if has(n.op, "crosses"):
        return tuple(i for i in range(len(n.inputs)) if n.rank(i) == 2)
    return {"SparseToDense": (0, 2), "RaggedTensorToTensor": (1, 4)}.get(n.op, (0,))


def _sizes(n: Op) -> tuple[int, ...]:
    """Return the inputs that say how many rows there are, for a block as for the whole."""
    return {"SparseToDense": (1,), "RaggedTensorToTensor": (3,)}.get(n.op, ())


_PLACERS: Mapping[str, Callable[[Op], Placed]] = {
    BLOCKWISE: _place_blockwise,
    LOCAL_INDICES: _place_local_indices,
    ROWS_APART: _place_rows_apart,
}
