"""Read regular files of limited size, and write files atomically, following links.

g.pb -> models/7.pb      read and written: models/7.pb; a reader sees the old bytes or the new ones, with their mode
/dev/zero, a pipe        refused before a byte is read
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autograph_rewrite.diagnostics.limits import VARIABLE, limit

AnyPath = str | os.PathLike[str]


class UnfitFileError(OSError):
    """The path is no regular file, or the file is too large; `strerror` says which."""

    def __init__(self, problem: str) -> None:
        super().__init__(0, problem)


def read_whole(path: AnyPath, most: str = "bytes") -> bytes:
    """Return the bytes of a file.

    Args:
        most: the name of the limit for its size.

    Raises:
        OSError: the file does not exist, cannot be read, is no regular file, or is too large.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK, a pipe waits for a writer
    try:
        known = os.fstat(handle)
        if stat.S_ISDIR(known.st_mode):
            raise UnfitFileError("this is no file, but a directory")
        if not stat.S_ISREG(known.st_mode):
            raise UnfitFileError("this is no file, but a device or a pipe")
        allowed = limit(most)
        if known.st_size > allowed:
            raise UnfitFileError(f"the file has {known.st_size:,} bytes, more than {allowed:,} ({VARIABLE}: {most})")
        with open(handle, "rb", closefd=False) as file:
            return file.read(known.st_size)  # not the bytes that are appended meanwhile
    finally:
        os.close(handle)


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces a file if the block ends without an error.

    A link is kept and its target is replaced; an existing file keeps its mode.

    Raises:
        OSError: the target is a folder or a device, or its folder cannot be written to.
    """
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    partial = target.with_name(f".{target.stem[:100]}.{secrets.token_hex(4)}{target.suffix}")
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
    try:
        yield partial
        if mode is not None:
            partial.chmod(mode)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: AnyPath, data: bytes) -> None:
    """Write a file so that no reader ever sees half of it.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as partial:
        partial.write_bytes(data)


def _mode(target: Path) -> int | None:
    """Return the permissions of an existing file; None for a new file."""
    try:
        known = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(known):
        raise UnfitFileError("this is a directory")
    if not stat.S_ISREG(known):
        raise UnfitFileError("this is no file, but a device or a pipe")
    return stat.S_IMODE(known)
