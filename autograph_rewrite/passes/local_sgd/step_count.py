"""What local steps need of the runtime: a counter that is kept from step to step, and a part of each batch.

before   step = Identity(0)                     next = step + 1
after    step = Identity(ReadVariableOp(n))     next = step + 1 ──► n
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite, Site
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable
from autograph_rewrite.passes.local_sgd.averages import SCOPE
from autograph_rewrite.passes.local_sgd.train_alone import Alone
from autograph_rewrite.resolve.server_nodes import ServerRegion

TOO_FEW = (
    "with local_sgd each replica trains on its part of the batch, and this batch has fewer examples than replicas: "
    "drop the last one (drop_remainder=True), or leave local_sgd out"
)


def keep_counts(rewrite: Rewrite, blocks: Blocks, alone: Alone) -> None:
    """Keep the counters of steps, and refuse a batch that leaves a replica without examples.

    Args:
        blocks: of the batch.
        alone: what replicas train by themselves.
    """
    for counter in alone.averages.counters:
        near = counter.before.output()
        kept = AuxiliaryVariable(rewrite, f"{SCOPE}/steps", (), dtypes.INT64, near=near)
        counter.before.set_input(0, kept.before)
        kept.becomes(counter.after, counter.after)
    parts = [node for node in alone.own.parts if node.name in rewrite.graph.nodes]
    if not parts:
        return
    build = FoldedBuilder.of(rewrite, blocks.source, f"{SCOPE}/examples", span=Span.ONCE)
    enough = build.op("GreaterEqual", blocks.part, build.const(rewrite.local, dtypes.INT32, "replicas"), what="suffice")
    text = {"value": np.asarray(TOO_FEW.encode(), object), "dtype": dtypes.STRING}
    said = rewrite.add("Const", [], Site(f"{SCOPE}/too_few", Span.ONCE, blocks.source.node), attrs=text)
    site = Site(f"{SCOPE}/check", Span.ONCE, blocks.source.node)
    check = rewrite.add("Assert", [enough, said.output()], site, attrs={"T": (dtypes.STRING,)})
    for node in parts:
        node.add_control(check)


def _run(rewrite: Rewrite) -> None:
    """Count the steps between averages, and give each replica examples (`local_sgd`)."""
    keep_counts(rewrite, rewrite.get(Blocks), rewrite.get(Alone))


COUNT_STEPS = Pass("count-steps", _run, lambda rewrite: rewrite.has(Alone), (ServerRegion, Blocks))
