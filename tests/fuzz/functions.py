"""Programs as functions over tf.Variables: a tape, an optimizer, and two calls of ar.distribute's result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.fuzz.net import D, Net
from tests.fuzz.optimizers import KERAS, by_hand, keras_optimizer
from tests.fuzz.program import Program, Stretch, grow, zero

FuncGraph = tf.__internal__.FuncGraph
Results = dict[str, Any]


class Step:
    """The training function of a program, with variables of its own.

    Attributes:
        net: the network of the first trace, which says what the inputs are.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.variables: dict[str, Any] = {}
        self.optimizer: Any = None
        with FuncGraph("survey").as_default():
            self.net = program.net(variables=self.variables)
            self._trace(self.net)
        self._begin = [np.asarray(v) for v in self._all()]

    def restart(self) -> None:
        """Give all variables the values that they began with."""
        for variable, value in zip(self._all(), self._begin, strict=True):
            variable.assign(value)

    def function(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return it."""

        def step(batch: dict[str, Any]) -> dict[str, Any]:
            return self._trace(self.program.net(batch, self.variables))

        return step

    def specs(self) -> dict[str, Any]:
        """Return the specification of its argument."""
        style, specs = self.program.style, {}
        for name, one in self.net.inputs.items():
            shape = one.shape(style.batch, style.time)
            is_ragged = one.kind == "ragged"
            specs[name] = tf.RaggedTensorSpec([shape[0], None], one.dtype) if is_ragged else None
            specs[name] = specs[name] or tf.TensorSpec(shape, one.dtype, name=name)
        return specs

    def _trace(self, net: Net) -> dict[str, Any]:
        extras = self.program.extras
        scale = 64.0 if "loss_scale" in extras else 1.0
        step = net.stored("global_step", zero(tf.int64))
        with tf.GradientTape() as tape:
            loss = grow(net)
            scaled = loss * scale
        found = zip(tape.gradient(scaled, net.trained), net.trained, strict=True)
        pairs = [(g, w) for g, w in found if g is not None]
        slopes = _shaped(net, extras, [_divided(g, scale) for g, _ in pairs])
        pairs = [(g, w) for g, (_, w) in zip(slopes, pairs, strict=True)]
        self._update(net, pairs, step)
        outputs = {"loss": loss, **net.outputs}
        if "value_after" in extras:
            outputs["after"] = pairs[0][1].read_value()
        if "metric" in extras:
            total = net.stored("total", zero())
            total.assign_add(tf.reduce_sum(net.fed["x0"]))
            outputs["total"] = total.read_value()
        return outputs

    def _update(self, net: Net, pairs: list[tuple[Any, Any]], step: Any) -> None:
        program, extras = self.program, self.program.extras
        for variable, value in net.late:
            variable.assign(value)
        if "counter" in extras:
            net.stored("seen", zero()).assign_add(tf.cast(tf.shape(net.fed["x0"])[0], D))
        if "weight_decay" in extras:
            for _, w in pairs[:2]:
                w.assign_sub(0.05 * w)
        if program.optimizer in KERAS:
            self._apply(net, pairs)
        else:
            rate = 0.05 * 0.5 ** (tf.cast(step, D) / 3.0) if "schedule" in extras else tf.constant(0.05, D)
            by_hand(net, program.optimizer, pairs, rate)
        step.assign_add(1)
        if "average" in extras:
            for _, w in pairs[:3]:
                average = net.stored("average", 0.0 * net.numbers.normal(size=tuple(w.shape)))
                average.assign(0.9 * average + 0.1 * w)

    def _apply(self, net: Net, pairs: list[tuple[Any, Any]]) -> None:
        if self.optimizer is None:
            with tf.init_scope():
                self.optimizer = keras_optimizer(self.program.optimizer, net.dice)
                self.optimizer.build([w for _, w in pairs])
        self.optimizer.apply([g for g, _ in pairs], [w for _, w in pairs])

    def _all(self) -> list[Any]:
        return [*self.variables.values(), *(self.optimizer.variables if self.optimizer is not None else ())]

    def named(self) -> dict[str, Any]:
        """Return all variables by name; those of an optimizer that Keras numbers, or names alike, have numbers here."""
        slots = self._all()[len(self.variables) :]
        times = Counter(v.path for v in slots)  # Adafactor calls the factors of rows and of columns alike
        is_name = [("/" in v.path and times[v.path] == 1) for v in slots]
        names = [v.path if named else f"optimizer/{i}" for i, (v, named) in enumerate(zip(slots, is_name, strict=True))]
        return dict(zip([*self.variables, *names], self._all(), strict=True))

    def values(self) -> Results:
        """Return the values of all variables."""
        return {f"variable {name}": np.asarray(v) for name, v in self.named().items()}

    def tracked(self) -> Any:
        """Return what a checkpoint is made of, as docs/jobs.md writes it."""
        parts = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return tf.train.Checkpoint(**self.variables, **parts)


def _shaped(net: Net, extras: tuple[str, ...], slopes: list[Any]) -> list[Any]:
    if "clip_value" in extras:
        slopes = [g if isinstance(g, tf.IndexedSlices) else tf.clip_by_value(g, -0.3, 0.3) for g in slopes]
    if "clip_norm" in extras:
        slopes, _ = tf.clip_by_global_norm(slopes, 0.7)
    if "gradient_norm" in extras:
        net.outputs["gradient_norm"] = tf.linalg.global_norm(slopes)
    return list(slopes)


def _divided(gradient: Any, scale: float) -> Any:
    if scale == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / scale, gradient.indices, gradient.dense_shape)
    return gradient / scale


def run_original(step: Step, feeds: list[dict[str, Any]]) -> Results:
    """Train on one device."""
    return run(step, feeds, None, Stretch([[i] for i in range(len(feeds))]))


def run(step: Step, feeds: list[dict[str, Any]], config: dict[str, Any] | None, stretch: Stretch) -> Results:
    """Train on one device (no configuration), or distribute, and train on many."""
    program, inputs = step.program, step.net.inputs
    each = 1 if config is None else config.get("steps_per_run", 1)
    tf.random.set_seed(program.seed)  # a function takes its seeds when it is traced
    if config is None:
        function: Any = tf.function(step.function(), input_signature=[step.specs()], autograph=False)
    else:
        axes = {f"batch/{name}": one.axis for name, one in inputs.items()}
        named = program.style.batch is not None or any(axis == 1 for axis in axes.values()) or program.seed % 4 == 0
        given = {"batch_inputs": axes} if named or each > 1 else {}
        function = ar.distribute(step.function(), config, step.specs(), **given)
    step.restart()
    if stretch.source is not None:
        ar.CheckpointManager(step.tracked(), stretch.source, config=config).restore()
    results: Results = {}
    for chunk in stretch.chunks:
        steps = [feeds[i] for i in chunk]
        batch = {
            name: tf.constant(np.stack([feed[name] for feed in steps]))
            if each > 1 and one.axis is not None and one.kind != "ragged"
            else _tensor(steps[0][name])
            for name, one in inputs.items()
        }
        got = function(batch)
        results |= {f"step {chunk[-1]} {name}": np.asarray(value) for name, value in got.items()}
    if stretch.target is not None:
        with ar.CheckpointManager(step.tracked(), stretch.target, config=config) as manager:
            manager.save(stretch.chunks[-1][-1] + 1)
    return results | step.values()


def _tensor(value: Any) -> Any:
    return value if isinstance(value, tf.RaggedTensor) else tf.constant(value)


def trainer(step: Step) -> tuple[Results, Callable[[Results, dict[str, Any]], Results]]:
    """Return the first values of all variables, and what makes of values those after a step on one device."""
    function = tf.function(step.function(), input_signature=[step.specs()], autograph=False)
    step.restart()

    def train(values: Results, feed: dict[str, Any]) -> Results:
        for name, variable in step.named().items():
            variable.assign(values[f"variable {name}"])
        function({name: _tensor(value) for name, value in feed.items()})
        return step.values()

    return step.values(), train
