"""Run chosen passes on a graph, and print the result as text with placements.

%dw: float32[3,1] @ partial(sum) = MatMul(%x, %dy) {transpose_a=true}

The text can be read again. Placements that it states are compared with what `propagate` finds; passes that begin behind
that take them as given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.dump import header
from autograph_rewrite.inspect.pass_snapshots import placements_of
from autograph_rewrite.ir.format.printer import render
from autograph_rewrite.ir.graph import Span
from autograph_rewrite.passes.base.pass_manager import Pass, run_passes
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.preconditions import require_no_servers
from autograph_rewrite.passes.propagate import take_placements_as_given
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class PrintedPasses:
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


NOTHING = PrintedPasses()


def optimize(
    item: TrainingGraph,
    plan: Plan,
    passes: Sequence[Pass],
    *,
    task: int = 0,
    shown: PrintedPasses = NOTHING,
    verify: bool = True,
) -> Rewrite:
    """Run passes on a copy of a normalised item.

    Args:
        item: flat graph; it is not changed. Its placements are compared, or taken as given.
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
        if Propagation in one.needs and not rewrite.has(Propagation) and item.placements:
            take_placements_as_given(rewrite)
        if one.name in shown.before:
            shown.write(f"# before {one.name}\n{text_of(rewrite, full=shown.full)}")
        run_passes(rewrite, [one], verify=verify)
        if one.name in shown.after:
            shown.write(f"# after {one.name}\n{text_of(rewrite, full=shown.full)}")
    return rewrite


def require_unfolded(item: TrainingGraph) -> None:
    """Refuse a graph on which passes have run that convert values.

    Raises:
        GraphError: nodes of it stand for an instance on every replica, or are such an instance.
    """
    hint = "begin with the original graph, or with what the passes before 'insert-reshards' leave"
    if any(node.span is not Span.ONCE for node in item.graph):
        raise GraphError("this graph is folded: passes have run on it, and what they found is not in it", hint=hint)
    if any(stated.span is not None for stated in item.placements.values()):
        raise GraphError("this graph is expanded: it has the instances of its nodes, and no more passes run", hint=hint)


def text_of(rewrite: Rewrite, *, full: bool = False) -> str:
    """Return the graph of a rewrite as text, with its signature and the placements of its values."""
    graph, moved = rewrite.graph, zip(rewrite.item.outputs.items(), rewrite.outputs, strict=True)
    outputs = {name: replace(info, tensor=value.name) for (name, info), value in moved}
    item = replace(rewrite.item, source=graph, outputs=outputs)
    return header(item, None) + render(graph, full=full, placements=placements_of(rewrite))
