"""Read the number of parts into which a dimension is cut, from a user's form to that of plans.

[1, 2]   [1, model]   [1, "?"]        (1, 2)   (1, MODEL)   (1, OPEN)
"""

from __future__ import annotations

import operator

MODEL = -1
"""As many parts as the model axis has devices."""
OPEN = 0
"""Cut or not, as follows from other tensors."""
HINT = "they begin at 1; 'model' stands for all devices of the model axis, and '?' or nothing leaves one open"


def read_parts(given: object) -> int | None:
    """Return a number of parts in the form of plans; None for an invalid one.

    Args:
        given: a number, "model", or "?" or None for a dimension that is left open.
    """
    if given is None or given == "?":
        return OPEN
    if given == "model":
        return MODEL
    try:
        count = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        return None
    return count if count >= 1 and not isinstance(given, bool) else None
