"""What is rewritten: the zoo, models in stages, on a model axis and for remat, an iterator, ten corpus programs.

Tracing may name nodes otherwise the next time, so each item is traced once and kept. This module imports TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.corpus import catalogue, judge
from tests.fuzz.worker import prepare
from tests.support import cut_images, recomputed, split_models
from tests.support.rank_jobs import EXTRA, item_of
from tests.support.staged import MODELS, staged_item
from tests.support.training import make_item
from tests.zoo import ZOO

v1 = tf.compat.v1
CORPUS = (
    "ptb_language_model",
    "word2vec_sampled",
    "resnet_v1_graph",
    "deepq",
    "maml",
    "wide_and_deep",
    "text_transformer",
    "switch_transformer",
    "mnist_convnet",
    "vae",
)
"""Programs of libraries that come with TensorFlow, as small as possible and each of another kind."""


def builders() -> Mapping[str, Callable[[], ar.GraphItem]]:
    """How each item is made, by its name."""
    found: dict[str, Callable[[], ar.GraphItem]] = {name: _of_zoo(name) for name in (*ZOO, *EXTRA)}
    found |= {f"staged_{name}": _staged(name) for name in MODELS}
    found |= {"split_mlp": split_models.item, "split_images": _images, "iterator": _iterator, "replicas": _replicas}
    found |= {"deep_chain": lambda: make_item(recomputed.chain())}
    found |= {"deep_transformer": lambda: make_item(recomputed.transformer(dropout="stateless"))}
    found |= {"with_checkpoints": lambda: make_item(_checkpoints)}
    return found | {name: _of_corpus(name) for name in CORPUS}


def trace(folder: Path, kept: Collection[str]) -> None:
    """Write items as files, but for those that are there."""
    made = builders()
    for name in [one for one in made if one not in kept]:
        made[name]().save(folder / f"{name}.ar")


def _of_zoo(name: str) -> Callable[[], ar.GraphItem]:
    """An entry of the zoo; functions as sessions run them, for those of the corpus stay with their captures."""
    from autograph_rewrite.runtime.function.session_step import stand_alone

    def build() -> ar.GraphItem:
        item = item_of(name)
        return stand_alone(item) if item.binding is not None else item

    return build


def _staged(name: str) -> Callable[[], ar.GraphItem]:
    return lambda: staged_item(MODELS[name])[0]


def _of_corpus(name: str) -> Callable[[], ar.GraphItem]:
    return lambda: judge.build(catalogue.programs()[name][1]).item


def _checkpoints() -> Mapping[str, tf.Tensor]:
    """Layers of which the graph's collection names two."""
    found = recomputed.chain(8)()
    for i in (2, 5):
        v1.add_to_collection("checkpoints", v1.get_default_graph().get_tensor_by_name(f"layer_{i}/act:0"))
    return found


def _images() -> ar.GraphItem:
    return ar.GraphItem.from_function(cut_images.step_of(cut_images.variables()), *cut_images.SPECS)


def _iterator() -> ar.GraphItem:
    """A graph that draws its batches itself, and a counter that needs nothing of them."""
    with tf.Graph().as_default() as graph:
        data = tf.data.Dataset.from_tensor_slices((np.ones((12, 4)), np.ones((12, 3)))).batch(6)
        x, y = v1.data.make_one_shot_iterator(data).get_next(name="next")
        w = v1.get_variable("w", initializer=np.ones((4, 3)), use_resource=True)
        loss = tf.reduce_mean(tf.square(x @ w - y), name="loss")
        step = v1.train.get_or_create_global_step()
        v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step, name="train")
        v1.variables_initializer(v1.global_variables(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def _replicas() -> ar.GraphItem:
    """A step that asks for its replica, and adds to variables what each replica has of its own."""
    w = tf.Variable(np.ones((3, 2)), name="w")
    seen = tf.Variable(np.zeros(()), trainable=False, name="seen")
    means = tf.Variable(np.zeros((3,)), trainable=False, name="means")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        seen.assign_add(tf.cast(ar.replica_id(), tf.float64))
        means.assign(0.9 * means + 0.1 * tf.reduce_mean(x, 0))
        return loss, tf.fill([tf.shape(x)[0]], ar.replica_id())

    return ar.GraphItem.from_function(step, tf.TensorSpec([None, 3], tf.float64))


if __name__ == "__main__":
    prepare()
    trace(Path(sys.argv[1]), sys.argv[2:])
