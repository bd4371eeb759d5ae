"""Define the values of `strategy.name`: a builder of this package, or a user's `path/to/file.py:Class`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema

from autograph_rewrite.diagnostics.faults import did_you_mean, either

StrategyName = Literal[
    "AllReduce",
    "PS",
    "PSLoadBalancing",
    "PartitionedPS",
    "UnevenPartitionedPS",
    "PartitionedAR",
    "RandomAxisPartitionAR",
    "Parallax",
    "FSDP",
    "Pipeline",
    "Auto",
]

KNOWN: tuple[str, ...] = get_args(StrategyName)
OWN = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def own_builder(name: str) -> tuple[str, str] | None:
    """The file and the class that `path/to/file.py:Class` names; None for a builder of this package."""
    match = OWN.fullmatch(name)
    return (match["file"], match["name"]) if match else None


def known_or_own(name: str, known: Sequence[str] = KNOWN) -> str:
    """Return a name that is known, or that names a class of the user.

    Raises:
        ValueError: it is neither.
    """
    if name in known or own_builder(name):
        return name
    hint = did_you_mean(name, known)
    close = f" ({hint})" if hint.startswith("did you mean") else ""
    raise ValueError(f"must be {either([*known, 'path/to/file.py:Class'])}, not {name!r}{close}")


BuilderName = Annotated[
    str,
    Field(strict=True),
    AfterValidator(known_or_own),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": list(KNOWN)}, {"type": "string", "pattern": r"\.py:"}]}),
]
