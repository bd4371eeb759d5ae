"""Images cut along rows or columns: each device reads rows of its neighbours, and finds what one device finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.facts.windows import Halo
from autograph_rewrite.passes.collectives.along_model import AlongModel
from autograph_rewrite.passes.sharding import local_program
from autograph_rewrite.passes.sharding.unroll import HaloExchange
from tests.support import cut_images
from tests.support.rewriting import run_pipeline

Op = Callable[..., Any]


def step_of(op: Op, filters: tf.Variable) -> Op:
    """Return a step that gives what an op makes of images and the gradient of them, and trains its filters."""

    def step(x: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = op(x, filters)
            total = tf.reduce_sum(tf.sin(y + tf.cos(3 * y)))
        dx, df = tape.gradient(total, [x, filters])
        filters.assign_sub(df)
        return y, dx

    return step


def convolution(x: Any, f: Any, *, stride: int, padding: Any) -> Any:
    return tf.nn.conv2d(x, f, stride, padding)


def depthwise(x: Any, f: Any, *, stride: int, padding: Any) -> Any:
    return tf.nn.depthwise_conv2d(x, f, [1, stride, stride, 1], padding)


def pooled(x: Any, f: Any, *, kind: Any, size: int, stride: int, padding: Any) -> Any:
    return kind(x, size, stride, padding) * tf.reduce_sum(f)


OPS: Mapping[str, tuple[Op, int, int]] = {  # the op, the size of its filter, rows of its input
    "3x3": (partial(convolution, stride=1, padding="SAME"), 3, 8),
    "5x5, more than a block": (partial(convolution, stride=1, padding="SAME"), 5, 4),
    "1x1": (partial(convolution, stride=1, padding="SAME"), 1, 8),
    "1x1, stride 2": (partial(convolution, stride=2, padding="SAME"), 1, 8),
    "3x3, stride 2": (partial(convolution, stride=2, padding="SAME"), 3, 8),
    "2x2, stride 2": (partial(convolution, stride=2, padding="VALID"), 2, 8),
    "2x2, stride 4": (partial(convolution, stride=4, padding="VALID"), 2, 16),
    "explicit": (partial(convolution, stride=1, padding=[[0, 0], [2, 0], [1, 1], [0, 0]]), 3, 8),
    "depthwise": (partial(depthwise, stride=1, padding="SAME"), 3, 8),
    "depthwise, stride 2": (partial(depthwise, stride=2, padding="SAME"), 3, 8),
    "max": (partial(pooled, kind=tf.nn.max_pool2d, size=2, stride=2, padding="VALID"), 1, 8),
    "max, overlapping": (partial(pooled, kind=tf.nn.max_pool2d, size=3, stride=2, padding="SAME"), 1, 8),
    "max, stride 1": (partial(pooled, kind=tf.nn.max_pool2d, size=3, stride=1, padding="SAME"), 1, 8),
    "average": (partial(pooled, kind=tf.nn.avg_pool2d, size=2, stride=2, padding="SAME"), 1, 8),
}


def found(op: Op, x: np.ndarray, size: int, config: dict[str, Any] | None) -> list[np.ndarray]:
    """Return what a step gives, and the filters after it; on one device where there is no configuration."""
    return run(op, x, size, config)[0]


def run(
    op: Op, x: np.ndarray, size: int, config: dict[str, Any] | None
) -> tuple[list[np.ndarray], Counter[str], list[str]]:
    """Return what is found, how many ops with windows there are, and what is noted about the model axis."""
    filters = tf.Variable(np.random.default_rng(0).normal(size=(size, size, 2, 2)), name="f")
    step, given = step_of(op, filters), tf.constant(x)
    made = tf.function(step) if config is None else ar.distribute(step, config)
    y, dx = made(given)
    item = None if config is None else made.items[0]
    ops = made.get_concrete_function(given).graph.as_graph_def() if item is None else item.graph_def
    windows = Counter(node.op for node in ops.node if "Conv" in node.op or "Pool" in node.op)
    notes = [note for note in item.report.plan.notes if "model axis" in note] if item else []
    return [y.numpy(), dx.numpy(), filters.numpy()], windows, notes


def images(rows: int, columns: int = 0) -> np.ndarray:
    """Return images of few different numbers: maxima have ties."""
    return np.random.default_rng(1).integers(-2, 3, (2, rows, columns or rows, 2)).astype(np.float64)


BOTH = pytest.mark.parametrize("variables", ["shared", "mirrored"])
SPLITS = pytest.mark.parametrize(
    "split", [[1, 2, 1, 1], [1, 4, 1, 1], [1, 1, 2, 1]], ids=["2 x rows", "4 x rows", "columns"]
)


@BOTH
@SPLITS
@pytest.mark.parametrize("name", OPS)
def test_an_op_with_a_window_is_cut_and_finds_on_blocks_what_it_finds_on_images(
    name: str, split: list[int], variables: str
) -> None:
    op, size, rows = OPS[name]
    x = images(rows)
    on_blocks, windows, notes = run(op, x, size, cut_images.config(max(split), split=split, variables=variables))
    expected, count, _ = run(op, x, size, None)
    for one, wanted in zip(on_blocks, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-12)
    if split == [1, 2, 1, 1]:
        assert count
        assert windows == {kind: 2 * many for kind, many in count.items()}
        assert not notes


def test_blocks_need_not_be_of_one_size() -> None:
    op, x = partial(convolution, stride=1, padding="SAME"), images(9, 6)
    for split in ([1, 2, 1, 1], [1, 4, 1, 1]):
        on_blocks = found(op, x, 3, cut_images.config(max(split), split=split))
        for one, wanted in zip(on_blocks, found(op, x, 3, None), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-12)


def test_rows_that_do_not_lie_on_the_blocks_are_computed_whole_and_it_is_said() -> None:
    op = partial(convolution, stride=2, padding="SAME")
    x, config = images(9), cut_images.config(2)
    for one, wanted in zip(found(op, x, 3, config), found(op, x, 3, None), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-12)
    filters = tf.Variable(np.zeros((3, 3, 2, 2)), name="f")
    item = ar.GraphItem.from_function(step_of(op, filters), tf.TensorSpec([None, 9, 9, 2], tf.float64, name="x"))
    said = [note for note in ar.rewrite(item, config).report.plan.notes if "model axis" in note]
    assert any("makes 5 rows of 9" in note for note in said), said


# What devices read of each other where each runs one program: rows in collectives, and padding written as rows.


def item_of(name: str) -> ar.GraphItem:
    """Return the item of a step with an op."""
    op, size, rows = OPS[name]
    filters = tf.Variable(np.random.default_rng(0).normal(size=(size, size, 2, 2)), name="f")
    return normalise_original(
        ar.GraphItem.from_function(step_of(op, filters), tf.TensorSpec([None, rows, rows, 2], tf.float64, name="x"))
    )


def certified(item: ar.GraphItem, split: list[int]) -> ar.GraphItem:
    """Return a rewrite of which everything is certified."""
    certificate = Certificate(strict=True)
    new = run_pipeline(
        item,
        ar.build_plan(item, cut_images.config(max(split), split=split, variables="mirrored")),
        certificate=certificate,
    )
    assert not certificate.not_covered
    return new


@SPLITS
@pytest.mark.parametrize("name", OPS)
def test_rows_that_devices_hand_each_other_are_certified(name: str, split: list[int]) -> None:
    new = certified(item_of(name), split)
    windows = {node.device for node in new.graph if node.op.startswith(("Conv", "Depthwise", "MaxPool", "AvgPool"))}
    assert len(windows) == max(split), "each device has a program of its blocks"


def test_devices_that_do_not_read_as_many_rows_run_apart_and_it_is_said() -> None:
    op = partial(convolution, stride=1, padding="VALID")
    config = cut_images.config(2, variables="mirrored")
    on_blocks, windows, notes = run(op, images(8), 3, config)
    for one, wanted in zip(on_blocks, found(op, images(8), 3, None), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-12)
    assert any("not all devices read as many" in note for note in notes), notes
    assert windows["Conv2D"] == 2


def test_edge_rows_travel_and_not_images() -> None:
    item = ar.GraphItem.from_function(cut_images.step_of(cut_images.variables()), *cut_images.SPECS)
    new = ar.rewrite(item, cut_images.config(4, variables="mirrored"))
    edges = [edge for edge in new.report.plan.model_edges if edge.from_ == edge.to == "split(1)"]
    assert edges
    gathers = [node for node in new.graph if node.op == "CollectiveGatherV2" and "/halo" in node.name]
    assert len(gathers) == 4 * len(edges)
    assert not any("first devices" in note or "in parts" in note for note in new.report.plan.notes)


def shifted(self: Halo, units: int, real: Callable[..., Any] = Halo.alike) -> Any:
    rows = real(self, units)
    return None if rows is None else (rows[0] + 1, rows[1] + 1)


def padded_again(node: Any, dim: int, rows: Any, beside: Any, real: Callable[..., Any] = local_program._padding) -> Any:
    return real(node, dim, (1, 1), beside)


def other_way(self: AlongModel, *given: Any, real: Callable[..., Any] = AlongModel._padded) -> Any:
    *others, before, after = given
    return real(self, *others, after, before)


@pytest.mark.parametrize(
    ("where", "name", "mistake", "said"),
    [
        (Halo, "alike", shifted, "is laid on another one"),
        (local_program, "_padding", padded_again, "pads rows"),
        (AlongModel, "_padded", other_way, "gets something else"),
    ],
)
def test_a_mistake_in_the_rows_of_neighbours_is_refused(
    where: Any, name: str, mistake: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = item_of("explicit")
    certified(item, [1, 2, 1, 1])
    monkeypatch.setattr(where, name, mistake)
    with pytest.raises(VerifyError, match=said):
        certified(item, [1, 2, 1, 1])


@pytest.mark.parametrize(
    ("data", "model", "variables"),
    [*((*mesh, mode) for mesh in ((1, 2), (2, 2), (1, 4)) for mode in ("shared", "mirrored")), (2, 4, "shared")],
)
def test_a_cnn_of_five_layers_trains_as_on_one_device(data: int, model: int, variables: str) -> None:
    alone, cut = cut_images.variables(), cut_images.variables()
    one, many = (
        tf.function(cut_images.step_of(alone)),
        ar.distribute(cut_images.step_of(cut), cut_images.config(model, data, variables=variables)),
    )
    x, y = map(tf.constant, cut_images.batch())
    for _ in range(5):
        assert abs(float(one(x, y)) - float(many(x, y))) <= 1e-9
    for name, variable in alone.items():
        np.testing.assert_allclose(cut[name].numpy(), variable.numpy(), rtol=0, atol=1e-9)


def test_rows_of_neighbours_that_are_left_out_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros instead of a halo: what a split without an exchange would compute."""
    monkeypatch.setattr(HaloExchange, "blocks", partialmethod(zeros_of_others, HaloExchange.blocks))
    item = ar.GraphItem.from_function(cut_images.step_of(cut_images.variables()), *cut_images.SPECS)
    assert not ar.verify(item, cut_images.config(2)).ok


def zeros_of_others(self: HaloExchange, blocks: Any) -> Any:
    """Return the blocks of a value, all but the first full of zeros."""
    first, *others = blocks(self)
    return [first, *((rows, self.unroll.add("ZerosLike", [part], part.node, "no"), k) for rows, part, k in others)]


def test_each_device_has_its_share_of_the_activations() -> None:
    head = tf.Variable(np.ones(64), name="head")

    def step(x: Any) -> Any:
        h = x
        for shape, stride in zip(cut_images.SHAPES, cut_images.STRIDES, strict=True):
            h = tf.nn.relu(tf.nn.conv2d(h, tf.constant(0.1, tf.float64, shape), stride, "SAME"))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reshape(h, [-1, 64]) * head)
        head.assign_sub(tape.gradient(loss, head))
        return loss

    item = ar.GraphItem.from_function(step, cut_images.SPECS[0])
    whole = sum(activations(item.graph_bytes).values())
    assert whole == 2 * (16 * 16 * 4 + 8 * 8 * (4 + 6 + 4) + 4 * 4 * 4)
    for model in (2, 4):
        held = activations(ar.rewrite(item, cut_images.config(model)).graph_bytes)
        assert len(held) == model
        assert set(held.values()) == {whole // model}


def activations(graph: bytes) -> Counter[str]:
    """Return the elements per image of what layers make, by device, from TensorFlow's shape inference."""
    parsed = tf.compat.v1.GraphDef.FromString(graph)
    found: Counter[str] = Counter()
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(parsed, name="")
        for op in imported.get_operations():
            if op.type in ("Conv2D", "Relu"):
                found[op.device] += op.outputs[0].shape[1:].num_elements()
    return found


def keras_model() -> Any:
    """Five layers, a normalisation among them, in float64."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    x = given = layers.Input((8, 8, 3), dtype="float64")
    for i, (channels, stride) in enumerate([(4, 1), (4, 2), (4, 1), (6, 2), (4, 1)]):
        x = layers.Conv2D(channels, 3, strides=stride, padding="same", use_bias=i != 1, dtype="float64")(x)
        x = layers.BatchNormalization(dtype="float64")(x) if i == 1 else x
        x = layers.ReLU(dtype="float64")(x)
    x = layers.Dense(5, dtype="float64")(layers.GlobalAveragePooling2D(dtype="float64")(x))
    model = keras.Model(given, x)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@BOTH
@pytest.mark.parametrize(("data", "model"), [(1, 2), (2, 2)])
def test_a_keras_cnn_fits_as_on_one_device(data: int, model: int, variables: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 8, 8, 3)), rng.integers(0, 5, (8,))
    alone, cut = keras_model(), keras_model()
    cut = ar.distribute(cut, cut_images.config(model, data, variables=variables))
    for one in (alone, cut):
        one.fit(x, y, batch_size=8, epochs=5, shuffle=False, verbose=0)
    for one, other in zip(alone.weights, cut.weights, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=0, atol=1e-9, err_msg=one.path)


CHANNELS = [{"match": "f0", "split": [1, 1, 1, 2]}, {"match": "f1", "split": [1, 1, 2, 1]}]


@pytest.mark.parametrize("data", [1, 2])
def test_filters_are_cut_on_output_and_input_channels(data: int) -> None:
    item = ar.GraphItem.from_function(cut_images.step_of(cut_images.variables()), *cut_images.SPECS)
    config = {**cut_images.config(2, data), "sharding": CHANNELS}
    report = ar.verify(item, config)
    assert report.ok, report
    assert max(row.error for row in report.rows) <= 1e-9
    edges = ar.rewrite(item, config).report.plan.model_edges
    sums = [edge.value for edge in edges if edge.lowering == "add_n"]
    assert sums == ["Conv2D_1"]  # the images need no gradient, so the backward pass sums nothing


def cnn_of_everything() -> Any:
    """A step with convolutions, a normalisation in training, both kinds of pools, and what feeds a moving mean."""
    rng = np.random.default_rng(0)
    f0, f1 = (
        tf.Variable(rng.normal(size=(3, 3, c, 4)) * 0.3, name=f"f{i}", dtype="float32") for i, c in enumerate((3, 4))
    )
    scale, offset = tf.Variable(tf.ones(4), name="scale"), tf.Variable(tf.zeros(4), name="offset")
    mean = tf.Variable(tf.zeros(4), name="mean", trainable=False)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h, now, _ = tf.compat.v1.nn.fused_batch_norm(tf.nn.conv2d(x, f0, 1, "SAME"), scale, offset)
            h = tf.nn.avg_pool2d(tf.nn.max_pool2d(tf.nn.relu(h), 2, 2, "VALID"), 2, 2, "VALID")
            loss = tf.reduce_mean(tf.nn.conv2d(h, f1, 1, "SAME") ** 2)
        mean.assign(0.9 * mean + 0.1 * now)
        trained = [f0, f1, scale, offset]
        for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step


@pytest.mark.parametrize("cut", [CHANNELS, [{"match": "x", "split": [1, 2, 1, 1]}]], ids=["channels", "rows"])
def test_all_of_a_cnn_is_certified_where_devices_run_one_program(cut: list[dict[str, Any]]) -> None:
    item = ar.GraphItem.from_function(cnn_of_everything(), tf.TensorSpec([None, 8, 8, 3], tf.float32, name="x"))
    config = {**cut_images.config(2, variables="mirrored"), "sharding": cut}
    certificate = Certificate(strict=True)
    run_pipeline(normalise_original(item), ar.build_plan(item, config), certificate=certificate)
    assert not certificate.not_covered
    report = ar.verify(item, config)
    assert report.ok, report


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_filters_between_two_that_are_cut_on_channels_are_certified(multiplier: int) -> None:
    rng = np.random.default_rng(0)
    shapes = {"up": (1, 1, 3, 4), "deep": (3, 3, 4, multiplier), "down": (1, 1, 4 * multiplier, 3)}
    v = {name: tf.Variable(rng.normal(size=shape) * 0.3, name=name) for name, shape in shapes.items()}

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.nn.depthwise_conv2d(tf.nn.conv2d(x, v["up"], 1, "SAME"), v["deep"], [1, 1, 1, 1], "SAME")
            loss = tf.reduce_mean((tf.nn.conv2d(tf.nn.relu6(h), v["down"], 1, "SAME") - x) ** 2)
        for one, gradient in zip(v.values(), tape.gradient(loss, list(v.values())), strict=True):
            one.assign_sub(0.1 * gradient)
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 8, 8, 3], tf.float64, name="x"))
    cut = [{"match": "up", "split": [1, 1, 1, 2]}, {"match": "down", "split": [1, 1, 2, 1]}]
    report = ar.verify(item, {**cut_images.config(2, variables="mirrored"), "sharding": cut})
    assert report.ok, report


def test_filters_of_volumes_that_are_cut_on_channels_are_certified() -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 2, 2, 3, 4), (2, 2, 2, 4, 2)
    up, down = (tf.Variable(rng.normal(size=one), name=f"f{one[3]}", dtype="float32") for one in shapes)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.nn.avg_pool3d(tf.nn.conv3d(x, up, [1] * 5, "SAME"), 2, 2, "VALID")
            loss = tf.reduce_mean(tf.nn.conv3d(h, down, [1] * 5, "SAME") ** 2)
        for one, gradient in zip((up, down), tape.gradient(loss, [up, down]), strict=True):
            one.assign_sub(0.01 * gradient)
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 4, 4, 4, 3], tf.float32, name="x"))
    cut = [{"match": "f3", "split": [1, 1, 1, 1, 2]}, {"match": "f4", "split": [1, 1, 1, 2, 1]}]
    report = ar.verify(item, {**cut_images.config(2, variables="mirrored"), "sharding": cut})
    assert report.ok, report


def test_rows_and_columns_are_cut_by_two_axes() -> None:
    item = ar.GraphItem.from_function(cut_images.step_of(cut_images.variables()), *cut_images.SPECS)
    both = {"mesh": {"data": 1, "model": [2, 2]}, "sharding": [{"match": "x", "axes": [-1, 0, 1, -1]}]}
    config = {**cut_images.config(4, variables="mirrored"), **both}
    report = ar.verify(item, config)
    assert report.ok, report
    assert not any("not all devices" in note for note in ar.rewrite(item, config).report.plan.notes)
