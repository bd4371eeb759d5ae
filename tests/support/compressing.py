"""Small models whose applied gradients can be seen, to compare what compressors apply with what there was to apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem

v1 = tf.compat.v1
MODES = ("shared", "mirrored")
HALVES = ("fp16", "bf16")
WITH_FEEDBACK = ("fp16_ef", "bf16_ef", "topk", "powersgd", "int8_ef")
COMPRESSORS = (*HALVES, *WITH_FEEDBACK)
WEIGHTS = {"w1": (6, 20), "b1": (20,), "w2": (20, 4)}
RATE = 0.05
LIMIT = 30_000
"""Milliseconds after which a step of a test has failed."""

Array = np.ndarray[Any, Any]


def config(mode: str, compressor: str = "none", replicas: int = 2, **strategy: Any) -> dict[str, Any]:
    """Return a configuration of CPU devices."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    return {"devices": devices, "strategy": {"variables": mode, "compressor": compressor, **strategy}}


def initial() -> dict[str, Array]:
    """Return the weights that every model of this file starts from."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape, scale=0.5).astype(np.float32) for name, shape in WEIGHTS.items()}


def batch(step: int, size: int = 7) -> dict[str, Array]:
    """Return the data of a step."""
    rng = np.random.default_rng([1, step % 4])
    x = rng.normal(size=(size, 6)).astype(np.float32)
    return {"x": x, "y": (x[:, :4] - x[:, 2:]).astype(np.float32)}


def loss_of(weights: Mapping[str, Any], x: Any, y: Any) -> Any:
    """Return the loss of a small perceptron."""
    hidden = tf.nn.relu(x @ weights["w1"] + weights["b1"])
    return tf.reduce_mean(tf.square(hidden @ weights["w2"] - y))


def exact_gradients(weights: Mapping[str, Array], data: Mapping[str, Array]) -> dict[str, Array]:
    """Return the gradients at some weights, in float64."""
    variables = {name: tf.constant(value, tf.float64) for name, value in weights.items()}
    with tf.GradientTape() as tape:
        for value in variables.values():
            tape.watch(value)
        loss = loss_of(variables, *(tf.constant(data[name], tf.float64) for name in ("x", "y")))
    return {name: np.asarray(g) for name, g in tape.gradient(loss, variables).items()}


def graph_item() -> GraphItem:
    """Return the perceptron as a v1 graph that gives the gradients it applies."""
    graph = tf.Graph()
    with graph.as_default():
        x, y = (v1.placeholder(tf.float32, [None, n], name=name) for name, n in (("x", 6), ("y", 4)))
        weights = {
            name: v1.get_variable(name, initializer=value, use_resource=True) for name, value in initial().items()
        }
        loss = tf.identity(loss_of(weights, x, y), name="loss")
        gradients = dict(zip(weights, v1.gradients(loss, list(weights.values())), strict=True))
        applied = {name: tf.identity(g, name=f"applied_{name}") for name, g in gradients.items()}
        tf.group([weights[name].assign_sub(RATE * g) for name, g in applied.items()], name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    outputs = ["loss", *(f"applied_{name}" for name in WEIGHTS)]
    return GraphItem.from_graph(graph, train_op="train", outputs=outputs, init_op="init")


class Net:
    """The perceptron as a function on tf.Variables that returns the gradients it applies."""

    def __init__(self) -> None:
        self.weights = {name: tf.Variable(value, name=name) for name, value in initial().items()}

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        """Train one step."""
        with tf.GradientTape() as tape:
            loss = loss_of(self.weights, x, y)
        gradients = tape.gradient(loss, self.weights)
        for name, gradient in gradients.items():
            self.weights[name].assign_sub(RATE * gradient)
        return {"loss": loss, **{f"applied_{name}": g for name, g in gradients.items()}}


class Account:
    """What was applied, and what there was to apply, added up in float64."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.applied = {name: np.zeros(shape) for name, shape in WEIGHTS.items()}
        self.exact = {name: np.zeros(shape) for name, shape in WEIGHTS.items()}

    def add(self, weights: Mapping[str, Array], data: Mapping[str, Array], results: Mapping[str, Any]) -> None:
        """Count a step that began with `weights`."""
        self.losses.append(float(results["loss"]))
        for name, gradient in exact_gradients(weights, data).items():
            self.exact[name] += gradient
            self.applied[name] += np.asarray(results[f"applied_{name}"], np.float64)

    def error(self, residuals: Mapping[str, Array]) -> float:
        """Return how much of the gradients is neither applied nor in a residual, relative to the largest sum."""
        errors = []
        for name, exact in self.exact.items():
            rest = residuals.get(f"{name}/autograph_residual")
            kept = rest.astype(np.float64).sum(axis=0) if rest is not None else 0.0
            errors.append(np.abs(self.applied[name] + kept - exact).max() / np.abs(exact).max())
        return float(max(errors))


def train_graph(item: GraphItem, steps: int) -> tuple[Account, dict[str, Array]]:
    """Train a rewritten graph; return the account and the residuals at the end."""
    account = Account()
    with item.session() as session:
        session.run(item.init_op)
        for step in range(steps):
            weights, data = {name: session.read_variable(name) for name in WEIGHTS}, batch(step)
            names = list(item.outputs)
            values = session.run([*names, "train"], data, timeout_ms=LIMIT)[:-1]
            account.add(weights, data, dict(zip(names, values, strict=True)))
        return account, {name: session.read_variable(name) for name in item.state}


def train_function(net: Net, step: Any, steps: int) -> tuple[Account, dict[str, Array]]:
    """Train a distributed function; return the account and the residuals at the end."""
    account = Account()
    for index in range(steps):
        weights, data = {name: v.numpy() for name, v in net.weights.items()}, batch(index)
        account.add(weights, data, step(data["x"], data["y"]))
    return account, residuals_of(step)


def residuals_of(step: Any) -> dict[str, Array]:
    """Return what a distributed function keeps back: one row per replica."""
    rows: dict[str, list[Array]] = {}
    for name, variable in sorted(vars(step.state).items()):
        if isinstance(variable, tf.Variable):
            rows.setdefault(name.rpartition("/")[0], []).append(variable.numpy())
    return {name: np.stack(values) for name, values in rows.items()}


def sums_item(*, shape: Sequence[int] = (8,), dtype: Any = tf.float32, name: str = "w") -> GraphItem:
    """Return a graph whose gradient is the sum of its examples: feeds say what each replica contributes."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(dtype, [None, *shape], name="x")
        w = v1.get_variable(name, initializer=np.zeros(shape, dtype.as_numpy_dtype), use_resource=True)
        loss = tf.reduce_sum(x * w, name="loss")
        (gradient,) = v1.gradients(loss, [w])
        applied = tf.identity(gradient, name="applied")
        tf.group(w.assign_sub(applied), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss", "applied"], init_op="init")


class Sums:
    """A session on a rewritten `sums_item`; each step takes one row per replica."""

    def __init__(self, item: GraphItem, settings: Mapping[str, Any]) -> None:
        self.item = ar.rewrite(item, settings)
        self.session = self.item.session()
        self.session.run("init")

    def __enter__(self) -> Sums:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def step(self, rows: Any) -> Array:
        """Return the applied gradient."""
        applied, _ = self.session.run(["applied", "train"], {"x": rows}, timeout_ms=LIMIT)
        return np.asarray(applied)

    def many(self, rows: Any, steps: int) -> Array:
        """Return the sum of the applied gradients of many equal steps, in float64; past all conveniences."""
        graph = self.session.graph
        fetches = [graph.get_tensor_by_name("applied:0"), graph.get_operation_by_name("train")]
        step = self.session.tf_session.make_callable(fetches, [graph.get_tensor_by_name("x:0")])
        return np.sum([step(rows)[0].astype(np.float64) for _ in range(steps)], axis=0)

    def residual(self, name: str = "w") -> Array:
        """Return what is kept back, one row per replica."""
        return self.session.read_variable(f"{name}/autograph_residual")
