"""Let reads of a variable on its server wait for the writes of worker 0 since the last step.

    written, fed ──► Switch ─┬─ false ──► Identity ──────────────────┬─► Merge ──^──► ResourceGather(w @ ps)
                             └─ true ───► Identity ◄──^── worker 0 has begun

Each worker knows what the program writes between two steps (`runtime.function.session_step`), but only worker 0 writes
it on the server, before its step begins. In all other steps no worker waits.
"""

from __future__ import annotations

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.rewriting import Rewrite, Site
from autograph_rewrite.passes.collectives.server_stores import ServerBuilder

PREFIX = "autograph_written"
FLAG = "flag"
"""Name, after prefix and variable, of the placeholder: whether the program has written since the last step."""


def await_writes(rewrite: Rewrite, variable: str, device: str, reads: list[Node]) -> None:
    """Let reads wait for writes between two steps.

    Args:
        variable: the name of its handle.
        device: holds the variable.
        reads: of its rows, or of a shard, outside of loops.
    """
    name = f"{PREFIX}/{variable}"
    begun = ServerBuilder(rewrite, device, reads[0], name).const(True, dtypes.BOOL, "begun", on_server=True)

    def add(op: str, what: str, *inputs: Value, controls: tuple[Node, ...] = (), **attrs: object) -> Node:
        site = Site(f"{name}/{what}", ONCE, reads[0])
        return rewrite.add(op, inputs, site, controls=controls, attrs=attrs or None)

    told = add("NoOp", "told", controls=(begun.node,))  # `delegate_to_chief` turns it into a token
    flag = add("Placeholder", FLAG, dtype=dtypes.BOOL, shape=()).output()  # Grappler folds one with a default
    switch = add("Switch", "switch", flag, flag)
    free = add("Identity", "free", switch.output(0)).output()
    waited = add("Identity", "waited", switch.output(1), controls=(told,)).output()
    merged = add("Merge", "merge", free, waited, N=2)
    for node in reads:
        node.add_control(merged)
