"""All samples, and the ops that cannot be run here with the reason."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import whole
from autograph_rewrite.ops.rules.table import TABLE, families
from autograph_rewrite.ops.traits import ops_with
from tests.rules import (
    samples_elementwise,
    samples_gather,
    samples_linalg,
    samples_lists,
    samples_neural,
    samples_shapes,
)
from tests.rules.sample import Sample

SAMPLES: list[Sample] = [
    *samples_elementwise.SAMPLES,
    *samples_shapes.SAMPLES,
    *samples_neural.SAMPLES,
    *samples_gather.SAMPLES,
    *samples_linalg.SAMPLES,
    *samples_lists.SAMPLES,
]

REMOVED = "TensorFlow removed it; only old graphs have it"
NO_KERNEL = "no kernel on the CPU"

NOT_RUN: dict[str, str] = {
    **samples_elementwise.NOT_RUN,
    **samples_shapes.NOT_RUN,
    **samples_gather.NOT_RUN,
    **samples_linalg.NOT_RUN,
    **samples_lists.NOT_RUN,
    "ar.reshard": "no op of TensorFlow: see tests/passes/sharding/test_residence.py",
    "ar.shard_alike": "no op of TensorFlow: see tests/passes/localize/test_rows_of_shards.py",
    **dict.fromkeys(
        (op for op, rule in TABLE.items() if rule.family in families("control")), "runs inside frames: see test_control"
    ),
    **dict.fromkeys(
        (op for op, rule in TABLE.items() if rule.family in families("tensor_arrays")),
        "runs in graphs only: see test_arrays",
    ),
    **dict.fromkeys(
        (op for op, rule in TABLE.items() if rule.family in families("variables") and rule.place is not whole),
        "reads or writes a variable, which is no array: see tests/passes/sharding",
    ),
    **dict.fromkeys(ops_with("table_lookups"), "reads a table, which is no array: see test_preprocessing"),
    "Conv2DBackpropInputV2": NO_KERNEL,
    "Conv2DBackpropFilterV2": NO_KERNEL,
    "Conv3DBackpropInput": REMOVED,
    "Conv3DBackpropFilter": REMOVED,
    "MaxPoolGradGradWithArgmax": NO_KERNEL,
}
