"""Seed mistakes into rewrites: at one boundary between two passes, one edit of one kind.

    draw ──► passes ... order-accesses ──► one mistake ──► the remaining passes ──► a graph that runs

Which node is hit follows from the names of draw, kind and boundary, so mutants never change.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autograph_rewrite import GraphItem
from autograph_rewrite.errors import RewriteError, VerifyError
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.graph import Graph
from tests.seeded_mistakes import accesses, blocks, exchanges, iterations
from tests.seeded_mistakes.bench import Bench, Kind, attempt
from tests.seeded_mistakes.draws import Draw
from tests.support.rewriting import run_pipeline

KINDS: tuple[Kind, ...] = (*accesses.KINDS, *exchanges.KINDS, *blocks.KINDS, *iterations.KINDS)
BOUNDARIES = ("order-accesses", "merge-instances", "roll-loop", "pad-empty-blocks")
"""The names of the passes behind which mistakes are seeded; the first is there in every rewrite."""
OTHER_BOUNDARY = 0.3
"""How often another one than the first is taken."""


class StillbornError(Exception):
    """There is nothing to spoil in that way, or the passes that follow refuse the spoilt graph."""


@dataclass(frozen=True)
class Mistake:
    """Which mistake is seeded into what.

    Attributes:
        draw: program and configuration.
        kind: what is done.
        boundary: the pass behind which it is done.
        number: tells mistakes apart that are alike in all that.
    """

    draw: Draw
    kind: Kind
    boundary: str = BOUNDARIES[0]
    number: int = 0

    def __str__(self) -> str:
        """Return its name."""
        return f"{self.draw}: {self.kind.__name__} behind {self.boundary} #{self.number}"


@dataclass(frozen=True)
class Spoilt:
    """A rewrite with a mistake in it."""

    item: GraphItem
    sentence: str


def spoil(mistake: Mistake, certificate: Certifier | None = None, *, let_through: bool = False) -> Spoilt:
    """Rewrite the program of a mistake, and make it on the way.

    Args:
        mistake: which.
        certificate: sees the rewrite, with the mistake in it.
        let_through: a refusal is raised, and does not only mean that no graph comes out.

    Raises:
        StillbornError: no graph comes out.
    """
    draw, said = mistake.draw, list[str]()
    try:
        plan = draw.plan
    except RewriteError as error:
        raise StillbornError(f"{type(error).__name__}: {error}") from error

    def observe(name: str, graph: Graph) -> None:
        if name != mistake.boundary or said:
            return
        instances = plan.replicas if name == "roll-loop" else plan.instances
        instances *= plan.model.size if plan.model is not None else 1
        bench = Bench(graph, draw.flat, instances, random.Random(str(mistake)))
        if sentence := attempt(mistake.kind, bench):
            said.append(sentence)
        else:
            raise StillbornError("nothing to spoil")

    try:
        item = run_pipeline(draw.flat, plan, observers=[observe], certificate=certificate)
    except (RewriteError, ValueError, KeyError, IndexError) as error:
        if let_through and isinstance(error, VerifyError):
            raise
        raise StillbornError(f"{type(error).__name__}: {error}") from error
    if not said:
        raise StillbornError("the rewrite has no such boundary")
    return Spoilt(item, said[0])


def is_refused(draw: Draw) -> bool:
    """Tell whether the program cannot be rewritten at all under its configuration: nothing can be spoilt."""
    try:
        run_pipeline(draw.flat, draw.plan)
    except RewriteError:
        return True
    return False


def mistakes(draw: Draw, made: Counter[str]) -> Iterator[Mistake]:
    """Yield mistakes for a draw, those first of whose kind the fewest have been made.

    Args:
        draw: what they are seeded into.
        made: how many there are of each kind; the caller counts those from which a graph came.
    """
    rng = random.Random(str(draw))
    for number in range(2):
        kinds = list(KINDS)
        rng.shuffle(kinds)
        for kind in sorted(kinds, key=lambda kind: made[kind.__name__]):
            boundary = rng.choice(BOUNDARIES) if rng.random() < OTHER_BOUNDARY else BOUNDARIES[0]
            if kind in iterations.KINDS:
                boundary = "roll-loop"
            if boundary == "roll-loop" and "loop" not in draw.config:
                continue
            yield Mistake(draw, kind, boundary, number)
