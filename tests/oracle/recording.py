"""A recording: stored items, the cases, what each gave, and the commit that gave it; one compressed file."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.oracle.rewrites import Case, Outcome

FILE = Path(__file__).with_name("recorded.tar.xz")
CASES = "cases.json"


@dataclass(frozen=True)
class Recording:
    """What the rewrites of a commit gave."""

    commit: str
    outcomes: Mapping[Case, Outcome]

    def to_json(self) -> str:
        """A line for each case, so that two recordings can be compared by eye."""
        lines = [
            json.dumps({"case": asdict(case), "outcome": _told(outcome)}, sort_keys=True)
            for case, outcome in sorted(self.outcomes.items(), key=lambda pair: str(pair[0]))
        ]
        return "\n".join([json.dumps({"commit": self.commit}), *lines]) + "\n"

    @classmethod
    def of_json(cls, text: str) -> Recording:
        """Read what `to_json` wrote."""
        first, *lines = (json.loads(line) for line in text.splitlines())
        return cls(first["commit"], {Case(**one["case"]): Outcome.of(one["outcome"]) for one in lines})


def _told(outcome: Outcome) -> dict[str, object]:
    return {key: value for key, value in asdict(outcome).items() if value}


def write(recording: Recording, items: Path, file: Path) -> None:
    """Write a recording with its items; equal ones give equal bytes."""
    parts = {f"items/{one.name}": one.read_bytes() for one in sorted(items.glob("*.ar"))}
    parts[CASES] = recording.to_json().encode()
    with tarfile.open(file, "w:xz", preset=9) as archive:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def read(file: Path, items: Path) -> Recording:
    """Read a recording, and write its items to a folder."""
    with tarfile.open(file) as archive:
        parts = {one.name: archive.extractfile(one) for one in archive.getmembers() if one.isfile()}
        found = {name: part.read() for name, part in parts.items() if part is not None}
    for name, data in found.items():
        if name != CASES:
            (items / Path(name).name).write_bytes(data)
    return Recording.of_json(found[CASES].decode())
