"""Computer vision, as the examples on keras.io write it."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.corpus.program import Built, Feed, Library, Program, ids, images, trained

CLASSES = 5
ADDRESS = "keras.io/examples/vision/"


def classifier(model: Any, feed: Feed, optimizer: Any = "adam", **more: Any) -> Built:
    """Compile a model that gives logits and train it on labels."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    return trained(model, feed, ids(CLASSES), **more)


def mnist_convnet() -> Built:
    model = keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    return trained(model, images(16, 1), Feed((), "one_hot", CLASSES))


def xception_from_scratch() -> Built:
    inputs = keras.Input((24, 24, 3))
    x = layers.Rescaling(1.0 / 255)(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    before = x
    for size in (8, 12):
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(size, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(size, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(size, 1, strides=2, padding="same")(before)
        x = layers.add([x, residual])
        before = x
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.25)(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-4), loss, metrics=[keras.metrics.BinaryAccuracy(name="acc")])
    return trained(model, images(24), Feed((1,), "binary"))


def resnet_v1() -> Built:
    inputs = keras.Input((16, 16, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", kernel_regularizer="l2")(inputs))
    for stride in (1, 2):
        y = layers.Conv2D(8, 3, strides=stride, padding="same", kernel_regularizer="l2")(x)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", kernel_regularizer="l2")(y))
        x = layers.Conv2D(8, 1, strides=stride, padding="same")(x) if stride > 1 else x
        x = layers.Activation("relu")(layers.add([x, y]))
    x = layers.Flatten()(layers.AveragePooling2D(4)(x))
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 10], [0.1, 0.05, 0.01])
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True)
    return classifier(keras.Model(inputs, layers.Dense(CLASSES)(x)), images(), optimizer)


class Patches(layers.Layer):
    """Cuts images into patches."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def call(self, x: Any) -> Any:
        shape = ops.shape(x)
        patches = ops.image.extract_patches(x, size=self.size)
        return ops.reshape(patches, (shape[0], (x.shape[1] // self.size) ** 2, self.size**2 * x.shape[3]))


class PatchEncoder(layers.Layer):
    """Projects patches and adds their positions."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.projection = layers.Dense(width)
        self.position = layers.Embedding(count, width)

    def call(self, patch: Any) -> Any:
        positions = ops.expand_dims(ops.arange(0, self.count, step=1), axis=0)
        return self.projection(patch) + self.position(positions)


def _mlp(x: Any, units: tuple[int, ...], rate: float) -> Any:
    for unit in units:
        x = layers.Dropout(rate)(layers.Dense(unit, activation=keras.activations.gelu)(x))
    return x


def vit() -> Built:
    inputs = keras.Input((16, 16, 3))
    encoded = PatchEncoder(16, 8)(Patches(4)(inputs))
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        x2 = layers.Add()([layers.MultiHeadAttention(num_heads=2, key_dim=8, dropout=0.1)(x1, x1), encoded])
        x3 = _mlp(layers.LayerNormalization(epsilon=1e-6)(x2), (16, 8), 0.1)
        encoded = layers.Add()([x3, x2])
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(encoded)))
    logits = layers.Dense(CLASSES)(_mlp(x, (16,), 0.5))
    optimizer = keras.optimizers.AdamW(learning_rate=0.001, weight_decay=0.0001)
    return classifier(keras.Model(inputs, logits), images(), optimizer)


def mlp_mixer() -> Built:
    inputs = keras.Input((16, 16, 3))
    x = layers.Dense(8)(Patches(4)(inputs))
    for _ in range(2):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Dense(16)(layers.Dense(16, activation="gelu")(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(8)(layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x)))
        x = layers.Add()([x, y])
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(x))
    optimizer = keras.optimizers.AdamW(0.005, weight_decay=0.0001, clipnorm=1.0)
    return classifier(keras.Model(inputs, layers.Dense(CLASSES)(x)), images(), optimizer)


def conv_mixer() -> Built:
    def block(x: Any) -> Any:
        return layers.BatchNormalization()(layers.Activation("gelu")(x))

    inputs = keras.Input((16, 16, 3))
    x = block(layers.Conv2D(8, kernel_size=2, strides=2)(layers.Rescaling(1.0 / 255)(inputs)))
    for _ in range(2):
        x = layers.Add()([block(layers.DepthwiseConv2D(kernel_size=5, padding="same")(x)), x])
        x = block(layers.Conv2D(8, kernel_size=1)(x))
    x = layers.GlobalAvgPool2D()(x)
    return classifier(keras.Model(inputs, layers.Dense(CLASSES)(x)), images(), keras.optimizers.AdamW(1e-3))


def autoencoder() -> Built:
    inputs = keras.Input((16, 16, 1))
    x = layers.Conv2D(8, (3, 3), activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D((2, 2), padding="same")(x)
    x = layers.Conv2DTranspose(8, (3, 3), strides=2, activation="relu", padding="same")(x)
    model = keras.Model(inputs, layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return trained(model, images(16, 1), images(16, 1))


class DepthToSpace(layers.Layer):
    """Moves channels to pixels."""

    def call(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.nn.depth_to_space(x, 2)


def super_resolution() -> Built:
    given = {"activation": "relu", "kernel_initializer": "orthogonal", "padding": "same"}
    inputs = keras.Input((None, None, 1))
    x = layers.Conv2D(8, 5, **given)(inputs)
    x = layers.Conv2D(8, 3, **given)(x)
    x = layers.Conv2D(4, 3, **given)(x)
    model = keras.Model(inputs, DepthToSpace()(x))
    model.compile(keras.optimizers.Adam(0.001), keras.losses.MeanSquaredError())
    return trained(model, images(8, 1), images(16, 1))


def unet_segmentation() -> Built:
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
    x = before = layers.Activation("relu")(layers.BatchNormalization()(x))
    for size in (8,):
        x = layers.BatchNormalization()(layers.SeparableConv2D(size, 3, padding="same")(layers.Activation("relu")(x)))
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        x = layers.add([x, layers.Conv2D(size, 1, strides=2, padding="same")(before)])
        before = x
    for size in (8, 8):
        x = layers.Conv2DTranspose(size, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.UpSampling2D(2)(layers.BatchNormalization()(x))
        residual = layers.Conv2D(size, 1, padding="same")(layers.UpSampling2D(2)(before))
        x = before = layers.add([x, residual])
    model = keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))
    model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy")
    return trained(model, images(), ids(3, 16, 16, 1))


def siamese_contrastive() -> Built:
    inputs = keras.Input((16, 16, 1))
    x = layers.BatchNormalization()(inputs)
    x = layers.AveragePooling2D(pool_size=(2, 2))(layers.Conv2D(4, (5, 5), activation="tanh")(x))
    x = layers.BatchNormalization()(layers.Flatten()(x))
    embedding = keras.Model(inputs, layers.Dense(10, activation="tanh")(x))
    a, b = keras.Input((16, 16, 1)), keras.Input((16, 16, 1))

    def distance(vectors: Any) -> Any:
        x, y = vectors
        squares = ops.sum(ops.square(x - y), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(squares, keras.backend.epsilon()))

    merged = layers.Lambda(distance, output_shape=(1,))([embedding(a), embedding(b)])
    output = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(merged))

    def loss(y_true: Any, y_pred: Any) -> Any:
        square, margin = ops.square(y_pred), ops.square(ops.maximum(1 - y_pred, 0))
        return ops.mean((1 - y_true) * square + y_true * margin)

    model = keras.Model([a, b], output)
    model.compile(loss=loss, optimizer="RMSprop", metrics=["accuracy"])
    return trained(model, [images(16, 1), images(16, 1)], Feed((1,), "binary"))


def ocr_with_ctc() -> Built:
    """Keras computes the loss in float32, whatever comes in."""
    image = keras.Input((16, 8, 1), name="image")
    x = layers.Conv2D(8, (3, 3), activation="relu", padding="same")(image)
    x = layers.MaxPooling2D((2, 2))(x)
    x = layers.Dense(8, activation="relu")(layers.Reshape((8, 32))(x))
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True, dropout=0.25))(layers.Dropout(0.2)(x))
    model = keras.Model(image, layers.Dense(6 + 1)(x))
    model.compile(keras.optimizers.Adam(), loss=keras.losses.CTC())
    return trained(model, Feed((16, 8, 1), "unit"), Feed((3,), "ids", 6))


def pointnet() -> Built:
    def conv(x: Any, filters: int) -> Any:
        return layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(layers.Conv1D(filters, 1)(x)))

    def dense(x: Any, filters: int) -> Any:
        return layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(layers.Dense(filters)(x)))

    class Orthogonal(keras.regularizers.Regularizer):
        """Keeps transforms near to rotations."""

        def __init__(self, size: int) -> None:
            self.size = size

        def __call__(self, x: Any) -> Any:
            x = ops.reshape(x, (-1, self.size, self.size))
            product = ops.matmul(x, ops.transpose(x, axes=(0, 2, 1)))
            return ops.sum(0.001 * ops.square(product - ops.eye(self.size)))

    inputs = keras.Input((12, 3))
    x = dense(layers.GlobalMaxPooling1D()(conv(inputs, 8)), 8)
    bias = keras.initializers.Constant(keras.ops.convert_to_numpy(ops.eye(3)).flatten())
    x = layers.Dense(9, kernel_initializer="zeros", bias_initializer=bias, activity_regularizer=Orthogonal(3))(x)
    x = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(x)])
    x = layers.Dropout(0.3)(dense(layers.GlobalMaxPooling1D()(conv(conv(x, 8), 16)), 8))
    return classifier(keras.Model(inputs, layers.Dense(CLASSES)(x)), Feed((12, 3)))


def ct_scans_3d() -> Built:
    """TensorFlow pools volumes in float32 only."""
    inputs = keras.Input((8, 8, 6, 1))
    x = layers.Conv3D(filters=4, kernel_size=3, activation="relu")(inputs)
    x = layers.BatchNormalization()(layers.MaxPool3D(pool_size=2)(x))
    x = layers.Dropout(0.3)(layers.Dense(8, activation="relu")(layers.GlobalAveragePooling3D()(x)))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-3, decay_steps=10, decay_rate=0.96, staircase=True)
    model.compile(loss="binary_crossentropy", optimizer=keras.optimizers.Adam(schedule), metrics=["acc"])
    return trained(model, Feed((8, 8, 6, 1), "unit"), Feed((1,), "binary"))


def conv_lstm() -> Built:
    inputs = keras.Input((4, 8, 8, 1))
    x = layers.ConvLSTM2D(filters=4, kernel_size=(3, 3), padding="same", return_sequences=True, activation="relu")(
        inputs
    )
    x = layers.BatchNormalization()(x)
    x = layers.Conv3D(filters=1, kernel_size=(3, 3, 3), activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, x)
    model.compile(loss=keras.losses.binary_crossentropy, optimizer=keras.optimizers.Adam())
    return trained(model, Feed((4, 8, 8, 1), "unit"), Feed((4, 8, 8, 1), "unit"))


def augmented_images() -> Built:
    """Keras rotates in float32 only."""
    inputs = keras.Input((16, 16, 3))
    x = layers.RandomFlip("horizontal", seed=1)(inputs)
    x = layers.RandomRotation(0.02, seed=2)(x)
    x = layers.RandomZoom(0.2, seed=3)(x)
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(x))
    return classifier(keras.Model(inputs, layers.Dense(CLASSES)(x)), images())


def detector_with_anchors() -> Built:
    class BoxLoss(keras.losses.Loss):
        """Smooth L1 over positive anchors, focal loss over all."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            boxes, scores = y_pred[..., :4], y_pred[..., 4]
            wanted, positive = y_true[..., :4], y_true[..., 4]
            difference = ops.abs(wanted - boxes)
            smooth = ops.where(difference < 1.0, 0.5 * difference**2, difference - 0.5)
            smooth = ops.sum(smooth, axis=-1) * positive
            entropy = ops.binary_crossentropy(positive, ops.sigmoid(scores))
            focal = 0.25 * ops.power(1 - ops.exp(-entropy), 2.0) * entropy
            count = ops.maximum(ops.sum(positive, axis=-1), 1.0)
            return (ops.sum(smooth, axis=-1) + ops.sum(focal, axis=-1)) / count

    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, strides=4, padding="same", activation="relu")(inputs)
    x = layers.Reshape((16, 5))(layers.Conv2D(5, 3, padding="same")(x))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), BoxLoss())
    return trained(model, images(), Feed((16, 5), "binary"))


PROGRAMS = (
    Program(mnist_convnet, ADDRESS + "mnist_convnet"),
    Program(xception_from_scratch, ADDRESS + "image_classification_from_scratch"),
    Program(resnet_v1, "keras.io/api/applications/resnet"),
    Program(vit, ADDRESS + "image_classification_with_vision_transformer"),
    Program(mlp_mixer, ADDRESS + "mlp_image_classification"),
    Program(conv_mixer, ADDRESS + "convmixer"),
    Program(autoencoder, ADDRESS + "autoencoder"),
    Program(super_resolution, ADDRESS + "super_resolution_sub_pixel"),
    Program(unet_segmentation, ADDRESS + "oxford_pets_image_segmentation"),
    Program(siamese_contrastive, ADDRESS + "siamese_contrastive"),
    Program(ocr_with_ctc, ADDRESS + "captcha_ocr", floats="float32"),
    Program(pointnet, ADDRESS + "pointnet"),
    Program(ct_scans_3d, ADDRESS + "3D_image_classification", floats="float32"),
    Program(conv_lstm, ADDRESS + "conv_lstm"),
    Program(augmented_images, ADDRESS + "image_classification_from_scratch", floats="float32"),
    Program(detector_with_anchors, ADDRESS + "retinanet"),
)
LIBRARY = Library("keras_vision", PROGRAMS)
