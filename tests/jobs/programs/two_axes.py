"""Train a Keras transformer on 8 devices: features on axis 0 of the model axes, heads and hidden units on axis 1.

Prints how far each mesh ends from one device.
"""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar

SHARDING = [
    {"match": "embedding/embeddings", "axes": [-1, 0]},
    {"match": r"attention\d/(query|key|value)/kernel", "axes": [0, 1, -1]},
    {"match": r"attention\d/attention_output/kernel", "axes": [1, -1, 0]},
    {"match": r"up\d/kernel", "axes": [0, 1]},
    {"match": r"down\d/kernel", "axes": [1, 0]},
    {"match": "head/kernel", "axes": [0, 1]},
]
MESHES: dict[str, dict[str, Any]] = {
    "shared": {"mesh": {"data": 2, "model": [2, 2]}},
    "mirrored": {"mesh": {"data": 2, "model": [2, 2]}, "strategy": {"variables": "mirrored"}},
    "stages": {
        "mesh": {"data": 1, "model": [2, 2], "stage": 2},
        "pipeline": {"stages": 2, "microbatches": 2},
        "strategy": {"name": "Pipeline"},
    },
}


def model() -> Any:
    """Return a decoder of one block in float64, its loss included."""
    layers, width, heads = keras.layers, 8, 4
    keras.utils.set_random_seed(0)
    ids = layers.Input((6,), dtype="int32")
    x = layers.Embedding(16, width, name="embedding")(ids)
    a = layers.LayerNormalization(name="norm_a")(x)
    a = layers.MultiHeadAttention(heads, width // heads, name="attention0")(a, a, use_causal_mask=True)
    x = layers.Add()([x, a])
    h = layers.Dense(31, activation="gelu", name="up0")(layers.LayerNormalization(name="norm_f")(x))
    x = layers.Add()([x, layers.Dense(width, name="down0")(h)])
    made = keras.Model(ids, layers.Dense(16, name="head")(x))
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def main() -> None:
    """Fit it for six steps on one device, and on each mesh."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    keras.config.set_floatx("float64")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (8, 6)), rng.integers(0, 16, (8, 6))
    alone, found = model(), {}
    alone.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    for name, mesh in MESHES.items():
        cut = ar.distribute(model(), {"devices": [f"CPU:{i}" for i in range(8)], "sharding": SHARDING, **mesh})
        cut.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        pairs = zip(alone.trainable_variables, cut.trainable_variables, strict=True)
        found[name] = max(float(np.abs(one.numpy() - other.numpy()).max()) for one, other in pairs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
