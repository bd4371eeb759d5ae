"""Updates of rows by ops that fetch many rows at a time: the same bits, and only where they are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.support.covering import covering
from tests.support.training import v1

Choose = Callable[[Any, Any], tuple[Any, Any]]
ROWS, WIDTH, STEPS = 4096, 64, 4
NEVER = 1 << 40
KERNELS = ("ResourceSparseApplyAdagrad", "ResourceSparseApplyAdagradV2")


def plain(rows: Any, added: Any) -> tuple[Any, Any]:
    return rows, added


def low(rows: Any, added: Any) -> tuple[Any, Any]:
    """Return those of a part of the table, counted from its beginning and moved to the end of the table."""
    places = tf.where(rows < ROWS // 2)
    return tf.gather_nd(rows, places) - 0 + ROWS // 2, tf.gather_nd(added, places)


def item_of(op: str, dtype: Any = tf.float32, *, choose: Choose = plain) -> GraphItem:
    """Return the training of a table of a mebibyte, and of a factor that is read in each step."""
    graph = tf.Graph()
    with graph.as_default():
        ids = v1.placeholder(tf.int32, [None, 3], name="ids")
        table, slot = (
            v1.get_variable(name, initializer=value, use_resource=True)
            for name, value in (
                ("table", tf.random.stateless_normal([ROWS, WIDTH], [1, 2], dtype=dtype)),
                ("slot", tf.fill([ROWS, WIDTH], tf.constant(0.1, dtype))),
            )
        )
        loss = tf.reduce_mean(tf.square(tf.gather(table, ids) - 0.5), name="loss")
        slices = v1.gradients(loss, [table])[0]
        rows, which = tf.unique(slices.indices)
        added = tf.math.unsorted_segment_sum(slices.values, which, tf.size(rows))
        indices, added = choose(rows, added)
        given: dict[str, Any] = {"var": table.handle, "accum": slot.handle, "lr": tf.constant(0.3, dtype)}
        given |= {"grad": added, "indices": indices}
        if op == KERNELS[1]:
            given["epsilon"] = tf.constant(0.01, dtype)
        update = getattr(tf.raw_ops, op)(**given)
        with tf.control_dependencies([update]):
            tf.reduce_sum(slot.read_value() + table.read_value(), name="after")
        tf.group(update, name="train")
        v1.global_variables_initializer()
    outputs = ["loss", "after"]
    return GraphItem.from_graph(graph, train_op="train", outputs=outputs, init_op="init", batch_inputs={"ids": 0})


def rewritten(item: GraphItem, mode: str, *, large: int = 1 << 20, strategy: str = "AllReduce") -> GraphItem:
    """Return the item over two devices, with the pass for tables of so many bytes."""
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": strategy, "variables": mode}}
    with mock.patch("autograph_rewrite.passes.emit.update_rows.LARGE", large):
        return ar.rewrite(item, config)


def trained(item: GraphItem) -> dict[str, Any]:
    """Return all that is fetched, and the variables."""
    found: dict[str, Any] = {}
    rng = np.random.default_rng(3)
    with item.session() as session:
        session.run("init")
        for step in range(STEPS):
            feeds = {"ids": rng.integers(0, 40 if step else ROWS, (7, 3))}
            found |= dict(zip((f"loss {step}", f"after {step}"), session.run(["loss", "after"], feeds), strict=True))
            session.run("train", feeds)
        found |= session.read_variables()
    return found


def ops(item: GraphItem) -> list[str]:
    return [node.op for node in item.graph_def.node]


@pytest.mark.parametrize(("dtype", "op", "mode"), covering([tf.float32, tf.float64], KERNELS, ["shared", "mirrored"]))
def test_rows_that_are_fetched_together_are_updated_to_the_same_bits(op: str, dtype: Any, mode: str) -> None:
    item = item_of(op, dtype)
    kernel = rewritten(item, mode, large=NEVER)
    expected = check_same_bits(op, rewritten(item, mode), kernel)
    assert not np.array_equal(expected["table"], trained_once(kernel)), "it would not see a step that is missing"


def check_same_bits(op: str, new: GraphItem, kernel: GraphItem) -> dict[str, Any]:
    """Check an item without a kernel against one that has it; return what that one makes."""
    assert op not in ops(new)
    assert op in ops(kernel)
    found, expected = trained(new), trained(kernel)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name
    return expected


@pytest.mark.parametrize("strategy", ["PartitionedPS", "UnevenPartitionedPS", "PartitionedAR", "FSDP"])
@pytest.mark.parametrize("op", KERNELS)
def test_rows_of_a_table_in_shards_are_updated_to_the_same_bits(op: str, strategy: str) -> None:
    item = item_of(op)
    new, kernel = (rewritten(item, "shared", large=size, strategy=strategy) for size in (1 << 16, NEVER))
    assert ops(kernel).count(op) > 1, "the table is in one piece"
    check_same_bits(op, new, kernel)


def test_rows_of_which_some_are_taken_are_distinct_still() -> None:
    item = item_of(KERNELS[0], choose=low)
    check_same_bits(KERNELS[0], rewritten(item, "shared"), rewritten(item, "shared", large=NEVER))


def trained_once(item: GraphItem) -> Any:
    with item.session() as session:
        session.run("init")
        session.run("train", {"ids": np.arange(21).reshape(7, 3)})
        return session.read_variable("table")


def test_the_kernel_stays_on_servers_that_do_not_wait_for_all_workers() -> None:
    cluster = {"workers": ["a:1", "b:1"], "ps": ["c:1"]}
    config = {"devices": ["CPU:0"], "cluster": cluster, "strategy": {"name": "PS"}}
    item = item_of(KERNELS[0])
    assert KERNELS[0] not in ops(ar.rewrite(item, config, task=0))
    apart = [{"match": ".*", "synchronizer": "ps", "sync": False}]
    assert KERNELS[0] in ops(ar.rewrite(item, {**config, "variables": apart}, task=1))


def test_a_rewrite_with_it_verifies() -> None:
    report = ar.verify(item_of(KERNELS[0]), {"devices": ["CPU:0", "CPU:1"]})
    assert report.ok, str(report)


def test_the_kernel_stays_where_a_slot_is_no_variable_of_the_program() -> None:
    """A function that captures nothing but a handle has one slot for all replicas: rows would be written by each."""
    table = tf.Variable(np.ones((ROWS, WIDTH), np.float32))
    slot, rate = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[ROWS, WIDTH], shared_name="nobody's"), tf.constant(0.1)
    tf.raw_ops.AssignVariableOp(resource=slot, value=table)

    def step(ids: Any, rows: Any) -> Any:
        seen = tf.reduce_sum(tf.gather(table, ids))
        unique, where = tf.unique(ids)
        total = tf.math.unsorted_segment_sum(rows, where, tf.size(unique))
        tf.raw_ops.ResourceSparseApplyAdagrad(var=table.handle, accum=slot, lr=rate, grad=total, indices=unique)
        return seen

    specs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, WIDTH], tf.float32)
    item = ar.GraphItem.from_function(step, *specs)
    assert KERNELS[0] in ops(ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"], "strategy": {"variables": "mirrored"}}))
