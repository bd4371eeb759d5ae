"""All samples, and the ops that cannot be run here with the reason."""

from __future__ import annotations

from tests.rules import samples_elementwise, samples_neural, samples_shapes
from tests.rules.sample import Sample

SAMPLES: list[Sample] = [
    *samples_elementwise.SAMPLES,
    *samples_shapes.SAMPLES,
    *samples_neural.SAMPLES,
]

REMOVED = "TensorFlow removed it; only old graphs have it"
NO_KERNEL = "no kernel on the CPU"

NOT_RUN: dict[str, str] = {
    **samples_elementwise.NOT_RUN,
    **samples_shapes.NOT_RUN,
    "Conv3DBackpropInput": REMOVED,
    "Conv3DBackpropFilter": REMOVED,
    "MaxPoolGradGradWithArgmax": NO_KERNEL,
}
