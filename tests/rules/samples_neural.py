"""Samples of layers, pooling, normalisation and fused recurrent cells."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from tests.rules.sample import Draw, Sample, Sizes, known

IMAGE = {"h": 4, "w": 4, "c": 3, "o": 2}


def image(d: Sizes, r: Draw, dtype: type = np.float64) -> np.ndarray:
    return r(d["n"], d["h"], d["w"], d["c"], dtype=dtype)


def volume(d: Sizes, r: Draw, dtype: type = np.float64) -> np.ndarray:
    return r(d["n"], 4, d["h"], d["w"], d["c"], dtype=dtype)


def images(op: str, attrs: Mapping[str, Any]) -> Sample:
    return Sample(op, "n", lambda d, r: [image({**IMAGE, **d}, r)], attrs, "n")


def _pool_grad(d: Sizes, r: Draw) -> list[np.ndarray]:
    import tensorflow as tf

    x = image({**IMAGE, **d}, r)
    y = tf.raw_ops.MaxPool(input=tf.constant(x), ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID").numpy()
    return [x, y, r(*y.shape)]


def _pool_grad_grad(d: Sizes, r: Draw) -> list[np.ndarray]:
    x, y, _ = _pool_grad(d, r)
    return [x, y, r(*x.shape)]


def _pool3(d: Sizes, r: Draw) -> list[np.ndarray]:
    import tensorflow as tf

    x = volume({**IMAGE, **d}, r, np.float32)
    y = tf.raw_ops.MaxPool3D(input=x, ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID").numpy()
    return [x, y, r(*y.shape, dtype=np.float32)]


def _argmax(d: Sizes, r: Draw) -> list[np.ndarray]:
    import tensorflow as tf

    x = image({**IMAGE, **d}, r, np.float32)
    y, at = tf.raw_ops.MaxPoolWithArgmax(
        input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID", Targmax=tf.int64
    )
    return [x, r(*y.shape, dtype=np.float32), at.numpy()]


POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
ACROSS = {"ksize": [1, 1, 1, 2], "strides": [1, 1, 1, 2], "padding": "VALID"}
POOL3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
CONV = {"strides": [1, 1, 1, 1], "padding": "SAME"}
CONV3 = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
F32 = np.float32


def _conv_input_gradient(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [known([d["n"], 4, 4, 3]), r(2, 2, 3, 2), r(d["n"], 4, 4, 2)]


def _conv_filter_gradient(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [r(d["n"], 4, 4, 3), known([2, 2, 3, 2]), r(d["n"], 4, 4, 2)]


def _depthwise_input_gradient(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [known([d["n"], 4, 4, 3]), r(2, 2, 3, 2), r(d["n"], 4, 4, 6)]


def _depthwise_filter_gradient(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [r(d["n"], 4, 4, 3), known([2, 2, 3, 2]), r(d["n"], 4, 4, 6)]


CONVOLUTIONS = [
    Sample("Conv2D", "n", lambda d, r: [r(d["n"], 4, 4, 3), r(2, 2, 3, 2)], CONV, "n"),
    Sample(
        "Conv2D", "n", lambda d, r: [r(d["n"], 4, 4, 3), r(2, 2, 3, 2)],
        {"strides": [1, 2, 2, 1], "padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 1, 0, 1, 0, 0]}, "n",
    ),
    Sample("DepthwiseConv2dNative", "n", lambda d, r: [r(d["n"], 4, 4, 3), r(2, 2, 3, 2)], CONV, "n"),
    Sample("Conv2DBackpropInput", "n", _conv_input_gradient, CONV, "n"),
    Sample("Conv2DBackpropFilter", "n", _conv_filter_gradient, CONV, "n"),
    Sample("DepthwiseConv2dNativeBackpropInput", "n", _depthwise_input_gradient, CONV, "n"),
    Sample("DepthwiseConv2dNativeBackpropFilter", "n", _depthwise_filter_gradient, CONV, "n"),
    Sample("Conv3D", "n", lambda d, r: [r(d["n"], 3, 3, 3, 2), r(2, 2, 2, 2, 3)], CONV3, "n"),
    Sample(
        "Conv3DBackpropInputV2", "n",
        lambda d, r: [known([d["n"], 3, 3, 3, 2]), r(2, 2, 2, 2, 3), r(d["n"], 3, 3, 3, 3)], CONV3, "n",
    ),
    Sample(
        "Conv3DBackpropFilterV2", "n",
        lambda d, r: [r(d["n"], 3, 3, 3, 2), known([2, 2, 2, 2, 3]), r(d["n"], 3, 3, 3, 3)], CONV3, "n",
    ),
]  # fmt: skip


def _conv(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [r(2, 4, 4, d["c"]), r(3, 3, d["c"], d["o"])]


def _conv_input(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [known([2, 4, 4, d["c"]]), r(3, 3, d["c"], d["o"]), r(2, 4, 4, d["o"])]


def _conv_filter(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [r(2, 4, 4, d["c"]), known([3, 3, d["c"], d["o"]]), r(2, 4, 4, d["o"])]


def _depthwise(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [r(2, 4, 4, d["c"]), r(3, 3, d["c"], 1), r(2, 4, 4, d["c"])]


def _conv3(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [r(2, 3, 3, 3, d["c"]), r(2, 2, 2, d["c"], d["o"]), r(2, 3, 3, 3, d["o"])]


CHANNELS = [
    Sample("Conv2D", "co", _conv, CONV, stays_static="co"),
    Sample("Conv2D", "co", _conv, {"strides": [1, 2, 2, 1], "padding": "VALID"}, stays_static="co"),
    Sample("Conv2D", "o", lambda d, r: [r(2, 4, 4, 6), r(3, 3, 3, 2 * d["o"])], CONV),  # two groups
    Sample("Conv2DBackpropInput", "co", _conv_input, CONV, stays_static="co"),
    Sample("Conv2DBackpropFilter", "co", _conv_filter, CONV, stays_static="co"),
    Sample("DepthwiseConv2dNative", "c", lambda d, r: _depthwise(d, r)[:2], CONV, stays_static="c"),
    Sample("DepthwiseConv2dNative", "c", lambda d, r: [r(2, 4, 4, d["c"]), r(3, 3, d["c"], 2)], CONV),
    Sample(
        "DepthwiseConv2dNativeBackpropInput", "c",
        lambda d, r: [known([2, 4, 4, d["c"]]), *_depthwise(d, r)[1:]], CONV, stays_static="c",
    ),
    Sample(
        "DepthwiseConv2dNativeBackpropFilter", "c",
        lambda d, r: [_depthwise(d, r)[0], known([3, 3, d["c"], 1]), _depthwise(d, r)[2]], CONV, stays_static="c",
    ),
    Sample("Conv3D", "co", lambda d, r: _conv3(d, r)[:2], CONV3, stays_static="co"),
    Sample(
        "Conv3DBackpropInputV2", "co",
        lambda d, r: [known([2, 3, 3, 3, d["c"]]), *_conv3(d, r)[1:]], CONV3, stays_static="co",
    ),
    Sample(
        "Conv3DBackpropFilterV2", "co",
        lambda d, r: [_conv3(d, r)[0], known([2, 2, 2, d["c"], d["o"]]), _conv3(d, r)[2]], CONV3, stays_static="co",
    ),
]  # fmt: skip
DILATION = {"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"}

LAYERS = [
    Sample("BiasAdd", "abc", lambda d, r: [r(d["a"], d["b"], d["c"]), r(d["c"])], {}, "ab"),
    Sample(
        "BiasAdd", "abc", lambda d, r: [r(d["a"], d["b"], d["c"], 2), r(d["b"])], {"data_format": "NCHW"}, "ac",
    ),
    Sample("BiasAddV1", "ab", lambda d, r: [r(d["a"], d["b"]), r(d["b"])], {}, "a"),
    Sample("BiasAddGrad", "abc", lambda d, r: [r(d["a"], d["b"], d["c"])], {}, "abc"),
    Sample("BiasAddGrad", "abc", lambda d, r: [r(d["a"], d["b"], d["c"], 2)], {"data_format": "NCHW"}, "abc"),
    Sample("Softmax", "ab", lambda d, r: [r(d["a"], d["b"])], {}, "a"),
    Sample("LogSoftmax", "ab", lambda d, r: [r(d["a"], d["b"])], {}, "a"),
    Sample("SoftmaxCrossEntropyWithLogits", "ab", lambda d, r: [r(d["a"], d["b"]), r.unit(d["a"], d["b"])], {}, "a"),
    Sample("SoftmaxCrossEntropyWithLogits", "ab", lambda d, r: [r(d["a"], d["b"]), r.unit(1, d["b"])], {}, "a"),
    Sample(
        "SparseSoftmaxCrossEntropyWithLogits", "ab", lambda d, r: [r(d["a"], d["b"]), r.ints(d["b"], d["a"])], {}, "a",
    ),
    Sample("InTopK", "ab", lambda d, r: [r(d["a"], d["b"], dtype=F32), r.ints(d["b"], d["a"])], {"k": 2}, "a"),
    Sample("InTopKV2", "ab", lambda d, r: [r(d["a"], d["b"], dtype=F32), r.ints(d["b"], d["a"]), known(2)], {}, "a"),
    Sample("Dilation2D", "n", lambda d, r: [r(d["n"], 4, 4, 3), r(2, 2, 3)], DILATION, "n"),
    Sample(
        "Dilation2DBackpropInput", "n",
        lambda d, r: [r(d["n"], 4, 4, 3), r(2, 2, 3), r(d["n"], 4, 4, 3)], DILATION, "n",
    ),
    Sample(
        "Dilation2DBackpropFilter", "n",
        lambda d, r: [r(d["n"], 4, 4, 3), r(2, 2, 3), r(d["n"], 4, 4, 3)], DILATION, "n",
    ),
]  # fmt: skip


def _pooled_channels(d: Sizes, r: Draw) -> list[np.ndarray]:
    return _pool_grad({"n": 2, "c": d["c"]}, r)


POOLS = [
    *(Sample(op, "c", lambda d, r: [r(2, 4, 4, d["c"])], POOL, stays_static="c") for op in ("AvgPool", "MaxPool")),
    Sample("MaxPool", "c", lambda d, r: [r(2, 4, 4, 2 * d["c"])], ACROSS),
    Sample("AvgPoolGrad", "c", lambda d, r: [known([2, 4, 4, d["c"]]), r(2, 2, 2, d["c"])], POOL, stays_static="c"),
    Sample("MaxPoolGrad", "c", _pooled_channels, POOL, stays_static="c"),
    images("AvgPool", POOL),
    images("MaxPool", POOL),
    Sample(
        "MaxPoolV2", "n", lambda d, r: [r(d["n"], 4, 4, 3), known([1, 2, 2, 1]), known([1, 2, 2, 1])],
        {"padding": "VALID"}, "n",
    ),
    Sample("AvgPoolGrad", "n", lambda d, r: [known([d["n"], 4, 4, 3]), r(d["n"], 2, 2, 3)], POOL, "n"),
    Sample("MaxPoolGrad", "n", _pool_grad, POOL, "n"),
    Sample("MaxPoolGradGrad", "n", _pool_grad_grad, POOL, "n"),
    Sample(
        "MaxPoolGradV2", "n", lambda d, r: [*_pool_grad(d, r), known([1, 2, 2, 1]), known([1, 2, 2, 1])],
        {"padding": "VALID"}, "n",
    ),
    Sample(
        "MaxPoolGradGradV2", "n", lambda d, r: [*_pool_grad_grad(d, r), known([1, 2, 2, 1]), known([1, 2, 2, 1])],
        {"padding": "VALID"}, "n",
    ),
    Sample("AvgPool3D", "n", lambda d, r: [r(d["n"], 4, 4, 4, 2, dtype=F32)], POOL3, "n", tolerance=1e-5),
    Sample("MaxPool3D", "n", lambda d, r: [r(d["n"], 4, 4, 4, 2, dtype=F32)], POOL3, "n"),
    Sample(
        "AvgPool3DGrad", "n", lambda d, r: [known([d["n"], 4, 4, 4, 2]), r(d["n"], 2, 2, 2, 2, dtype=F32)],
        POOL3, "n", tolerance=1e-5,
    ),
    Sample("MaxPool3DGrad", "n", _pool3, POOL3, "n"),
    Sample(
        "MaxPool3DGradGrad", "n",
        lambda d, r: [*_pool3(d, r)[:2], r(d["n"], 4, 4, 4, 3, dtype=F32)], POOL3, "", "n",
    ),
    Sample(
        "MaxPoolWithArgmax", "n", lambda d, r: [image({**IMAGE, **d}, r, F32)], {**POOL, "Targmax": 9}, "", "n",
    ),
    Sample(
        "MaxPoolWithArgmax", "n", lambda d, r: [image({**IMAGE, **d}, r, F32)],
        {**POOL, "Targmax": 9, "include_batch_in_index": True},
    ),
    Sample("MaxPoolGradWithArgmax", "n", lambda d, r: _argmax(d, r), POOL, "n"),
]  # fmt: skip


def _normalised(d: Sizes, r: Draw) -> list[np.ndarray]:
    x = r(d["n"], 3, 3, 2, dtype=F32)
    return [x, r(2, dtype=F32), r(2, dtype=F32), r(2, dtype=F32), r.unit(2, dtype=F32)]


def _denormalised(d: Sizes, r: Draw, count: int) -> list[np.ndarray]:
    x = r(d["n"], 3, 3, 2, dtype=F32)
    rest = [r(2, dtype=F32), r(2, dtype=F32), r.unit(2, dtype=F32), r(2, dtype=F32)]
    return [r(*x.shape, dtype=F32), x, *rest[:count]]


def _normalised_channels(d: Sizes, r: Draw) -> list[np.ndarray]:
    c = d["c"]
    return [r(2, 3, 3, c, dtype=F32), r(c, dtype=F32), r(c, dtype=F32), r(0, dtype=F32), r(0, dtype=F32)]


def _denormalised_channels(d: Sizes, r: Draw, count: int) -> list[np.ndarray]:
    c, x = d["c"], r(2, 3, 3, d["c"], dtype=F32)
    rest = [r(c, dtype=F32), r(c, dtype=F32), r.unit(c, dtype=F32), r(0, dtype=F32)]
    return [r(*x.shape, dtype=F32), x, *rest[:count]]


def inference(op: str, make: object, undefined: tuple[int, ...] = ()) -> Sample:
    return Sample(op, "n", make, {"is_training": False}, "n", tolerance=1e-4, undefined=undefined)  # type: ignore[arg-type]


NORMALS = [
    *(inference(f"FusedBatchNorm{v}", _normalised, undefined=(3, 4)) for v in ("", "V2", "V3")),
    inference("FusedBatchNormGrad", lambda d, r: _denormalised(d, r, 3)),
    inference("FusedBatchNormGradV2", lambda d, r: _denormalised(d, r, 3)),
    inference("FusedBatchNormGradV3", lambda d, r: _denormalised(d, r, 4)),
    *(
        Sample(f"FusedBatchNorm{v}", "n", _normalised, {"is_training": True}, "n", tolerance=1e-4)
        for v in ("", "V2", "V3")
    ),
    *(
        Sample(f"FusedBatchNorm{v}", "c", _normalised_channels, {"is_training": True}, stays_static="c", tolerance=1e-4)
        for v in ("", "V2", "V3")
    ),
    *(
        Sample(
            f"FusedBatchNormGrad{v}", "c", partial(_denormalised_channels, count=count), {"is_training": True},
            stays_static="c", tolerance=1e-4, undefined=(3, 4),
        )
        for v, count in (("", 3), ("V2", 3), ("V3", 4))
    ),
    Sample("LRN", "n", lambda d, r: [r(d["n"], 2, 2, 6, dtype=F32)], {}, "n", tolerance=1e-5),
    Sample(
        "LRNGrad", "n", lambda d, r: [r(d["n"], 2, 2, 6, dtype=F32) for _ in range(3)], {}, "n", tolerance=1e-5,
    ),
]  # fmt: skip


def _lstm(d: Sizes, r: Draw) -> list[np.ndarray]:
    b, i, u = d["b"], 3, 2
    state = [r(b, i, dtype=F32), r(b, u, dtype=F32), r(b, u, dtype=F32)]
    return [*state, r(i + u, 4 * u, dtype=F32), *[r(u, dtype=F32) for _ in range(3)], r(4 * u, dtype=F32)]


def _lstm_grad(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [*_lstm(d, r), *[r(d["b"], 2, dtype=F32) for _ in range(8)]]


def _gru(d: Sizes, r: Draw) -> list[np.ndarray]:
    i, u = 3, 2
    weights = [r(i + u, 2 * u, dtype=F32), r(i + u, u, dtype=F32), r(2 * u, dtype=F32), r(u, dtype=F32)]
    return [r(d["b"], i, dtype=F32), r(d["b"], u, dtype=F32), *weights]


def _gru_grad(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [*_gru(d, r), *[r(d["b"], 2, dtype=F32) for _ in range(4)]]


def _block(d: Sizes, r: Draw) -> list[np.ndarray]:
    x, *rest = _lstm(d, r)
    return [known(2, np.int64), r(2, *x.shape, dtype=F32), *rest]


def _block_grad(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [*_block(d, r), *[r(2, d["b"], 2, dtype=F32) for _ in range(9)]]


RECURRENT = [
    Sample("LSTMBlockCell", "b", _lstm, {}, "", "b", tolerance=1e-5),
    Sample("LSTMBlockCellGrad", "b", _lstm_grad, {"use_peephole": True}, "b", tolerance=1e-4),
    Sample("GRUBlockCell", "b", _gru, {}, "b", tolerance=1e-5),
    Sample("GRUBlockCellGrad", "b", _gru_grad, {}, "b", tolerance=1e-4),
    Sample("BlockLSTM", "b", _block, {}, "b", tolerance=1e-5),
    Sample("BlockLSTMV2", "b", _block, {}, "b", tolerance=1e-5),
    Sample("BlockLSTMGrad", "b", _block_grad, {"use_peephole": True}, "b", tolerance=1e-4),
    Sample("BlockLSTMGradV2", "b", _block_grad, {"use_peephole": False}, "b", tolerance=1e-4),
]

LOW, HIGH = np.float64(-0.7), np.float64(0.9)


def _limits(d: Sizes, r: Draw) -> list[np.ndarray]:
    return [-r.unit(d["c"], dtype=F32), r.unit(d["c"], dtype=F32)]


def _fake(name: str, count: int, *limits: Any, **attrs: Any) -> Sample:
    """Return a sample of a fake quantisation of two examples with channels, or of its gradient."""

    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        given = _limits(d, r) if name.startswith("VarsPerChannel") else [F32(limit) for limit in limits]
        return [*(r(d["a"], d["b"], d["c"], dtype=F32) for _ in range(count)), *given]

    return Sample(f"FakeQuantWithMinMax{name}", "abc", make, attrs, "abc", tolerance=1e-5)


def _rounded(version: int, *bits: np.ndarray, stays: str = "ab", **attrs: Any) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        limits = [np.full(d["b"], limit) for limit in (LOW, HIGH)] if attrs.get("axis") == 1 else [LOW, HIGH]
        return [r(d["a"], d["b"]), *limits, *bits]

    return Sample(f"QuantizeAndDequantizeV{version}", "ab", make, {"range_given": True, **attrs}, stays)


QUANTIZED = [
    _fake("Args", 1, min=-0.7, max=0.9),
    _fake("ArgsGradient", 2, min=-0.7, max=0.9),
    _fake("Vars", 1, LOW, HIGH),
    _fake("VarsGradient", 2, LOW, HIGH),
    _fake("VarsPerChannel", 1),
    _fake("VarsPerChannelGradient", 2),
    *(_rounded(version) for version in (2, 4)),
    _rounded(3, known(8)),
    _rounded(3, known(8), stays="a", axis=1),  # the other kernels take one range only
    _rounded(4, stays="", range_given=False),
]

SAMPLES = [*QUANTIZED, *CONVOLUTIONS, *CHANNELS, *LAYERS, *POOLS, *NORMALS, *RECURRENT]
