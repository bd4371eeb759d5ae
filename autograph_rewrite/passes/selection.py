"""Select passes by name; refuse a selection in which a pass lacks the result of another.

only propagate,decompose                 two passes
stop after place-reductions              all up to it
skip rematerialize                       all but it: what it gives, others give as well, or nobody needs
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.errors import PassError
from autograph_rewrite.passes.base.pass_manager import Pass


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
