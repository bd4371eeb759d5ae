"""Contracts of lookups in shards: their results are valid within a block until they are stitched together.

    ids: split(0) ──► Where (in this shard) ──► rows of the shard ──► DynamicStitch ──► split(0), in the ids' order

The rewrite marks the links. The mark is not trusted: places in a block may go nowhere but to what looks them up in the
same block, and rows that were found have no rows to be aligned with but those of the same search.
"""

from __future__ import annotations

from autograph_rewrite.certify.contracts.seen import Seen, said
from autograph_rewrite.ir.graph import Node

MARK = "_autograph_blockwise"
READERS = frozenset(("Cast", "Reshape", "GatherNd", "DynamicStitch"))
"""What may read places in a block."""
LINKS = READERS | {"Where"}


def judge_blockwise(seen: Seen) -> str | None:
    """Return what is wrong with a link of a look-up."""
    node = seen.node
    if node.op not in LINKS:
        return f"{node.op} is no part of a look-up"
    if node.op == "Where" and (stray := _stray(node)) is not None:
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


def _stray(node: Node) -> Node | None:
    """Return a reader of places in a block that makes something else of them than a look-up."""
    for use in node.output().uses:
        if use.node.op not in READERS or (use.node.op == "GatherNd" and use.index != 1):
            return use.node
    return None
