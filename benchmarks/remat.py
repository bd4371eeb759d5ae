"""Rematerialisation: peak activation bytes and step time, of a chain of 64 layers and of a transformer.

The peak is that of the runtime's allocation records in one traced step, beside the variables. `recompute_grad` is
TensorFlow's own: the user wraps each block, and the graph is run as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.child import call
from benchmarks.cost import allocated, traced
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import interleaved

TITLE = "rematerialisation: one CPU device, Session"
LAYERS = 24
PEAKS = 3
"""Steps of which the peak is taken: which ops overlap differs from one to the next."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "sqrt": {"remat": {"policy": "sqrt"}},
    "every:1": {"remat": {"policy": "every:1"}},
    "save_matmuls": {"remat": {"policy": "save_matmuls"}},
    "blocks": {"remat": {"policy": "scopes", "scopes": [r"block_\d+"]}},
}


@dataclass(frozen=True)
class Built:
    """A graph, as `benchmarks.cost.traced` takes it."""

    item: Any
    outputs: tuple[str, ...] = ("loss:0",)
    train_op: str = "train"
    init_op: str = "init"


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the numbers that they are made of."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for model, target in (("chain", 0.3), ("transformer", 1 / 3)):
        arguments = {"model": model, "tiny": effort.tiny, "rounds": effort.rounds(15), "seconds": effort.seconds(0.2)}
        details[model] = found = call("benchmarks.remat:measure", arguments, timeout=900)
        before = found["none"]
        for way, one in found.items():
            if way == "none":
                continue
            figures.append(
                Figure(
                    f"{model}: peak bytes, {way} / none",
                    one["peak"] / before["peak"],
                    at_most=target if way == "sqrt" else None,
                    how=f"{one['peak'] / 2**20:,.1f} MiB / {before['peak'] / 2**20:,.1f} MiB; step "
                    f"{milliseconds(one['seconds'])} / {milliseconds(before['seconds'])}",
                )
            )
        figures += beside(model, found)
    return figures, details


def beside(model: str, found: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """Return how sqrt does beside TensorFlow's own, and how far predicted peaks are from measured ones."""
    figures = []
    if "recompute_grad" in found:
        for what in ("peak", "seconds"):
            ratio = found["sqrt"][what] / found["recompute_grad"][what]
            figures.append(Figure(f"{model}: {what}, sqrt / recompute_grad", ratio, at_most=1.0))
    errors = {way: abs(one["predicted"] / one["peak"] - 1) for way, one in found.items() if "predicted" in one}
    worst = max(errors, key=lambda way: errors[way])
    how = (
        f"{worst}: {found[worst]['predicted'] / 2**20:,.1f} MiB predicted, {found[worst]['peak'] / 2**20:,.1f} measured"
    )
    return [*figures, Figure(f"{model}: predicted peak, worst error", errors[worst], at_most=0.1, how=how)]


def measure(model: str, tiny: bool, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Train one model in every way; return peaks and step times by way (in a child)."""
    import tensorflow as tf

    import autograph_rewrite as ar
    from autograph_rewrite.cost.hardware.machine import Machine

    build, feeds = MODELS[model](tiny)
    graphs = {"recompute_grad": _item(tf, lambda: build(tf.recompute_grad))} if model == "transformer" else {}
    plain = _item(tf, lambda: build(lambda block: block))
    graphs |= dict.fromkeys(WAYS, plain)
    found: dict[str, dict[str, float]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for way, item in graphs.items():
        if model == "chain" and way in ("save_matmuls", "blocks"):
            continue
        new = ar.rewrite(item, {"devices": ["CPU:0"], **WAYS.get(way, {})})
        built = Built(item)
        session = new.session()
        session.run("init")
        steps[way] = lambda session=session: session.run(["loss", "train"], feeds)  # type: ignore[misc]
        steps[way]()
        found[way] = {"peak": median(allocated(stats, new) for stats in traced(new, built, feeds, PEAKS))}
        if way in WAYS:  # beside variables and what is fed, of which the step has no record
            examples = next(iter(feeds.values())).shape[0]
            machine = replace(Machine(), cores=os.cpu_count() or 1)
            step = ar.simulate(item, new.report.plan, batch=examples, machine=machine).devices[0]
            fed = sum(value.nbytes for value in feeds.values())
            found[way]["predicted"] = step.peak_bytes - step.variable_bytes - fed
    times = interleaved(steps, rounds=rounds, seconds=seconds, warm_up=2)
    for way, one in found.items():
        one["seconds"] = median(times["wall"][way])
    return {"none": found["none"], **found}


def _item(tf: Any, build: Callable[[], Any]) -> Any:
    import autograph_rewrite as ar

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        loss = tf.identity(build(), name="loss")
        trained = v1.trainable_variables()
        slopes = v1.gradients(loss, trained)
        tf.group([w.assign_sub(0.01 * g) for w, g in zip(trained, slopes, strict=True)], name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init", batch_inputs={"x": 0})


def _variable(tf: Any, name: str, *shape: int) -> Any:
    scale = 1 / np.sqrt(shape[0])
    value = np.random.default_rng(len(name) + sum(shape)).normal(size=shape, scale=scale).astype(np.float32)
    return tf.compat.v1.get_variable(name, initializer=value, use_resource=True)


def _chain(tiny: bool) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """Return 64 layers of equal size: a product and a hyperbolic tangent each."""
    import tensorflow as tf

    layers, batch, width = (6, 16, 8) if tiny else (64, 4096, 64)

    def build(_: Any) -> Any:
        x = h = tf.compat.v1.placeholder(tf.float32, [None, width], name="x")
        for i in range(layers):
            with tf.name_scope(f"block_{i}"):
                h = tf.tanh(h @ _variable(tf, f"w{i}", width, width))
        return tf.reduce_mean((h - x) ** 2)

    return build, {"x:0": np.random.default_rng(0).normal(size=(batch, width)).astype(np.float32)}


def _transformer(tiny: bool, batch: int = 4) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """Return 24 blocks of attention and two dense layers, each behind a layer normalisation."""
    import tensorflow as tf

    layers, time, width, heads = (2, 4, 8, 2) if tiny else (LAYERS, 64, 64, 4)

    def norm(h: Any) -> Any:
        mean = tf.reduce_mean(h, -1, keepdims=True)
        return (h - mean) * tf.math.rsqrt(tf.reduce_mean((h - mean) ** 2, -1, keepdims=True) + 1e-3)

    def block(h: Any, qkv: Any, out: Any, up: Any, down: Any) -> Any:
        q, k, v = tf.unstack(tf.einsum("btd,dchk->cbhtk", norm(h), qkv))
        attention = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.float32(np.sqrt(width // heads)))
        mixed = tf.transpose(tf.matmul(attention, v), [0, 2, 1, 3])
        h = h + tf.reshape(mixed, [-1, time, width]) @ out
        return h + tf.nn.gelu(norm(h) @ up) @ down

    def build(wrap: Any) -> Any:
        x = h = tf.compat.v1.placeholder(tf.float32, [batch, time, width], name="x")
        for i in range(layers):
            weights = [
                _variable(tf, f"qkv{i}", width, 3, heads, width // heads),
                _variable(tf, f"out{i}", width, width),
                _variable(tf, f"up{i}", width, 4 * width),
                _variable(tf, f"down{i}", 4 * width, width),
            ]
            with tf.name_scope(f"block_{i}"):
                h = wrap(block)(h, *[tf.identity(one) for one in weights])
        return tf.reduce_mean((h - x) ** 2)

    return build, {"x:0": np.random.default_rng(0).normal(size=(batch, time, width)).astype(np.float32)}


MODELS = {"chain": _chain, "transformer": _transformer}
