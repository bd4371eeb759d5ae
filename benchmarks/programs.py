"""The training programs of the function-mode benchmarks: Keras models, and one step for a single device.

The same model and loss run in `tf.distribute.MirroredStrategy` (`benchmarks.contestants`). They have no dropout
and sum their losses over the whole batch, so that all contestants compute one and the same thing, except that batch
normalisation in MirroredStrategy sees only the part of one replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Program:
    """A model, its optimizer and a batch.

    Attributes:
        model: Keras model from inputs to logits.
        optimizer: built for the model's variables.
        x: inputs of the whole batch.
        y: class numbers.
    """

    model: Any
    optimizer: Any
    x: Any
    y: Any

    def loss(self, x: Any, y: Any, batch: int) -> Any:
        """Return the sum of the losses of some examples, divided by the size of the whole batch."""
        import tensorflow as tf

        logits = self.model(x, training=True)
        return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)) / batch

    def train(self, x: Any, y: Any, batch: int) -> Any:
        """Update the variables once; return the loss."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.loss(x, y, batch)
        weights = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    def gradients(self) -> list[Any]:
        """Return the gradients of the whole batch."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.loss(self.x, self.y, len(self.y))
        found: list[Any] = tape.gradient(loss, self.model.trainable_variables)
        return found


def single_step(program: Program) -> Callable[[Any, Any], Any]:
    """Return the training step that a user would write for one device."""
    batch = len(program.y)

    def step(x: Any, y: Any) -> Any:
        return program.train(x, y, batch)

    return step


def build(name: str, *, tiny: bool = False) -> Program:
    """Return a program by name, with seeded weights and data; call it where its variables are to be."""
    import keras

    keras.utils.set_random_seed(7)
    model, x, y = MODELS[name](tiny)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    return Program(model, optimizer, x, y)


def _labels(rng: np.random.RandomState, count: int, classes: int) -> Any:
    return rng.randint(0, classes, count).astype(np.int32)


def mlp(tiny: bool) -> tuple[Any, Any, Any]:
    """Four wide layers."""
    import keras

    width, batch = (16, 8) if tiny else (512, 64)
    layers = [keras.layers.Dense(width, "relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    rng = np.random.RandomState(0)
    return model, rng.standard_normal((batch, 784)).astype(np.float32), _labels(rng, batch, 10)


def cnn(tiny: bool) -> tuple[Any, Any, Any]:
    """The network of TensorFlow's own tutorial on training with tf.distribute.Strategy."""
    import keras

    layers = keras.layers
    first, second, units, batch = (4, 4, 8, 4) if tiny else (32, 64, 64, 64)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(first, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(second, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(units, "relu"),
            layers.Dense(10),
        ]
    )
    rng = np.random.RandomState(0)
    return model, rng.standard_normal((batch, 28, 28, 1)).astype(np.float32), _labels(rng, batch, 10)


def deep(tiny: bool) -> tuple[Any, Any, Any]:
    """Many thin layers: what takes long is not the work but the graph."""
    return _thin_layers(*(5, 8) if tiny else (100, 32))


def sixty(tiny: bool) -> tuple[Any, Any, Any]:
    """Sixty small variables: what takes long between processes is how often they speak."""
    return _thin_layers(*(3, 8) if tiny else (30, 64))


def _thin_layers(depth: int, batch: int) -> tuple[Any, Any, Any]:
    import keras

    layers = [keras.layers.Dense(32, "relu") for _ in range(depth - 1)]
    model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(10)])
    rng = np.random.RandomState(0)
    return model, rng.standard_normal((batch, 32)).astype(np.float32), _labels(rng, batch, 10)


def large(tiny: bool) -> tuple[Any, Any, Any]:
    """A model whose variables dominate: hardly any activations."""
    import keras

    width, batch = (16, 4) if tiny else (3072, 4)
    layers = [keras.layers.Dense(width, "relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])
    rng = np.random.RandomState(0)
    return model, rng.standard_normal((batch, width)).astype(np.float32), _labels(rng, batch, 10)


def small(tiny: bool) -> tuple[Any, Any, Any]:
    """Next to no work, so that a call costs what calling costs."""
    import keras

    del tiny
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    rng = np.random.RandomState(0)
    return model, rng.standard_normal((4, 4)).astype(np.float32), _labels(rng, 4, 2)


def resnet(tiny: bool) -> tuple[Any, Any, Any]:
    """A small ResNet with batch normalisation."""
    import keras

    layers = keras.layers
    size, channels, batch = (8, (4,), 4) if tiny else (32, (16, 32, 64), 64)

    def convolved(x: Any, width: int, stride: int = 1) -> Any:
        x = layers.Conv2D(width, 3, stride, "same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((size, size, 3))
    x = layers.ReLU()(convolved(inputs, channels[0]))
    for stage, width in enumerate(channels):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = convolved(layers.ReLU()(convolved(x, width, stride)), width)
            x = x if stride == 1 else layers.Conv2D(width, 1, stride, use_bias=False)(x)
            x = layers.ReLU()(layers.Add()([x, y]))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    rng = np.random.RandomState(0)
    return model, rng.standard_normal((batch, size, size, 3)).astype(np.float32), _labels(rng, batch, 10)


def transformer(tiny: bool) -> tuple[Any, Any, Any]:
    """A two-layer encoder."""
    import keras

    layers, ops = keras.layers, keras.ops
    width, inner, length, batch = (8, 12, 4, 4) if tiny else (64, 256, 32, 64)
    vocabulary = 2000
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs) + layers.Embedding(length, width)(ops.arange(length))
    x = layers.LayerNormalization()(x)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, width // 4)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(width)(layers.Dense(inner, "gelu")(x)))
    model = keras.Model(inputs, layers.Dense(2)(x[:, 0]))
    rng = np.random.RandomState(0)
    ids = rng.randint(0, vocabulary, (batch, length)).astype(np.int32)
    return model, ids, _labels(rng, batch, 2)


MODELS: dict[str, Callable[[bool], tuple[Any, Any, Any]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "transformer": transformer,
    "deep": deep,
    "sixty": sixty,
    "large": large,
    "small": small,
}
