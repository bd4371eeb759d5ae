"""Tensor arrays and stacks, run with one array per replica as their rules say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.ops.facts.placement import Fact, Placement
from autograph_rewrite.ops.rules.base import LocalEntry
from autograph_rewrite.ops.rules.tensor_arrays import element
from tests.rules.facts import ANY, PARTIAL, REPLICATED, B, fact, node, placed, split
from tests.rules.harness import Operand, converted, instances, together

BLOCKS = (2, 2, 1)
FLOW = fact(REPLICATED)
INDICES = fact(REPLICATED, 2)

Program = Callable[[Any, Any], Any]


def array(tf: Any) -> tuple[Any, Any]:
    made = tf.raw_ops.TensorArrayV3(size=2, dtype=tf.float64, dynamic_size=True)
    return made.handle, made.flow


def scatter_gather(tf: Any, value: Any) -> Any:
    handle, flow = array(tf)
    flow = tf.raw_ops.TensorArrayScatterV3(handle=handle, indices=[1, 0], value=value, flow_in=flow)
    return tf.raw_ops.TensorArrayGatherV3(handle=handle, indices=[0, 1], flow_in=flow, dtype=tf.float64)


def write_read(tf: Any, value: Any) -> Any:
    handle, flow = array(tf)
    flow = tf.raw_ops.TensorArrayWriteV3(handle=handle, index=1, value=value, flow_in=flow)
    return tf.raw_ops.TensorArrayReadV3(handle=handle, index=1, flow_in=flow, dtype=tf.float64)


def split_concat(tf: Any, value: Any) -> Any:
    handle, flow = array(tf)
    lengths = tf.constant([1, 1], tf.int64)
    flow = tf.raw_ops.TensorArraySplitV3(handle=handle, value=value, lengths=lengths, flow_in=flow)
    return tf.raw_ops.TensorArrayConcatV3(handle=handle, flow_in=flow, dtype=tf.float64).value


def push_pop(tf: Any, value: Any) -> Any:
    handle = tf.raw_ops.StackV2(max_size=-1, elem_type=tf.float64)
    with tf.control_dependencies([tf.raw_ops.StackPushV2(handle=handle, elem=value)]):
        return tf.raw_ops.StackPopV2(handle=handle, elem_type=tf.float64)


PROGRAMS: list[tuple[Program, str, str]] = [
    (scatter_gather, "TensorArrayScatterV3", "TensorArrayGatherV3"),
    (write_read, "TensorArrayWriteV3", "TensorArrayReadV3"),
    (split_concat, "TensorArraySplitV3", "TensorArrayConcatV3"),
    (push_pop, "StackPushV2", "StackPopV2"),
]


def execute(program: Program, value: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        result: np.ndarray = session.run(program(tf, tf.constant(value)))
        return result


def claims(write: str, read: str, value: Fact) -> tuple[Any, Placement]:
    """Return what the write wants of its value, and the placement of what is read."""
    handle = fact(ANY, cell="array")
    index = 2 if write.startswith("TensorArray") and write != "TensorArraySplitV3" else 1
    inputs = [handle, INDICES, value, FLOW] if index == 2 else [handle, value, INDICES, FLOW]
    answer = placed(node(write, *(inputs if write.startswith("Tensor") else inputs[:2])))
    assert answer.holds == (0, index)
    cells = {0: element(write, value)}
    readers = (handle, INDICES, FLOW) if read in ("TensorArrayGatherV3", "TensorArrayReadV3") else (handle, FLOW)
    outputs = placed(node(read, *readers, outputs=2 if "Concat" in read else 1, cells=cells)).outputs
    return answer.operand_reshards.get(index), outputs[0]


@pytest.mark.parametrize(("program", "write", "read"), PROGRAMS)
@pytest.mark.parametrize("placement", [REPLICATED, PARTIAL, split(0), split(1)])
def test_an_array_per_replica_gives_what_one_array_gives(
    program: Program, write: str, read: str, placement: Placement
) -> None:
    shape, dim = [2, 2], placement.dim
    if placement.is_split:
        shape[dim] = sum(BLOCKS)
    value = np.random.RandomState(0).randn(*shape)
    if write == "TensorArraySplitV3" and placement == split(0):
        pytest.skip("the lengths are those of two rows")
    sizes = tuple(B if placement == split(d) else n for d, n in enumerate(shape))
    reshard, after = claims(write, read, fact(placement, *sizes))
    operand = Operand(value, tuple(int(placement == split(d)) for d in range(2)))
    held = instances(operand, placement, BLOCKS)
    if reshard is not None:
        assert not isinstance(reshard, LocalEntry)
        held = converted(operand, held, reshard, BLOCKS)
    if write == "TensorArrayScatterV3" and placement == split(0):
        assert reshard == REPLICATED
        return
    found = together([execute(program, part) for part in held], after)
    np.testing.assert_allclose(found, execute(program, value), rtol=1e-12)
