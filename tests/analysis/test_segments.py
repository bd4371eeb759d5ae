"""A concatenation along the batch stays divided: each replica has a segment of each part; the whole keeps its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.analysis.transfer import FAMILIES, are_lost, read_whole
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.ops.facts.placement import Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import (
    Sym,
    are_rows,
    between_seams,
    joined,
    rows_per_example,
    segments,
    to_global,
)
from autograph_rewrite.ops.rules.base import Op, Semantics
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.collectives.all_gather import rows_between
from autograph_rewrite.passes.reshard import lower_reshards
from autograph_rewrite.strategies import builder_for
from tests.support.covering import covering
from tests.support.rewriting import run_pipeline
from tests.support.training import assert_trains_alike, distributed, make_item, placeholder, variable

RNG = np.random.default_rng(0)
W, U = RNG.normal(size=(4, 4)), RNG.normal(size=(4, 3))
FEEDS = [{"x": RNG.normal(size=(rows, 4))} for rows in (7, 6, 3, 1)]


def two_parts(batch: int | None = None) -> tuple[Any, Any, Any]:
    """Return x, something made of it, and the two, one behind the other."""
    x = placeholder("x", batch, 4)
    other = tf.tanh(x[:, ::-1] @ variable("w", W))
    return x, other, tf.concat([other, x], 0)


def rows(z: Any) -> Any:
    return tf.shape(z)[0]


def mean(y: Any) -> dict[str, Any]:
    return {"loss": tf.reduce_mean(y * y), "y": y}


def labelled(z: Any, x: Any, other: Any) -> dict[str, Any]:
    labels = tf.concat([tf.ones_like(other[:, :1]), tf.zeros_like(x[:, :1])], 0)
    score = tf.reduce_sum(tf.tanh(z @ variable("u", U)), 1, keepdims=True)
    return {"loss": tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, score)), "score": score}


def views(z: Any, x: Any, other: Any) -> dict[str, Any]:
    a, b = tf.split(tf.math.l2_normalize(tf.tanh(z @ variable("u", U)), 1), 2)
    labels = tf.range(rows(a))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, a @ tf.transpose(b))
    return {"loss": tf.reduce_mean(loss), "each": loss, "b": b}


def normalised(z: Any, x: Any, other: Any) -> dict[str, Any]:
    h = tf.tanh(z @ variable("u", U))
    centre, spread = tf.nn.moments(h, 0)
    y = tf.nn.batch_normalization(h, centre, spread, None, variable("g", np.ones(3)), 1e-3)
    return {"loss": tf.reduce_mean(y**4), "y": y, "largest": tf.reduce_max(h, 0)}


def fused(z: Any, x: Any, other: Any) -> dict[str, Any]:
    h = tf.cast(tf.reshape(z, [-1, 2, 2, 1]), tf.float32)
    h = tf.nn.conv2d(h, tf.cast(tf.reshape(variable("k", W), [2, 2, 1, 4]), tf.float32), 1, "SAME")
    y, _, _ = tf.compat.v1.nn.fused_batch_norm(h, tf.ones(4), tf.zeros(4), epsilon=0.1)
    return {"loss": tf.cast(tf.reduce_mean(y**3), tf.float64), "y": tf.nn.max_pool2d(y, 2, 2, "SAME")}


def each_against_all(z: Any, x: Any, other: Any) -> dict[str, Any]:
    """The normalised, temperature-scaled cross entropy of two views: each row finds the other view of its example."""
    h, n = tf.math.l2_normalize(z @ variable("u", U), 1), rows(x)
    likeness = h @ tf.transpose(h) - 1e9 * tf.eye(2 * n, dtype=tf.float64)
    partner = tf.concat([tf.range(n) + n, tf.range(n)], 0)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(partner, likeness)
    return {"loss": tf.reduce_mean(loss), "each": loss}


def dropped(z: Any, x: Any, other: Any) -> dict[str, Any]:
    y = tf.nn.dropout(z @ variable("u", U), 0.5)
    mask = tf.cast(tf.not_equal(y, 0), tf.float64)
    return {"loss": tf.reduce_sum(y * 0) + tf.reduce_sum(z @ variable("v", U)), "kept": tf.shape(mask)}


PROGRAMS: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "as it is": lambda z, x, o: mean(z),
    "its square": lambda z, x, o: mean(z * z),
    "labels for real and generated rows": labelled,
    "two views": views,
    "each against all": each_against_all,
    "dropout": dropped,
    "statistics of all": normalised,
    "fused statistics of images": fused,
    "cut by slices": lambda z, x, o: mean((z * z)[: rows(o)] * 2 - (z * 3)[rows(o) :]),
    "cut by tf.slice": lambda z, x, o: mean(tf.slice(z @ variable("u", U), [rows(o), 0], [rows(x), 2])),
    "cut by sizes": lambda z, x, o: mean(tf.subtract(*tf.split(z * 2, [rows(o), rows(x)]))),
    "cut elsewhere": lambda z, x, o: mean(z[1:]),
    "cut in three": lambda z, x, o: mean(tf.concat([z, z + o[:1]], 0)[rows(o) : rows(z) + rows(x)] ** 3),
    "concatenated again": lambda z, x, o: mean(tf.concat([z, x * 2, z], 0) @ variable("u", U)),
    "flattened, and back": lambda z, x, o: mean(tf.reshape(tf.tanh(tf.reshape(z, [-1])), [-1, 2, 2])),
    "rows taken together in pairs": lambda z, x, o: mean(tf.reshape(z, [-1, 8])),
    "views stacked": lambda z, x, o: mean(tf.reshape(z, [2, -1, 4])),
    "transposed": lambda z, x, o: mean(tf.transpose(tf.transpose(z) * variable("g", np.ones((4, 1))))),
    "against all": lambda z, x, o: mean(z @ tf.transpose(z)),
    "softmax over the rows": lambda z, x, o: mean(tf.nn.softmax(z, 0)),
    "running sum": lambda z, x, o: mean(tf.cumsum(z)),
    "reversed": lambda z, x, o: mean(z * tf.reverse(z, [0])),
    "sorted": lambda z, x, o: mean(tf.sort(z, 0)),
    "a number for each row": lambda z, x, o: mean(z * tf.cast(tf.range(rows(z)), tf.float64)[:, None]),
    "as many rows as both have": lambda z, x, o: mean(z + tf.ones([rows(o) + rows(x), 1], tf.float64) * tf.cumsum(z)),
    "tiled": lambda z, x, o: mean(tf.tile(z, [2, 1])),
    "rows by number": lambda z, x, o: mean(tf.gather(z, tf.range(rows(z))[::-1])),
    "looked up": lambda z, x, o: mean(tf.gather(variable("t", W), tf.cast(tf.abs(z[:, 0]), tf.int32) % 4)),
    "masked": lambda z, x, o: mean(tf.boolean_mask(z, z[:, 0] > 0)),
    "largest row": lambda z, x, o: {**mean(z), "at": tf.cast(tf.argmax(z, 0), tf.float64)},
    "in a branch": lambda z, x, o: mean(tf.cond(tf.reduce_sum(z) > 0, lambda: z * 2, lambda: z - 1)),
    "in a loop": lambda z, x, o: mean(tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * z), (0, z))[1]),
    "made in a loop": lambda z, x, o: mean(
        tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.reduce_mean(tf.concat([y, x], 0) ** 2) * y), (0, o))[
            1
        ]
    ),
    "row by row": lambda z, x, o: mean(tf.map_fn(lambda row: row * 2, z)),
    "of uneven parts": lambda z, x, o: mean(tf.concat([tf.repeat(x, 2, 1), tf.reshape(z, [-1, 8])], 0)),
    "two rows of each example": lambda z, x, o: mean(tf.concat([tf.reshape(o, [-1, 2]), x[:, 2:]], 0) ** 2),
    "other columns": lambda z, x, o: mean(tf.concat([tf.transpose(x), tf.transpose(o)], 1)),
    "chosen": lambda z, x, o: mean(tf.where(z > 0, z, tf.zeros_like(z))),
    "of a constant, too": lambda z, x, o: mean(tf.concat([z, tf.constant(W)], 0)),
}


@pytest.mark.parametrize(("program", "replicas"), covering(list(PROGRAMS), [2, 3]))
def test_both_parts_train_as_on_one_device(program: str, replicas: int) -> None:
    def forward() -> dict[str, Any]:
        x, other, z = two_parts()
        return PROGRAMS[program](z, x, other)

    tolerance = 1e-4 if program.startswith("fused") else 1e-9
    assert_trains_alike(make_item(forward), FEEDS, replicas=replicas, tolerance=tolerance)


@pytest.mark.parametrize("program", PROGRAMS)
def test_both_parts_of_a_static_batch_train_as_on_one_device(program: str) -> None:
    def forward() -> dict[str, Any]:
        x, other, z = two_parts(7)
        return PROGRAMS[program](z, x, other)

    tolerance = 1e-4 if program.startswith("fused") else 1e-9
    assert_trains_alike(make_item(forward, batch_inputs={"x": 0}), FEEDS[:1], tolerance=tolerance)


def two_inputs(program: Callable[[Any, Any, Any], dict[str, Any]]) -> Any:
    def forward() -> dict[str, Any]:
        x, other = placeholder("x", None, 4), placeholder("other", None, 4)
        return program(tf.concat([other, x], 0) @ variable("w", W), x, other)

    return make_item(forward)


def test_two_views_that_are_fed_train_as_on_one_device() -> None:
    feeds = [{**feed, "other": feed["x"][::-1] * 2} for feed in FEEDS]
    assert_trains_alike(two_inputs(views), feeds, replicas=3)


def test_two_inputs_that_only_stand_behind_each_other_may_differ_in_size() -> None:
    def forward() -> dict[str, Any]:
        x, other = placeholder("x", None, 4), placeholder("other", None, 4)
        return {**mean(x @ variable("w", W)), "both": tf.cumsum(tf.concat([other, x * 2], 0))}

    assert distributed(make_item(forward), "shared").report.batches == (("x",), ("other",))


def test_views_of_different_sizes_that_are_cut_in_equal_parts_are_refused() -> None:
    new = distributed(two_inputs(views), "shared")
    with new.session() as session:
        session.run(new.init_op)
        with pytest.raises(ar.GraphError, match="different sizes"):
            session.run(["out_loss", "train"], {"x": FEEDS[0]["x"], "other": FEEDS[1]["x"]})


def ops(item: Any) -> Counter[str]:
    return Counter(node.op for node in item.graph_def.node)


def wholes(program: str, **kwargs: Any) -> list[str]:
    """Return the names of products that no replica has to itself, and of values that are put together."""
    item = make_item(lambda: (lambda x, other, z: PROGRAMS[program](z, x, other))(*two_parts(**kwargs)))
    new = distributed(item, "shared")
    products = [node.name for node in new.graph_def.node if node.op == "MatMul"]
    gathers = [edge.value for edge in new.report.plan.edges if edge.lowering == "concat"]
    return [name for name in products if not name.startswith("replica_")] + gathers


@pytest.mark.parametrize("program", ["labels for real and generated rows", "statistics of all"])
def test_nothing_of_real_and_generated_rows_is_gathered_but_what_is_returned(program: str) -> None:
    (returned,) = wholes(program)
    assert not returned.startswith("gradients")


def test_two_views_gather_one_view_and_what_is_returned() -> None:
    assert len(wholes("two views")) <= 5


def test_without_the_order_the_rows_of_the_whole_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_reshards, "in_order", lambda context, joined, *more: joined)
    item = make_item(lambda: (lambda x, other, z: PROGRAMS["running sum"](z, x, other))(*two_parts()))
    with pytest.raises((AssertionError, VerifyError), match=r"Not equal|the whole of"):  # by number, or certified
        assert_trains_alike(item, FEEDS, modes=["shared"])


def test_a_value_that_nobody_declared_is_fetched_in_the_order_of_the_original() -> None:
    item = make_item(lambda: (lambda x, other, z: mean(tf.identity(z * 2, "twice")))(*two_parts()))
    with item.session() as one, distributed(item, "shared", 3).session() as many:
        for session in (one, many):
            session.run(item.init_op)
        for feed in FEEDS:
            np.testing.assert_allclose(*(session.run("twice:0", feed) for session in (one, many)))


def certified(spoil: Callable[[Any], Any], program: str = "labels for real and generated rows") -> None:
    item = normalise(make_item(lambda: (lambda x, other, z: PROGRAMS[program](z, x, other))(*two_parts())))
    config = Config.of({"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "shared"}})
    plan = builder_for(config).build(item, config)
    certificate = Certificate(strict=True)
    claimed = certificate.claimed
    certificate.claimed = lambda graph, claims: claimed(graph, spoil(claims))  # type: ignore[method-assign]
    run_pipeline(item, plan, certificate=certificate)
    assert not [text for text in certificate.not_covered if "concat" in text]


def spoilt(new: Any, *, dim: int = 0) -> Callable[[Any], Any]:
    """Return what changes the size of one value with segments after the other, until it is refused."""

    def spoil(claims: Any) -> Any:
        values = dict(claims.values)
        name = next(n for n, c in values.items() if c.shape and c.shape[dim : dim + 1] == ((1, ("b[1,1]",)),))
        claim = values[name]
        values[name] = claim._replace(shape=(*claim.shape[:dim], new, *claim.shape[dim + 1 :]))
        return replace(claims, values=values)

    return spoil


def test_the_certificate_accepts_segments() -> None:
    for program in (
        "labels for real and generated rows",
        "two views",
        "cut by slices",
        "cut by tf.slice",
        "cut by sizes",
    ):
        certified(lambda claims: claims, program)


@pytest.mark.parametrize("size", [(2, ("b",)), (1, ("b[2,1]",)), (1, ("b[1,1,1]",)), (1, ("b#concat:0",)), None])
@pytest.mark.parametrize("program", ["labels for real and generated rows", "two views", "running sum", "cut by slices"])
def test_the_certificate_refuses_other_segments(size: Any, program: str) -> None:
    with pytest.raises(VerifyError, match="is wrong"):
        certified(spoilt(size), program)


def test_the_certificate_refuses_a_gather_that_leaves_blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_reshards, "in_order", lambda context, joined, *more: joined)
    with pytest.raises(VerifyError, match="whole of"):
        certified(lambda claims: claims, "running sum")


def test_the_certificate_refuses_a_slice_that_follows_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_in_a_row(context: Any, whole: Any, parts: Any, dim: int, blocks: Any) -> Any:
        limits = blocks.rows("begin", sum(parts)), blocks.rows("end", sum(parts))
        return rows_between(context, whole, whole.node.name, dim, limits)

    monkeypatch.setattr(lower_reshards, "piece_with_segments", rows_in_a_row)
    with pytest.raises(VerifyError, match="its own block of"):
        certified(lambda claims: claims, "a number for each row")


def test_an_op_that_does_not_know_segments_reads_the_whole() -> None:
    size = joined((1, 1))
    blocks = Fact(split(0), 1, (size, 4))
    for op, rule in TABLE.items():
        n = Op(op, lambda name, default=None: default, (blocks,), (1,), (None,), Semantics(segments=True), {})
        seen = read_whole(n, rule)
        assert seen == (() if rule.family in FAMILIES else (0,)) or has(op, "gathers") or op == "ResourceGather"


def test_segments_are_lost_where_a_rule_hands_rows_on_without_them() -> None:
    blocks = Fact(split(0), 1, (joined((1, 1)), 4))
    others = [Fact(split(0), 1, (size, 4)) for size in (Sym(2, ("b",)), Sym(1, ("b#y:0",)), None)]
    assert all(are_lost("Square", [blocks], [other]) for other in others)
    assert not are_lost("Square", [blocks], [blocks])
    assert not are_lost("Split", [blocks], [Fact(split(0), 1, (Sym(1, ("b",)), 4))])


def test_sizes_of_segments_say_what_stands_between_seams() -> None:
    size = joined((2, 4, 2))
    assert segments(size) == (2, 4, 2)
    assert rows_per_example(size) == 8
    assert to_global(size, None) == Sym(8, ("B",))
    assert to_global(size, 3) == 24
    assert between_seams(size, 0, 2) == Sym(2, ("b",))
    assert between_seams(size, 2, 8) == joined((4, 2))
    assert between_seams(size, 0, 4) is None
    assert not are_rows(size, Sym(8, ("b",)))
