"""Insert user passes into the pipeline: each runs after the pass that it names, and is verified like a built-in one.

    propagate ► decompose ► ...     with fold-bias after propagate:     propagate ► fold-bias ► decompose ► ...

After a user pass that edits the graph, unneeded nodes are dropped and placements propagated again.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.config.user_code import blaming
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.user_extensions import PassFunction, function_of


def with_user_passes(passes: Sequence[Pass], plan: Plan) -> tuple[Pass, ...]:
    """Return passes with the user passes of a plan; one that follows a pass that is left out runs first.

    Raises:
        PlanError: a user pass is not registered in this program.
    """
    if not plan.passes:
        return tuple(passes)
    names = {one.name for one in passes}
    behind: dict[str, list[Pass]] = {}
    for own in plan.passes:
        made = Pass(own.name, _guarded(own.name, function_of(own)))
        behind.setdefault(own.after if own.after in names else "", []).append(made)
    return (*behind.get("", ()), *(each for one in passes for each in (one, *behind.get(one.name, ()))))


def _guarded(name: str, function: PassFunction) -> PassFunction:
    def run(rewrite: Rewrite) -> None:
        edits = rewrite.graph.edits
        with blaming(f"the pass '{name}' of your own has failed", PassError):
            function(rewrite)
        if rewrite.graph.edits != edits:
            _name_outputs(rewrite)
            eliminate_dead_code(rewrite.graph, rewrite.roots)
            if rewrite.has(Propagation):
                rewrite.put(revise(rewrite.get(Propagation)))

    run.__doc__ = function.__doc__
    return run


def _name_outputs(rewrite: Rewrite) -> None:
    """Give the value that replaced an output the name of that output, by which callers fetch it."""
    graph = rewrite.graph
    for value, info in zip(rewrite.outputs, rewrite.item.outputs.values(), strict=True):
        name, _, index = info.tensor.partition(":")
        if value.node.name == name or value.index != int(index or 0):
            continue
        if name in graph.nodes:
            take_name(graph, graph.nodes[name], graph.unique_name(f"{name}/replaced"))
        take_name(graph, value.node, name)
