"""Negative controls, and segments that several gradients go through: of two losses, and of a gradient's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.attr_inference import ORIGIN_ATTR, PASS_ATTR
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.passes import rematerialize
from tests.passes.rematerialize.test_rematerialize import EVERY, MICRO, ONE, SMALL, SQRT, TWO, assert_same, rewritten
from tests.support.covering import covering
from tests.support.recomputed import chain, executed
from tests.support.training import make_item, placeholder, v1, variable

POLICIES = [SQRT, EVERY, {"policy": "hierarchical"}, None]
"""None: what the graph marks."""


def with_policy(config: Mapping[str, Any], remat: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**config} if remat is None else {**config, "remat": remat}


def layers() -> list[tuple[Any, Any]]:
    """Return marked segments of two layers, and their weights."""

    def segment(h: Any, a: Any, b: Any) -> Any:
        return tf.tanh(tf.sin(h @ a) @ b)

    start = [variable(f"{name}{i}", np.eye(4) * 0.6 + 0.1 * i) for i in range(3) for name in "ab"]
    return [(ar.recompute_grad(segment), start[i : i + 2]) for i in (0, 2, 4)]


def run(h: Any) -> tuple[Any, list[Any]]:
    weights = []
    for segment, own in layers():
        h = segment(h, *own)
        weights += own
    return h, weights


def two_losses_through_all_segments() -> Mapping[str, Any]:
    x, y = placeholder("x", None, 4), placeholder("y", None, 4)
    h, _ = run(x)
    return {"loss": tf.reduce_mean((h - y) ** 2) + tf.reduce_mean(tf.abs(h)), "other": tf.reduce_mean(tf.abs(h))}


def two_gradients_of_one_segment() -> Mapping[str, Any]:
    """Return a loss whose weights are gradients of another through the same segments."""
    x, y = placeholder("x", None, 4), placeholder("y", None, 4)
    h, weights = run(x)
    slopes = v1.gradients(tf.reduce_mean(tf.abs(h)), weights)
    pull = tf.add_n([tf.reduce_sum(tf.stop_gradient(s) * w) for s, w in zip(slopes, weights, strict=True)])
    return {"loss": tf.reduce_mean((h - y) ** 2) + 0.1 * pull}


def hessian_times_vector() -> Mapping[str, Any]:
    """Return a loss with the product of the Hessian and a vector: gradients of gradients through each segment."""
    x, y = placeholder("x", None, 4), placeholder("y", None, 4)
    h, weights = run(x)
    loss = tf.reduce_mean((h - y) ** 2)
    slopes = v1.gradients(loss, weights)
    along = tf.add_n([tf.reduce_sum(s * np.linspace(-1, 1, 16).reshape(4, 4)) for s in slopes])
    products = v1.gradients(along, weights)
    pull = tf.add_n([tf.reduce_sum(tf.stop_gradient(p) * w) for p, w in zip(products, weights, strict=True)])
    return {"loss": loss + 0.1 * pull, "along": along}


@pytest.mark.parametrize(
    ("forward", "config", "remat"),
    covering(
        [two_losses_through_all_segments, two_gradients_of_one_segment, hessian_times_vector],
        [ONE, TWO, MICRO],
        POLICIES,
    ),
)
def test_several_gradients_go_through_one_segment(
    forward: Any, config: Mapping[str, Any], remat: Mapping[str, Any] | None
) -> None:
    item = make_item(forward)
    new = ar.rewrite(item, with_policy(config, remat))
    assert_same(item, new, SMALL)
    if forward is two_losses_through_all_segments:
        assert new.report.recomputed.segments


def plain_copies(graph: Graph, nodes: Sequence[Node], scope: str, triggers: Sequence[Node]) -> dict[Node, Node]:
    """Copy nodes as they are: nothing waits, and nothing says what it is a copy of."""
    made = copies_of(graph, nodes, scope, [])
    for copy in made.values():
        copy.drop_attr(ORIGIN_ATTR)
        copy.drop_attr(PASS_ATTR)
    return made


copies_of = rematerialize.copy_nodes


def test_without_edges_and_marks_tensorflow_merges_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_item(chain())
    assert executed(ar.rewrite(item, {**ONE, "remat": EVERY}), SMALL[0])["Tanh"] > 16
    monkeypatch.setattr(rematerialize, "copy_nodes", plain_copies)
    assert executed(ar.rewrite(item, {**ONE, "remat": EVERY}), SMALL[0])["Tanh"] == 16


def test_without_edges_a_copy_waits_for_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_item(chain())

    def early() -> int:
        graph = ar.rewrite(item, {**ONE, "remat": EVERY}).graph
        made = [node for node in graph if "remat/" in node.name]
        return sum(not any("gradients" in one.name for one in ancestors([node])) for node in made)

    assert early() == 0
    monkeypatch.setattr(rematerialize, "copy_nodes", lambda graph, nodes, scope, _: copies_of(graph, nodes, scope, []))
    assert early() > 8


def test_a_copy_of_a_draw_would_be_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are kept; were a stateful draw computed again, gradients would be those of another mask."""
    from autograph_rewrite.errors import VerifyError
    from autograph_rewrite.resolve.remat import activations, segments

    def forward() -> Mapping[str, Any]:
        h, y = placeholder("x", None, 4), placeholder("y", None, 4)
        for i in range(4):
            with tf.name_scope(f"layer_{i}"):
                h = tf.nn.dropout(tf.tanh(h @ variable(f"w{i}", np.eye(4) * 0.6 + 0.1)), 0.4, seed=i)
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    item = make_item(forward)
    assert_same(item, rewritten(item, ONE, EVERY), SMALL)
    monkeypatch.setattr(activations, "is_pure", lambda op: True)
    monkeypatch.setattr(segments, "worth_repeating", lambda acts, nodes: nodes)
    apart = {**TWO, "semantics": {"random": "independent"}}  # where each replica draws what it needs itself
    with pytest.raises(VerifyError, match=r"random_uniform.* runs a second time"):
        rewritten(item, apart, EVERY)
