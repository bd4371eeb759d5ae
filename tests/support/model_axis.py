"""Steps on a mesh with a model axis: trained beside one device, and the conversions between its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import autograph_rewrite as ar
from autograph_rewrite.analysis.propagate import propagate
from autograph_rewrite.compile import request
from autograph_rewrite.config.config import Config
from autograph_rewrite.inspect.pass_states import optimize
from autograph_rewrite.ir.mesh import MODEL
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.passes.pass_pipeline import PIPELINE

Variables = dict[str, Any]
StepOf = Callable[[Variables], Callable[..., Any]]
JOINS = {"AddN": "sum", "ConcatV2": "gather", "Maximum": "max", "Minimum": "min", "LogicalAnd": "all"}
CONVERSIONS = {**JOINS, "SplitV": "cut"}


def on_mesh(data: int, model: int, sharding: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the configuration of a mesh; `sharding` has a 0 for each dimension of a variable that is cut, else a 1."""
    entries = [{"match": name, "split": [model if one == 0 else 1 for one in dims]} for name, dims in sharding.items()]
    devices = [f"CPU:{i}" for i in range(data * model)]
    return {"devices": devices, "mesh": {"data": data, "model": model}, "sharding": entries}


def variables_of(shapes: Mapping[str, Sequence[int]]) -> Variables:
    """Return variables of random content, the same in every call."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    return {
        name: tf.Variable(rng.normal(size=shape) * 0.5, name=name, dtype=tf.float64) for name, shape in shapes.items()
    }


def descent(loss_of: Callable[..., Any]) -> StepOf:
    """Return steps of gradient descent on a loss of (variables, *data)."""
    import tensorflow as tf

    def step_of(variables: Variables) -> Callable[..., Any]:
        def step(*data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(variables, *data)
            gradients = tape.gradient(loss, list(variables.values()))
            for variable, gradient in zip(variables.values(), gradients, strict=True):
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return loss

        return step

    return step_of


def worst_difference(
    shapes: Mapping[str, Sequence[int]], step_of: StepOf, data: Sequence[Any], config: Mapping[str, Any], steps: int = 5
) -> float:
    """Train on one device and on a mesh; return the largest difference of losses and variables.

    Args:
        shapes: of the variables.
        step_of: makes the step of variables.
        data: arrays, in which the first dimension is that of the examples.
        config: of the mesh.
        steps: how many.
    """
    import tensorflow as tf

    one, many = variables_of(shapes), variables_of(shapes)
    alone, together = tf.function(step_of(one)), ar.distribute(step_of(many), config)
    fed = [tf.constant(part) for part in data]
    losses = [float(alone(*fed)) - float(together(*fed)) for _ in range(steps)]
    states = [np.abs(one[name].numpy() - many[name].numpy()).max() for name in shapes]
    return float(max(*map(abs, losses), *states))


def conversions(
    shapes: Mapping[str, Sequence[int]], step_of: StepOf, data: Sequence[Any], config: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...]]]:
    """Return what is joined and cut between the devices of a replica in a step, and its shape (-1: open).

    Args:
        shapes: of the variables.
        step_of: makes the step of variables.
        data: arrays, as examples.
        config: of the mesh.
    """
    import tensorflow as tf

    specs = [tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in data]
    item = normalise_original(ar.GraphItem.from_function(step_of(variables_of(shapes)), *specs))
    position = [one.name for one in PIPELINE].index("partition-model")
    rewrite = optimize(item, request(item, Config.of(config)), PIPELINE[: position + 1])
    facts = propagate(rewrite.graph, {}, Semantics()).facts
    found = []
    for node in rewrite.graph:
        devices = {value.node.at(MODEL) for value in node.inputs}
        if node.op == "SplitV" or (node.op in JOINS and len(devices) > 1 and "/part_" not in node.name):
            shape = facts[node.inputs[0] if node.op == "SplitV" else node.output()].shape or ()
            found.append((CONVERSIONS[node.op], tuple(dim if isinstance(dim, int) else -1 for dim in shape)))
    return found
