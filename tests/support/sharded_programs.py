"""Training steps with lookups, user-partitioned tables and every optimizer of TensorFlow 1, for servers and shards.

python -m tests.support.sharded_programs [SEED COUNT]   draws that many combinations, and counts what came of them
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from random import Random
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import RewriteError
from tests.support.training import v1

ROWS, WIDTH, CLASSES = 12, 4, 10
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "adagrad_da": lambda: v1.train.AdagradDAOptimizer(0.1, v1.train.get_or_create_global_step()),
    "adadelta": lambda: v1.train.AdadeltaOptimizer(0.5),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.1, momentum=0.9),
    "rmsprop_centered": lambda: v1.train.RMSPropOptimizer(0.1, centered=True),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01),
    "proximal": lambda: v1.train.ProximalGradientDescentOptimizer(0.1, l2_regularization_strength=0.01),
    "proximal_adagrad": lambda: v1.train.ProximalAdagradOptimizer(0.1, l1_regularization_strength=0.01),
}
NARROW = ("adagrad_da", "proximal", "proximal_adagrad")
"""The optimizers whose rates are float32, whatever they update."""
SAMPLED = ("nce", "sampled_softmax")
"""The programs with samplers, which draw in float32."""
STRATEGIES = (
    "PS", "PSLoadBalancing", "Parallax", "PartitionedPS", "UnevenPartitionedPS", "PartitionedAR",
    "RandomAxisPartitionAR", "FSDP", "Auto", "AllReduce",
)  # fmt: skip


def _normal(seed: int = 1) -> Any:
    return v1.random_normal_initializer(seed=seed, stddev=0.5)


def _variable(name: str, *shape: int) -> Any:
    return v1.get_variable(name, shape, _dtype(), initializer=_normal(), use_resource=True)


def _dtype() -> Any:
    """Return the type that the graph under construction computes in: that of its input `y`."""
    return v1.get_default_graph().get_tensor_by_name("y:0").dtype


def _ids(dtype: Any = tf.int64) -> Any:
    return v1.placeholder(dtype, [None], "ids")


def _loss(h: Any) -> Any:
    y = v1.get_default_graph().get_tensor_by_name("y:0")
    return tf.reduce_mean(tf.square(tf.tanh(tf.reduce_sum(h, 1)) - y))


def gather() -> Any:
    return _loss(tf.gather(_variable("table", ROWS, WIDTH), _ids()) @ _variable("w", WIDTH, 2))


def lookup_alone() -> Any:
    return tf.reduce_mean(tf.square(tf.nn.embedding_lookup(_variable("table", ROWS, WIDTH), _ids())))


def twice() -> Any:
    table, ids = _variable("table", ROWS, WIDTH), _ids()
    return _loss(tf.nn.embedding_lookup(table, ids) + tf.nn.embedding_lookup(table, (ids + 1) % ROWS))


def tied() -> Any:
    table = _variable("table", ROWS, WIDTH)
    return _loss(tf.nn.embedding_lookup(table, _ids()) @ tf.transpose(table))


def _sparse_ids(ids: Any) -> tuple[Any, Any]:
    """Two ids for each example, and their weights, as the sparse tensors that feature columns make."""
    count = tf.shape(ids, tf.int64)[0]
    rows = tf.reshape(tf.stack([tf.range(count), tf.range(count)], 1), [-1])
    places = tf.stack([rows, tf.tile(tf.constant([0, 1], tf.int64), [count])], 1)
    values = tf.reshape(tf.stack([ids, (ids + 3) % ROWS], 1), [-1])
    weights = 0.5 + tf.cast(values, _dtype()) / ROWS
    shape = tf.stack([count, 2])
    return tf.SparseTensor(places, values, shape), tf.SparseTensor(places, weights, shape)


def _combined(combiner: str, *, weighted: bool = False, safe: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        found = v1.nn.safe_embedding_lookup_sparse if safe else v1.nn.embedding_lookup_sparse
        ids, weights = _sparse_ids(_ids())
        table = _variable("table", ROWS, WIDTH)
        tables = [table] if safe else table
        return _loss(found(tables, ids, weights if weighted else None, combiner=combiner) @ _variable("w", WIDTH, 2))

    return make


def _sampled(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        ids = _ids()
        hidden = tf.nn.embedding_lookup(_variable("table", ROWS, WIDTH), ids)
        w, b = _variable("w", CLASSES, WIDTH), _variable("b", CLASSES)
        labels = v1.placeholder(tf.int64, [None, 1], "labels")
        if kind == "nce":
            values = tf.random.log_uniform_candidate_sampler(labels, 1, 4, True, CLASSES, seed=1)
            return tf.reduce_mean(tf.nn.nce_loss(w, b, labels, hidden, 4, CLASSES, sampled_values=values))
        return tf.reduce_mean(tf.nn.sampled_softmax_loss(w, b, labels, hidden, 4, CLASSES, seed=1))

    return make


def _partitioned(strategy: str, parts: int = 3) -> Callable[[], Any]:
    def make() -> Any:
        with v1.variable_scope("user", partitioner=v1.fixed_size_partitioner(parts), use_resource=True):
            table = v1.get_variable("table", [ROWS + 1, WIDTH], _dtype(), initializer=_normal())
            w = v1.get_variable("w", [WIDTH, 2], _dtype(), initializer=_normal(), partitioner=None)
        found = v1.nn.embedding_lookup(table, _ids(), partition_strategy=strategy)
        return _loss(found @ tf.convert_to_tensor(w))

    return make


def wide_and_deep() -> Any:
    ids = _ids()
    sparse, _ = _sparse_ids(ids)
    wide = v1.nn.embedding_lookup_sparse(_variable("wide", ROWS, 1), sparse, None, combiner="sum")
    deep = tf.nn.embedding_lookup(_variable("deep", ROWS, WIDTH), ids)
    hidden = tf.nn.relu(deep @ _variable("w", WIDTH, 6) + _variable("b", 6))
    return _loss(wide + hidden @ _variable("out", 6, 1) + _variable("bias", 1))


def whole_batch() -> Any:
    table = _variable("table", ROWS, WIDTH)
    h = tf.nn.embedding_lookup(table, _ids())
    a = tf.matmul(h, h, transpose_a=True) + 2 * tf.eye(WIDTH, dtype=_dtype())
    return _loss(tf.transpose(tf.linalg.solve(a, tf.transpose(h))) @ _variable("w", WIDTH, 2) + _variable("b", 2))


def in_a_loop() -> Any:
    w, h = _variable("w", WIDTH, WIDTH), tf.nn.embedding_lookup(_variable("table", ROWS, WIDTH), _ids())
    _, out = tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, tf.tanh(a @ w)), (0, h))
    return _loss(out)


def in_a_branch() -> Any:
    w, h = _variable("w", WIDTH, WIDTH), tf.nn.embedding_lookup(_variable("table", ROWS, WIDTH), _ids())
    return _loss(tf.cond(tf.reduce_sum(h) > 0, lambda: h @ w, lambda: h - w[0]))


PROGRAMS: Mapping[str, Callable[[], Any]] = {
    "gather": gather, "lookup_alone": lookup_alone, "twice": twice, "tied": tied,
    "sparse_mean": _combined("mean"), "sparse_sqrtn_weighted": _combined("sqrtn", weighted=True),
    "sparse_sum": _combined("sum"), "safe_mean": _combined("mean", safe=True),
    "safe_sum_weighted": _combined("sum", weighted=True, safe=True), "nce": _sampled("nce"),
    "sampled_softmax": _sampled("softmax"), "user_mod": _partitioned("mod"), "user_div": _partitioned("div"),
    "wide_and_deep": wide_and_deep, "whole_batch": whole_batch, "in_a_loop": in_a_loop, "in_a_branch": in_a_branch,
}  # fmt: skip


class Case(NamedTuple):
    """One program, how it is trained, and how it is distributed."""

    program: str
    optimizer: str
    strategy: str
    mode: str
    replicas: int

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        devices = [f"CPU:{i}" for i in range(self.replicas)]
        return {"devices": devices, "strategy": {"name": self.strategy, "variables": self.mode}}


def cases() -> list[Case]:
    """Return all combinations."""
    return [Case(*one) for one in product(PROGRAMS, OPTIMIZERS, STRATEGIES, ("shared", "mirrored"), (2, 3))]


def item_of(program: str, optimizer: str) -> ar.GraphItem:
    """Return the training step."""
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        narrow = optimizer in NARROW or program in SAMPLED
        v1.placeholder(tf.float32 if narrow else tf.float64, [None], "y")
        loss = tf.identity(PROGRAMS[program](), name="loss")
        step = v1.train.get_or_create_global_step()
        OPTIMIZERS[optimizer]().minimize(loss, global_step=step, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def feeds(item: ar.GraphItem, steps: int = 3) -> Iterator[dict[str, Any]]:
    """Yield batches of uneven sizes."""
    random = np.random.default_rng(2)
    for size in (7, 8, 5)[:steps]:
        one = {"ids": random.integers(0, ROWS, size), "y": random.normal(size=size)}
        one["labels"] = random.integers(0, CLASSES, (size, 1))
        yield {name: value for name, value in one.items() if name in item.graph.nodes}


def trained(item: ar.GraphItem, given: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the losses of some steps, and all variables behind them."""
    with item.session() as session:
        session.run("init")
        losses = [session.run(["loss", "train"], feed, timeout_ms=30000)[0] for feed in given]
        return {"loss": losses, **session.read_variables()}


def error(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how far two runs are from each other, relative to the size of what is compared, in tolerances."""
    found = 0.0
    narrow = any(np.asarray(value).dtype == np.float32 for value in one.values())
    for name, value in one.items():
        a, b = np.asarray(value, np.float64), np.asarray(other[name], np.float64)
        found = max(found, float(np.abs(a - b).max(initial=0) / max(np.abs(a).max(initial=0), 1e-3)))
    return found / (2e-5 if narrow else 1e-9)


def outcome(case: Case, truths: dict[tuple[str, str], tuple[ar.GraphItem, list[dict[str, Any]], Any]]) -> str:
    """Return "equal", "refused: ...", "WRONG: ..." or "CRASH: ..."."""
    key = case.program, case.optimizer
    if key not in truths:
        item = item_of(*key)
        given = list(feeds(item))
        truths[key] = item, given, trained(item, given)
    item, given, expected = truths[key]
    try:
        new = ar.rewrite(item, case.config)
    except RewriteError as refusal:
        kind = "CRASH" if type(refusal).__name__ == "VerifyError" else "refused"
        return f"{kind}: {type(refusal).__name__} {refusal.problem}"
    except Exception as crash:
        return f"CRASH: {type(crash).__name__} {crash}"
    try:
        worst = error(expected, trained(new, given))
    except Exception as crash:
        return f"CRASH: {type(crash).__name__} {str(crash)[:300]}"
    return "equal" if worst < 1 else f"WRONG: {worst:.3g} times the tolerance"


def sweep(seed: int, count: int) -> Counter[str]:
    """Draw cases, tell what is not equal, and count."""
    every = cases()
    Random(seed).shuffle(every)
    drawn = sorted(every[:count])
    counts: Counter[str] = Counter()
    truths: dict[tuple[str, str], Any] = {}
    for case in drawn:
        found = outcome(case, truths)
        counts[found.partition(":")[0]] += 1
        if found != "equal":
            print(*case, found.replace("\n", " ")[:250], flush=True)
    return counts


if __name__ == "__main__":
    print(dict(sweep(int(sys.argv[1]) if sys.argv[1:] else 0, int(sys.argv[2]) if sys.argv[2:] else 10**6)))
