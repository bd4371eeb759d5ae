"""Updates by rows of a table whose shards are on several servers: rows meet at the first, which hands them on.

    rows of every process ──► server 0: Unique, sum ──► update of shard 0
                                            └─ share of shard 1 ──► server 1: update of shard 1

Which rows there are is known only once all are together; a dense gradient is cut before it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from autograph_rewrite.cost.hardware.topology import Topology
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep
from autograph_rewrite.cost.tasks.communication import exchange_task
from autograph_rewrite.cost.tasks.task import Task
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.variable_ops import updates_rows
from autograph_rewrite.plan.parts.residence import OnServer, Residence


def meeting_places(folded: AnalyzedStep, residences: Mapping[str, Residence]) -> dict[str, Residence]:
    """Return where what leads to the update of each variable runs: where it lives, or on the first of its servers.

    Args:
        folded: the analysed step.
        residences: by variable, where it is not every replica.
    """

    def place(name: str, holder: Residence) -> Residence:
        by_rows = name in folded.uses and any(map(updates_rows, folded.uses[name].updates))
        return OnServer(holder.servers[0]) if by_rows and holder.is_on_server else holder

    return {name: place(name, holder) for name, holder in residences.items()}


def handed_on(node: Node, rows: int, holder: Residence, topology: Topology) -> Task | None:
    """Return the exchange that brings the other servers their rows; None where one process has all of them.

    Args:
        node: the update.
        rows: bytes of the rows that it is given, and of their indices; 0 where it is no update of rows.
        holder: the servers of its table.
        topology: devices and links.
    """
    if not rows:
        return None
    exchange = topology.hand_on(rows, *holder.servers)
    return exchange_task(f"rows of {node.name}", "hand_on", exchange) if exchange.seconds else None
