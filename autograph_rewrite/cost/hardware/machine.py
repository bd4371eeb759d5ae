"""Model a machine: compute throughput by op family, and the links between devices and between processes.

    seconds of an op        op_seconds + max(flops / rate of its family, bytes / memory rate)
    seconds of a message    latency + bytes / bandwidth

The defaults are round figures of one CPU core and of one accelerator; `cost.hardware.calibrate` measures this machine.
oneDNN's kernels and Eigen's need different amounts of memory. TensorFlow takes oneDNN's on processors with instructions
for products of small numbers (`FEATURES`), or where TF_ENABLE_ONEDNN_OPTS says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from autograph_rewrite.config.sections import Network

FEATURES = frozenset(("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni", "avx_vnni"))
"""Linux's names of the features of processors on which TensorFlow takes oneDNN's kernels by default."""
_PROCESSORS = Path("/proc/cpuinfo")
_SAID = MappingProxyType({"0": False, "false": False, "1": True, "true": True})


def uses_onednn() -> bool:
    """Return whether TensorFlow takes oneDNN's kernels in processes like this one.

    This repeats TensorFlow's `IsMklEnabled` without importing TensorFlow.
    """
    told = _SAID.get(os.environ.get("TF_ENABLE_ONEDNN_OPTS", "").lower())
    if told is not None:
        return told
    try:
        with _PROCESSORS.open(errors="replace") as lines:  # all processors have the flags of the first
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return False
    return not FEATURES.isdisjoint(flags.split())


SERIAL = frozenset(("sort",))
"""Families whose ops use only one core."""


@dataclass(frozen=True)
class Link:
    """A connection that transfers one message at a time.

    Attributes:
        seconds: latency of a message.
        bytes_per_second: bandwidth.
    """

    seconds: float
    bytes_per_second: float

    def time(self, nbytes: float, messages: int = 1) -> float:
        """Return the seconds of some messages with `nbytes` in total."""
        return messages * self.seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Compute:
    """A core or an accelerator.

    Attributes:
        flops: operations per second, by family.
        bytes_per_second: memory bandwidth, reads and writes together.
        op_seconds: the time of starting an op.
    """

    flops: Mapping[str, float]
    bytes_per_second: float
    op_seconds: float


CORE = Compute(
    MappingProxyType(
        {
            "matmul": 25e9,
            "conv": 20e9,
            "elementwise": 2e9,
            "transcendental": 1e9,
            "reduce": 2e9,
            "gather": 1e9,
            "random": 2e8,
            "sort": 1e8,
        }
    ),
    bytes_per_second=6e9,
    op_seconds=2e-6,
)

ACCELERATOR = Compute(
    MappingProxyType(
        {
            "matmul": 60e12,
            "conv": 40e12,
            "elementwise": 5e12,
            "transcendental": 2e12,
            "reduce": 3e12,
            "gather": 1e12,
            "random": 1e12,
            "sort": 1e10,
        }
    ),
    bytes_per_second=1e12,
    op_seconds=5e-6,
)


@dataclass(frozen=True)
class Machine:
    """A machine as the cost model sees it.

    Attributes:
        core: one core of its CPU.
        cores: how many there are; the CPU devices of a process share them.
        accelerator: one GPU or TPU.
        memory: copies between CPU devices of one process; a message is a collective's step.
        local: the link between the accelerators of one process.
        host: the link between one accelerator and its host's memory, each way.
        run_seconds: the time of an empty step.
        apart: the logical devices of a replica have separate cores and memory although they are CPUs of one process.
        onednn: TensorFlow takes oneDNN's kernels on its CPU, which need less memory for a convolution; default: as in
            this process.
    """

    core: Compute = CORE
    cores: int = 4
    accelerator: Compute = ACCELERATOR
    memory: Link = Link(25e-6, 4e9)
    local: Link = Link(10e-6, 50e9)
    host: Link = Link(10e-6, 12e9)
    run_seconds: float = 0.0
    apart: bool = False
    onednn: bool = field(default_factory=uses_onednn)


def network_link(network: Network | None) -> Link:
    """Return the link between two processes that a configuration describes."""
    described = network or Network()
    return Link(described.latency_us * 1e-6, described.bandwidth_gbps * 1e9 / 8)
