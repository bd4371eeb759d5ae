"""Rows of variables that are split over the replicas are looked up and updated where they are, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.compile import request
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.passes.localize import rows_of_shards
from autograph_rewrite.passes.sharding import residence
from tests.support.covering import covering
from tests.support.training import train, v1, variable

ROWS, WIDTH = 131, 6  # more rows than are looked up in a step, of which 64 examples are assumed
RNG = np.random.default_rng(0)
TABLE, OUT = RNG.normal(size=(ROWS, WIDTH)), RNG.normal(size=(WIDTH, 2))
FEEDS = [
    {"ids:0": np.array(ids), "y:0": np.random.default_rng(len(ids)).normal(size=(len(ids), 2))}
    for ids in ([0, 130, 65, 65, 1], [2, 2, 2, 2], [66, 43, 130, 0, 1, 99, 44, 0])
]


def _pairs(ids: Any) -> Any:
    """Return two numbers for each example."""
    return tf.stack([ids, (ids + 3) % ROWS], 1)


LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda w, ids: tf.gather(w, ids),
    "rows of the value": lambda w, ids: tf.gather(tf.convert_to_tensor(w), ids),
    "several": lambda w, ids: tf.reduce_sum(tf.gather(w, _pairs(ids)), 1),
    "the same for all": lambda w, ids: tf.gather(w, ids) * tf.reduce_mean(tf.gather(w, [1, 5, 1]), 0),
    "elements": lambda w, ids: tf.gather(w, ids) * tf.gather_nd(w, tf.stack([ids, ids % WIDTH], 1))[:, None],
    "in a branch": lambda w, ids: tf.cond(
        tf.reduce_sum(ids) % 2 > 0, lambda: tf.gather(w, ids), lambda: tf.gather(w, (ids + 1) % ROWS)
    ),
    "tied": lambda w, ids: tf.matmul(tf.gather(w, ids), w, transpose_b=True)[:, :WIDTH],
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.3),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.3),
    "momentum": lambda: v1.train.MomentumOptimizer(0.3, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.3),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.1),
}


def item(lookup: str, optimizer: str = "sgd", rows: int = ROWS) -> ar.GraphItem:
    """Return a table of rows and a layer, with a loss of a batch of any size."""
    graph = tf.Graph()
    with graph.as_default():
        ids, y = v1.placeholder(tf.int64, [None], "ids"), v1.placeholder(tf.float64, [None, 2], "y")
        h = LOOKUPS[lookup](variable("table", TABLE[:rows]), ids % rows)
        loss = tf.reduce_mean(tf.square(tf.tanh(h) @ variable("out", OUT) - y), name="out_loss")
        tf.group(OPTIMIZERS[optimizer]().minimize(loss), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["out_loss"], init_op="init")


def config(replicas: int = 2, axis: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "devices": [f"CPU:{i}" for i in range(replicas)],
        "strategy": {"name": "AllReduce", "variables": "mirrored"},
        "variables": [{"match": "table", "partition": {"over": "data", "axis": axis, "stage": 3}}],
        **more,
    }


def differences(lookup: str, optimizer: str, given: dict[str, Any], rows: int = ROWS) -> float:
    """Return how far a rewrite is from one device, at most."""
    one = item(lookup, optimizer, rows)
    new = ar.rewrite(one, given)
    assert new.variables["table"].shards is not None
    found, expected = train(new, FEEDS), train(one, FEEDS)
    worst = max(np.abs(found.variables[name] - value).max() for name, value in expected.variables.items())
    losses = zip(found.fetched, expected.fetched, strict=True)
    return float(max(worst, *(abs(got["loss"] - wanted["loss"]) for got, wanted in losses)))


@pytest.mark.parametrize(
    ("lookup", "optimizer", "axis", "replicas"), covering(list(LOOKUPS), list(OPTIMIZERS), (0, 1), (2, 3, 4))
)
def test_rows_in_shards_train_as_on_one_device(lookup: str, optimizer: str, axis: int, replicas: int) -> None:
    assert differences(lookup, optimizer, config(replicas, axis)) < 1e-12


@pytest.mark.parametrize("lookup", ["rows", "several", "tied"])
def test_micro_batches_look_rows_up_in_shards(lookup: str) -> None:
    assert differences(lookup, "adagrad", config(2, microbatches=2)) < 1e-12


def test_no_replica_holds_the_whole_table_where_rows_are_looked_up() -> None:
    edges = ar.rewrite(item("rows"), config()).report.plan.edges
    assert not any(edge.lowering == "all_gather" and edge.owner == "table" for edge in edges)
    tied = ar.rewrite(item("tied"), config()).report.plan.edges
    assert any(edge.lowering == "all_gather" and edge.owner == "table" for edge in tied)


@pytest.mark.parametrize(
    ("lookup", "axis"), [("rows", 0), ("rows", 1), ("rows of the value", 0), ("in a branch", 0), ("tied", 0)]
)
def test_a_table_of_fewer_bytes_than_the_rows_that_are_looked_up_is_gathered(
    lookup: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchanged() -> tuple[int, int]:
        edges = ar.rewrite(item(lookup, "adagrad", 7), config(axis=axis)).report.plan.edges
        gathers = [edge for edge in edges if edge.lowering == "all_gather" and edge.owner == "table"]
        return sum(edge.bytes for edge in edges), len(gathers)

    assert differences(lookup, "adagrad", config(axis=axis), 7) < 1e-12
    less, gathers = exchanged()
    assert gathers > 0
    monkeypatch.setattr(residence._Asks, "_takes_less", lambda *_: False)
    assert less < exchanged()[0]


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_a_row_that_there_is_not_is_refused_as_by_the_whole_table(wrong: int) -> None:
    graph = tf.Graph()
    with graph.as_default():
        ids = v1.placeholder(tf.int64, [None], "ids")
        loss = tf.reduce_sum(tf.square(tf.gather(variable("table", TABLE), ids)), name="out_loss")
        tf.group(OPTIMIZERS["sgd"]().minimize(loss), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    one = ar.GraphItem.from_graph(graph, train_op="train", outputs=["out_loss"], init_op="init")
    feeds = {"ids:0": np.array([0, wrong, 1])}
    with ar.rewrite(one, config(3)).session() as session:
        session.run("init")
        with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
            session.run("out_loss:0", feeds)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("lookup", ["rows", "rows of the value", "the same for all"])
def test_the_certificate_covers_rows_in_shards(lookup: str, axis: int) -> None:
    flat = normalise_original(item(lookup, "adagrad"))
    given = Config.of(config(2, axis))
    pass_pipeline.rewrite(Request(flat, request(flat, given), certificate=Certificate(strict=True)))


def test_shards_that_begin_elsewhere_train_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rows_of_shards.RowsOfShards._find

    def shifted(self: Any, node: Any, ids: Any, table: rows_of_shards.Table) -> Any:
        ((axis, (first, second, *others)),) = table.levels
        return own(self, node, ids, table._replace(levels=((axis, (first - 1, second + 1, *others)),)))

    monkeypatch.setattr(rows_of_shards.RowsOfShards, "_find", shifted)
    with suppress(tf.errors.InvalidArgumentError, RewriteError):
        assert differences("rows", "sgd", config()) > 1e-6
