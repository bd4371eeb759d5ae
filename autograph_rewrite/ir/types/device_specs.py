"""Parses device specifications as graphs hold them: any part may be missing, and then means "any".

    /job:worker/task:1        the whole process            /device:GPU:*   some GPU
    /device:CPU:0, /cpu:0     of any process               (empty)         wherever TensorFlow likes

A plan names single devices; `ir.types.device_names` reads those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

_PART = re.compile(
    r"job:(?P<job>[A-Za-z][A-Za-z0-9_]*)|replica:(?P<replica>\d+|\*)|task:(?P<task>\d+|\*)"
    r"|(?:device:)?(?P<kind>[A-Za-z][A-Za-z0-9_]*|\*):(?P<number>\d+|\*)"
)


class Spec(NamedTuple):
    """A parsed specification; an empty part fits everything."""

    job: str = ""
    replica: str = ""
    task: str = ""
    kind: str = ""
    number: str = ""

    def fits(self, device: Spec) -> bool:
        """Return whether the two agree in every part that both state."""
        return all(not mine or not other or mine == other for mine, other in zip(self, device, strict=True))


@lru_cache(maxsize=4096)
def parse(text: str) -> Spec | None:
    """Read a specification; None when it is malformed."""
    found: dict[str, str] = {}
    for part in text.strip("/").split("/") if text else ():
        match = _PART.fullmatch(part)
        parts = {key: value for key, value in match.groupdict().items() if value} if match else {}
        if not parts or found.keys() & parts:
            return None
        found |= parts
    spec = Spec(**{key: "" if value == "*" else value for key, value in found.items()})
    return spec._replace(kind=spec.kind.upper())


def canonical(text: str) -> str:
    """Return one spelling for all spellings of a device; a malformed text is returned unchanged."""
    spec = parse(text)
    return text if spec is None else _spelled(spec)


def process(text: str) -> str:
    """Return the process of a device; empty where the text does not name one."""
    spec = parse(text)
    return "" if spec is None or not spec.task else _spelled(spec._replace(kind="", number=""))


def _spelled(spec: Spec) -> str:
    replica = spec.replica or ("0" if spec.job or spec.task else "")
    parts = (("job", spec.job), ("replica", replica), ("task", spec.task))
    kind = f"/device:{spec.kind}:{spec.number or '*'}" if spec.kind else ""
    return "".join(f"/{name}:{value}" for name, value in parts if value) + kind


def reachable(devices: Iterable[str]) -> list[Spec]:
    """Return the given devices and the host CPU of each."""
    specs = [spec for spec in map(parse, devices) if spec is not None]
    return list(dict.fromkeys([*specs, *(spec._replace(kind="CPU", number="0") for spec in specs)]))


def short(text: str) -> str:
    """Return `CPU:0` for `/device:CPU:0`; a text that names a process, or lacks kind or number, stays whole."""
    spec = parse(text)
    if spec is None or spec.job or spec.replica or spec.task or not spec.kind or not spec.number:
        return text
    return f"{spec.kind}:{spec.number}"
