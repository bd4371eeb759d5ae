"""Define passes as values, and run them: with conditions, timing, verification, observers and the certificate.

PIPELINE = (Pass("propagate", propagate, gives=(Propagation,)), Pass("loop", roll, when=is_looped), ...)
run_passes(rewrite, PIPELINE)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import VerifyError, add_note
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import Mesh
from autograph_rewrite.ir.verify.folded import check_folded
from autograph_rewrite.passes.base.report import PassRecord
from autograph_rewrite.passes.base.rewriting import Rewrite

GraphObserver = Callable[[str, Graph], None]


class RewriteObserver:
    """Observes the results of passes, such as placements, in addition to the graph."""

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Look at a rewrite after the pass of that name, without changing it."""
        raise NotImplementedError


Observer = GraphObserver | RewriteObserver
"""Called after each pass with its name and the folded graph."""

WHILE = "while running pass '{}'"
"""The note by which an error names its pass."""


def always(rewrite: Rewrite) -> bool:
    """Run the pass in every rewrite."""
    return True


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: its name in messages, in records and in the provenance of nodes.
        run: edits the graph or analyses it; the first line of its docstring is the summary.
        when: whether the pass has work in a rewrite; if not, it does not run and leaves no record.
        needs: types of the results of other passes that it reads.
        gives: types of the results that it leaves.
        is_whole: whether the graph keeps its invariants after the pass; otherwise a later pass restores them.
    """

    name: str
    run: Callable[[Rewrite], None]
    when: Callable[[Rewrite], bool] = always
    needs: tuple[type, ...] = ()
    gives: tuple[type, ...] = ()
    is_whole: bool = True

    @property
    def summary(self) -> str:
        """A sentence on what the pass does."""
        return (self.run.__doc__ or "").partition("\n")[0]


def run_passes(
    rewrite: Rewrite, passes: Sequence[Pass], *, verify: bool = False, observers: Sequence[Observer] = ()
) -> None:
    """Run passes in their order.

    Args:
        passes: those without work in this rewrite are skipped.
        verify: check the graph's invariants after each pass that has edited it.
        observers: called after each pass.

    Raises:
        RewriteError: a pass refuses; a note of the error names it.
    """
    for one in passes:
        if one.when(rewrite):
            _run(rewrite, one, verify=verify)
            for observe in observers:
                if isinstance(observe, RewriteObserver):
                    observe.after_pass(one.name, rewrite)
                else:
                    observe(one.name, rewrite.graph)
            if rewrite.request.certificate is not None and one.is_whole:
                rewrite.request.certificate.check(one.name, rewrite.graph)


def failed_pass(error: BaseException) -> str | None:
    """Return the name of the pass that raised an error; None if no pass did."""
    before, behind = WHILE.split("{}")
    said = [note for note in getattr(error, "__notes__", ()) if note.startswith(before)]
    return said[0].removeprefix(before).removesuffix(behind) if said else None


def _require_targets(rewrite: Rewrite) -> None:
    """Check that the graph still has the nodes that a step runs.

    Raises:
        VerifyError: a node was removed or renamed.
    """
    missing = [name for name in rewrite.item.targets if name not in rewrite.graph.nodes]
    if missing:
        raise VerifyError(f"the graph has no node '{missing[0]}' any more, which a step is to run")


def _run(rewrite: Rewrite, one: Pass, *, verify: bool) -> None:
    """Run one pass, and name it in provenance and errors."""
    graph = rewrite.graph
    stage("%s (%s nodes)", one.name, f"{len(graph):,}")
    before, graph.current_pass, began = len(graph), one.name, time.perf_counter()
    try:
        one.run(rewrite)
        graph = rewrite.graph  # a pass may have replaced the graph
        if verify and one.is_whole and graph.edits != rewrite.verified:
            micro = 1 if rewrite.is_rolled else rewrite.micro
            replicas, along = rewrite.instances // micro, rewrite.along
            mesh = Mesh.of(replicas, micro, rewrite.places, model=along, divided=rewrite.divided)
            check_folded(graph, mesh, rewrite.job.all_devices)
            _require_targets(rewrite)
            rewrite.verified = graph.edits
    except Exception as error:
        add_note(error, WHILE.format(one.name))
        raise
    finally:
        graph.current_pass = ""
    delta = len(graph) - before
    rewrite.records.append(PassRecord(one.name, time.perf_counter() - began, max(delta, 0), max(-delta, 0)))
