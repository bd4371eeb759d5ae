"""Below function mode: registered functions, what they leave behind, and the watchdog over them."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import tf_private
from autograph_rewrite.runtime.engine import native
from autograph_rewrite.runtime.engine.native import FunctionSignature
from autograph_rewrite.runtime.job.watchdog import Watchdog
from tests.support.linear_step import Linear, assert_same_state, batch, config


@pytest.fixture
def pair() -> tuple[Linear, Linear]:
    return Linear(), Linear()


def test_the_public_call_op_serves_where_tensorflows_private_modules_have_changed(
    pair: tuple[Linear, Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf_private, "executor", lambda: None)
    one, many = pair
    step = ar.distribute(many.step, config("mirrored"))
    for size in (5, 4):
        one.step(*batch(size))
        step(*batch(size))
    assert_same_state(one, many)


def test_mirrored_steps_leave_no_threads_behind(pair: tuple[Linear, Linear]) -> None:
    step = ar.distribute(pair[1].step, config("mirrored"))
    for _ in range(5):
        step(*batch(5))
    before = len(os.listdir("/proc/self/task"))
    for _ in range(60):
        step(*batch(5))
    assert len(os.listdir("/proc/self/task")) < before + 20


def test_a_dropped_function_is_forgotten_by_tensorflow(pair: tuple[Linear, Linear]) -> None:
    from tensorflow.python.eager import context

    step = ar.distribute(pair[1].step, config("shared"))
    step(*batch(5))
    name = step._traces[0].step._call._name
    assert context.context().has_function(name)
    del step
    gc.collect()
    assert not context.context().has_function(name)


def lonely_collective() -> Any:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [3], name="x")
        with tf.device("/device:CPU:0"):
            tf.raw_ops.CollectiveReduceV2(
                input=x, group_size=2, group_key=77, instance_key=1, ordering_token=[], merge_op="Add", final_op="Id",
                name="sum",
            )  # fmt: skip
    data = graph.as_graph_def().SerializeToString()
    return native.Call(native.build(data, native.new_name("lonely"), FunctionSignature(["x"], ["sum:0"])))


def test_a_replica_that_waits_for_ever_is_cancelled_and_the_process_goes_on(
    pair: tuple[Linear, Linear], capfd: pytest.CaptureFixture[str]
) -> None:
    call, watchdog = lonely_collective(), Watchdog(1.0)
    with pytest.raises(tf.errors.CancelledError):
        call([tf.ones([3])], watchdog.start())
    assert watchdog.expired
    told = [line for line in capfd.readouterr().err.splitlines() if "stood still" in line]
    assert len(told) == 1
    assert told[0].endswith("a replica waits for another; after 1 s (timeout_seconds) it is ended")
    watchdog.stop(failed=True)
    one, many = pair
    step = ar.distribute(many.step, config("mirrored"))
    one.step(*batch(5))
    step(*batch(5))
    assert_same_state(one, many)


def test_a_step_that_computes_for_long_is_not_cancelled() -> None:
    watchdog = Watchdog(0.3)
    watchdog.start()
    done = threading.Event()
    timer = threading.Timer(1.0, done.set)
    timer.start()
    while not done.is_set():
        sum(range(10000))
    assert not watchdog.expired


def test_a_missing_node_is_named_when_a_function_is_built() -> None:
    with pytest.raises(ar.GraphError, match="no node 'train'"):
        native.build(b"", "f", FunctionSignature(targets=["train"]))
