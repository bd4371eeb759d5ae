"""User passes in the pipeline: each runs after the pass that it names, and is verified like the built-in ones.

    propagate ► decompose ► ...     with fold-bias after propagate:     propagate ► fold-bias ► decompose ► ...

Behind one that edits the graph, what nobody needs any more is dropped, and placements are propagated again.
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
    """Return passes with those of the user's own that a plan names; where the pass before one is left out, it is first.

    Raises:
        PlanError: one is not registered in this program.
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
    """Let what has taken the place of an output have its name, by which the outside asks for it."""
    graph = rewrite.graph
    for value, info in zip(rewrite.outputs, rewrite.item.outputs.values(), strict=True):
        name, _, index = info.tensor.partition(":")
        if value.node.name == name or value.index != int(index or 0):
            continue
        if name in graph.nodes:
            take_name(graph, graph.nodes[name], graph.unique_name(f"{name}/replaced"))
        take_name(graph, value.node, name)
