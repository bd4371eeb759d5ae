"""The truth that everything is compared with: the same program, trained on one device on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import tensorflow as tf

from autograph_rewrite.load.keras_library import optimizer_variables, path_of

from .case import Array, Built, BuiltFunction, BuiltModel
from .data import stable_name

v1 = tf.compat.v1
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Trace:
    """What a training run leaves behind: the outputs of every step and the final variables."""

    outputs: tuple[Mapping[str, Array], ...]
    variables: Mapping[str, Array]


def session_config() -> Any:
    """Return the options of a modest single-device Session that cannot hang for ever."""
    return v1.ConfigProto(
        device_count={"CPU": 1},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=1,
        allow_soft_placement=False,
        operation_timeout_in_ms=TIMEOUT_SECONDS * 1000,
    )


@singledispatch
def train(built: Any, batches: Sequence[int], *, rows: slice | None = None) -> Trace:
    """Train one step per batch size; `rows` keeps only those examples of every batch."""
    raise TypeError(f"not a zoo entry: {type(built).__name__}")


@train.register
def _(built: Built, batches: Sequence[int], *, rows: slice | None = None) -> Trace:
    with v1.Session(graph=built.graph, config=session_config()) as session:
        session.run(built.init_op)
        outputs = []
        for step, batch in enumerate(batches):
            feed = built.feeds(step, batch)
            if rows is not None:
                feed = {name: _take(feed[name], rows, built.batch_inputs[name[:-2]]) for name in feed}
            values = session.run([list(built.outputs), built.train_op], feed)[0]
            outputs.append(dict(zip(built.outputs, values, strict=True)))
        variables = session.run({each.op.name: each for each in _globals(built.graph)})
    return Trace(tuple(outputs), variables)


@train.register
def _(built: BuiltFunction, batches: Sequence[int], *, rows: slice | None = None) -> Trace:
    step = tf.function(built.step, input_signature=built.specs)
    outputs = []
    for at, batch in enumerate(batches):
        arguments = built.feeds(at, batch)
        if rows is not None:
            axes = built.batch_inputs.values()
            arguments = tuple(_take(value, rows, axis) for value, axis in zip(arguments, axes, strict=True))
        outputs.append(as_arrays(step(*map(tf.constant, arguments))))
    return Trace(tuple(outputs), as_arrays(built.variables))


@train.register
def _(built: BuiltModel, batches: Sequence[int], *, rows: slice | None = None) -> Trace:
    outputs = []
    for step, batch in enumerate(batches):
        x, y = built.feeds(step, batch)
        if rows is not None:
            x, y = tf.nest.map_structure(lambda array: array[rows], (x, y))
        outputs.append(as_arrays(built.model.train_on_batch(x, y, return_dict=True)))
    return Trace(tuple(outputs), model_variables(built.model))


def model_variables(model: Any) -> dict[str, Array]:
    """Return weights, optimizer variables and metric variables of a Keras model by path."""
    groups = {
        "model": model.variables,
        "optimizer": optimizer_variables(model.optimizer),
        "metric": [variable for metric in model.metrics for variable in metric.variables],
    }
    return {f"{group}/{stable_name(path_of(each))}": _copy(each) for group, each in _flat(groups)}


def as_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    """Copy tensors, variables and numbers to numpy."""
    return {name: _copy(value) for name, value in values.items()}


def _copy(value: Any) -> Array:
    return np.array(value.numpy() if hasattr(value, "numpy") else value)


def _flat(groups: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any]]:
    return [(group, each) for group, found in groups.items() for each in found]


def _take(value: Array, rows: slice, axis: int) -> Array:
    return value[(slice(None),) * axis + (rows,)]


def _globals(graph: Any) -> list[Any]:
    return list(graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES))
