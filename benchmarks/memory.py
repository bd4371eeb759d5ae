"""Memory: the bytes of all variables, and the most memory that the process had, where variables dominate.

Shared variables exist once however many replicas there are; mirrored ones, as in MirroredStrategy, once per device.
The peak is that of a fresh process after a few steps, without what it had before the model was made (TensorFlow
itself, mostly).
"""

from __future__ import annotations

import gc
from typing import Any

from benchmarks import contestants
from benchmarks.child import call, peak_bytes
from benchmarks.effort import Effort
from benchmarks.figure import Figure

TITLE = "memory: 38 million parameters, Adam, 2 replicas"
REPLICAS, STEPS = 2, 5
MIB = 2**20


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the numbers of bytes that they are made of."""
    measured = {
        how: call("benchmarks.memory:measure", {"how": how, "tiny": effort.tiny}, timeout=120)
        for how in contestants.HOW
    }
    figures = []
    for what, title in (("variables", "bytes of live variables"), ("peak", "peak memory")):
        other = measured["strategy"][what]
        for how in ("shared", "mirrored"):
            own = measured[how][what]
            figures.append(
                Figure(
                    f"{title}: {how} / MirroredStrategy",
                    own / max(other, 1),
                    at_most=0.6 if how == "shared" else None,
                    how=f"{own / MIB:,.0f} MiB / {other / MIB:,.0f} MiB; "
                    f"single device {measured['single'][what] / MIB:,.0f} MiB",
                )
            )
    return figures, measured


def measure(how: str, tiny: bool) -> dict[str, int]:
    """Train a few steps; return the bytes of all variables and the growth of the peak (in a child)."""
    import keras
    import tensorflow as tf

    contestants.split_cpu(REPLICAS)
    keras.utils.set_random_seed(7)
    tf.constant(0.0) + 1.0  # TensorFlow's runtime starts with its first op
    before = peak_bytes()
    contestant = contestants.prepare(how, "large", REPLICAS, tiny=tiny)
    step = contestant.start()
    for _ in range(STEPS):
        step()
    return {"variables": variable_bytes(), "peak": peak_bytes() - before, "before": before}


def variable_bytes() -> int:
    """Return the bytes of all live variables of this process, whoever made them."""
    from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

    found = {id(each.handle): each for each in gc.get_objects() if isinstance(each, BaseResourceVariable)}
    return sum(
        (each.shape.num_elements() or 0) * each.dtype.size for each in found.values()
    )  # others may have open shapes
