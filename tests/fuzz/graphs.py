"""Programs as v1 graphs: gradients, what is around the optimizer by control edges, and a Session for two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.runtime.engine.session import open_session
from tests.fuzz.net import D, Net
from tests.fuzz.optimizers import GRAPH, by_hand
from tests.fuzz.program import Program, Stretch, grow, zero

v1 = tf.compat.v1
Results = dict[str, Any]
RUN_MS = 40000


@contextmanager
def _written_as(program: Program) -> Iterator[None]:
    """Use the control flow and variables that a program is written with."""
    had_version, had_resources = v1.control_flow_v2_enabled(), v1.resource_variables_enabled()
    (v1.enable_control_flow_v2 if program.style.version == 2 else v1.disable_control_flow_v2)()
    (v1.disable_resource_variables if program.style.reference else v1.enable_resource_variables)()
    try:
        yield
    finally:
        (v1.enable_control_flow_v2 if had_version else v1.disable_control_flow_v2)()
        (v1.enable_resource_variables if had_resources else v1.disable_resource_variables)()


@dataclass(frozen=True)
class Built:
    """A training graph.

    Attributes:
        graph: it.
        net: the network in it.
        fetches: names of what a step returns.
    """

    graph: Any
    net: Net
    fetches: tuple[str, ...]


def build(program: Program) -> Built:
    """Build the graph of a program."""
    graph = tf.Graph()
    with graph.as_default(), _written_as(program):
        v1.set_random_seed(program.seed)
        net = program.net()
        loss = tf.identity(grow(net), name="loss")
        train, fetches = _train(program, net, loss)
        tf.group(train, name="train")
        # Named, as what initialises the global ones alone would be the first to be called "init".
        v1.variables_initializer([*v1.global_variables(), *v1.local_variables()], name="init")
    return Built(graph, net, fetches)


def _train(program: Program, net: Net, loss: Any) -> tuple[Any, tuple[str, ...]]:
    """Add the training step; return its last op and what is fetched."""
    extras, trained = program.extras, net.trained
    step = net.stored("global_step", zero(tf.int64))
    scale = 64.0 if "loss_scale" in extras else 1.0
    optimizer = GRAPH[program.optimizer](_rate(program, step)) if program.optimizer in GRAPH else None
    slopes = tf.gradients(loss * scale, trained, gate_gradients=True)
    pairs = [(g, w) for g, w in zip(slopes, trained, strict=True) if g is not None]
    slopes = _shaped(net, extras, [_divided(g, scale) for g, _ in pairs])
    pairs = [(g, w) for g, (_, w) in zip(slopes, pairs, strict=True)]
    fetched = {name: tf.identity(value, name=f"out_{name}") for name, value in net.outputs.items()}
    ready = [loss, *fetched.values(), *(_values(g) for g, _ in pairs), *net.updates]
    with tf.control_dependencies(ready):
        late = [v1.assign(variable, value) for variable, value in net.late]
        if "counter" in extras:
            seen = net.stored("seen", zero())
            late.append(v1.assign_add(seen, tf.cast(tf.shape(net.fed["x0"])[0], D)))
        if "weight_decay" in extras:
            late += [v1.assign_sub(w, 0.05 * w) for _, w in pairs[:2]]
    with tf.control_dependencies([*ready, *late]):
        apply = _apply(program, net, optimizer, pairs, step)
    return _behind(extras, net, apply, pairs), ("loss", *(t.op.name for t in fetched.values()), *_after(net))


def _apply(program: Program, net: Net, optimizer: Any, pairs: list[tuple[Any, Any]], step: Any) -> Any:
    def updates() -> Any:
        if optimizer is not None:
            return optimizer.apply_gradients(pairs, global_step=step)
        done = by_hand(net, program.optimizer, pairs, _rate(program, step))
        with tf.control_dependencies(done):
            return tf.group(v1.assign_add(step, 1))

    if "skip_step" not in program.extras or program.optimizer not in GRAPH:
        return updates()
    # Slots are made outside of the branch, as a v1 program has to.
    optimizer._create_slots([w for _, w in pairs])
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(g))) for g, _ in pairs])
    return tf.cond(finite, updates, tf.no_op)


def _rate(program: Program, step: Any) -> Any:
    if "schedule" not in program.extras:
        return 0.05
    return tf.cast(v1.train.exponential_decay(tf.constant(0.05, D), step, 3, 0.5), D)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _divided(gradient: Any, scale: float) -> Any:
    if scale == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / scale, gradient.indices, gradient.dense_shape)
    return gradient / scale


def _shaped(net: Net, extras: tuple[str, ...], slopes: list[Any]) -> list[Any]:
    """Clip gradients, and tell how long they are."""
    if "clip_value" in extras:
        slopes = [g if isinstance(g, tf.IndexedSlices) else tf.clip_by_value(g, -0.3, 0.3) for g in slopes]
    if "clip_norm" in extras:
        slopes, _ = tf.clip_by_global_norm(slopes, 0.7)
    if "gradient_norm" in extras:
        net.outputs["gradient_norm"] = tf.linalg.global_norm(slopes)
    return list(slopes)


def _behind(extras: tuple[str, ...], net: Net, apply: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Add what is ordered behind the update; return the last op."""
    last = [apply]
    if "average" in extras:
        average = v1.train.ExponentialMovingAverage(0.9)
        with tf.control_dependencies(last):
            last.append(average.apply([w for _, w in pairs[:3]]))
    if "metric" in extras:
        name = next((name for name in ("each", "row_norm", "mean") if name in net.outputs), None)
        if name is not None:
            last.append(v1.metrics.mean(net.outputs[name])[1])
    if "value_after" in extras:
        with tf.control_dependencies(last):
            read = pairs[0][1].read_value() if not net.style.reference else pairs[0][1] + 0.0
            last.append(tf.identity(read, name="out_after"))
    return last


def _after(net: Net) -> tuple[str, ...]:
    found = {op.name for op in v1.get_default_graph().get_operations() if op.name == "out_after"}
    return tuple(found)


def run_original(built: Built, feeds: list[dict[str, Any]], *, optimised: bool) -> Results:
    """Train on one device."""
    graph = built.graph
    with graph.as_default():
        variables = {v.op.name: v for v in [*v1.global_variables(), *v1.local_variables()]}
    with v1.Session(graph=graph, config=settings(optimised)) as session:
        session.run("init")
        results: Results = {}
        for i, feed in enumerate(feeds):
            got = session.run([*(f"{name}:0" for name in built.fetches), "train"], _named(feed))
            results |= {f"step {i} {name}": value for name, value in zip(built.fetches, got, strict=False)}
        values = session.run(
            {name: v.value() if built.net.style.reference else _read(v) for name, v in variables.items()}
        )
        return results | {f"variable {name}": value for name, value in values.items()}


def _read(variable: Any) -> Any:
    return f"{variable.op.name}/Read/ReadVariableOp:0"


def item_of(program: Program, built: Built) -> Any:
    """Return the item of a graph."""
    net = built.net
    axes = {name: one.axis for name, one in net.inputs.items()}
    named = net.style.batch is not None or any(axis == 1 for axis in axes.values()) or program.seed % 4 == 0
    named = named or program.choice.steps_per_run > 1
    given = {"batch_inputs": axes} if named else {}
    return ar.GraphItem.from_graph(built.graph, train_op="train", outputs=list(built.fetches), init_op="init", **given)


def run_rewritten(
    program: Program,
    built: Built,
    feeds: list[dict[str, Any]],
    config: dict[str, Any] | None,
    stretch: Stretch,
    *,
    optimised: bool,
) -> Results:
    """Rewrite, and train on many devices; without a configuration on one, in a session that takes checkpoints."""
    item = item_of(program, built)
    new = item if config is None else ar.rewrite(item, config)
    each = 1 if config is None else config.get("steps_per_run", 1)
    axes = {name: one.axis for name, one in built.net.inputs.items()}
    results: Results = {}
    with open_session(new, config=settings(optimised)) as session:
        session.run(new.init_op)
        if stretch.source is not None:
            ar.CheckpointManager(session, stretch.source, config=config).restore()
        for chunk in stretch.chunks:
            feed = feeds[chunk[0]]
            if each > 1:
                rows = {n: np.stack([feeds[i][n] for i in chunk]) for n, axis in axes.items() if axis is not None}
                feed = {**feed, **rows}
            got = session.run([*built.fetches, "train"], _named(feed), timeout_ms=RUN_MS)
            results |= {f"step {chunk[-1]} {name}": value for name, value in zip(built.fetches, got, strict=False)}
        if stretch.target is not None:
            with ar.CheckpointManager(session, stretch.target, config=config) as manager:
                manager.save(stretch.chunks[-1][-1] + 1)
        results |= {f"variable {name}": value for name, value in session.read_variables(item.variables).items()}
    return results


def trainer(built: Built) -> tuple[Results, Callable[[Results, dict[str, Any]], Results]]:
    """Return the first values of all variables, and what makes of values those after a step on one device."""
    with built.graph.as_default():
        variables = {f"variable {v.op.name}": v for v in [*v1.global_variables(), *v1.local_variables()]}
    session = v1.Session(graph=built.graph, config=settings(optimised=False))
    session.run("init")
    reads = {n: v.value() if built.net.style.reference else _read(v) for n, v in variables.items()}

    def train(values: Results, feed: dict[str, Any]) -> Results:
        for name, variable in variables.items():
            session.run(variable.initializer, {variable.initializer.inputs[1]: values[name]})
        session.run("train", _named(feed))
        return session.run(reads)

    return session.run(reads), train


def settings(optimised: bool) -> Any:
    """Return the configuration of a session, with or without Grappler, which takes long."""
    config = v1.ConfigProto(inter_op_parallelism_threads=4, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimised
    return config


def _named(feed: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}:0": value for name, value in feed.items()}
