"""keras.applications, at the smallest images that they take, without their weights; of tf_keras, too."""

from __future__ import annotations

from typing import Any

from tests.corpus.program import Built, Library, Program, ids, images, trained
from tests.support.chosen_keras import keras

ADDRESS = "keras.io/api/applications/"


def _fitted(make: Any, side: int = 32, **options: Any) -> Built:
    model = make(weights=None, classes=5, input_shape=(side, side, 3), **options)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return trained(model, images(side), ids(5))


def mobilenet() -> Built:
    return _fitted(keras.applications.MobileNet, alpha=0.25)


def mobilenet_v2() -> Built:
    return _fitted(keras.applications.MobileNetV2, alpha=0.35)


def mobilenet_v3_small() -> Built:
    return _fitted(keras.applications.MobileNetV3Small, alpha=0.75, minimalistic=True)


def vgg_16() -> Built:
    return _fitted(keras.applications.VGG16)


def resnet_50() -> Built:
    return _fitted(keras.applications.ResNet50)


def densenet_121() -> Built:
    return _fitted(keras.applications.DenseNet121)


def efficientnet_b0() -> Built:
    return _fitted(keras.applications.EfficientNetB0)


def xception() -> Built:
    return _fitted(keras.applications.Xception, 71)


def transfer_learning() -> Built:
    """A frozen base, a new head."""
    base = keras.applications.MobileNet(weights=None, alpha=0.25, include_top=False, input_shape=(32, 32, 3))
    base.trainable = False
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Rescaling(scale=1 / 127.5, offset=-1)(inputs)
    x = keras.layers.GlobalAveragePooling2D()(base(x, training=False))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.2)(x)))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=[keras.metrics.BinaryAccuracy()])
    return trained(model, images(32), ids(2, 1))


PROGRAMS = (
    Program(transfer_learning, "keras.io/guides/transfer_learning"),
    Program(mobilenet, ADDRESS + "mobilenet"),
    Program(mobilenet_v3_small, ADDRESS + "mobilenet"),
    Program(vgg_16, ADDRESS + "vgg"),
    Program(mobilenet_v2, ADDRESS + "mobilenet"),
    Program(resnet_50, ADDRESS + "resnet"),
    Program(efficientnet_b0, ADDRESS + "efficientnet"),
    Program(densenet_121, ADDRESS + "densenet"),
    Program(xception, ADDRESS + "xception"),
)
LIBRARY = Library("keras_applications", PROGRAMS)
