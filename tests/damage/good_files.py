"""Whole files, one or more of every format that is read: what the damage is done to, and the verbs that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.inspect.dump import dump

v1 = tf.compat.v1
CONFIG = """\
devices: [CPU:0, CPU:1]
strategy: {name: AllReduce, variables: mirrored, bucket_bytes: 4MiB}
variables:
  - {match: 'u.*', synchronizer: all_reduce}
semantics: {strict: false, random: exact, min_coverage: 0.1}
timeout_seconds: 60
"""
NAMES = ("--train-op", "train", "--output", "loss:0", "--init-op", "init")


@dataclass(frozen=True)
class Good:
    """A format with a whole file.

    Attributes:
        name: of the format.
        path: of the file; of a SavedModel, the part of it that is damaged.
        verbs: command lines that read it; `{}` stands for the file, `{base}` for a whole graph.
    """

    name: str
    path: Path
    verbs: tuple[tuple[str, ...], ...]


def graph() -> Any:
    """Return a graph with a loop, a branch, a function and two kinds of updates."""
    with tf.Graph().as_default() as made:
        v1.set_random_seed(1)
        x = v1.placeholder(tf.float32, [None, 3], "x")
        y = v1.placeholder(tf.float32, [None, 2], "y")
        w = v1.get_variable("w", [3, 4], use_resource=True)
        u = v1.get_variable("u", [4, 2], use_resource=True)
        hidden = tf.nn.dropout(tf.tanh(x @ w), 0.3)
        hidden = tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h * 0.5), (0, hidden))[1]
        error = tf.cond(tf.reduce_sum(hidden) > 0, lambda: hidden @ u - y, lambda: y * 0.5)
        loss = tf.reduce_mean(tf.square(error), name="loss")
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, v1.train.get_or_create_global_step(), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
        v1.add_to_collection(v1.GraphKeys.TRAIN_OP, made.get_operation_by_name("train"))
        made.saver = v1.train.Saver(name="saver")
    return made


def make(folder: Path) -> Mapping[str, Good]:
    """Write a file of every format; return them by name.

    Args:
        folder: where.
    """
    made = graph()
    data = made.as_graph_def(add_shapes=True)
    base = folder / "base.pb"
    base.write_bytes(data.SerializeToString())
    (folder / "graph.pbtxt").write_text(str(data))
    with made.as_default():
        (folder / "graph.meta").write_bytes(
            v1.train.export_meta_graph(saver_def=made.saver.saver_def).SerializeToString()
        )
        with v1.Session() as session:
            session.run("init")
            builder = v1.saved_model.Builder(str(folder / "v1"))
            signature = v1.saved_model.predict_signature_def(
                {"x": made.get_tensor_by_name("x:0")}, {"loss": made.get_tensor_by_name("loss:0")}
            )
            builder.add_meta_graph_and_variables(session, ["train"], {"serving_default": signature})
            builder.save()
    item = ar.GraphItem.load(str(base), train_op="train", outputs=["loss"], init_op="init")
    (folder / "graph.txt").write_text(dump(item, full=True))
    item.save(str(folder / "graph.ar"))
    (folder / "config.yaml").write_text(CONFIG)
    plan = ar.build_plan(item, str(folder / "config.yaml"))
    plan.save(str(folder / "plan.yaml"))
    plan.save(str(folder / "plan.pb"))
    _second_saved_model(folder / "v2")
    config = str(folder / "config.yaml")
    reading = (("inspect", "{}"), ("dump", "{}"), ("plan", "{}", "--config", config), ("comm", "{}"))
    named = tuple((*line, *NAMES) for line in reading)
    planned = (("explain", "{base}", "--plan", "{}", *NAMES), ("simulate", "{base}", "--plan", "{}", *NAMES))
    files = {
        "pb": (base, named),
        "pbtxt": (folder / "graph.pbtxt", named),
        "meta": (folder / "graph.meta", reading),
        "saved_model_v1": (folder / "v1" / "saved_model.pb", (*reading[:2], (*reading[2], "--train-op", "train"))),
        "saved_model_v2": (folder / "v2" / "saved_model.pb", (*reading[:2], reading[2])),
        "ar": (folder / "graph.ar", reading),
        "text": (folder / "graph.txt", reading),
        "plan": (folder / "plan.yaml", planned),
        "plan_pb": (folder / "plan.pb", planned),
        "config": (folder / "config.yaml", (("plan", "{base}", "--config", "{}", *NAMES),)),
    }
    return {name: Good(name, path, tuple(verbs)) for name, (path, verbs) in files.items()}


def _second_saved_model(folder: Path) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(tf.ones([3, 1]))

        @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])])
        def train(self, x: Any, y: Any) -> Any:
            error = x @ self.w - y
            self.w.assign_sub(0.1 * tf.matmul(x, error, transpose_a=True))
            return {"loss": tf.reduce_mean(tf.square(error))}

    model = Model()
    tf.saved_model.save(model, str(folder), signatures={"train": model.train})
