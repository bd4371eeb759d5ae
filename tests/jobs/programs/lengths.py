"""Workers with sequences of other lengths: `lengths.py OUT [CASE ...]`; each compares itself with one device.

The reference computes on all parts in their true lengths, one after another, and takes means over what is there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.jobs.programs.job import Job
from tests.jobs.programs.worker import split_cpu

JOB = Job.here(Path(sys.argv[1]))
REPLICAS = int(os.environ.get("JOB_REPLICAS", "1"))
split_cpu(REPLICAS)
CONFIG = {
    **JOB.config(replicas=REPLICAS),
    **json.loads(os.environ.get("JOB_CONFIG", "{}")),
    "timeout_seconds": 10,
}
STEPS, RATE = 3, 0.125
LENGTHS = ((3, 5), (4, 4), (1, 6))
EXAMPLES = (2, 6)
F = tf.float64


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        variables: what it trains.
        terms: of one part of the batch, sums and what they are divided by: the loss is the sum of their quotients.
        loss: the same on the whole batch, as a user writes it.
        inputs: of one part: number of examples, length, random numbers.
        specs: of the inputs.
    """

    variables: Sequence[Any]
    terms: Callable[..., Sequence[tuple[Any, Any]]]
    loss: Callable[..., Any]
    inputs: Callable[[int, int, np.random.Generator], Sequence[Any]]
    specs: Sequence[tf.TensorSpec]


def x_of(count: int, length: int, rng: np.random.Generator) -> Sequence[Any]:
    """Return sequences of vectors."""
    return (rng.normal(size=(count, length, 4)),)


X = tf.TensorSpec([None, None, 4], F)


def size(x: Any) -> Any:
    """Return the number of elements."""
    return tf.cast(tf.size(x), F)


def count(x: Any) -> Any:
    """Return the number of examples."""
    return tf.cast(tf.shape(x)[0], F)


def mean_of_tokens() -> Program:
    """A mean over examples and time."""
    w = tf.Variable(np.eye(4) * 0.3, name="w")

    def made(x):
        return tf.tanh(x @ w) ** 2

    return Program([w], lambda x: [(tf.reduce_sum(made(x)), size(x))], lambda x: tf.reduce_mean(made(x)), x_of, [X])


def mean_of_sums() -> Program:
    """A mean over examples of sums over time."""
    w = tf.Variable(np.eye(4) * 0.3, name="w")

    def made(x):
        return tf.reduce_sum(tf.tanh(x @ w) ** 2, [1, 2])

    return Program([w], lambda x: [(tf.reduce_sum(made(x)), count(x))], lambda x: tf.reduce_mean(made(x)), x_of, [X])


def attention() -> Program:
    """Keras' attention over the sequence, with a causal mask, and layer normalisation."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.MultiHeadAttention(2, 2, dtype="float64")
    norm = keras.layers.LayerNormalization(dtype="float64")
    layer.build((None, None, 4), (None, None, 4))
    norm.build((None, None, 4))
    variables = [v.value for one in (layer, norm) for v in one.trainable_variables]

    def made(x):
        return norm(layer(x, x, use_causal_mask=True) + x) ** 2 * x

    return Program(
        variables, lambda x: [(tf.reduce_sum(made(x)), size(x))], lambda x: tf.reduce_mean(made(x)), x_of, [X]
    )


def recurrent() -> Program:
    """A GRU whose outputs are compared with targets, a loop over time."""
    keras.utils.set_random_seed(2)
    layer = keras.layers.GRU(4, return_sequences=True, dtype="float64")
    layer.build((None, None, 4))

    def made(x, y):
        return (tf.reduce_sum(layer(x), -1) - y) ** 2

    def inputs(n, length, rng):
        return (rng.normal(size=(n, length, 4)), rng.normal(size=(n, length)))

    return Program(
        [v.value for v in layer.trainable_variables],
        lambda x, y: [(tf.reduce_sum(made(x, y)), size(y))],
        lambda x, y: tf.reduce_mean(made(x, y)),
        inputs,
        [X, tf.TensorSpec([None, None], F)],
    )


def positions() -> Program:
    """Tokens and positions are looked up, and a mask says which count."""
    tokens = tf.Variable(np.random.default_rng(3).normal(size=(20, 4)), name="tokens")
    places = tf.Variable(np.random.default_rng(4).normal(size=(8, 4)), name="places")

    def made(ids: Any, mask: Any) -> Any:
        h = tf.gather(tokens, ids) + tf.gather(places, tf.range(tf.shape(ids)[1]))
        return tf.reduce_sum(tf.tanh(h) ** 2, -1) * mask

    def inputs(n, length, rng):
        return (
            rng.integers(0, 20, (n, length)),
            (rng.uniform(size=(n, length)) < 0.8).astype(float),
        )

    return Program(
        [tokens, places],
        lambda ids, mask: [(tf.reduce_sum(made(ids, mask)), tf.reduce_sum(mask))],
        lambda ids, mask: tf.reduce_sum(made(ids, mask)) / tf.reduce_sum(mask),
        inputs,
        [tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None, None], F)],
    )


def convolution() -> Program:
    """A convolution along time, the maximum over time, and a statistic of all tokens."""
    keras.utils.set_random_seed(5)
    layer = keras.layers.Conv1D(4, 3, padding="same", dtype="float64")
    layer.build((None, None, 4))

    def made(x):
        return tf.reduce_max(layer(x), 1) ** 2

    def spread(x):
        return tf.square(x @ layer.kernel.value[0])

    return Program(
        [v.value for v in layer.trainable_variables],
        lambda x: [(tf.reduce_sum(made(x)), 4 * count(x)), (tf.reduce_sum(spread(x)), size(x))],
        lambda x: tf.reduce_mean(made(x)) + tf.reduce_mean(spread(x)),
        x_of,
        [X],
    )


CASES = {make.__name__: make for make in (mean_of_tokens, mean_of_sums, attention, recurrent, positions, convolution)}


def parts(program: Program, step: int) -> list[Sequence[Any]]:
    """Return the workers' parts of one batch."""
    return [
        [
            tf.constant(v)
            for v in program.inputs(EXAMPLES[task], LENGTHS[step][task], np.random.default_rng([step, task]))
        ]
        for task in range(JOB.count)
    ]


def descend(variables: Sequence[Any], loss: Any, tape: tf.GradientTape) -> None:
    """Take a step down the gradient."""
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(RATE * tf.convert_to_tensor(gradient))


def expected(program: Program) -> list[float]:
    """Train on all parts, on one device; return the losses."""
    losses = []
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            terms = [program.terms(*part) for part in parts(program, step)]
            loss = tf.add_n(
                [tf.add_n([t[0] for t in one]) / tf.add_n([t[1] for t in one]) for one in zip(*terms, strict=True)]
            )
        descend(program.variables, loss, tape)
        losses.append(float(loss))
    return losses


def trained(program: Program) -> list[float]:
    """Train in the job; return the losses."""

    def train(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = program.loss(*given)
        descend(program.variables, loss, tape)
        return loss

    step = ar.distribute(train, CONFIG, *program.specs)
    return [float(step(*parts(program, number)[JOB.task])) for number in range(STEPS)]


def check(name: str) -> float:
    """Return the largest difference of losses and variables from one device."""
    program = CASES[name]()
    before = [v.numpy() for v in program.variables]
    losses, wanted = expected(program), [v.numpy() for v in program.variables]
    for variable, value in zip(program.variables, before, strict=True):
        variable.assign(value)
    got = trained(program)
    pairs = [(got, losses), *((v.numpy(), w) for v, w in zip(program.variables, wanted, strict=True))]
    return max(float(np.max(np.abs(np.asarray(a) - b))) for a, b in pairs)


def outputs() -> dict[str, Any]:
    """Return an output that has the length, and what it should be: padded with zeros to the longest."""
    w = tf.Variable(np.eye(4), name="w")

    def predict(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x @ w
            loss = tf.reduce_mean(h**2)
        descend([w], loss, tape)
        return loss, h

    step = ar.distribute(predict, CONFIG, X)
    _, got = step(tf.constant(x_of(EXAMPLES[JOB.task], LENGTHS[0][JOB.task], np.random.default_rng(JOB.task))[0]))
    whole = [x_of(EXAMPLES[t], LENGTHS[0][t], np.random.default_rng(t))[0] for t in range(JOB.count)]
    wanted = np.zeros_like(got)
    for begin, x in zip((0, EXAMPLES[0]), whole, strict=True):
        wanted[begin : begin + len(x), : x.shape[1]] = x
    return {"shape": list(got.shape), "equal": bool(np.array_equal(got, wanted))}


def stores_the_length(w: Any, x: Any) -> Any:
    """Write the length into a variable."""
    w.assign_add(0 * w + tf.cast(tf.shape(x)[1], F))
    return tf.reduce_mean(x @ w)


def divides_by_the_length(w: Any, x: Any) -> Any:
    """Divide what all workers have added up by a length, of which each has its own."""
    return tf.reduce_sum(x @ w) / tf.cast(tf.shape(x)[1], F)


def draws_noise(w: Any, x: Any) -> Any:
    """Draw as many numbers as one device would draw."""
    return tf.reduce_mean(tf.nn.dropout(x @ w, 0.5, seed=3))


def squares_gradients_of_positions(w: Any, x: Any) -> Any:
    """Take the square of a sum over examples that has the length."""
    return tf.reduce_sum(tf.reduce_sum(x @ w, 0) ** 2)


REFUSED = {
    make.__name__: make
    for make in (stores_the_length, divides_by_the_length, draws_noise, squares_gradients_of_positions)
}


def refused(name: str) -> tuple[str, str]:
    """Return the note of the plan, and the error of workers with other lengths."""
    w = tf.Variable(np.eye(4), name="w")

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = REFUSED[name](w, x)
        descend([w], loss, tape)
        return loss

    step = ar.distribute(train, CONFIG, X)
    x = x_of(EXAMPLES[JOB.task], LENGTHS[0][JOB.task], np.random.default_rng(JOB.task))[0]
    try:
        step(tf.constant(x))
    except ar.ClusterError as error:
        return "\n".join(step.items[0].report.plan.notes), str(error)
    return "", "no error"


def session() -> float:
    """Return the largest difference of a loss in a session from one device's."""
    v1, graph = tf.compat.v1, tf.Graph()
    with graph.as_default():
        x = v1.placeholder(F, [None, None, 4], name="x")
        w = v1.get_variable("w", initializer=np.eye(4) * 0.3, use_resource=True)
        loss = tf.reduce_mean(tf.tanh(x @ w) ** 2, name="loss")
        v1.train.GradientDescentOptimizer(RATE).minimize(loss, name="train")
        v1.global_variables_initializer()
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")
    wanted = expected(mean_of_tokens())
    program = mean_of_tokens()
    with ar.rewrite(item, CONFIG).session() as opened:
        opened.run("init")
        feeds = [{"x": parts(program, step)[JOB.task][0].numpy()} for step in range(STEPS)]
        got = [opened.run(["loss", "train"], feed)[0] for feed in feeds]
    return float(np.max(np.abs(np.array(got) - wanted)))


def keras_model() -> float:
    """Return the largest difference of a Keras model's losses, whose workers are given their own data."""
    keras.utils.set_random_seed(7)
    keras.config.set_floatx("float64")
    layers = [keras.layers.Input((None, 4)), keras.layers.Dense(4, "tanh"), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    kernels = [v.numpy() for v in model.trainable_variables]

    def loss_of(weights: Sequence[Any], given: Sequence[Any], targets: Sequence[Any]) -> Any:
        w, b, v, c = weights
        outs = [tf.reduce_mean(tf.tanh(x @ w + b), 1) @ v + c for x in given]
        return tf.reduce_mean((tf.concat(outs, 0) - tf.concat(targets, 0)) ** 2)

    weights = [tf.Variable(k) for k in kernels]
    program, wanted, got = mean_of_tokens(), [], []
    labels = [tf.constant(np.arange(count, dtype=float)[:, None]) for count in EXAMPLES]
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, [part[0] for part in parts(program, step)], labels[: JOB.count])
        descend(weights, loss, tape)
        wanted.append(float(loss))
    model = ar.distribute(model, {**CONFIG, "input": "per_worker"})
    for step in range(STEPS):
        got.append(float(model.train_on_batch(parts(program, step)[JOB.task][0], labels[JOB.task])))
        model.reset_metrics()
    keras.config.set_floatx("float32")
    return float(np.max(np.abs(np.array(got) - wanted)))


OTHERS = {made.__name__: made for made in (outputs, session, keras_model)}


def main() -> None:
    """Run the cases."""
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        found[name] = check(name) if name in CASES else refused(name) if name in REFUSED else OTHERS[name]()
    (JOB.folder / f"worker{JOB.task}.json").write_text(json.dumps(found))


main()
