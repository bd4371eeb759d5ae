"""From a forward function to a whole v1 training graph, the way tutorials write it.

Placeholders, forward, loss, `compute_gradients`, optional clipping, `apply_gradients` with a global step,
moving-average updates as control dependencies, one initializer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from .case import Array, Built, Options
from .data import Input, initial
from .optimizers import GRAPH_OPTIMIZERS

v1 = tf.compat.v1


@dataclass(frozen=True)
class Variables:
    """Makes variables whose initial values are constants that depend on seed and name only."""

    options: Options

    def __call__(
        self,
        name: str,
        shape: Sequence[int],
        *,
        scale: float = 0.3,
        offset: float = 0.0,
        trainable: bool = True,
    ) -> Any:
        """Create (or, in a reusing scope, find) the variable `name`."""
        full_name = f"{v1.get_variable_scope().name}/{name}".lstrip("/")
        kwargs = {"trainable": trainable, "use_resource": not self.options.ref_variables}
        if self.options.size == "large":  # a constant of BERT's size would not fit into a GraphDef
            draw = v1.random_normal_initializer(offset, scale, seed=self.options.seed)
            return v1.get_variable(name, shape, initializer=draw, dtype=self.options.dtype, **kwargs)
        value = initial(self.options.seed, full_name, shape, scale, offset, self.options.dtype)
        return v1.get_variable(name, initializer=value, **kwargs)

    def dense(self, x: Any, name: str, units: int, *, bias: bool = True) -> Any:
        """Apply a fully connected layer to the last axis."""
        with v1.variable_scope(name):
            kernel = self("w", (x.shape[-1], units))
            y = tf.matmul(x, kernel) if x.shape.rank == 2 else tf.tensordot(x, kernel, 1)
            return y + self("b", (units,), scale=0.1) if bias else y


@dataclass(frozen=True)
class Forward:
    """What a model hands to the trainer."""

    losses: Any = None  # one loss per example (or per token): reduced as the options say
    loss: Any = None  # or the finished loss
    outputs: Mapping[str, Any] = field(default_factory=dict)
    penalty: Any = None  # a term that does not depend on the batch
    clip_norm: float | None = None


@contextmanager
def control_flow(v2: bool) -> Iterator[None]:
    """Build loops and branches as functional ops (v2) or as frames (v1), then restore the user's setting."""
    before = v1.control_flow_v2_enabled()
    switch = v1.enable_control_flow_v2 if v2 else v1.disable_control_flow_v2
    switch()
    try:
        yield
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()


def reduced(losses: Any, how: str) -> Any:
    """Reduce per-example losses to a scalar."""
    return tf.reduce_mean(losses) if how == "mean" else tf.reduce_sum(losses)


@dataclass(frozen=True)
class Step:
    """A finished training step: what `assemble` needs to name it."""

    loss: Any
    train: Any  # the op (or ops) that update the variables
    outputs: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    init: tuple[Any, ...] = ()  # initializers other than the variables'


def training_graph(
    options: Options, inputs: Sequence[Input], forward: Callable[[Variables, dict[str, Any]], Forward]
) -> Built:
    """Build the graph that trains `forward` on `inputs` with the optimizer of the options."""

    def body(variables: Variables, tensors: dict[str, Any]) -> Step:
        step = v1.train.get_or_create_global_step()
        result = forward(variables, tensors)
        loss = result.loss if result.loss is not None else reduced(result.losses, options.reduction)
        if result.penalty is not None:
            loss += result.penalty
        train, gradients = _train(options, loss, step, result.clip_norm)
        return Step(loss, train, result.outputs, gradients)

    return assemble(options, inputs, body)


def assemble(options: Options, inputs: Sequence[Input], body: Callable[[Variables, dict[str, Any]], Step]) -> Built:
    """Build the graph whose step is `body`, and name its loss, outputs, train op and initializer."""
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(options.seed)
        result = body(Variables(options), {each.name: _placeholder(each, options) for each in inputs})
        tf.identity(result.loss, name="loss")
        for name, tensor in result.outputs.items():
            tf.identity(tensor, name=name)
        tf.group(result.train, name="train")
        tf.group(v1.variables_initializer(v1.global_variables(), "init_variables"), *result.init, name="init")
        variables = tuple(variable.op.name for variable in v1.global_variables())

    def feeds(at: int, batch: int) -> dict[str, Array]:
        return {f"{each.name}:0": each.sample(options.dtype, options.seed, at, batch) for each in inputs}

    return Built(
        graph=graph,
        train_op="train",
        init_op="init",
        loss="loss:0",
        outputs=("loss:0", *(f"{name}:0" for name in result.outputs)),
        variables=variables,
        gradients=result.gradients,
        batch_inputs={each.name: each.axis for each in inputs},
        feeds=feeds,
    )


def _placeholder(each: Input, options: Options) -> Any:
    return v1.placeholder(each.concrete(options.dtype), each.batched(options.batch), name=each.name)


def _train(options: Options, loss: Any, step: Any, clip_norm: float | None) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """Add the backward pass and the update; return the raw gradient's name(s) by variable as well."""
    optimizer = GRAPH_OPTIMIZERS[options.optimizer]()
    pairs = optimizer.compute_gradients(loss, v1.trainable_variables())
    raw = {variable.op.name: _parts(gradient) for gradient, variable in pairs if gradient is not None}
    if clip_norm is not None:
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], clip_norm)
        pairs = [(gradient, variable) for gradient, (_, variable) in zip(clipped, pairs, strict=True)]
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        return optimizer.apply_gradients(pairs, step), raw


def _parts(gradient: Any) -> tuple[str, ...]:
    if isinstance(gradient, tf.IndexedSlices):
        return (gradient.values.name, gradient.indices.name)
    return (gradient.name,)
