"""Every shipped configuration that this version can carry out trains to the numbers of one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ConfigError
from tests.support.paths import CONFIGS

EXACT = [path for path in CONFIGS if path.stem not in ("all_reduce_accelerators", "all_reduce_compressed", "spatial")]
"""One needs accelerators, one is not exact, one needs images."""


@cache
def language_model() -> ar.GraphItem:
    """A table that is looked up, one that is tied, and dense layers."""
    from tests.zoo import ZOO

    item: ar.GraphItem = ZOO["language_model"].build(optimizer="adam").item()
    return item


@cache
def wide() -> ar.GraphItem:
    """Weights so large that replicas on one device compute their gradients once, of the whole batch."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(3)
        x, y = v1.placeholder(tf.float32, (None, 256), "x"), v1.placeholder(tf.float32, (None, 1), "y")
        shift = v1.get_variable("shift", (1,), use_resource=True)  # the first server's, so that `first` is the second's
        hidden = tf.tanh(x @ v1.get_variable("first", (256, 300), use_resource=True))
        made = hidden @ v1.get_variable("second", (300, 1), use_resource=True)
        loss = tf.identity(tf.reduce_mean((made + shift - y) ** 2), "loss")
        v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, name="train")
        v1.global_variables_initializer()
    init = next(op.name for op in graph.get_operations() if op.name.startswith("init"))
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op=init)


def usable(path: Path) -> dict[str, Any] | Path:
    """The configuration, if this version can carry it out; those for the others are loaded by other tests."""
    try:
        Config.load(path).require_usable()
    except ConfigError:
        pytest.skip("not available yet in this version")
    return path


@pytest.mark.parametrize("path", EXACT, ids=[path.stem for path in EXACT])
def test_a_configuration_trains_a_language_model_as_one_device_does(path: Path) -> None:
    report = ar.verify(language_model(), usable(path), steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("path", EXACT[::2], ids=[path.stem for path in EXACT[::2]])
def test_a_configuration_trains_large_weights_as_one_device_does(path: Path) -> None:
    report = ar.verify(wide(), usable(path), steps=2)
    assert report.ok, str(report)
