"""Turns every spelling of a device name that a user may write into its canonical name.

    CPU:0   /cpu:0   /device:CPU:0                 ->  /device:CPU:0
    /job:worker/task:1/GPU:0                       ->  /job:worker/replica:0/task:1/device:GPU:0

Pure text: `plan.verify` checks whether a device exists.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autograph_rewrite.errors import ConfigError

KINDS = ("CPU", "GPU", "TPU", "TPU_SYSTEM", "XLA_CPU", "XLA_GPU", "XPU", "NPU")

_PART = re.compile(r"(?P<key>job|replica|task|device):(?P<value>.+)", re.DOTALL)
_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9]{1,9}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class DeviceNameError(ConfigError, ValueError):
    """A text that names no device (also a ValueError, which lets pydantic collect it)."""


@dataclass(frozen=True)
class Device:
    """A device: its kind and index, and the process that owns it where that is another process."""

    kind: str
    index: int
    job: str | None = None
    replica: int = 0
    task: int = 0

    @property
    def short(self) -> str:
        """`CPU:0`, without the process."""
        return f"{self.kind}:{self.index}"

    def __str__(self) -> str:
        place = f"/job:{self.job}/replica:{self.replica}/task:{self.task}" if self.job else ""
        return f"{place}/device:{self.kind}:{self.index}"


@lru_cache(2**16)  # a job of thousands of workers asks for each name many times
def parse(text: str) -> Device:
    """Read a device name in any spelling that TensorFlow has.

    Raises:
        DeviceNameError: when `text` names no single device.
    """
    parts = text.removeprefix("/").split("/")
    process: dict[str, str] = {}
    for part in parts[:-1]:
        match = _PART.fullmatch(part)
        if match is None or match["key"] == "device" or match["key"] in process:
            raise DeviceNameError(
                f"'{text}' is not a device: its part '{part}' is out of place",
                hint="write CPU:0, or /job:worker/task:0/device:CPU:0",
            )
        process[match["key"]] = match["value"]
    kind, index = _kind_and_index(text, parts[-1])
    return Device(kind, index, *_process(text, process))


def canonical(text: str) -> str:
    """The canonical name of the device that `text` means."""
    return str(parse(text))


def process_of(text: str) -> str:
    """The process that owns a device, as in `/job:worker/replica:0/task:1`; empty for a device of this process."""
    return text.rpartition("/device:")[0]


def on_task(text: str, job: str, task: int) -> str:
    """The canonical name of a device of this process as another process calls it."""
    return str(replace(parse(text), job=job, replica=0, task=task))


def short(text: str) -> str:
    """The short name of a device of this process; the whole name of a device of another process."""
    device = parse(text)
    return str(device) if device.job else device.short


def accelerators(names: Iterable[str]) -> tuple[str, ...]:
    """The devices among `names` that are meant for compute, in their order, canonical.

    `TPU_SYSTEM` and `XLA_*` are views of a device that is also listed as `TPU`, `GPU` or `CPU`.
    """
    devices = (parse(name) for name in names)
    return tuple(str(device) for device in devices if device.kind in ("GPU", "TPU", "XPU", "NPU"))


def repeated(names: Sequence[str]) -> tuple[str, ...]:
    """The names that occur more than once, in order of their first occurrence."""
    return tuple(name for name, count in Counter(names).items() if count > 1)


def _kind_and_index(text: str, last: str) -> tuple[str, int]:
    """Read `CPU:0`, `cpu:0` or `device:CPU:0`."""
    explicit = last.startswith("device:")
    kind, colon, index = last.removeprefix("device:").partition(":")
    if not explicit and kind in ("job", "replica", "task"):
        raise DeviceNameError(f"'{text}' names a process, not a device", hint=f"write {text}/device:CPU:0")
    if _KIND.fullmatch(kind) is None:
        raise DeviceNameError(f"'{text}' is not a device", hint="write a kind and an index, like CPU:0")
    if not colon:
        raise DeviceNameError(f"'{text}' has no index", hint=f"write {_with_index(kind)}")
    if _NUMBER.fullmatch(index) is None:
        raise DeviceNameError(
            f"'{text}' is not a device: its index '{index}' is not a number", hint=f"write {kind.upper()}:0"
        )
    # Plug-ins register more kinds. Those need the prefix `device:`, so that a typing error is not taken for one.
    if not explicit and kind.upper() not in KINDS:
        close = difflib.get_close_matches(kind.upper(), KINDS, n=1)
        hint = f"did you mean '{close[0]}:{index}'?" if close else "spell a plug-in's kind /device:KIND:0"
        raise DeviceNameError(f"'{text}' is not a device: there is no kind '{kind}'", hint=hint)
    return kind.upper(), int(index)


def _process(text: str, parts: dict[str, str]) -> tuple[str | None, int, int]:
    """Read job, replica and task."""
    job = parts.get("job")
    if parts and job is None:
        hint = "write /job:worker/task:0/device:CPU:0"
        raise DeviceNameError(f"'{text}' names a task without its job", hint=hint)
    if job is not None and _JOB.fullmatch(job) is None:
        raise DeviceNameError(f"'{text}' is not a device: '{job}' is no name of a job")
    for key in ("replica", "task"):
        if _NUMBER.fullmatch(parts.get(key, "0")) is None:
            raise DeviceNameError(f"'{text}' is not a device: its {key} '{parts[key]}' is not a number")
    return job, int(parts.get("replica", "0")), int(parts.get("task", "0"))


def _with_index(kind: str) -> str:
    """`CPU:0` for `CPU`, `GPU:1` for `GPU1`."""
    match = re.fullmatch(r"([A-Za-z_]+?)([0-9]*)", kind)
    name, index = match.groups() if match else (kind, "")
    return f"{name.upper()}:{index or 0}"
