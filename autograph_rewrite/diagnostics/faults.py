"""All faults of a file, reported together, each with its line."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autograph_rewrite.errors import RewriteError

# Enough to see the pattern; a file of another kind would otherwise print a page per line.
SHOWN = 50


@dataclass(frozen=True)
class FileFault:
    """One thing that is wrong, the place where it stands and, if there is one, the way out."""

    where: str
    message: str
    hint: str | None = None
    line: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f" ({self.hint})" if self.hint else "")


def raise_if_any(faults: Iterable[FileFault], *, error: type[RewriteError], title: str) -> None:
    """Raise one `error` that lists all `faults`; do nothing when there are none.

    Args:
        faults: what was found. They are told in the order of their lines, each once.
        error: the type to raise. Its `where` is the place of the first fault.
        title: what was read, as in "configs/ring.yaml"; it opens a message of several lines.
    """
    listed = sorted(dict.fromkeys(faults), key=lambda fault: fault.line)
    if listed:
        raise failure(listed, error=error, title=title)


def failure(faults: Sequence[FileFault], *, error: type[RewriteError], title: str = "") -> RewriteError:
    """The error that tells these faults.

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
    made.where = faults[0].where  # for programs; the text above says it already
    return made


def did_you_mean(word: str, known: Sequence[str], *, noun: str = "known keys") -> str:
    """A hint that names the closest of `known`, or all of them when none is close.

    Args:
        noun: what `known` is called, after "known" and in the plural.
    """
    by_case = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_case, n=1)
    if close:
        return f"did you mean '{by_case[close[0]]}'?"
    return f"{noun}: {', '.join(known)}" if known else f"there are no {noun.removeprefix('known ')} here"


def either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


# Warnings that name the line of the user's program, however deep in the package they are given.

PACKAGE = __name__.partition(".")[0]


def warn_user(message: str) -> None:
    """Warn at the innermost line that is not the package's own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{PACKAGE}: {message}", stacklevel=level)


def _is_own(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")
