"""Step time in graph mode: the rewritten graph in a Session against the original one, on the same total batch.

Two replicas on two virtual CPU devices, which share the cores that one device has too: nothing can be gained but by
using them better, and what the rewrite adds shows as a ratio above one. Mirrored variables are updated on every
device, so a mirrored step may cost one more update: that share of the step is measured by itself.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import Times, compare, interleaved, ratio, spread

TITLE = "step time, Session: 2 virtual CPU devices against one, same total batch"
MODELS = {"mlp": ("large", 256), "cnn": ("large", 16), "transformer": ("small", 64)}
"""Zoo entry -> size and total batch."""


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for model in effort.some(list(MODELS)):
        size, batch = MODELS[model]
        arguments = {
            "model": model,
            "size": "tiny" if effort.tiny else size,
            "batch": 4 if effort.tiny else batch,
            "rounds": effort.rounds(11),
            "seconds": effort.seconds(0.4),
        }
        times: Times = call("benchmarks.session_step:measure", arguments, timeout=150)
        figures += step_figures(model, times)
        details[model] = times
    return figures, details


def step_figures(model: str, times: Times) -> list[Figure]:
    """Return what is asked of the steps "shared" and "mirrored", given those of "single" and "update"."""
    wall = times["wall"]
    single = wall["single"]
    share = ratio(wall["update"], single)
    faster = min(("shared", "mirrored"), key=lambda name: ratio(wall[name], single))
    shown = ", ".join(f"{name} {milliseconds(median(wall[name]))}" for name in ("single", "shared", "mirrored"))
    return [
        Figure(
            f"{model}: better of the two / single device",
            ratio(wall[faster], single),
            at_most=1.0,
            how=f"{faster}; medians of {len(single)} rounds: {shown}; spread {spread(single):.0%}",
        ),
        Figure(
            f"{model}: shared / single device",
            ratio(wall["shared"], single),
            how=compare(times, "shared", "single"),
        ),
        Figure(
            f"{model}: mirrored / single device",
            ratio(wall["mirrored"], single),
            at_most=1.1 + share,
            how=f"{compare(times, 'mirrored', 'single')}; "
            f"the update, done on each device, is {share:.0%} of the single-device step",
        ),
    ]


def measure(model: str, size: str, batch: int, rounds: int, seconds: float) -> Times:
    """Time the step of a zoo graph, distributed and not (in a child)."""
    import tensorflow as tf

    import autograph_rewrite as ar
    from tests.zoo import ZOO

    v1 = tf.compat.v1
    built = ZOO[model].build(size=size, optimizer="adam", dtype="float32")
    feeds = built.feeds(0, batch)
    single = v1.Session(graph=built.graph)
    single.run(built.init_op)
    contestants = {"single": lambda: single.run([built.loss, built.train_op], feeds)}
    item = ar.GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs),
    )
    for variables in ("shared", "mirrored"):
        config = {
            "devices": ["CPU:0", "CPU:1"],
            "strategy": {"name": "AllReduce", "variables": variables},
        }
        session = ar.rewrite(item, config).session()
        session.run(built.init_op)
        contestants[variables] = _step(session, [built.loss, built.train_op], feeds)
    contestants["update"] = _update(built, single.run(_gradients(built), feeds))
    return interleaved(contestants, rounds=rounds, seconds=seconds, warm_up=2)


def _step(session: Any, fetches: list[str], feeds: dict[str, Any]) -> Any:
    return lambda: session.run(fetches, feeds)


def _gradients(built: Any) -> dict[str, list[Any]]:
    """Return the gradient tensors by variable: one, or values and indices."""
    return {name: [built.graph.get_tensor_by_name(g) for g in found] for name, found in built.gradients.items()}


def _update(built: Any, gradients: dict[str, list[Any]]) -> Any:
    """Return a step that only applies given gradients, which stand in variables of a graph of their own."""
    import numpy as np
    import tensorflow as tf

    from tests.zoo.optimizers import GRAPH_OPTIMIZERS

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        pairs, feeds = [], {}
        shapes = {v.op.name: v.shape.as_list() for v in built.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)}

        def held(value: Any, *, trainable: bool) -> Any:
            value = np.asarray(value)
            source = v1.placeholder(value.dtype, value.shape)
            feeds[source] = value
            return v1.Variable(source, trainable=trainable, use_resource=True)

        for name, found in gradients.items():
            weight = held(np.zeros(shapes[name], np.float32), trainable=True)
            parts = [held(part, trainable=False).read_value() for part in found]
            pairs.append((tf.IndexedSlices(*parts, weight.shape) if len(parts) == 2 else parts[0], weight))
        train = GRAPH_OPTIMIZERS["adam"]().apply_gradients(pairs)
        init = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(init, feeds)
    return lambda: session.run(train)
