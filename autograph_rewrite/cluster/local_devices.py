"""The devices of this process, for a configuration that leaves `devices` out."""

from __future__ import annotations

from autograph_rewrite.cluster.membership import process_count
from autograph_rewrite.config.config import Config
from autograph_rewrite.requires import tensorflow


def with_local_devices(config: Config) -> Config:
    """The configuration with a replica on each accelerator of this process, where it names no devices.

    In a job, the physical devices are counted: asking for the logical ones would start TensorFlow before the process
    has joined.

    Raises:
        ConfigError: there is no accelerator, and no cluster whose workers could train on their CPUs.
    """
    if config.devices is not None:
        return config
    known = tensorflow().config
    if process_count(config) == 1:
        return config.with_devices([device.name for device in known.list_logical_devices()])
    physical = known.list_physical_devices()
    return config.with_devices([device.name.replace("physical_device:", "device:") for device in physical])
