"""The snapshots that a host has: which version of each, sent to another host in pieces, and never half a one.

    host of worker 0    fit-1.npz changes ──► version (generation 3, 17) ──► pieces of 1 MiB ──┐
    second host         fit-1.npz (3, 17) ◄── renamed once it is whole ◄───────────────────────┘

Versions are what hosts compare: who leads fetches the newest, and all begin a generation with the same.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path

from autograph_rewrite.tools.launcher.agents.wire import CHUNK, Message, Wire

Version = tuple[int, int]
"""The generation that took a snapshot, and its number in it: a later one is greater."""
_NAME = re.compile(r"[a-z]+(-[0-9]{1,6})?")
_SUFFIX = ".npz"


class Snapshots:
    """The snapshots of a host.

    Args:
        folder: where they are.

    Attributes:
        versions: of each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[str, Version] = {}
        self._known: dict[str, int] = {}
        self._count = 0

    def changed(self, generation: int) -> dict[str, int]:
        """Return the snapshots that a worker of this host has written since, and when."""
        found = {}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            name = path.name.removesuffix(_SUFFIX)
            if not _NAME.fullmatch(name):  # one that is being written, and may be renamed at any moment
                continue
            written = path.stat().st_mtime_ns
            if self._known.get(name) == written:
                continue
            self._count += 1
            self._known[name], self.versions[name], found[name] = written, (generation, self._count), written
        return found

    async def send(self, wire: Wire, name: str) -> None:
        """Send a snapshot to another host.

        Args:
            wire: leads there.
        """
        version = self.versions[name]
        with open(self._path(name), "rb") as file:  # a newer one has another file
            size, at = os.fstat(file.fileno()).st_size, 0
            while at < size and wire.is_open:
                data = file.read(CHUNK)
                wire.post("piece", data, name=name, version=version, size=size, at=at)
                at += len(data)
                await wire.drained()
                await asyncio.sleep(0)

    def take(self, message: Message, data: bytes) -> bool:
        """Keep a piece of a snapshot; return whether it is whole now.

        Args:
            message: says what it is a piece of.
        """
        name, version, at = str(message["name"]), message["version"], int(message["at"])
        new = self._path(f"coming-{name}") if _NAME.fullmatch(name) else None
        if new is None:
            return False
        new = new.with_suffix(".part")
        with open(new, "wb" if at == 0 else "ab") as file:
            if file.tell() != at:
                return False  # the rest of another
            file.write(data)
        if at + len(data) < int(message["size"]):
            return False
        written = new.stat().st_mtime_ns
        os.replace(new, self._path(name))
        self._known[name], self.versions[name] = written, (int(version[0]), int(version[1]))
        return True

    def keep_only(self, versions: Mapping[str, Version]) -> None:
        """Forget the snapshots that are none of these.

        Args:
            versions: of those that count.
        """
        for name in [name for name, version in self.versions.items() if versions.get(name) != version]:
            self._path(name).unlink(missing_ok=True)
            del self.versions[name]
            self._known.pop(name, None)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def versions_of(said: object) -> dict[str, Version]:
    """Read versions from a message.

    Args:
        said: what it says.
    """
    assert isinstance(said, dict)
    return {str(name): (int(version[0]), int(version[1])) for name, version in said.items()}
