"""Graphs on which AutoDist raises, does nothing silently, or trains to wrong values (FIELD.md, section 6).

Each is one habit of real programs, as small as it gets. They are not part of the matrix: one test runs each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from .case import Built, Case, Options
from .data import Input, generator, integers
from .optimizers import GRAPH_OPTIMIZERS
from .training import Forward, Step, Variables, assemble, reduced, training_graph

v1 = tf.compat.v1
_X, _Y = Input("x", "float", (4,)), Input("y", "float", ())


def _predict(variables: Variables, x: Any, name: str = "out") -> Any:
    return variables.dense(tf.tanh(variables.dense(x, f"{name}_hidden", 5)), name, 1)[:, 0]


def _loss(options: Options, predictions: Any, y: Any) -> Any:
    return reduced(tf.square(predictions - y), options.reduction)


def two_optimizers(options: Options) -> Built:
    """Train a wide part with FTRL and a deep part with Adagrad, as wide-and-deep models do."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        wide = tf.nn.embedding_lookup(variables("wide", (7, 1)), inputs["ids"])[:, 0]
        loss = _loss(options, wide + _predict(variables, inputs["x"]), inputs["y"])
        step = v1.train.get_or_create_global_step()
        shallow, deep = [], []
        for variable in v1.trainable_variables():
            (shallow if variable.op.name == "wide" else deep).append(variable)
        first = GRAPH_OPTIMIZERS["ftrl"]().minimize(loss, var_list=shallow)
        second = GRAPH_OPTIMIZERS["adagrad"]().minimize(loss, step, var_list=deep)
        return Step(loss, [first, second])

    return assemble(options, (_X, _Y, Input("ids", "int32", (), integers(7))), body)


def positional_global_step(options: Options) -> Built:
    """Pass `global_step` by position, and let the learning rate decay with it."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        step = v1.train.get_or_create_global_step()
        rate = v1.train.exponential_decay(0.2, step, 2, 0.5)
        loss = _loss(options, _predict(variables, inputs["x"]), inputs["y"])
        optimizer = v1.train.MomentumOptimizer(rate, 0.9)
        return Step(loss, optimizer.apply_gradients(optimizer.compute_gradients(loss), step), {"rate": rate})

    return assemble(options, (_X, _Y), body)


def keyword_gradients(options: Options) -> Built:
    """Pass the gradients by keyword."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        loss = _loss(options, _predict(variables, inputs["x"]), inputs["y"])
        optimizer = GRAPH_OPTIMIZERS[options.optimizer]()
        return Step(loss, optimizer.apply_gradients(grads_and_vars=optimizer.compute_gradients(loss)))

    return assemble(options, (_X, _Y), body)


def variable_without_gradient(options: Options) -> Built:
    """Have a trainable variable that the loss does not read, and one that nothing reads."""

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        unused = variables("unused", (3,))
        variables("untouched", (2,))
        predictions = _predict(variables, inputs["x"])
        return Forward(
            loss=_loss(options, predictions, inputs["y"]),
            outputs={"shown": predictions + tf.reduce_sum(unused)},
        )

    return training_graph(options, (_X, _Y), forward)


def second_update(options: Options) -> Built:
    """Decay the weights after the optimizer has updated them: a second update of every variable."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        loss = _loss(options, _predict(variables, inputs["x"]), inputs["y"])
        train = GRAPH_OPTIMIZERS[options.optimizer]().minimize(loss, v1.train.get_or_create_global_step())
        with tf.control_dependencies([train]):
            decay = [v1.assign_sub(each, 0.1 * each.read_value()) for each in v1.trainable_variables()]
        return Step(loss, decay)

    return assemble(options, (_X, _Y), body)


def prime_dimension(options: Options) -> Built:
    """Have a table of 1009 rows."""

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        rows = tf.nn.embedding_lookup(variables("table", (1009, 3)), inputs["ids"])
        predictions = variables.dense(tf.reduce_sum(rows, 1), "out", 1)[:, 0]
        return Forward(loss=_loss(options, predictions, inputs["y"]))

    return training_graph(options, (Input("ids", "int64", (5,), integers(1009)), _Y), forward)


def function_call(options: Options) -> Built:
    """Call functions, one inside the other, that read variables and take part in the backward pass."""

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        kernel = variables("kernel", (4, 3))

        @tf.function
        def inner(x: Any) -> Any:
            return tf.nn.softplus(tf.matmul(x, kernel))

        @tf.function
        def outer(x: Any) -> Any:
            return inner(x) * inner(2 * x), tf.reduce_mean(x)

        hidden, mean = outer(inputs["x"])
        predictions = variables.dense(hidden, "out", 1)[:, 0] + mean
        return Forward(loss=_loss(options, predictions, inputs["y"]), outputs={"average": mean})

    return training_graph(options, (_X, _Y), forward)


def dataset(options: Options, one_shot: bool) -> Built:
    """Read batches from a tf.data iterator in the graph: of 8, 8 and 3 rows, over and over."""
    rows = {
        "x": generator(options.seed, "rows").standard_normal((19, 4)).astype(options.dtype),
        "y": generator(options.seed, "targets").standard_normal(19).astype(options.dtype),
    }

    def body(variables: Variables, _: dict[str, Any]) -> Step:
        data = tf.data.Dataset.from_tensor_slices(rows).batch(8).repeat()
        make = v1.data.make_one_shot_iterator if one_shot else v1.data.make_initializable_iterator
        iterator = make(data)
        batch = iterator.get_next()
        loss = _loss(options, _predict(variables, batch["x"]), batch["y"])
        train = GRAPH_OPTIMIZERS[options.optimizer]().minimize(loss, v1.train.get_or_create_global_step())
        return Step(loss, train, init=() if one_shot else (iterator.initializer,))

    return assemble(options, (), body)


def seeded_dropout(options: Options) -> Built:
    """Seed every dropout: all replicas would draw the same mask if each drew its own."""

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        hidden = tf.nn.dropout(variables.dense(inputs["x"], "hidden", 6), 0.5, seed=11)
        predictions = variables.dense(hidden, "out", 1)[:, 0]
        return Forward(loss=_loss(options, predictions, inputs["y"]), outputs={"dropped": hidden})

    return training_graph(options, (_X, _Y), forward)


def ref_variables(options: Options) -> Built:
    """Use VariableV2 and Assign, as graphs from before 2.0 do."""
    return seeded_dropout(replace(options, ref_variables=True))


def sparse_gradients(options: Options) -> Built:
    """Train two tables that are only looked up: repeated rows, untouched rows, two lookups of one table."""

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        users, items = variables("users", (6, 3)), variables("items", (9, 3))
        left = tf.nn.embedding_lookup(users, inputs["user"])
        right = tf.nn.embedding_lookup(items, inputs["item"]) + tf.nn.embedding_lookup(items, inputs["last"])
        return Forward(loss=_loss(options, tf.reduce_sum(left * right, 1), inputs["y"]))

    ids = [Input(name, "int32", (), integers(high)) for name, high in (("user", 4), ("item", 5), ("last", 5))]
    return training_graph(options, (*ids, _Y), forward)


def accumulated_gradients(options: Options) -> Built:
    """Read the gradients back from a conditional accumulator of the user's own."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        loss = _loss(options, _predict(variables, inputs["x"]), inputs["y"])
        optimizer = GRAPH_OPTIMIZERS[options.optimizer]()
        step, taken = v1.train.get_or_create_global_step(), []
        for gradient, variable in optimizer.compute_gradients(loss):
            store = v1.ConditionalAccumulator(gradient.dtype, gradient.shape)
            with tf.control_dependencies([store.apply_grad(gradient, step)]):
                taken.append((store.take_grad(1), variable))
        return Step(loss, optimizer.apply_gradients(taken, step))

    return assemble(options, (_X, _Y), body)


def linear_regression(_: Options) -> Built:
    """AutoDist's own acceptance case c0: in float32, after one step of SGD the bias is 0.0417503."""
    rng = np.random.RandomState(123)
    inputs, noise = rng.randn(1000).astype("float32"), rng.randn(1000).astype("float32")
    arrays: Mapping[str, Any] = {"x:0": inputs, "y:0": inputs * 3.0 + 2.0 + noise}
    options = Options(dtype="float32")

    def body(variables: Variables, tensors: dict[str, Any]) -> Step:
        slope, bias = variables("w", (), scale=0, offset=5.0), variables("b", (), scale=0)
        loss = tf.reduce_mean(tf.square(tensors["y"] - (slope * tensors["x"] + bias)))
        return Step(loss, v1.train.GradientDescentOptimizer(0.01).minimize(loss))

    built = assemble(options, (Input("x", "float", ()), Input("y", "float", ())), body)
    return replace(built, feeds=lambda at, batch: {name: value[:batch] for name, value in arrays.items()})


AUTODIST: Mapping[str, Case] = {
    name: Case(name=name, kind="graph", family="autodist", builder=builder)
    for name, builder in {
        "two_optimizers": two_optimizers,
        "positional_global_step": positional_global_step,
        "keyword_gradients": keyword_gradients,
        "variable_without_gradient": variable_without_gradient,
        "second_update": second_update,
        "prime_dimension": prime_dimension,
        "function_call": function_call,
        "one_shot_iterator": lambda options: dataset(options, one_shot=True),
        "initializable_iterator": lambda options: dataset(options, one_shot=False),
        "seeded_dropout": seeded_dropout,
        "ref_variables": ref_variables,
        "sparse_gradients": sparse_gradients,
        "accumulated_gradients": accumulated_gradients,
        "linear_regression": linear_regression,
    }.items()
}
