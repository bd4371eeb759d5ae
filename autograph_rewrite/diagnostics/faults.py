"""Report all faults of a file together, each with its line; warn at the line of the user's program."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autograph_rewrite.errors import RewriteError

# Enough to see the pattern; a file of another kind may have thousands of faults.
SHOWN = 50


@dataclass(frozen=True)
class FileFault:
    """One fault, its place, and a hint if there is one."""

    where: str
    message: str
    hint: str | None = None
    line: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f" ({self.hint})" if self.hint else "")


def raise_if_any(faults: Iterable[FileFault], *, error: type[RewriteError], title: str) -> None:
    """Raise one `error` that lists all `faults`; do nothing when there are none.

    Args:
        faults: they are listed in the order of their lines, without repetition.
        error: the type to raise. Its `where` is the place of the first fault.
        title: the file, as in "configs/ring.yaml"; it heads a list of several faults.
    """
    listed = sorted(dict.fromkeys(faults), key=lambda fault: fault.line)
    if listed:
        raise failure(listed, error=error, title=title)


def failure(faults: Sequence[FileFault], *, error: type[RewriteError], title: str = "") -> RewriteError:
    """Return the error that lists these faults.

    Args:
        faults: at least one.
        title: the file's name; it heads a list of several faults.
    """
    if len(faults) == 1:
        problem = str(faults[0])
    else:
        lines = [f"{title} has {len(faults)} problems:", *(f"  {fault}" for fault in faults[:SHOWN])]
        if len(faults) > SHOWN:
            lines.append(f"  ... and {len(faults) - SHOWN} more")
        problem = "\n".join(lines)
    made = error(problem)
    made.where = faults[0].where  # for programs; the message already has the place
    return made


def did_you_mean(word: str, known: Sequence[str], *, noun: str = "known keys") -> str:
    """Return a hint that names the closest of `known`, or all of them if none is close.

    Args:
        noun: "known" and a plural noun for the words in `known`.
    """
    by_case = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_case, n=1)
    if close:
        return f"did you mean '{by_case[close[0]]}'?"
    return f"{noun}: {', '.join(known)}" if known else f"there are no {noun.removeprefix('known ')} here"


def either(words: Sequence[str]) -> str:
    """Return `a, b or c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


# Warnings show the line of the user's program, however deep in the package they arise.

PACKAGE = __name__.partition(".")[0]


def warn_user(message: str) -> None:
    """Warn at the innermost line outside of this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{PACKAGE}: {message}", stacklevel=level)


def _is_own(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")
