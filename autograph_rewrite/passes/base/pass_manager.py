"""Define passes as values, and run them: with conditions, timing, verification, observers and the certificate.

PIPELINE = (Pass("propagate", propagate, gives=(Propagation,)), Pass("loop", roll, when=is_looped), ...)
run_passes(rewrite, PIPELINE)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import PassError, VerifyError, add_note
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


# Select passes by name; refuse a selection in which a pass lacks the result of another.
#
# only propagate,decompose                 two passes
# stop after place-reductions              all up to it
# skip rematerialize                       all but it: what it gives, others give as well, or nobody needs


def select(
    passes: Sequence[Pass],
    *,
    only: Sequence[str] = (),
    stop_after: str | None = None,
    skip: Collection[str] = (),
    given: Collection[type] = (),
) -> tuple[Pass, ...]:
    """Return the selected passes of a pipeline.

    Args:
        passes: the whole pipeline, in order.
        only: names of the passes to run, in the order to run them; none: all.
        stop_after: name of the last pass to run.
        skip: names of passes to leave out.
        given: types of the results that exist before any pass runs.

    Raises:
        PassError: no pass has one of the names, or a pass needs a result that no selected pass before it gives.
    """
    require_known((*only, *([stop_after] if stop_after else []), *skip), passes)
    known = {one.name: one for one in passes}
    chosen = [known[name] for name in only] if only else list(passes)
    if stop_after is not None:
        if known[stop_after] not in chosen:
            raise PassError(f"'{stop_after}' is not among the passes to run", hint="name it there, too")
        chosen = chosen[: chosen.index(known[stop_after]) + 1]
    chosen = [one for one in chosen if one.name not in skip]
    _require_needs(chosen, passes, given)
    return tuple(chosen)


def require_known(names: Iterable[str], passes: Sequence[Pass]) -> None:
    """Raise a PassError for a name that no pass has."""
    known = [one.name for one in passes]
    for name in names:
        if name not in known:
            raise PassError(f"there is no pass '{name}'", hint=did_you_mean(name, known, noun="passes"))


def _require_needs(chosen: Sequence[Pass], passes: Sequence[Pass], given: Collection[type]) -> None:
    found = set(given)
    for one in chosen:
        for kind in one.needs:
            if kind not in found:
                giver = next(other.name for other in passes if kind in other.gives)
                raise PassError(
                    f"the pass '{one.name}' needs the {kind.__name__} that '{giver}' finds",
                    hint="let that one run before it",
                )
        found.update(one.gives)
