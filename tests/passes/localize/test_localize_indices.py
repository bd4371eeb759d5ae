"""Rows that each example looks up among its own are found in the block, so no micro-batch waits for another one."""

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
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.strategies import builder_for
from tests.certify.wrong_claims import Reader, Seen
from tests.support.rewriting import run_pipeline
from tests.support.training import learnt

v1 = tf.compat.v1
T, WIDTH = 5, 3
CONFIGS: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": {"stages": 2, "microbatches": 4, "schedule": "gpipe"}},
    "1f1b": {"pipeline": {"stages": 2, "microbatches": 4, "schedule": "1f1b", "layout": "interleaved"}},
    "loop": {"microbatches": 3, "accumulation": {"form": "loop", "layout": "interleaved"}},
    "two replicas": {"devices": ["CPU:0", "CPU:1"], "microbatches": 2},
}


def offsets(x: Any, positions: Any) -> Any:
    """As gather_indexes of BERT."""
    batch, length = tf.shape(x)[0], tf.shape(x)[1]
    begins = tf.reshape(tf.range(batch) * length, [-1, 1])
    return tf.gather(tf.reshape(x, [-1, WIDTH]), tf.reshape(positions + begins, [-1]))


def stated_offsets(x: Any, positions: Any) -> Any:
    """The same where the size of the batch is stated: numbers are constants."""
    begins = tf.constant(np.arange(8)[:, None] * T, tf.int32)
    return tf.gather(tf.reshape(x, [-1, WIDTH]), tf.reshape(begins + positions, [-1]))


def batch_dims(x: Any, positions: Any) -> Any:
    """TensorFlow's own gather in each example, whose gradient numbers rows of the whole batch."""
    return tf.reshape(tf.gather(x, positions, batch_dims=1), [-1, WIDTH])


def largest(x: Any, positions: Any) -> Any:
    """The largest of each example, whose gradient numbers all entries of the whole batch."""
    return tf.reshape(tf.nn.top_k(tf.reshape(x, [-1, T * WIDTH]), 2 * WIDTH)[0], [-1, WIDTH])


def item_of(gathered: Callable[[Any, Any], Any], batch: int | None = None, length: int | None = T) -> GraphItem:
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("", use_resource=True):
        x = v1.placeholder(tf.float64, [batch, length, WIDTH], name="x")
        positions = v1.placeholder(tf.int32, [batch, 2], name="positions")
        w = tf.Variable(initial_value(1))
        u = tf.Variable(initial_value(2))
        h = tf.tanh(tf.tensordot(x, w, [[2], [0]]))
        found = gathered(h, positions)
        loss = tf.reduce_mean(tf.square(found @ u)) + tf.reduce_sum(tf.square(h)) / 7.0
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        init = v1.global_variables_initializer()
    axes: dict[str, int | None] = {"x": 0, "positions": 0}
    return GraphItem.from_graph(graph, train_op=train, outputs=[loss], init_op=init, batch_inputs=axes)


def initial_value(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(WIDTH, WIDTH))


def batch_of(step: int, rows: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(rows, T, WIDTH)), "positions": rng.integers(0, T, (rows, 2))}


BATCHES = [batch_of(step) for step in range(2)]


def rewritten(item: GraphItem, how: str) -> GraphItem:
    return ar.rewrite(item, {"devices": ["CPU:0"], **CONFIGS[how]})


@pytest.mark.parametrize("how", CONFIGS)
def test_positions_with_offsets_are_found_in_the_block(how: str) -> None:
    item = item_of(offsets, length=None)
    new = rewritten(item, how)
    assert not any("meet" in note.text for note in new.report.notes)
    for mine, other in zip(learnt(new, BATCHES), learnt(item, BATCHES), strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)


@pytest.mark.parametrize(
    ("gathered", "batch"),
    [(stated_offsets, 8), (offsets, 8), (batch_dims, 8), (batch_dims, None), (largest, 8), (largest, None)],
)
def test_other_ways_to_write_it_are_found_alike(gathered: Callable[[Any, Any], Any], batch: int | None) -> None:
    item = item_of(gathered, batch)
    for mine, other in zip(learnt(rewritten(item, "1f1b"), BATCHES), learnt(item, BATCHES), strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)


@pytest.mark.parametrize("position", [-1, T])
def test_a_position_in_another_example_is_an_error_not_another_number(position: int) -> None:
    new = rewritten(item_of(offsets), "1f1b")
    feed = batch_of(0)
    feed["positions"][3, 1] = position
    with new.session() as session:
        session.run(new.init_op)
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside of its own example"):
            session.run(new.targets[0], feed, timeout_ms=60000)


def test_offsets_that_are_no_lengths_of_examples_are_left_alone() -> None:
    def shifted(x: Any, positions: Any) -> Any:
        begins = tf.reshape(tf.range(tf.shape(x)[0]) * (T - 1), [-1, 1])
        return tf.gather(tf.reshape(x, [-1, WIDTH]), tf.reshape(positions + begins, [-1]))

    item = item_of(shifted)
    new = ar.rewrite(item, {"devices": ["CPU:0"], "microbatches": 4})
    for mine, other in zip(learnt(new, BATCHES), learnt(item, BATCHES), strict=True):
        np.testing.assert_allclose(mine, other, 1e-9, 1e-9)


def claimed(certificate: Any, gathered: Callable[[Any, Any], Any] = offsets) -> None:
    """Rewrite into micro-batches, under the eyes of a certificate."""
    flat = normalise_original(item_of(gathered))
    config = Config.model_validate({"devices": ["CPU:0"], "microbatches": 2})
    run_pipeline(flat, builder_for(config).build(flat, config), certificate=certificate)


def claims() -> tuple[Graph, Claims]:
    reader = Reader()
    with pytest.raises(Seen):
        claimed(reader)
    return reader.graph, reader.claims


@pytest.mark.parametrize("gathered", [offsets, largest])
def test_the_certificate_covers_it(gathered: Callable[[Any, Any], Any]) -> None:
    certificate = Certificate(strict=True)
    claimed(certificate, gathered)
    assert not certificate.not_covered


def only(graph: Graph, op: str, part: str) -> Node:
    (found,) = [node for node in graph if node.op == op and part in node.name]
    return found


def unchecked(graph: Graph) -> None:
    checked = only(graph, "CheckNumerics", "/checked")
    checked.output().replace_all_uses_with(checked.inputs[0])


def checked_against_other_rows(graph: Graph) -> None:
    less = only(graph, "Less", "/not_behind")
    less.set_input(1, only(graph, "GreaterEqual", "/not_before").inputs[1])


def numbers_read_elsewhere(graph: Graph) -> None:
    numbered = only(graph, "Range", "/numbered")
    graph.add("Square", [numbered.output()], name="stray")


@pytest.mark.parametrize("spoil", [unchecked, checked_against_other_rows, numbers_read_elsewhere])
def test_numbers_that_may_name_other_rows_are_refused(spoil: Callable[[Graph], None]) -> None:
    graph, right = claims()
    check_claims(topological_order(graph), right)
    spoil(graph)
    nodes = [node for node in topological_order(graph) if node.name != "stray"]
    with pytest.raises(VerifyError, match=r"nothing checks|in a block only"):
        check_claims(nodes, right)


def test_blocks_that_do_not_fit_the_numbers_are_refused() -> None:
    graph, right = claims()
    for node in [node for node in graph if node.attr("_autograph_in_block", b"") == b"local indices"]:
        name = node.output().name
        whole = right.values[name]._replace(kind="replicated")
        wrong = Claims(**{**vars(right), "values": {**right.values, name: whole}})
        with pytest.raises(VerifyError, match="is wrong"):
            check_claims(topological_order(graph), wrong)
