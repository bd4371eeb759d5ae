"""Which kernels TensorFlow has on this machine: oneDNN's or its own (Eigen), which differ in the memory that they need.

TensorFlow takes oneDNN's where the processor multiplies small numbers in one instruction, or where it is told so.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

FEATURES = frozenset(("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni", "avx_vnni"))
"""Of a processor on which TensorFlow takes oneDNN's kernels by itself, as Linux names them."""
_PROCESSORS = Path("/proc/cpuinfo")
_SAID = MappingProxyType({"0": False, "false": False, "1": True, "true": True})


def uses_onednn() -> bool:
    """Return whether TensorFlow takes oneDNN's kernels in processes like this one.

    As `IsMklEnabled` of TensorFlow says, without importing it.
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
