"""tensorflow-recommenders tasks and layers, which need Keras 2."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.corpus.program import Built, Feed, Library, Program, ids, stepped

ADDRESS = "tensorflow.org/recommenders/examples/"
F = "float32"


def _step(loss_of: Any, variables: Any, optimizer: Any) -> Any:
    def train(*given: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(*given)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}

    return train


def two_tower_retrieval() -> Built:
    import tensorflow_recommenders as tfrs
    import tf_keras

    users, movies = tf_keras.layers.Embedding(9, 4), tf_keras.layers.Embedding(11, 4)
    users.build(None)
    movies.build(None)
    task = tfrs.tasks.Retrieval()
    variables = [*users.trainable_variables, *movies.trainable_variables]
    optimizer = tf_keras.optimizers.Adagrad(0.1)
    optimizer.build(variables)
    train = _step(lambda user, movie: task(users(user), movies(movie), compute_metrics=False), variables, optimizer)

    def step(user: Any, movie: Any) -> dict[str, Any]:
        return train(user, movie)

    return stepped(step, user=ids(9), movie=ids(11))


def ranking() -> Built:
    import tensorflow_recommenders as tfrs
    import tf_keras

    layers = tf_keras.layers
    users, movies = layers.Embedding(9, 4), layers.Embedding(11, 4)
    ratings = tf_keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
    ratings.build((None, 8))
    users.build(None)
    movies.build(None)
    task = tfrs.tasks.Ranking(
        loss=tf_keras.losses.MeanSquaredError(), metrics=[tf_keras.metrics.RootMeanSquaredError()]
    )
    variables = [*users.trainable_variables, *movies.trainable_variables, *ratings.trainable_variables]
    optimizer = tf_keras.optimizers.Adam(0.01)
    optimizer.build(variables)

    def loss_of(user: Any, movie: Any, rating: Any) -> Any:
        return task(labels=rating, predictions=ratings(tf.concat([users(user), movies(movie)], 1)))

    train = _step(loss_of, variables, optimizer)

    def step(user: Any, movie: Any, rating: Any) -> dict[str, Any]:
        return train(user, movie, rating)

    return stepped(step, user=ids(9), movie=ids(11), rating=Feed((1,), "unit"))


def deep_cross_network() -> Built:
    import tensorflow_recommenders as tfrs
    import tf_keras

    cross = tfrs.layers.dcn.Cross(projection_dim=3, kernel_initializer="glorot_uniform")
    head = tf_keras.layers.Dense(1)
    head(cross(tf.zeros((1, 6))))
    variables = [*cross.trainable_variables, *head.trainable_variables]
    optimizer = tf_keras.optimizers.Adam(0.01)
    optimizer.build(variables)
    train = _step(lambda x, y: tf.reduce_mean((head(cross(x)) - y) ** 2), variables, optimizer)

    def step(x: Any, y: Any) -> dict[str, Any]:
        return train(x, y)

    return stepped(step, x=Feed((6,)), y=Feed((1,)))


PROGRAMS = (
    Program(two_tower_retrieval, ADDRESS + "basic_retrieval", floats=F),
    Program(ranking, ADDRESS + "basic_ranking", floats=F),
    Program(deep_cross_network, ADDRESS + "dcn", floats=F),
)
LIBRARY = Library(
    "tensorflow_recommenders",
    PROGRAMS,
    needs=("tf_keras", "tensorflow_recommenders"),
    environment={"TF_USE_LEGACY_KERAS": "1"},
)
