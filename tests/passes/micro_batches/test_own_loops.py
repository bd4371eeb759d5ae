"""Loops over time: each micro-batch has one for itself, unless the micro-batches share something in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.analysis.barriers import barrier_depths
from autograph_rewrite.compile import request
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError, VerifyError
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import ONCE, PerInstance
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.reshard import insert_reshards
from tests.support.training import make_item, placeholder, train, variable

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
TIME, WIDTH = 4, 3
X = RNG.normal(size=(13, TIME, WIDTH))
FEEDS = [{"x": X[:6]}, {"x": X}]
Loop = Callable[[Any, Any, Any], Any]


def cell(x: Any, h: Any, w: Any) -> Any:
    return tf.tanh(x @ w + h)


def counted(x: Any, h: Any, w: Any) -> Any:
    """Return the state of a recurrent layer after the last step."""
    return tf.while_loop(lambda t, _: t < TIME, lambda t, h: (t + 1, cell(x[:, t], h, w)), (0, h))[1]


def within_a_loop(x: Any, h: Any, w: Any) -> Any:
    def twice(t: Any, h: Any) -> Any:
        return t + 1, tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, cell(x[:, t], h, w)), (0, h))[1]

    return tf.while_loop(lambda t, _: t < TIME, twice, (0, h))[1]


def with_a_branch(x: Any, h: Any, w: Any) -> Any:
    """The gradient of the branch takes what it needs out of optional values, which hold whole ones."""

    def step(t: Any, h: Any) -> Any:
        return t + 1, tf.cond(t % 2 > 0, lambda: cell(x[:, t], h, w), lambda: 2 * h)

    return tf.while_loop(lambda t, _: t < TIME, step, (0, h))[1]


def decided_by_real_numbers(x: Any, h: Any, w: Any) -> Any:
    return tf.while_loop(lambda t, _: t < TIME - 0.5, lambda t, h: (t + 1, cell(x[:, 0], h, w)), (0.0, h))[1]


def meeting(x: Any, h: Any, w: Any) -> Any:
    """The mean of the whole batch is taken in each step."""

    def step(t: Any, h: Any) -> Any:
        return t + 1, cell(x[:, t], h - tf.reduce_mean(h, 0), w)

    return tf.while_loop(lambda t, _: t < TIME, step, (0, h))[1]


OWN: dict[str, Loop] = {one.__name__: one for one in (counted, within_a_loop)}
SHARED: dict[str, Loop] = {one.__name__: one for one in (decided_by_real_numbers, meeting, with_a_branch)}
FORMS: dict[str, dict[str, Any]] = {
    "copies": {"devices": ["CPU:0"], "microbatches": 3},
    "copies, 2 replicas": {"devices": ["CPU:0", "CPU:1"], "microbatches": 3},
    "copies, mirrored": {
        "devices": ["CPU:0", "CPU:1"], "microbatches": 2, "strategy": {"name": "AllReduce", "variables": "mirrored"},
    },
    "a loop": {"devices": ["CPU:0"], "microbatches": 3, "accumulation": {"form": "loop"}},
    "a loop, 2 replicas": {"devices": ["CPU:0", "CPU:1"], "microbatches": 3, "accumulation": {"form": "loop"}},
    "gpipe": {"devices": ["CPU:0", "CPU:1"], "pipeline": {"stages": 2, "microbatches": 3, "boundaries": ["h0"]}},
    "1f1b, 2 replicas": {
        "devices": [f"CPU:{i}" for i in range(4)],
        "pipeline": {"stages": 2, "microbatches": 3, "schedule": "1f1b", "boundaries": ["h0"]},
    },
    "a loop of stages": {
        "devices": ["CPU:0", "CPU:1"],
        "pipeline": {"stages": 2, "microbatches": 3, "form": "loop", "boundaries": ["h0"]},
    },
}  # fmt: skip


def item(loop: Loop, version: int = 2) -> ar.GraphItem:
    """Return two recurrent layers that are trained together, with loops of one of TensorFlow's versions."""

    def model() -> dict[str, Any]:
        x = placeholder("x", None, TIME, WIDTH)
        rng = np.random.default_rng(1)
        h = tf.zeros_like(x[:, 0])
        for i in range(2):
            h = tf.identity(loop(x, h, variable(f"w{i}", rng.normal(size=(WIDTH, WIDTH)))), name=f"h{i}")
        return {"loss": tf.reduce_mean(h**2)}

    return make_item(model, version=version)


def worst(one: ar.GraphItem, new: Any) -> float:
    alone, together = train(one, FEEDS), train(new, FEEDS)
    pairs = [(together.variables[name], value) for name, value in alone.variables.items()]
    pairs += [(b["loss"], a["loss"]) for a, b in zip(alone.fetched, together.fetched, strict=True)]
    return max(float(np.abs(found - value).max()) for found, value in pairs)


def copies_of_loops(new: Any) -> set[int]:
    """Return how many copies there are of the loops, by the names of their frames; those of this package left out."""
    names = {node.attr("frame_name").decode() for node in new.graph if node.op == "Enter"}
    own = [name for name in names if "autograph" not in name]
    copies = Counter(re.sub(r"/\d+$", "", name) for name in own)
    return set(copies.values())


UNROLLED = [form for form in FORMS if "loop" not in form]


@pytest.mark.parametrize(
    ("loop", "version", "form"),
    [
        *(("counted", 2, form) for form in FORMS),
        *(("counted", 1, form) for form in UNROLLED),
        *(("within_a_loop", 2, form) for form in UNROLLED),
    ],
)
def test_each_micro_batch_has_the_loop_for_itself_and_trains_as_on_one_device(
    loop: str, version: int, form: str
) -> None:
    one = item(OWN[loop], version)
    new = ar.rewrite(one, FORMS[form])
    replicas, micro = new.report.plan.replicas, new.report.plan.microbatches
    assert copies_of_loops(new) == {replicas if new.report.plan.looped else replicas * micro}
    assert not any("all micro-batches meet" in note.text for note in new.report.notes)
    assert worst(one, new) < 1e-12


@pytest.mark.parametrize("loop", SHARED)
def test_micro_batches_that_share_something_in_a_loop_meet_in_it(loop: str) -> None:
    one = item(SHARED[loop])
    new = ar.rewrite(one, FORMS["copies, 2 replicas"])
    assert 1 in copies_of_loops(new)
    assert any("all micro-batches meet" in note.text for note in new.report.notes)
    assert worst(one, new) < 1e-12
    for form in ("gpipe", "a loop", "a loop of stages"):
        with pytest.raises(RewriteError):
            ar.rewrite(one, FORMS[form])


def test_a_loop_of_micro_batches_with_a_loop_within_goes_with_a_model_axis() -> None:
    """In a step that begins the inner loop once too often, the second device waits for ever."""

    def model() -> dict[str, Any]:
        x, rng = placeholder("x", None, TIME, WIDTH), np.random.default_rng(1)
        h = counted(x, tf.zeros_like(x[:, 0]), variable("w", rng.normal(size=(WIDTH, WIDTH))))
        return {"loss": tf.reduce_mean((h @ variable("head", rng.normal(size=(WIDTH, 4)))) ** 2)}

    sharding = [{"match": "head", "split": [1, 2]}]
    on_mesh = {"mesh": {"data": 1, "model": 2}, "sharding": sharding, "timeout_seconds": 30}
    one = make_item(model)
    assert worst(one, ar.rewrite(one, {**FORMS["a loop, 2 replicas"], **on_mesh})) < 1e-12


@pytest.mark.parametrize("form", ["a loop", "a loop of stages"])
def test_what_differs_between_micro_batches_within_a_loop_is_in_no_loop_of_theirs(form: str) -> None:
    with pytest.raises(RewriteError, match="is in a branch or a loop"):
        ar.rewrite(item(within_a_loop), FORMS[form])


def after_a_meeting(x: Any, h: Any, w: Any) -> Any:
    """Begin a loop of each micro-batch behind one that all share; its number of steps does not depend on that."""
    return counted(x, meeting(x, h, w), w)


def test_all_of_a_loop_waits_for_as_many_meetings() -> None:
    """A counter that ran ahead of them would wait for its own iterations, and hold up those who have to meet."""
    found: dict[tuple[str, str], set[int]] = {}

    def look(done: str, graph: Graph) -> None:
        order = topological_order(graph)
        depths = barrier_depths(order, ())
        for node, frame in frames_of(order).items():
            found.setdefault((done, frame[0]), set()).add(depths[node])

    one = normalise_original(item(after_a_meeting))
    given = Config.of(FORMS["copies"])
    pass_pipeline.rewrite(Request(one, request(one, given)), observers=[look])
    assert {len(depths) for depths in found.values()} == {1}
    assert worst(item(after_a_meeting), ar.rewrite(item(after_a_meeting), FORMS["copies, 2 replicas"])) < 1e-12


def test_two_instances_of_a_loop_under_one_name_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Rewrite.frame_name

    def shared(self: Rewrite, frame: Any, depth: int = -1) -> Any:
        name = own(self, frame, depth)
        return PerInstance((name.raws[0], *name.raws[:-1])) if isinstance(name, PerInstance) else name

    monkeypatch.setattr(Rewrite, "frame_name", shared)
    with pytest.raises(VerifyError, match="frame_name"):
        ar.verify(item(counted), FORMS["copies"], steps=1, batch=6)


def test_what_runs_once_in_a_loop_of_each_micro_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = insert_reshards.assign_spans

    def once(rewrite: Rewrite) -> None:
        own(rewrite)
        next(node for node in rewrite.graph if node.op == "Less").set_span(ONCE)

    monkeypatch.setattr(insert_reshards, "assign_spans", once)
    with pytest.raises(RewriteError, match="of each instance"):
        ar.verify(item(counted), FORMS["copies"], steps=1, batch=6)


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN"])
def test_recurrent_layers_of_keras_fit_in_stages_as_on_one_device(layer: str) -> None:
    def model() -> Any:
        tf.keras.utils.set_random_seed(0)
        x = h = tf.keras.Input((TIME, WIDTH), dtype="float64")
        for i in range(2):
            h = getattr(tf.keras.layers, layer)(4, return_sequences=True, name=f"layer_{i}", dtype="float64")(h)
        made = tf.keras.Model(x, tf.keras.layers.Dense(1, name="head", dtype="float64")(h))
        made.compile(tf.keras.optimizers.SGD(0.1), "mse")
        return made

    y = RNG.normal(size=(12, TIME, 1))
    config = {"devices": ["CPU:0", "CPU:1"], "pipeline": {"stages": 2, "microbatches": 2, "schedule": "1f1b"}}
    one, new = model(), ar.distribute(model(), config)
    losses = [
        each.fit(X[:12], y, batch_size=6, epochs=2, verbose=0, shuffle=False).history["loss"] for each in (one, new)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)  # which Keras keeps as float32
    for mine, other in zip(one.get_weights(), new.get_weights(), strict=True):
        np.testing.assert_allclose(other, mine, rtol=1e-10, atol=1e-14)
