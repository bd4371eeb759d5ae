"""Create the logical devices that a plan needs, or tell which line of code to add if TensorFlow has started.

TensorFlow fixes its devices when the first op runs. A program that builds its model first has to say beforehand how
many virtual CPU devices it wants; only mirrored variables need more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.requires import tensorflow


def ensure_devices(devices: Sequence[str]) -> None:
    """Make sure that this process has the devices, adding virtual CPU devices if TensorFlow has not started.

    Raises:
        ClusterError: some are missing and cannot be added any more.
    """
    tf = tensorflow()
    wanted = {parse(device).short for device in devices}
    cpus = 1 + max((parse(device).index for device in devices if parse(device).kind == "CPU"), default=0)
    if cpus > 1:
        _split_cpu(tf, cpus)
    present = [parse(device.name).short for device in tf.config.list_logical_devices()]
    missing = sorted(wanted.difference(present))
    if missing:
        raise ClusterError(_problem(missing, present), hint=_hint(missing, cpus))


def _split_cpu(tf: Any, count: int) -> None:
    """Ask for `count` virtual CPU devices; TensorFlow refuses once it has started, which is for the caller to find."""
    physical = tf.config.list_physical_devices("CPU")
    try:
        if len(tf.config.get_logical_device_configuration(physical[0]) or ()) < count:
            tf.config.set_logical_device_configuration(
                physical[0], [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
            )
    except (RuntimeError, IndexError):
        return


def _problem(missing: Sequence[str], present: Iterable[str]) -> str:
    return f"this process has no {', '.join(missing)}; its devices are {', '.join(present)}"


def _hint(missing: Sequence[str], cpus: int) -> str:
    if any(not name.startswith("CPU") for name in missing):
        return "name devices that exist, or virtual CPU devices (CPU:0, CPU:1, ...)"
    return (
        "TensorFlow has started already; add this line at the top of the program, before anything runs:\n"
        '       tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], '
        f"[tf.config.LogicalDeviceConfiguration()] * {cpus})\n"
        "       or use variables: shared, which needs no second device"
    )
