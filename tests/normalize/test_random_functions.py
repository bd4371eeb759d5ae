"""Random training functions, with nested loops, branches, calls, updates and gradients, keep their meaning."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.normal_form import assert_same_calls

X = np.array([0.1, 0.2, 0.9])
VALUES = (
    "tf.sin(a) * v", "a * w + b", "tf.tanh(b) - a", "tf.cos(a + b)", "a * 0.5", "b", "tf.reduce_mean(a) + b",
    "tf.ones_like(a) * w.read_value()", "x * 0.1",
)  # fmt: skip
CONDITIONS = ("tf.reduce_sum(a) > 0.3", "v > 2.0", "c % 2 == 0", "tf.reduce_sum(x) > w")
UPDATES = (
    "v.assign(tf.tanh(v + 0.1 * tf.reduce_mean(a)) + 1.0)", "v.assign(tf.tanh(v + 0.1 * tf.reduce_mean(b)) + 1.0)",
    "w.assign_add(0.125)", "w.assign_add(0.01 * tf.reduce_sum(a))", "w.assign_add(v * 0.01)",
)  # fmt: skip


def block(chance: random.Random, depth: int, indent: int, calls: bool) -> list[str]:
    """Return source lines that change a, b and c, and update v and w."""
    lines: list[str] = []
    pad = "    " * indent
    for _ in range(chance.randint(1, 3)):
        kind = chance.random()
        if depth and kind < 0.22:
            lines += [f"{pad}if {chance.choice(CONDITIONS)}:", *block(chance, depth - 1, indent + 1, calls)]
            if chance.random() < 0.6:
                lines += [f"{pad}else:", *block(chance, depth - 1, indent + 1, calls)]
        elif depth and kind < 0.42:
            lines += [f"{pad}for i in tf.range({chance.randint(1, 3)}):", f"{pad}    c = c + i"]
            lines += block(chance, depth - 1, indent + 1, calls)
        elif kind < 0.62:
            lines.append(pad + chance.choice(UPDATES))
        elif calls and kind < 0.75:
            lines.append(f"{pad}a, b = f{chance.randint(0, 1)}({chance.choice(('a, b', 'x, a', 'b, x'))})")
        else:
            lines.append(f"{pad}{chance.choice('ab')} = {chance.choice(VALUES)}")
    return lines


def program(seed: int) -> str:
    """Return the source of two helper functions and a `step`, which half of the time returns a gradient."""
    chance = random.Random(seed)
    lines = ["import tensorflow as tf"]
    for name in ("f0", "f1"):
        lines += ["@tf.function", f"def {name}(a, b):", "    x, c = a, tf.constant(1)"]
        lines += [*block(chance, 1, 1, calls=False), "    return a, b"]
    lines += ["def step(x):", "    a, b, c = x, x * 0.5, tf.constant(0)"]
    if chance.random() < 0.5:
        return "\n".join([*lines, *block(chance, 3, 1, calls=True), "    return a, b, c"])
    lines += ["    with tf.GradientTape() as tape:", "        tape.watch(x)", "        a = x * 1.0"]
    lines += [*block(chance, 3, 2, calls=True), "        loss = tf.reduce_sum(a) + tf.reduce_sum(b)"]
    return "\n".join([*lines, "    return a, b, c, tape.gradient(loss, x, unconnected_gradients='zero')"])


def check(seed: int, directory: Path) -> None:
    path = directory / f"program_{seed}.py"  # AutoGraph reads the source
    path.write_text(program(seed))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    module.v, module.w = tf.Variable(1.5, dtype=tf.float64), tf.Variable(0.5, dtype=tf.float64)
    spec.loader.exec_module(module)
    assert_same_calls(module.step, X, steps=2)


@pytest.mark.parametrize("seed", range(10))
def test_a_random_function_computes_and_updates_the_same_in_normal_form(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10, 150))
def test_many_random_functions_compute_and_update_the_same_in_normal_form(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
