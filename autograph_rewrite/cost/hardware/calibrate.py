"""`calibrate`: measure this machine's CPU with a short profile of TensorFlow's kernels (about three seconds).

For each family of ops one large op is timed in a chain, in which each op waits for the one before. A chain of an op on
a few numbers gives the time of starting an op.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autograph_rewrite import requires
from autograph_rewrite.cost.hardware.machine import CORE, SERIAL, Machine

Op = Callable[[Any, Any], Any]
"""An op of a chain: it takes the result of the one before, and a value of the same shape that never changes."""
CHAIN = 8
QUICKEST = 1e-6
"""The least seconds of starting an op; a chain measures less, because TensorFlow runs all of it in one thread."""
SECONDS = 0.04
"""How long each chain is repeated."""


def calibrate(machine: Machine | None = None) -> Machine:
    """Return a machine with measured figures for the CPU of this process; all others stay the same.

    Args:
        machine: gives all other figures; default: round figures.
    """
    tf = requires.tensorflow()
    machine = machine or Machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    run, op_seconds = _call(tf, _multiply, (8,), 1), _small(tf, _multiply, (8,))
    rates = {}
    for family, (make, shape, flops) in _families(tf).items():
        rates[family] = flops / _large(tf, make, shape) / (1 if family in SERIAL else cores)
    streamed = 1 << 22
    core = replace(
        CORE,
        flops=MappingProxyType({**CORE.flops, **rates}),
        bytes_per_second=2 * 4 * streamed / _large(tf, _multiply, (streamed,)) / cores,
        op_seconds=op_seconds,
    )
    return replace(machine, core=core, cores=cores, run_seconds=run)


def _multiply(x: Any, y: Any) -> Any:
    return x * y  # y is no constant, because TensorFlow would fold a chain of constants


def _families(tf: Any) -> Mapping[str, tuple[Op, tuple[int, ...], float]]:
    """Return, by family, an op that keeps its input's shape, that shape, and its FLOPs."""
    weight = tf.constant(0.01, shape=(512, 512))
    kernel = tf.constant(0.01, shape=(3, 3, 32, 32))
    rows = tf.range(4096)[::-1]
    many = 1 << 18  # a mebibyte: it stays in the caches
    noise = tf.random.stateless_uniform((many,), (1, 2))
    return {
        "matmul": (lambda x, _: tf.matmul(x, weight), (512, 512), 2 * 512.0**3),
        "conv": (lambda x, _: tf.nn.conv2d(x, kernel, 1, "SAME"), (16, 32, 32, 32), 2 * 16 * 32**2 * 9 * 32.0**2),
        "elementwise": (_multiply, (many,), float(many)),
        "transcendental": (lambda x, _: tf.tanh(x), (many,), 2.0 * many),
        "reduce": (lambda x, _: x + tf.reduce_sum(x), (many,), 2.0 * many),
        "gather": (lambda x, _: tf.gather(x, rows), (4096, 64), 4096 * 64.0),
        "sort": (lambda x, _: x + tf.math.top_k(x + noise, many // 100).values[0], (many,), float(many)),
        "random": (lambda x, _: tf.random.uniform(tf.shape(x), maxval=x[0]), (many,), float(many)),
    }


def _small(tf: Any, make: Op, shape: tuple[int, ...]) -> float:
    """Return the seconds of one op of a chain, from the difference of a longer and a shorter chain."""
    short, long = (_call(tf, make, shape, chain) for chain in (4 * CHAIN, 20 * CHAIN))
    return max((long - short) / (16 * CHAIN), QUICKEST)


def _large(tf: Any, make: Op, shape: tuple[int, ...]) -> float:
    """Return the seconds of one op of a chain that is so slow that the call is negligible."""
    return _call(tf, make, shape, CHAIN) / CHAIN


def _call(tf: Any, make: Op, shape: tuple[int, ...], chain: int) -> float:
    """Return the seconds of the fastest of several calls of a chain, which other programs disturb least."""

    def chained(x: Any, y: Any) -> Any:
        for _ in range(chain):
            x = make(x, y)
        return tf.reshape(x, [-1])[:1]

    function = tf.function(chained, autograph=False)
    with tf.device("/device:CPU:0"):
        x, y = tf.constant(0.5, shape=shape), tf.constant(1.0001, shape=shape)
        function(x, y)
        best, until = float("inf"), time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            began = time.perf_counter()
            function(x, y)
            best = min(best, time.perf_counter() - began)
    return best
