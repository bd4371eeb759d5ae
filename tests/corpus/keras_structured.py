"""Tables, recommendations, time series and graphs, as the examples on keras.io write them."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.corpus.program import Built, Feed, Library, Program, ids, trained

ADDRESS = "keras.io/examples/structured_data/"
SERIES = "keras.io/examples/timeseries/"


def _tables() -> tuple[dict[str, Any], dict[str, Feed]]:
    """Return inputs of a table with numbers and categories, and their feeds."""
    inputs = {name: keras.Input((1,), name=name) for name in ("age", "hours")}
    inputs |= {name: keras.Input((1,), name=name, dtype="int32") for name in ("job", "sex")}
    feeds = {"age": Feed((1,)), "hours": Feed((1,)), "job": ids(6, 1), "sex": ids(2, 1)}
    return inputs, feeds


def _binary(model: Any, feeds: Any, optimizer: Any = None) -> Built:
    model.compile(optimizer or keras.optimizers.Adam(), keras.losses.BinaryCrossentropy(), metrics=["accuracy"])
    return trained(model, feeds, Feed((1,), "binary"))


def wide_and_deep() -> Built:
    inputs, feeds = _tables()
    crossed = layers.CategoryEncoding(num_tokens=12, output_mode="multi_hot")(inputs["job"] * 2 + inputs["sex"])
    wide = layers.BatchNormalization()(crossed)
    parts = [layers.Flatten()(layers.Embedding(6, 3)(inputs["job"])), inputs["age"], inputs["hours"]]
    deep = layers.concatenate(parts)
    for _ in range(2):
        deep = layers.Dropout(0.1)(layers.ReLU()(layers.BatchNormalization()(layers.Dense(8)(deep))))
    output = layers.Dense(1, activation="sigmoid")(layers.concatenate([wide, deep]))
    return _binary(keras.Model(inputs, output), feeds)


def deep_and_cross() -> Built:
    inputs, feeds = _tables()
    parts = [layers.Flatten()(layers.Embedding(6, 3)(inputs["job"])), inputs["age"], inputs["hours"]]
    x0 = layers.concatenate(parts)
    cross = x0
    for _ in range(2):
        cross = x0 * layers.Dense(5)(cross) + cross
    deep = layers.Dense(8, activation="relu")(x0)
    return _binary(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.concatenate([cross, deep]))), feeds)


def tab_transformer() -> Built:
    inputs, feeds = _tables()
    encoded = [layers.Embedding(6, 4)(inputs["job"]), layers.Embedding(2, 4)(inputs["sex"])]
    x = layers.concatenate(encoded, axis=1) + layers.Embedding(2, 4)(ops.arange(2))
    y = layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.2)(x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([y, x]))
    y = layers.Dropout(0.2)(layers.Dense(4, activation="gelu")(layers.LayerNormalization()(x)))
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([y, x]))
    numeric = layers.LayerNormalization(epsilon=1e-6)(layers.concatenate([inputs["age"], inputs["hours"]]))
    x = layers.BatchNormalization()(layers.concatenate([layers.Flatten()(x), numeric]))
    x = layers.Dropout(0.2)(layers.Dense(8, activation="selu")(x))
    optimizer = keras.optimizers.AdamW(0.001, weight_decay=0.0001)
    return _binary(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)), feeds, optimizer)


def gated_residual_network() -> Built:
    class Gated(layers.Layer):
        """A gated linear unit around two dense layers."""

        def __init__(self, units: int) -> None:
            super().__init__()
            self.elu, self.linear = layers.Dense(units, activation="elu"), layers.Dense(units)
            self.drop, self.norm = layers.Dropout(0.1), layers.LayerNormalization()
            self.gate_linear, self.gate = layers.Dense(units), layers.Dense(units, activation="sigmoid")
            self.project = layers.Dense(units)

        def call(self, inputs: Any) -> Any:
            x = self.drop(self.linear(self.elu(inputs)))
            return self.norm(self.project(inputs) + self.gate_linear(x) * self.gate(x))

    inputs, feeds = _tables()
    parts = [layers.Dense(4)(inputs[n]) for n in ("age", "hours")]
    parts += [layers.Flatten()(layers.Embedding(6, 4)(inputs["job"]))]
    weights = ops.expand_dims(layers.Dense(3, activation="softmax")(Gated(4)(layers.concatenate(parts))), -1)
    stacked = ops.stack([Gated(4)(part) for part in parts], axis=1)
    x = ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), stacked), axis=1)
    return _binary(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)), feeds)


def neural_decision_forest() -> Built:
    depth = 3
    leaves = 2**depth

    class Tree(layers.Layer):
        """Routes each row to all leaves, with probabilities."""

        def __init__(self) -> None:
            super().__init__()
            self.decide = layers.Dense(leaves, activation="sigmoid")

        def build(self, shape: Any) -> None:
            self.pi = self.add_weight(shape=(leaves, 2), initializer="random_normal", name="pi")

        def call(self, features: Any) -> Any:
            size = ops.shape(features)[0]
            decisions = ops.expand_dims(self.decide(features), axis=2)
            decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
            mu, begin, end = ops.ones([size, 1, 1]), 1, 2
            for level in range(depth):
                mu = ops.reshape(mu, [size, -1, 1])
                mu = ops.tile(mu, (1, 1, 2)) * decisions[:, begin:end, :]
                begin, end = end, end + 2 ** (level + 1)
            return ops.matmul(ops.reshape(mu, [size, leaves]), ops.softmax(self.pi))

    inputs = keras.Input((6,))
    x = layers.BatchNormalization()(inputs)
    model = keras.Model(inputs, (Tree()(x) + Tree()(x)) / 2.0)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    return trained(model, Feed((6,)), ids(2))


def collaborative_filtering() -> Built:
    class Recommender(keras.Model):
        """The whole of users meets the whole of movies in one scalar, as the example has it."""

        def __init__(self) -> None:
            super().__init__()
            given = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.l2(1e-6)}
            self.user, self.user_bias = layers.Embedding(9, 4, **given), layers.Embedding(9, 1)
            self.movie, self.movie_bias = layers.Embedding(11, 4, **given), layers.Embedding(11, 1)

        def call(self, inputs: Any) -> Any:
            users, movies = self.user(inputs[:, 0]), self.movie(inputs[:, 1])
            dot = ops.tensordot(users, movies, 2)
            return ops.nn.sigmoid(dot + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1]))

    model = Recommender()
    model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(0.001))
    return trained(model, ids(9, 2), Feed((1,), "unit"))


def behavior_sequence_transformer() -> Built:
    inputs = {"movies": keras.Input((4,), dtype="int32", name="movies"), "target": keras.Input((1,), name="target")}
    inputs["target"] = keras.Input((1,), dtype="int32", name="target")
    inputs["ratings"] = keras.Input((4,), name="ratings")
    table = layers.Embedding(11, 4)
    x = (table(inputs["movies"]) + layers.Embedding(4, 4)(ops.arange(4))) * ops.expand_dims(inputs["ratings"], -1)
    x = layers.concatenate([x, table(inputs["target"])], axis=1)
    y = layers.Dropout(0.1)(layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.1)(x, x))
    x = layers.LeakyReLU()(layers.LayerNormalization()(layers.Add()([x, y])))
    x = layers.Dropout(0.1)(layers.LeakyReLU()(layers.BatchNormalization()(layers.Dense(8)(layers.Flatten()(x)))))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(
        keras.optimizers.Adagrad(0.01), keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError()]
    )
    feeds = {"movies": ids(11, 4), "target": ids(11, 1), "ratings": Feed((4,), "unit")}
    return trained(model, feeds, Feed((1,), "unit"))


def imbalanced_weights() -> Built:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dropout(0.3)])
    model.add(layers.Dense(1, activation="sigmoid"))
    metrics = [keras.metrics.FalseNegatives(), keras.metrics.Precision(), keras.metrics.AUC(num_thresholds=10)]
    model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", weighted_metrics=metrics)
    return trained(model, Feed((6,)), Feed((1,), "binary"))


def graph_node_classification() -> Built:
    """A fed graph without a batch: nodes and edges, messages summed by segment."""
    import tensorflow as tf

    from tests.corpus.program import stepped

    first, second = layers.Dense(6, activation="gelu"), layers.Dense(3)
    first.build((None, 10))
    second.build((None, 11))
    variables = [*first.trainable_variables, *second.trainable_variables]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(variables)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(picked: Any, labels: Any, features: Any, edges: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            source, target = edges[:, 0], edges[:, 1]
            messages = tf.math.unsorted_segment_mean(tf.gather(features, source), target, 9)
            hidden = first(tf.concat([features, messages], -1))
            logits = second(tf.concat([hidden, features], -1))
            loss = entropy(labels, tf.gather(logits, picked))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    return stepped(
        step,
        picked=ids(9),
        labels=ids(3),
        features=Feed((9, 5), whole=True),
        edges=Feed((14, 2), "ids", 9, whole=True),
    )


def molecule_message_passing() -> Built:
    """A batch of small dense graphs: adjacency matrices per example."""
    adjacency, nodes = keras.Input((5, 5)), keras.Input((5, 4))
    x = layers.Dense(8)(nodes)
    for _ in range(2):
        x = layers.GRU(8, return_sequences=True)(ops.matmul(adjacency, layers.Dense(8)(x)))
    pooled = ops.sum(x * layers.Dense(1, activation="sigmoid")(x), axis=1)
    return _binary(
        keras.Model([adjacency, nodes], layers.Dense(1, activation="sigmoid")(pooled)),
        [Feed((5, 5), "binary"), Feed((5, 4))],
    )


def timeseries_transformer() -> Built:
    inputs = keras.Input((12, 1))
    x = layers.Dropout(0.25)(layers.MultiHeadAttention(key_dim=4, num_heads=2, dropout=0.25)(inputs, inputs))
    res = layers.LayerNormalization(epsilon=1e-6)(x) + inputs
    x = layers.Dropout(0.25)(layers.Conv1D(filters=4, kernel_size=1, activation="relu")(res))
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(filters=1, kernel_size=1)(x)) + res
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.Dense(8, activation="relu")(x)))
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(1e-4),
        metrics=["sparse_categorical_accuracy"],
    )
    return trained(model, Feed((12, 1)), ids(3))


def timeseries_anomaly() -> Built:
    model = keras.Sequential(
        [
            keras.Input((12, 1)),
            layers.Conv1D(filters=6, kernel_size=5, padding="same", strides=2, activation="relu"),
            layers.Dropout(rate=0.2),
            layers.Conv1DTranspose(filters=6, kernel_size=5, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(filters=1, kernel_size=5, padding="same"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse")
    return trained(model, Feed((12, 1)), Feed((12, 1)))


def timeseries_resnet() -> Built:
    inputs = x = keras.Input((12, 1))
    for _ in range(2):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(filters=6, kernel_size=3, padding="same")(x)))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x)))
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return trained(model, Feed((12, 1)), ids(3))


PROGRAMS = (
    Program(wide_and_deep, ADDRESS + "wide_deep_cross_networks"),
    Program(deep_and_cross, ADDRESS + "wide_deep_cross_networks"),
    Program(tab_transformer, ADDRESS + "tabtransformer"),
    Program(gated_residual_network, ADDRESS + "classification_with_grn_and_vsn"),
    Program(neural_decision_forest, ADDRESS + "deep_neural_decision_forests"),
    Program(collaborative_filtering, ADDRESS + "collaborative_filtering_movielens"),
    Program(behavior_sequence_transformer, ADDRESS + "movielens_recommendations_transformers"),
    Program(imbalanced_weights, ADDRESS + "imbalanced_classification"),
    Program(
        graph_node_classification,
        "keras.io/examples/graph/gnn_citations",
        why="the batch is a list of nodes; the graph around them is whole in every step",
    ),
    Program(molecule_message_passing, "keras.io/examples/graph/mpnn-molecular-graphs"),
    Program(timeseries_transformer, SERIES + "timeseries_classification_transformer"),
    Program(timeseries_anomaly, SERIES + "timeseries_anomaly_detection"),
    Program(timeseries_resnet, SERIES + "timeseries_classification_from_scratch"),
)
LIBRARY = Library("keras_structured", PROGRAMS)
