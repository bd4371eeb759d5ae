"""Keras' preprocessing, augmentation and regularisation layers, each with the kind of input that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

L = keras.layers
WORDS = np.array(["a", "b", "c", "d", "zz", "a b", "b c a", "a, c! b d"])
EDGES = [-0.5, 0.0, 0.5]
MODES = ("int", "one_hot", "multi_hot", "count", "tf_idf")
IMAGE = (8, 8, 3)


class Layer(NamedTuple):
    """How to make one layer, or what is made of several, and what goes in.

    Attributes:
        make: the layer.
        shape: of one example.
        dtype: of it.
        mixes: ops that read the whole batch, because the layer mixes examples.
    """

    make: Callable[[], Callable[..., Any]]
    shape: tuple[int, ...] = IMAGE
    dtype: str = "float32"
    mixes: tuple[str, ...] = ()

    def draw(self, count: int, seed: int) -> Any:
        """Return a batch."""
        random = np.random.default_rng(seed)
        shape = (count, *self.shape)
        if self.dtype == "string":
            return random.choice(WORDS, size=shape).astype(object)
        if self.dtype.startswith("int"):
            return random.integers(0, 5, size=shape).astype(self.dtype)
        values = random.uniform(0, 255, size=shape) if self.shape == IMAGE else random.normal(size=shape)
        return values.astype(self.dtype)


def _of_images() -> dict[str, Callable[[], Any]]:
    factors = {name: 0.2 for name in ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")}
    return {
        "Rescaling": lambda: L.Rescaling(1 / 255),
        "Normalization": lambda: L.Normalization(mean=[1.0, 2.0, 3.0], variance=[1.0, 2.0, 3.0]),
        "Resizing": lambda: L.Resizing(5, 6),
        "Resizing and crop": lambda: L.Resizing(5, 6, crop_to_aspect_ratio=True),
        "Resizing and pad": lambda: L.Resizing(5, 12, pad_to_aspect_ratio=True),
        "Resizing to the nearest": lambda: L.Resizing(5, 6, interpolation="nearest", antialias=True),
        "CenterCrop": lambda: L.CenterCrop(5, 6),
        "RandomCrop": lambda: L.RandomCrop(5, 6, seed=1),
        "RandomFlip": lambda: L.RandomFlip(seed=1),
        "RandomRotation": lambda: L.RandomRotation(0.3, seed=1),
        "RandomTranslation": lambda: L.RandomTranslation(0.3, 0.2, seed=1),
        "RandomZoom": lambda: L.RandomZoom(0.3, 0.2, seed=1),
        "RandomContrast": lambda: L.RandomContrast(0.3, seed=1),
        "RandomBrightness": lambda: L.RandomBrightness(0.3, seed=1),
        "RandomShear": lambda: L.RandomShear(0.3, 0.3, seed=1),
        "RandomPerspective": lambda: L.RandomPerspective(seed=1),
        "RandomErasing": lambda: L.RandomErasing(seed=1),
        "RandomGrayscale": lambda: L.RandomGrayscale(seed=1),
        "RandomColorJitter": lambda: L.RandomColorJitter(**factors, seed=1),
        "RandomColorDegeneration": lambda: L.RandomColorDegeneration(0.3, seed=1),
        "RandomGaussianBlur": lambda: L.RandomGaussianBlur(seed=1),
        "RandomHue": lambda: L.RandomHue(0.3, seed=1),
        "RandomInvert": lambda: L.RandomInvert(seed=1),
        "RandomPosterization": lambda: L.RandomPosterization(4, seed=1),
        "RandomSaturation": lambda: L.RandomSaturation(0.3, seed=1),
        "RandomSharpness": lambda: L.RandomSharpness(0.3, seed=1),
        "Solarization": lambda: L.Solarization(0.1, 0.5, seed=1),
        "Equalization": lambda: L.Equalization(),
        "AutoContrast": lambda: L.AutoContrast(),
        "RandAugment": lambda: L.RandAugment(seed=1),
        "AugMix": lambda: L.AugMix(seed=1),
        "Pipeline": lambda: L.Pipeline([L.RandomFlip(seed=1), L.RandomRotation(0.1, seed=2), L.Rescaling(1 / 255)]),
        "SpatialDropout2D": lambda: L.SpatialDropout2D(0.3, seed=1),
        "GaussianNoise": lambda: L.GaussianNoise(0.3, seed=1),
        "GaussianDropout": lambda: L.GaussianDropout(0.3, seed=1),
        "AlphaDropout": lambda: L.AlphaDropout(0.3, seed=1),
        "Dropout": lambda: L.Dropout(0.3, seed=1),
        "Dropout of channels": lambda: L.Dropout(0.3, noise_shape=(None, 1, 1, 3), seed=1),
    }


def _of_numbers() -> dict[str, Layer]:
    binned: Mapping[str, tuple[int, ...]] = {"int": (6,), "one_hot": (1,), "multi_hot": (6,), "count": (6,)}
    found = {
        f"Discretization {mode}": Layer(lambda mode=mode: L.Discretization(EDGES, output_mode=mode), shape)
        for mode, shape in binned.items()
    }
    found |= {
        f"CategoryEncoding {mode}": Layer(
            lambda mode=mode: L.CategoryEncoding(7, output_mode=mode), (1,) if mode == "one_hot" else (5,), "int32"
        )
        for mode in MODES[1:4]
    }
    audio = {"frame_length": 16, "frame_step": 8, "fft_length": 16}
    mel = {"sequence_stride": 16, "fft_length": 32, "min_freq": 20, "max_freq": 3000}
    return found | {
        "SpatialDropout1D": Layer(lambda: L.SpatialDropout1D(0.3, seed=1), (9, 4)),
        "SpatialDropout3D": Layer(lambda: L.SpatialDropout3D(0.3, seed=1), (3, 3, 3, 2)),
        "Hashing of numbers": Layer(lambda: L.Hashing(5), (5,), "int32"),
        "STFTSpectrogram": Layer(lambda: L.STFTSpectrogram(**audio), (64, 1)),
        "STFTSpectrogram angle": Layer(lambda: L.STFTSpectrogram("angle", expand_dims=True, **audio), (64, 1)),
        "MelSpectrogram": Layer(lambda: L.MelSpectrogram(num_mel_bins=4, sampling_rate=8000, **mel), (64,)),
    }


def _looked_up(kind: Any, words: list[Any], mode: str, count: int = 4) -> Any:
    weights = [0.1, 0.2, 0.3, 0.4][:count]
    return kind(vocabulary=words, output_mode=mode, idf_weights=weights if mode == "tf_idf" else None)


def _there_and_back() -> Callable[[Any], Any]:
    texts, numbers = L.StringLookup(vocabulary=["a", "b", "c", "d"], invert=True), L.StringLookup(vocabulary=["d", "a"])
    return lambda x: numbers(texts(x))


def _of_words() -> dict[str, Layer]:
    found = {}
    for mode in MODES:
        shape = (1,) if mode == "one_hot" else (5,)
        texts = lambda mode=mode: _looked_up(L.StringLookup, ["a", "b", "c", "d"], mode)  # noqa: E731
        numbers = lambda mode=mode: _looked_up(L.IntegerLookup, [1, 2, 3, 4], mode)  # noqa: E731
        found[f"StringLookup {mode}"] = Layer(texts, shape, "string")
        found[f"IntegerLookup {mode}"] = Layer(numbers, shape, "int64")
    hashed = {"StringLookup with hashed words": lambda: L.StringLookup(vocabulary=["a", "b"], num_oov_indices=3)}
    hashed |= {"Hashing": lambda: L.Hashing(5), "Hashing multi_hot": lambda: L.Hashing(5, output_mode="multi_hot")}
    hashed |= {"Hashing with salt": lambda: L.Hashing(5, salt=[1, 2])}
    found |= {name: Layer(make, (5,), "string") for name, make in hashed.items()}
    return found | {"StringLookup there and back": Layer(_there_and_back, (5,), "int64")}


def _of_texts() -> dict[str, Layer]:
    words = ["a", "b", "c"]
    return {
        "TextVectorization": Layer(
            lambda: L.TextVectorization(vocabulary=words, output_sequence_length=4), (), "string"
        ),
        "HashedCrossing": Layer(lambda: _crossed(L.HashedCrossing(5)), (1,), "int32"),
        "HashedCrossing one_hot": Layer(lambda: _crossed(L.HashedCrossing(5, output_mode="one_hot")), (1,), "int32"),
        "FeatureSpace": Layer(_feature_space, (1,)),
        # Each word counts in the vector of its text, of which the lengths are known only for the whole batch.
        **{
            f"TextVectorization {mode}": Layer(
                lambda mode=mode: _looked_up(L.TextVectorization, words, mode, 3), (), "string", ("StringSplitV2",)
            )
            for mode in MODES[2:]
        },
    }


def _crossed(layer: Any) -> Callable[[Any], Any]:
    return lambda x: layer((x, x + 1))


def _feature_space() -> Callable[[Any], Any]:
    kind = keras.utils.FeatureSpace
    features = {"a": kind.float_normalized(), "b": kind.float_discretized(4), "c": kind.integer_categorical()}
    space = kind(features, crosses=[kind.cross(("b", "c"), crossing_dim=8)])
    random = np.random.default_rng(0)
    known = {"a": random.uniform(size=(20, 1)), "b": random.uniform(size=(20, 1)), "c": random.integers(0, 4, (20, 1))}
    space.adapt(tf.data.Dataset.from_tensor_slices(known).batch(5))
    return lambda x: space({"a": x, "b": x * 2, "c": tf.cast(tf.abs(x) * 3, "int64")})


MIXING = {
    "MixUp": Layer(lambda: L.MixUp(seed=1), mixes=("GatherV2",)),
    "CutMix": Layer(lambda: L.CutMix(seed=1), mixes=("GatherV2",)),
    # Of a batch of unknown size it distorts the first image, for all.
    "RandomElasticTransform": Layer(lambda: L.RandomElasticTransform(seed=1), mixes=("StridedSlice",)),
}
LAYERS: Mapping[str, Layer] = {
    **{name: Layer(make) for name, make in _of_images().items()},
    **MIXING,
    **_of_numbers(),
    **_of_words(),
    **_of_texts(),
}
