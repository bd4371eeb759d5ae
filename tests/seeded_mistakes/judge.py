"""Make one mistake, ask the certificate about it, run it, and put both answers into a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.graph import Graph
from tests.seeded_mistakes.execute import Outcome, execute
from tests.seeded_mistakes.seed import Mistake, StillbornError, spoil


def judge(mistake: Mistake, *, run_refused: bool = True) -> dict[str, Any]:
    """Return what came of a mistake: `verdict` by execution, `refused` by the certificate, and the sentence.

    Args:
        mistake: which.
        run_refused: also run what the certificate refuses; else its verdict is `not run`.
    """
    row: dict[str, Any] = {
        "draw": str(mistake.draw),
        "kind": mistake.kind.__name__,
        "boundary": mistake.boundary,
        "number": mistake.number,
    }
    began, guard = time.perf_counter(), Refusals()
    try:
        spoilt = spoil(mistake, guard)
    except StillbornError as error:
        return row | {"verdict": "stillborn", "detail": str(error)}
    run = run_refused or not guard.refusal
    outcome = execute(mistake.draw, spoilt.item) if run else Outcome("not run")
    return row | {
        "verdict": outcome.verdict,
        "detail": outcome.detail,
        "sentence": spoilt.sentence,
        "refused": guard.refusal,
        "not_covered": len(guard.certificate.not_covered),
        "seconds": round(time.perf_counter() - began, 2),
    }


class Refusals:
    """A certificate that notes its first refusal and lets the rewrite go on, so that it can be run."""

    def __init__(self) -> None:
        self.certificate = Certificate()
        self.refusal = ""

    def begin(self, graph: Graph, targets: Sequence[str]) -> None:
        """Take the original."""
        self.certificate.begin(graph, targets)

    def placed(self, graph: Graph, claims: Claims) -> None:
        """Take the claims of values along the model axis."""
        self.certificate.placed(graph, claims)

    def written(self, before: Graph, graph: Graph, claims: Claims) -> None:
        """Take the program of one device."""
        self.certificate.written(before, graph, claims)

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Take the claims."""
        self.certificate.claimed(graph, claims)

    def check(self, after: str, graph: Graph) -> None:
        """Check behind a pass, unless something was refused already."""
        if self.refusal:
            return
        try:
            self.certificate.check(after, graph)
        except VerifyError as error:
            self.refusal = f"behind {after}: {error}"
