"""Rows that a mask keeps are found in the block, so no micro-batch waits for another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.certify.check_claims import check_claims
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import PassError, VerifyError
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.strategies import builder_for
from tests.certify.wrong_claims import Reader, Seen
from tests.support.rewriting import run_pipeline
from tests.support.training import learnt

v1 = tf.compat.v1
WIDTH, ROWS = 3, 8
STAGED: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": {"stages": 2, "microbatches": 4, "schedule": "gpipe"}},
    "1f1b, interleaved": {"pipeline": {"stages": 2, "microbatches": 4, "schedule": "1f1b", "layout": "interleaved"}},
    "loop of micro-batches": {"microbatches": 3, "accumulation": {"form": "loop"}},
    "two replicas": {"devices": ["CPU:0", "CPU:1"], "microbatches": 2},
}


def mean_of_kept(h: Any, mask: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.boolean_mask(h, mask)))


def two_kept_alike(h: Any, mask: Any, y: Any) -> Any:
    """Predictions and labels, kept by one mask."""
    return tf.reduce_mean(tf.square(tf.boolean_mask(h, mask) - tf.boolean_mask(y, mask)))


def scattered(h: Any, mask: Any, y: Any) -> Any:
    """Kept rows are changed and put back."""
    at = tf.where(mask)
    back = tf.scatter_nd(at, tf.tanh(tf.gather_nd(h, at)), tf.shape(h, out_type=tf.int64))
    return tf.reduce_mean(tf.square(h + back - y))


def all_read(h: Any, mask: Any, y: Any) -> Any:
    """The largest of the kept ones: they have to be whole."""
    return tf.reduce_mean(tf.nn.top_k(tf.boolean_mask(h[:, 0], mask), 2)[0])


def by_values(h: Any, mask: Any, y: Any) -> Any:
    """What is kept depends on variables, and so does the divisor of the mean."""
    return tf.reduce_mean(tf.square(tf.boolean_mask(h, h[:, 0] > 0)))


def item_of(loss_of: Callable[[Any, Any, Any], Any], batch: int | None = None) -> GraphItem:
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("", use_resource=True):
        x, y = (v1.placeholder(tf.float64, [batch, WIDTH], name=name) for name in "xy")
        mask = v1.placeholder(tf.bool, [batch], name="mask")
        w, u = (tf.Variable(np.random.default_rng(seed).normal(size=(WIDTH, WIDTH))) for seed in (1, 2))
        loss = loss_of(tf.tanh(x @ w) @ u, mask, y)
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        init = v1.global_variables_initializer()
    axes: dict[str, int | None] = {"x": 0, "y": 0, "mask": 0}
    return GraphItem.from_graph(graph, train_op=train, outputs=[loss], init_op=init, batch_inputs=axes)


def batch_of(step: int) -> dict[str, Any]:
    """Return a batch of which the second micro-batch keeps nothing."""
    rng = np.random.default_rng(step)
    mask = rng.random(ROWS) < 0.5
    mask[:1], mask[-1:], mask[2:4] = True, True, False
    return {"x": rng.normal(size=(ROWS, WIDTH)), "y": rng.normal(size=(ROWS, WIDTH)), "mask": mask}


BATCHES = [batch_of(step) for step in range(2)]


def assert_trains_alike(item: GraphItem, config: dict[str, Any]) -> GraphItem:
    new = ar.rewrite(item, {"devices": ["CPU:0"], **config})
    for mine, other in zip(learnt(new, BATCHES), learnt(item, BATCHES), strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)
    return new


@pytest.mark.parametrize("how", STAGED)
@pytest.mark.parametrize("loss_of", [mean_of_kept, two_kept_alike, scattered])
def test_kept_rows_stay_in_their_micro_batch(loss_of: Callable[..., Any], how: str) -> None:
    new = assert_trains_alike(item_of(loss_of), STAGED[how])
    assert not any("meet" in note.text for note in new.report.notes)


@pytest.mark.parametrize("loss_of", [mean_of_kept, two_kept_alike, scattered])
def test_a_stated_batch_is_no_hindrance(loss_of: Callable[..., Any]) -> None:
    assert_trains_alike(item_of(loss_of, ROWS), STAGED["1f1b, interleaved"])


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
def test_kept_rows_that_are_all_read_are_in_the_order_of_the_batch(layout: str) -> None:
    assert_trains_alike(item_of(all_read), {"microbatches": 4, "accumulation": {"layout": layout}})


def test_a_number_of_rows_that_variables_decide_is_refused_in_stages_and_right_without() -> None:
    item = item_of(by_values)
    with pytest.raises(PassError, match="of the whole batch"):
        ar.rewrite(item, {"devices": ["CPU:0"], **STAGED["gpipe"]})
    assert_trains_alike(item, {"microbatches": 4})


def claimed(certificate: Any, loss_of: Callable[..., Any] = scattered) -> None:
    """Rewrite into micro-batches, under the eyes of a certificate."""
    flat = normalise_original(item_of(loss_of))
    config = Config.model_validate({"devices": ["CPU:0"], "microbatches": 2})
    run_pipeline(flat, builder_for(config).build(flat, config), certificate=certificate)


def claims(loss_of: Callable[..., Any] = scattered) -> tuple[Graph, Claims]:
    reader = Reader()
    with pytest.raises(Seen):
        claimed(reader, loss_of)
    return reader.graph, reader.claims


@pytest.mark.parametrize("loss_of", [mean_of_kept, two_kept_alike, scattered])
def test_the_certificate_covers_it(loss_of: Callable[..., Any]) -> None:
    certificate = Certificate(strict=True)
    claimed(certificate, loss_of)
    assert not certificate.not_covered


def the(graph: Graph, op: str) -> Node:
    return next(node for node in graph if node.op == op)


def numbers_read_elsewhere(graph: Graph) -> None:
    graph.add("Square", [the(graph, "Where").output()], name="stray")


@pytest.mark.parametrize("size", [(2, ("b",)), None])
def test_a_mask_of_other_rows_is_refused(size: Any) -> None:
    graph, right = claims(mean_of_kept)
    check_claims(topological_order(graph), right)
    mask = the(graph, "Where").inputs[0]
    other = right.values[mask.name]._replace(shape=(size,))
    wrong = Claims(**{**vars(right), "values": {**right.values, mask.name: other}})
    with pytest.raises(VerifyError, match="a mask of"):
        check_claims([node for node in topological_order(graph) if node is not mask.node], wrong)


def test_numbers_of_a_block_that_are_read_elsewhere_are_refused() -> None:
    graph, right = claims()
    numbers_read_elsewhere(graph)
    with pytest.raises(VerifyError, match="in a block only"):
        check_claims([node for node in topological_order(graph) if node.name != "stray"], right)


def test_blocks_that_do_not_fit_the_mask_are_refused() -> None:
    graph, right = claims()
    for node in [node for node in graph if node.attr("_autograph_in_block", b"") == b"local indices"]:
        name = node.output().name
        whole = right.values[name]._replace(kind="replicated")
        wrong = Claims(**{**vars(right), "values": {**right.values, name: whole}})
        with pytest.raises(VerifyError, match="is wrong"):
            check_claims(topological_order(graph), wrong)
