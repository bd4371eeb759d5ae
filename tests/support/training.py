"""Train a small TensorFlow graph on one device and over replicas, and compare what is fetched and what is learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem

v1 = tf.compat.v1
MODES = ("shared", "mirrored")
Feed = Mapping[str, Any]


@contextmanager
def control_flow(version: int) -> Iterator[None]:
    """Build loops and branches as TensorFlow 1 or 2 did."""
    was_v2 = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if version == 2 else v1.disable_control_flow_v2)()
    try:
        yield
    finally:
        (v1.enable_control_flow_v2 if was_v2 else v1.disable_control_flow_v2)()


def make_item(
    forward: Callable[[], Mapping[str, Any]], *, batch_inputs: Mapping[str, int | None] | None = None, version: int = 2
) -> GraphItem:
    """Return the item of gradient descent on the `loss` that `forward` returns, with all that it returns as outputs."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(version):
        v1.set_random_seed(1)
        results = {name: tf.identity(tensor, name=f"out_{name}") for name, tensor in forward().items()}
        trained = v1.trainable_variables()
        pairs = zip(trained, v1.gradients(results["loss"], trained), strict=True)
        slopes = [(w, tf.convert_to_tensor(g)) for w, g in pairs if g is not None]
        with tf.control_dependencies([*results.values()]):
            steps = [w.assign_sub(0.1 * g) for w, g in slopes]
        tf.group(steps, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    outputs = [f"out_{name}" for name in results]
    kwargs = {} if batch_inputs is None else {"batch_inputs": dict(batch_inputs)}
    return GraphItem.from_graph(graph, train_op="train", outputs=outputs, init_op="init", **kwargs)


def variable(name: str, value: Any) -> Any:
    """Make a trained resource variable."""
    return v1.get_variable(name, initializer=np.asarray(value), use_resource=True)


def placeholder(name: str, *shape: int | None, dtype: Any = tf.float64) -> Any:
    """Make an input."""
    return v1.placeholder(dtype, shape, name=name)


def distributed(item: GraphItem, mode: str, replicas: int = 2, **semantics: str) -> GraphItem:
    """Rewrite an item for CPU devices."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    config = {"devices": devices, "strategy": {"name": "AllReduce", "variables": mode}, "semantics": semantics}
    return ar.rewrite(item, config)


@dataclass
class Run:
    """What a few steps gave: fetches by step, and the variables at the end."""

    fetched: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)


def train(item: GraphItem, feeds: Sequence[Feed]) -> Run:
    """Run one training step for each feed."""
    result = Run()
    names = [name for name in item.outputs if name.startswith("out_")]
    with item.session() as session:
        session.run(item.init_op)
        for feed in feeds:
            values = session.run([*names, "train"], dict(feed), timeout_ms=30000)[:-1]
            result.fetched.append({name[4:]: np.asarray(v) for name, v in zip(names, values, strict=True)})
        result.variables = session.read_variables()
    return result


def learnt(item: GraphItem, feeds: Sequence[Feed]) -> list[Any]:
    """Return the first output of one training step for each feed, and all variables behind them."""
    with item.session() as session:
        session.run(item.init_op)
        names = [*item.outputs, item.targets[0]]
        losses = [session.run(names, feed, timeout_ms=60000)[0] for feed in feeds]
        return [*losses, *session.run([variable.handle for variable in item.variables.values()])]


def assert_trains_alike(
    item: GraphItem, feeds: Sequence[Feed], *, modes: Sequence[str] = MODES, replicas: int = 2, tolerance: float = 1e-9
) -> None:
    """Compare each mode with a single device: all outputs of every step, and all variables after the last."""
    expected = train(item, feeds)
    for mode in modes:
        got = train(distributed(item, mode, replicas), feeds)
        for step, (a, b) in enumerate(zip(got.fetched, expected.fetched, strict=True)):
            for name, value in b.items():
                assert a[name].shape == value.shape, f"{mode}, step {step}: {name}"
                np.testing.assert_allclose(a[name], value, tolerance, tolerance, err_msg=f"{mode}, step {step}: {name}")
        for name, value in expected.variables.items():
            np.testing.assert_allclose(got.variables[name], value, tolerance, tolerance, err_msg=f"{mode}: {name}")
