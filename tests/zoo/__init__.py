"""The zoo: small real training programs, shared by tests and benchmarks.

    ZOO["transformer"].build(optimizer="adam", dtype="float64")   # -> Built, BuiltFunction or BuiltModel
    train(built, batches=(12,) * 5)                               # -> Trace: what one device computes

`GRAPHS`, `FUNCTIONS` and `MODELS` are the same entries by kind. Importing this package imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    branching,
    cnn,
    custom_loop,
    functions,
    keras_models,
    language_model,
    loss_scaling,
    masked,
    mlp,
    recurrent,
    transformer,
)
from .case import Built, BuiltFunction, BuiltModel, Case, Options
from .optimizers import GRAPH_OPTIMIZERS, KERAS_OPTIMIZERS, optimizers_for
from .oracle import Trace, train

_MODULES = (
    mlp,
    cnn,
    transformer,
    language_model,
    recurrent,
    branching,
    masked,
    functions,
    custom_loop,
    loss_scaling,
    keras_models,
)

ZOO: Mapping[str, Case] = {case.name: case for module in _MODULES for case in module.CASES}
GRAPHS = tuple(case for case in ZOO.values() if case.kind == "graph")
FUNCTIONS = tuple(case for case in ZOO.values() if case.kind == "function")
MODELS = tuple(case for case in ZOO.values() if case.kind == "keras")

__all__ = [
    "FUNCTIONS",
    "GRAPHS",
    "GRAPH_OPTIMIZERS",
    "KERAS_OPTIMIZERS",
    "MODELS",
    "ZOO",
    "Built",
    "BuiltFunction",
    "BuiltModel",
    "Case",
    "Options",
    "Trace",
    "optimizers_for",
    "train",
]
