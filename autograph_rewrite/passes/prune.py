"""Begin a rewrite: drop unneeded nodes, record what runs write, and keep captured variables in this process."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.ir.run_writes import Written, writes_of
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.order_accesses import AccessOrder, access_order
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.replica_devices import within_reach


@dataclass(frozen=True)
class Recorded:
    """The writes of each run of the original graph, and the names of its nodes."""

    writes: Written
    nodes: frozenset[str]


def _prune(rewrite: Rewrite) -> None:
    """Drop nodes that no output, target or initialiser needs; record what runs write, and in which order."""
    eliminate_dead_code(rewrite.graph, rewrite.roots)
    rewrite.put(access_order(rewrite.graph, rewrite.targets))
    rewrite.put(Recorded(writes_of(rewrite.graph), frozenset(rewrite.graph.nodes)))


def _bind(rewrite: Rewrite) -> None:
    """Keep variables that a function has captured on devices of this process."""
    rewrite.plan = within_reach(rewrite.plan, rewrite.task)


ELIMINATE_DEAD_CODE = Pass("eliminate-dead-code", _prune, gives=(AccessOrder, Recorded))
BIND_CAPTURES = Pass("bind-captures", _bind, lambda rewrite: rewrite.captures)
