"""Dimensions that nobody knows, such as time, are no reason to compute anything whole: every size has a symbol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ops.facts.placement import Axes
from autograph_rewrite.ops.facts.symbolic_dims import (
    Sym,
    are_rows,
    broadcast_dim,
    common_symbol,
    local_symbol,
    times,
)
from autograph_rewrite.ops.rules import sizes
from autograph_rewrite.ops.rules.sizes import broadcast_gradient_axes, rows_of_operands
from tests.support.training import assert_trains_alike, distributed, make_item, placeholder, variable

SIZES = ((6, 4), (7, 5), (3, 2), (1, 4), (5, 1), (1, 1))
"""Batch and time: uneven, fewer examples than replicas, and 1, where a symbol could be taken for what it is not."""
PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
WIDTH, WORDS = 4, 9
RNG = np.random.default_rng(3)

Outputs = Mapping[str, Any]
Feed = Callable[[int, int], Mapping[str, Any]]


def weight(name: str, *shape: int) -> Any:
    return variable(name, 0.4 * np.random.default_rng(sum(map(ord, name))).normal(size=shape))


def dense(x: Any, name: str, units: int = WIDTH) -> Any:
    return tf.tensordot(x, weight(name, int(x.shape[-1]), units), 1)


def normalised(x: Any, name: str) -> Any:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, None, weight(name, int(x.shape[-1])), 1e-6)


def attended(h: Any, name: str, mask: Any) -> Any:
    batch, time = tf.shape(h)[0], tf.shape(h)[1]

    def heads(part: str) -> Any:
        return tf.transpose(tf.reshape(dense(h, name + part), [batch, time, 2, WIDTH // 2]), [0, 2, 1, 3])

    scores = tf.matmul(heads("query"), heads("key"), transpose_b=True) + mask
    mixed = tf.transpose(tf.matmul(tf.nn.softmax(scores), heads("value")), [0, 2, 1, 3])
    return normalised(h + dense(tf.reshape(mixed, [batch, time, WIDTH]), name + "joined"), name + "norm")


def ids(batch: int, time: int) -> Any:
    return RNG.integers(0, WORDS, (batch, time)).astype(np.int32)


def numbers(batch: int, time: int) -> Any:
    return RNG.normal(size=(batch, time, WIDTH))


def encoder() -> Outputs:
    """Token ids, positions cut to the length, a padding mask, two layers, and a class for each example."""
    words, label = placeholder("words", None, None, dtype=tf.int32), placeholder("label", None, dtype=tf.int32)
    h = tf.gather(weight("table", WORDS, WIDTH), words) + weight("position", 8, WIDTH)[: tf.shape(words)[1]]
    mask = tf.cast(tf.equal(words, 0), tf.float64)[:, None, None, :] * -1e9
    for layer in ("first", "second"):
        h = attended(h, layer, mask)
    logits = dense(h[:, 0], "logits", 3)
    return {"loss": tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits))}


def language_model() -> Outputs:
    """The next token, with a causal mask, the table tied to the output, and both ends of the sequence cut off."""
    words = placeholder("words", None, None, dtype=tf.int32)
    time, table = tf.shape(words)[1], weight("table", WORDS, WIDTH)
    h = tf.gather(table, words) + tf.gather(weight("position", 8, WIDTH), tf.range(time))
    seen = tf.cast(tf.range(time)[:, None] >= tf.range(time), tf.float64)
    h = attended(h, "layer", (1 - tf.reshape(seen, [1, 1, time, time])) * -1e9)
    logits = tf.matmul(tf.reshape(h, [-1, WIDTH]), table, transpose_b=True)
    logits = tf.reshape(logits, [tf.shape(words)[0], time, WORDS])
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(words[:, 1:], logits[:, :-1])
    return {"loss": tf.reduce_sum(each) / (1e-3 + tf.cast(tf.size(each), tf.float64))}


def masked_loss() -> Outputs:
    """A label for every step, a mask from the lengths, and an assertion about them."""
    x, label = placeholder("x", None, None, WIDTH), placeholder("steps", None, None, dtype=tf.int32)
    length = placeholder("length", None, dtype=tf.int32)
    logits = dense(normalised(tf.nn.relu(dense(x, "hidden")), "norm"), "logits", 3)
    time = tf.shape(x)[1]
    with tf.control_dependencies([tf.compat.v1.assert_less_equal(tf.reduce_max(length), time)]):
        mask = tf.sequence_mask(length, time, tf.float64)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
    return {"loss": tf.reduce_sum(each * mask) / tf.reduce_sum(mask), "each": each}


def flat_loss() -> Outputs:
    """Labels and weights in one line, of an input of their own each: their lengths agree, but nothing says so."""
    x, label = placeholder("x", None, None, WIDTH), placeholder("steps", None, None, dtype=tf.int32)
    share = placeholder("share", None, None)
    logits = tf.reshape(dense(tf.nn.relu(dense(x, "hidden")), "logits", 3), [-1, 3])
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(label, [-1]), logits)
    shares = tf.reshape(share, [-1])
    return {"loss": tf.reduce_sum(each * shares) / tf.reduce_sum(shares)}


def fed_mask() -> Outputs:
    """A fed mask, which may be as long as the sequence or 1: which one, only the run will tell."""
    x, share = placeholder("x", None, None, WIDTH), placeholder("share", None, None)
    h = tf.tanh(dense(tf.tanh(dense(x, "first")) * share[:, :, None], "hidden"))
    pooled = tf.reduce_sum(h * share[:, :, None], 1) / tf.reduce_sum(share, 1, keepdims=True)
    return {"loss": tf.reduce_mean(tf.square(dense(pooled, "out", 1))), "pooled": pooled}


def images_of_any_size() -> Outputs:
    """Convolutions, one of them transposed to the size of the input, over images of open height and width."""
    x = placeholder("image", None, None, None, 3)
    shape, kernel = tf.shape(x), weight("kernel", 3, 3, 3, 4)
    h = tf.nn.relu(tf.nn.conv2d(x, kernel, 2, "SAME"))
    mean, variance = tf.nn.moments(h, [0, 1, 2])
    h = (h - mean) * tf.math.rsqrt(variance + 1e-2)
    h = tf.nn.conv2d_transpose(h, kernel, tf.stack([shape[0], shape[1], shape[2], 3]), 2, "SAME")
    return {"loss": tf.reduce_mean(tf.square(h - tf.reduce_mean(x, -1, keepdims=True)))}


def scanned() -> Outputs:
    """A recurrence over the time axis, in a loop."""
    steps = tf.transpose(dense(placeholder("x", None, None, WIDTH), "in"), [1, 0, 2])
    begin = tf.zeros(tf.shape(steps[0]), tf.float64)
    states = tf.scan(lambda state, step: tf.tanh(state + step), steps, initializer=begin)
    return {"loss": tf.reduce_mean(tf.square(states))}


FEEDS: dict[str, Feed] = {
    "words": ids,
    "label": lambda batch, time: RNG.integers(0, 3, batch).astype(np.int32),
    "steps": lambda batch, time: RNG.integers(0, 3, (batch, time)).astype(np.int32),
    "length": lambda batch, time: (np.arange(batch) % time + 1).astype(np.int32),
    "share": lambda batch, time: RNG.uniform(0.5, 1, (batch, time)),
    "x": numbers,
    "image": lambda batch, time: RNG.normal(size=(batch, time, time + 1, 3)),
}
PROGRAMS = (encoder, language_model, masked_loss, flat_loss, fed_mask, images_of_any_size, scanned)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_over_open_dimensions_is_divided_and_computes_the_same(program: Callable[[], Outputs]) -> None:
    item = make_item(program)
    feeds = [{name: FEEDS[name](*size) for name in item.inputs} for size in SIZES]

    new = distributed(item, "shared")
    products = [node.name for node in new.graph_def.node if node.op in PRODUCTS]
    whole = [name for name in products if not name.startswith("replica_")]
    gathers = [edge.value for edge in new.report.plan.edges if edge.lowering in ("concat", "all_gather")]

    assert whole == []
    assert [value for value in gathers if not value.startswith("out_") and "Gather" not in value] == []
    assert_trains_alike(item, feeds)


def test_a_mask_of_length_one_stretches_as_it_did() -> None:
    item = make_item(fed_mask)
    feeds = [{"x": numbers(5, 3), "share": RNG.uniform(0.5, 1, (5, 1))}]

    assert_trains_alike(item, feeds)


def test_lengths_that_do_not_fit_are_refused_by_the_op_itself() -> None:
    new = distributed(make_item(flat_loss), "shared")

    with new.session() as session:
        session.run(new.init_op)
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run("train", {"x": numbers(4, 3), "steps": ids(4, 2) % 3, "share": RNG.uniform(size=(4, 3))})


B, T, U = local_symbol(), common_symbol("x/1"), common_symbol("y/1")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (B, B, True),
        (times(B, T), times(B, U), True),
        (times(B, T), times(5, B), True),
        (times(3, B), times(5, B), False),
        (B, times(B, T), False),
        (B, T, False),
        (T, U, False),
        (local_symbol("one"), local_symbol("other"), False),
        (None, None, False),
    ],
)
def test_rows_of_one_batch_line_up_if_their_number_can_agree(a: Any, b: Any, same: bool) -> None:
    assert are_rows(a, b) is same


def test_two_open_dimensions_broadcast_to_nothing_known() -> None:
    assert broadcast_dim(T, U) is None
    assert broadcast_dim(T, 1) == T
    assert broadcast_dim(times(B, T), times(B, U)) == times(B, T)


def test_the_axes_of_a_gradient_are_told_operand_by_operand() -> None:
    batch = Sym(1, ("B",))
    left, right = broadcast_gradient_axes((batch, T, 6), (batch, U, 1))

    # where the run decides, the kernel also names a batch of one example
    assert left == Axes(frozenset(), frozenset({0, 1}))
    assert right == Axes(frozenset({2}), frozenset({0, 1, 2}))
    assert broadcast_gradient_axes((batch, 6), (None,))[0] == Axes(frozenset(), frozenset({0}))


def test_rows_count_for_nothing_only_where_both_operands_have_them() -> None:
    assert rows_of_operands((B, T), (B, 1)) == ([True, False], [True, False])
    assert rows_of_operands((B, T), (T,)) == ([True, False], [False])
    assert rows_of_operands((B, T), (None, T)) == ([False, False], [False, False])


@pytest.mark.parametrize("program", [fed_mask, language_model], ids=lambda program: program.__name__)
def test_what_is_claimed_of_open_dimensions_is_certified(program: Callable[[], Outputs]) -> None:
    item = make_item(program)
    feeds = {name: FEEDS[name](5, 3) for name in item.inputs}

    assert ar.verify(item, {"devices": ["CPU:0", "CPU:1"]}, feeds=feeds).ok


def test_axes_that_are_claimed_for_sure_where_the_run_decides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(mine: Any, others: Any) -> Axes:
        ones = frozenset(i for i, size in enumerate(mine) if size == 1)
        return Axes(ones, ones)

    item = make_item(fed_mask)
    feeds = {name: FEEDS[name](5, 3) for name in item.inputs}
    monkeypatch.setattr(sizes, "_stretched", wrong)

    with pytest.raises(ar.VerifyError, match=r"claimed not to name 1, where T:\S+ may be stretched"):
        ar.verify(item, {"devices": ["CPU:0", "CPU:1"]}, feeds=feeds)
