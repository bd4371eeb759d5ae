"""What the function entries share: seeded variables, argument specs, names of the optimizer's variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from .case import BuiltFunction, Options
from .data import Input, initial, samples, stable_name


def variable(options: Options, name: str, shape: Sequence[int], scale: float = 0.3) -> Any:
    """Create a trainable `tf.Variable` whose value depends on seed and name only."""
    return tf.Variable(initial(options.seed, name, shape, scale, 0.0, options.dtype), name=name)


def finish(
    options: Options,
    inputs: Sequence[Input],
    step: Callable[..., Any],
    weights: Iterable[Any],
    optimizer: Any,
    others: Iterable[Any] = (),
) -> BuiltFunction:
    """Build the optimizer's variables now, so that the first trace creates none, and describe the step."""
    weights = list(weights)
    optimizer.build(weights)
    named = {each.name.removesuffix(":0"): each for each in [*weights, *others]}
    named.update({stable_name(each.path): each for each in optimizer.variables})
    return BuiltFunction(
        step=step,
        specs=tuple(_spec(each, options) for each in inputs),
        variables=named,
        batch_inputs={each.name: each.axis for each in inputs},
        feeds=lambda at, batch: samples(inputs, options.dtype, options.seed, at, batch),
    )


def _spec(each: Input, options: Options) -> Any:
    return tf.TensorSpec(each.batched(options.batch), each.concrete(options.dtype), name=each.name)


def apply(optimizer: Any, gradients: Sequence[Any], weights: Sequence[Any]) -> None:
    """Apply gradients to plain `tf.Variable`s with a Keras 3 optimizer."""
    optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))
