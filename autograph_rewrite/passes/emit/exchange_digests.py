"""Exchange digests of the inputs of each process in the step; the runtime compares them.

    autograph_batch/digest ──► one row with the size of the part ──► sum over the processes ──► autograph_batch/digests
                                 ▲ waits
    IteratorGetNext ─────────────┘

The data end in the same step in all processes, and in that step no process may begin an exchange: the process that ends
first leaves the step, and the others would wait for it instead of finding that their data end, too.

If variables are on servers, this is the only collective of most steps, and a job goes on after a failed step. Then the
readers of the batch wait until the exchange is over:

    autograph_batch/digests ──► every reader of a batch input

A process whose step fails during the exchange frees its buffers. Then the collective of the others fails, too, and
TensorFlow refuses all later collectives of a process in which one has failed.
"""

from __future__ import annotations

from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.anchors import DIGEST_OF_PROCESS, DIGESTS_OF_ALL
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.plan.parts.messages import SIZES


def _exchange_digests(rewrite: Rewrite) -> None:
    """Exchange digests of the inputs of a job's processes, with the sizes of their parts; the runtime compares them."""
    blocks = rewrite.get(Blocks)
    rewrite.graph.set_anchor(DIGEST_OF_PROCESS, blocks.digest)
    rewrite.graph.set_anchor(DIGESTS_OF_ALL, blocks.digests)
    if rewrite.plan.homes and not rewrite.plan.is_asynchronous:
        _hold_readers(rewrite, blocks.digests.node)
    if blocks.static is None:  # the row waits for the draw that it measures
        return
    row = next(use.node for use in blocks.digest.uses)
    for draw in _drawn_by_all(rewrite):
        row.add_control(draw)


def _hold_readers(rewrite: Rewrite, exchanged: Node) -> None:
    """Let the readers of the batch, which may fail because of its values, wait until the exchange is over."""
    before = ancestors([exchanged])
    batch = [info.tensor for info in rewrite.item.inputs.values() if info.batch_axis is not None]
    readers = {use.node for tensor in batch for use in rewrite.graph.value(tensor).uses} - before
    for node in sorted(readers, key=lambda node: node.name):
        node.add_control(exchanged)


def _drawn_by_all(rewrite: Rewrite) -> list[Node]:
    """Return the draws that are common to all targets that draw: so the digest lets no step draw more."""
    always = unconditional_nodes(rewrite.state.order)
    drawn = [{node for node in ancestors([target]) if has(node.op, "draws_element")} for target in rewrite.targets]
    common = set.intersection(*filter(None, drawn)) if any(drawn) else set()
    return sorted(common & always, key=lambda node: node.name)


def _is_in_a_job(rewrite: Rewrite) -> bool:
    """Return whether processes exchange sizes and digests in each step."""
    return rewrite.processes > 1 and (rewrite.get(Blocks).source.name, SIZES) in rewrite.edges


EXCHANGE_DIGESTS = Pass("exchange-digests", _exchange_digests, _is_in_a_job, (Homes, Blocks))
