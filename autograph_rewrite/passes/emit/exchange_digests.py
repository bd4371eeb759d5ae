"""Consistency check in the step: digests of what each process was fed, exchanged and compared by the runtime.

autograph_batch/digest ──► one row with the size of the part ──► sum over the processes ──► autograph_batch/digests
"""

from __future__ import annotations

from autograph_rewrite.passes.base.anchors import DIGEST_OF_PROCESS, DIGESTS_OF_ALL
from autograph_rewrite.passes.base.context import Context
from autograph_rewrite.passes.collectives.block_bounds import Blocks


def exchange_digests(context: Context, blocks: Blocks) -> None:
    """Keep both for the runtime, where there are several processes."""
    if context.processes == 1:
        return
    graph = context.graph
    graph.set_anchor(DIGEST_OF_PROCESS, blocks.digest)
    graph.set_anchor(DIGESTS_OF_ALL, blocks.digests)
