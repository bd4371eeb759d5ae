"""What TensorFlow's own kernels of a convolution's gradients hold while they run, as its allocator records it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from autograph_rewrite.cost.hardware import machine
from autograph_rewrite.cost.hardware.machine import uses_onednn
from autograph_rewrite.ops.rules.convolutions import filter_patches, input_patches

WIDTH = np.dtype(np.float64).itemsize
"""oneDNN has no kernels for these."""
THREADS = 1
PATCHES = {"Conv2DBackpropFilter": filter_patches, "Conv2DBackpropInput": input_patches}


def held(gradient: tf.Operation, operands: list[tf.Tensor]) -> int:
    """Return the bytes that a node asked for in one run, beside its output."""
    v1 = tf.compat.v1
    config = v1.ConfigProto(intra_op_parallelism_threads=THREADS, use_per_session_threads=True)
    rng = np.random.default_rng(0)
    feeds = {one: rng.normal(size=one.shape) for one in operands}
    metadata = v1.RunMetadata()
    with v1.Session(graph=gradient.graph, config=config) as session:
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        made = session.run(gradient.outputs[0], feeds, options=options, run_metadata=metadata)
    ran = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    memory = next(node.memory for node in ran if node.node_name == gradient.name)
    asked = sum(record.alloc_bytes for one in memory for record in one.allocation_records if record.alloc_bytes > 0)
    return asked - made.nbytes


@pytest.mark.parametrize("op", ["Conv2DBackpropFilter", "Conv2DBackpropInput"])
@pytest.mark.parametrize(
    ("image", "kernel", "stride", "padding"),
    [
        ((4, 9, 9, 3), (3, 3, 3, 8), 1, "SAME"),
        ((4, 9, 9, 3), (3, 3, 3, 8), 2, "VALID"),
        ((1, 9, 9, 3), (3, 3, 3, 8), 1, "SAME"),
        ((2, 32, 32, 16), (5, 5, 16, 32), 1, "SAME"),
        ((3, 6, 7, 5), (1, 1, 5, 2), 1, "VALID"),
    ],
)
def test_patches_take_what_is_predicted(
    op: str, image: tuple[int, ...], kernel: tuple[int, ...], stride: int, padding: str
) -> None:
    with tf.Graph().as_default():
        x, w = (tf.compat.v1.placeholder(tf.float64, shape) for shape in (image, kernel))
        y = tf.nn.conv2d(x, w, stride, padding)
        back = tf.compat.v1.placeholder(tf.float64, y.shape)
        strides = [1, stride, stride, 1]
        if op == "Conv2DBackpropFilter":
            operands = [x, back]
            found = tf.raw_ops.Conv2DBackpropFilter(
                input=x, filter_sizes=kernel, out_backprop=back, strides=strides, padding=padding
            )
        else:
            operands = [w, back]
            found = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=image, filter=w, out_backprop=back, strides=strides, padding=padding
            )
        shapes = [tuple(one.shape) for one in found.op.inputs]
        predicted = PATCHES[op](shapes, [tuple(found.shape)], WIDTH, THREADS) * WIDTH
        assert predicted > 0
        assert held(found.op, operands) == pytest.approx(predicted, abs=256)  # the allocator rounds up


def test_nothing_is_predicted_of_what_is_not_known() -> None:
    assert filter_patches([(4, 9, 9, 3), (4,), ()], [(3, 3, 3, 8)], 4, 1) == 0
    assert filter_patches([(0, 9, 9, 3), (4,), (0, 9, 9, 8)], [(3, 3, 3, 8)], 4, 1) == 0


def test_the_kernels_are_those_that_tensorflow_says() -> None:
    assert uses_onednn() == _pywrap_util_port.IsMklEnabled()


@pytest.mark.parametrize(("said", "flags", "expected"), [
    ("1", "fpu", True), ("False", "fpu avx512_vnni", False), ("", "fpu avx_vnni", True), ("maybe", "fpu avx2", False),
])  # fmt: skip
def test_what_is_said_goes_before_what_the_processor_can_do(
    said: str, flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", said)
    assert uses_onednn() is expected
