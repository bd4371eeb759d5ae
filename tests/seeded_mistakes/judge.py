"""Make one mistake, ask the certificate about it, run it, and put both answers into a row."""

from __future__ import annotations

from typing import Any

from tests.seeded_mistakes.execute import execute
from tests.seeded_mistakes.seed import Mistake, StillbornError, spoil


def judge(mistake: Mistake) -> dict[str, Any]:
    """Return what came of a mistake: `verdict` by execution, `refused` by the certificate, and the sentence."""
    row: dict[str, Any] = {
        "draw": str(mistake.draw),
        "kind": mistake.kind.__name__,
        "boundary": mistake.boundary,
        "number": mistake.number,
    }
    try:
        spoilt = spoil(mistake)
    except StillbornError as error:
        return row | {"verdict": "stillborn", "detail": str(error)}
    outcome = execute(mistake.draw, spoilt.item)
    return row | {"verdict": outcome.verdict, "detail": outcome.detail, "sentence": spoilt.sentence}
