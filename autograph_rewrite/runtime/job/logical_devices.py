"""Create the logical devices that a plan needs, or say which line of code to add if TensorFlow has started.

TensorFlow fixes its devices when the first op runs. A program that builds its model first has to say before how many
virtual CPU devices it wants; only mirrored variables need more than one. A configuration of the command line is known
in time: when TensorFlow is imported (`join_on_import`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ClusterError, ConfigError
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.plan.selected import chosen_config
from autograph_rewrite.requires import tensorflow


def ensure_devices(devices: Sequence[str]) -> None:
    """Make sure that this process has the devices, adding virtual CPU devices if TensorFlow has not started.

    Raises:
        ClusterError: some are missing and cannot be added any more.
    """
    tf = tensorflow()
    wanted = {parse(device).short for device in devices}
    cpus = _split_cpu(tf, devices)
    present = [parse(device.name).short for device in tf.config.list_logical_devices()]
    missing = sorted(wanted.difference(present))
    if missing:
        problem = f"this process has no {', '.join(missing)}; its devices are {', '.join(present)}"
        raise ClusterError(problem, hint=_hint(missing, cpus))


def prepare_devices() -> None:
    """Ask for the devices that the command line's configuration needs; its errors are reported when it is used."""
    with suppress(ConfigError):
        config = chosen_config(None)
        if config.devices is not None:
            ask_for_devices(config)


def ask_for_devices(config: Config) -> None:
    """Ask for the devices of the replicas; Auto may find a plan for which each replica needs a separate one.

    Raises:
        ConfigError: the configuration names no devices.
    """
    _split_cpu(tensorflow(), config.replica_devices() if config.strategy.name == "Auto" else devices_of(config))


def devices_of(config: Config) -> tuple[str, ...]:
    """Return the devices of the replicas of this process; replicas that share their variables on CPUs share one device.

    Raises:
        ConfigError: the configuration names no devices.
    """
    own = config.replica_devices()
    parsed = [parse(device) for device in own]
    is_one = config.mode == "shared" and all(device.kind == "CPU" and device.job is None for device in parsed)
    return ("/device:CPU:0",) * len(own) if is_one and not config.is_driven else own


def _split_cpu(tf: Any, devices: Sequence[str]) -> int:
    """Ask for as many virtual CPU devices as are named, and return how many.

    TensorFlow refuses this once it has started; the caller has to look whether the devices exist.
    """
    count = 1 + max((parse(device).index for device in devices if parse(device).kind == "CPU"), default=0)
    if count == 1:
        return count
    physical = tf.config.list_physical_devices("CPU")
    with suppress(RuntimeError, IndexError):
        if len(tf.config.get_logical_device_configuration(physical[0]) or ()) < count:
            tf.config.set_logical_device_configuration(
                physical[0], [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
            )
    return count


def _hint(missing: Sequence[str], cpus: int) -> str:
    if any(not name.startswith("CPU") for name in missing):
        return "name devices that exist, or virtual CPU devices (CPU:0, CPU:1, ...)"
    return (
        "TensorFlow has started already; add this line at the top of the program, before anything runs:\n"
        f"       ar.virtual_devices({cpus})\n"
        "       or use variables: shared, which needs no second device"
    )
