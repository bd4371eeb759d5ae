"""Run chosen passes on a graph, and print the result as text with placements.

%dw: float32[3,1] = MatMul(%x, %dy) {transpose_a=true}  # partial(sum)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from autograph_rewrite.analysis.facts.placement import REPLICATED
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.printer import render
from autograph_rewrite.ir.graph import Graph, Node, Span
from autograph_rewrite.item import GraphItem
from autograph_rewrite.passes.base.context import Context
from autograph_rewrite.passes.base.pass_manager import Pass, run_passes
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.preconditions import require_no_servers
from autograph_rewrite.plan.plan import Plan


@dataclass(frozen=True)
class Shown:
    """Passes around which the graph is printed.

    Attributes:
        before: names of passes.
        after: names of passes.
        write: takes each text, which begins with a line that says where it is from.
        full: with every attribute and constant.
    """

    before: Collection[str] = ()
    after: Collection[str] = ()
    write: Callable[[str], None] = print
    full: bool = False


NOTHING = Shown()


def optimize(
    item: GraphItem,
    plan: Plan,
    passes: Sequence[Pass],
    *,
    task: int = 0,
    shown: Shown = NOTHING,
    verify: bool = True,
) -> Rewrite:
    """Run passes on a copy of a normalised item.

    Args:
        item: flat graph; it is not changed.
        plan: the request, or a plan with edges.
        passes: what to run, in this order.
        task: which of the plan's processes the graph is for.
        shown: what to print on the way.
        verify: check the graph's invariants after each pass that has edited it.

    Raises:
        RewriteError: a pass refuses.
    """
    rewrite = Rewrite.of(Request(item, plan, task), item.graph.clone())
    require_no_servers(rewrite.job)
    for one in passes:
        if one.name in shown.before:
            shown.write(f"# before {one.name}\n{text_of(rewrite, full=shown.full)}")
        run_passes(rewrite, [one], verify=verify)
        if one.name in shown.after:
            shown.write(f"# after {one.name}\n{text_of(rewrite, full=shown.full)}")
    return rewrite


def require_unfolded(graph: Graph) -> None:
    """Refuse a graph on which passes have run.

    Raises:
        GraphError: nodes of it stand for an instance on every replica.
    """
    if any(node.span is Span.EACH for node in graph):
        raise GraphError(
            "this graph is folded: passes have run on it, and what they found is not in it",
            hint="begin with the original graph, and name the passes again",
        )


def text_of(rewrite: Rewrite, *, full: bool = False) -> str:
    """Return the graph of a rewrite as text, with the placement of every value that is not replicated."""
    return render(rewrite.graph, full=full, comments=comments_of(rewrite))


def comments_of(rewrite: Rewrite) -> Callable[[Node], str]:
    """Return what tells the placements of a node, where they are not replicated; nothing before `propagate`."""
    if not rewrite.has(Propagation):
        return lambda node: ""
    state = rewrite.get(Propagation)
    source = rewrite.get(Context).fact if rewrite.has(Context) else state.source

    def placements(node: Node) -> str:
        if node not in state.transfers:
            return ""
        values = [node.output(i) for i in range(len(state.transfers[node].outputs))]
        said = [f"batch along {state.whole_inputs[value]}" for value in values if value in state.whole_inputs]
        facts = [source(value).placement for value in values if value not in state.whole_inputs]
        said += [repr(placement) for placement in facts if placement != REPLICATED]
        said += ["reduced here" for value in values if value in state.reduced]
        return ", ".join(said)

    return placements
