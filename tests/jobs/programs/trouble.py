"""A worker that trains, and of which one gets into trouble: `trouble.py KIND MODE OUT`.

What `KIND` says happens to worker 1 before step 3; the others carry on until they notice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

STEPS, AT = 6, 3
TIMEOUT = float(os.environ.get("JOB_TIMEOUT", "6"))
KIND, MODE = sys.argv[1:3]
LATE = int(os.environ.get("JOB_LATE", "-1"))
"""Who begins a step that fails later than the others."""
FAILING = (AT, AT + 2) if KIND == "skips" else (AT,)
"""Steps that fail: what is learnt from the first says nothing about the second."""
OUT = Path(sys.argv[3])


def main() -> None:
    """Train as TF_CONFIG says."""
    if KIND == "starts_tensorflow_first":
        import tensorflow as tf

        tf.constant(1.0) + 1.0
    if KIND == "wrong":
        import autograph_rewrite as ar

        ar.join()
    from tests.jobs.programs.job import Job

    job = Job.here(OUT)
    print("begins", time.time(), flush=True)
    if KIND == "busy":  # a thread that computes all the time, in every process
        threading.Thread(target=_compute, daemon=True).start()
    step = MODES[MODE](job)
    for number in range(1, STEPS + 1):
        if number == AT and job.task == 1:
            _trouble()
        if KIND == "slow" or (KIND in ("all_fail", "skips") and number in FAILING and job.task == LATE):
            time.sleep(1)
        try:
            step(number)
        except Exception as error:
            if KIND not in ("skips", "all_fail") or type(error).__name__ != "InvalidArgumentError":
                raise
            print("caught", time.time(), type(error).__name__, str(error)[:300], flush=True)
        print(f"did step {number}", time.time(), flush=True)
    print("done", time.time(), flush=True)


def _trouble() -> None:
    match KIND:
        case "killed" | "busy":
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed_soon":  # now and then in the middle of an exchange
            subprocess.Popen(["sh", "-c", f"kill -9 {os.getpid()}"], start_new_session=True)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises":
            raise ValueError("the data of worker 1 are broken")
        case "leaves":
            print("has no more batches", flush=True)
            sys.exit()
        case "hangs":
            time.sleep(1000)


def _compute() -> None:
    while True:
        np.linalg.norm(np.ones((200, 200)))


def _is_odd(job: Any, kind: str) -> bool:
    return kind == KIND and job.task == 1


def _config(job: Any) -> Mapping[str, Any]:
    config = {**job.config(**json.loads(os.environ.get("JOB_CONFIG", "{}"))), "timeout_seconds": TIMEOUT}
    if _is_odd(job, "other_config"):
        config["semantics"] = {"batch_norm": "local"}
    return config


def _fails(job: Any, number: int) -> bool:
    """Return whether this worker gets ids that are not in its table."""
    return number in FAILING and (KIND == "all_fail" or _is_odd(job, "user_error") or _is_odd(job, "skips"))


def session(job: Any) -> Callable[[int], Any]:
    """A v1 graph."""
    import autograph_rewrite as ar
    from autograph_rewrite import GraphItem
    from tests.zoo import ZOO

    built = ZOO["language_model"].build(optimizer="momentum" if _is_odd(job, "other_program") else "adam")
    item = GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=["loss"],
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs),
    )
    opened = ar.rewrite(item, _config(job)).session()
    opened.run(item.init_op)

    def step(number: int) -> Any:
        feeds = {name: job.part(value) for name, value in built.feeds(number, 8).items()}
        if _is_odd(job, "shape") and number == AT:
            feeds = {name: np.concatenate([v, v[:, :1]], 1) if v.ndim > 1 else v for name, v in feeds.items()}
        if _fails(job, number):
            feeds = {name: v + 1000 for name, v in feeds.items()}
        return opened.run(["loss", built.train_op], feeds)

    return step


def function(job: Any) -> Callable[[int], Any]:
    """A function over variables."""
    import tensorflow as tf

    import autograph_rewrite as ar
    from tests.zoo import ZOO

    name = "custom_loop" if _is_odd(job, "other_program") else "function_sparse"
    built = ZOO[name].build(optimizer="adam")

    @tf.function
    def delayed(ids: Any, y: Any) -> Any:  # what fails does so behind the first exchanges
        product = tf.ones([500, 500]) / 500
        for _ in range(30):
            product @= product
        return built.step(ids + tf.cast(0 * tf.reduce_sum(product), ids.dtype), y)

    train = delayed if KIND == "all_fail" else built.step
    distributed = ar.distribute(train, _config(job), *built.specs, batch_inputs=dict(built.batch_inputs))

    def step(number: int) -> Any:
        x, y = map(job.part, built.feeds(number, 8))
        if _fails(job, number):
            x = x + 1000
        if _is_odd(job, "shape") and number == AT:
            y = y[:-1]
        return distributed(tf.constant(x), tf.constant(y))

    return step


def outer(job: Any) -> Callable[[int], Any]:
    """The same, called by another function."""
    import tensorflow as tf

    import autograph_rewrite as ar
    from tests.zoo import ZOO

    built = ZOO["function_sparse"].build(optimizer="adam")
    distributed = ar.distribute(built.step, _config(job), *built.specs, batch_inputs=dict(built.batch_inputs))
    whole = tf.function(distributed, input_signature=built.specs)
    return lambda number: whole(*(tf.constant(job.part(value)) for value in built.feeds(number, 8)))


def keras_model(job: Any) -> Callable[[int], Any]:
    """A Keras model."""
    import keras

    import autograph_rewrite as ar
    from tests.zoo import ZOO

    if KIND == "other_seed":
        keras.utils.set_random_seed(job.task)
    built = ZOO["keras_two_inputs"].build(dtype="float32", optimizer="sgd")
    model = ar.distribute(built.model, _config(job))

    def step(number: int) -> Any:
        x, y = built.feeds(number + 7 * _is_odd(job, "other_data"), 8)
        if _is_odd(job, "shape") and number == AT:
            y = y[:-2]
        return model.train_on_batch(x, y)

    return step


MODES: dict[str, Callable[[Any], Callable[[int], Any]]] = {
    "session": session,
    "function": function,
    "outer": outer,
    "keras": keras_model,
}
main()
