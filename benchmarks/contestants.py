"""The ways of running one program: on a single device, rewritten, and in `tf.distribute.MirroredStrategy`.

Contestant = prepare(how, program name, replicas)      makes the model and its data where they belong
contestant.start() ──► step                            traces, rewrites, registers: what time to first step counts
step()                                                 one training step on the whole batch

All contestants have the same initial weights and the same batch, so they compute the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import programs

HOW = ("single", "shared", "mirrored", "strategy")
LOCAL = ("shared-local", "mirrored-local")
"""With batch statistics per replica, as in MirroredStrategy; the others normalise over the whole batch."""
Step = Callable[[], Any]


@dataclass(frozen=True)
class Contestant:
    """A program and the way it is run.

    Attributes:
        program: model, optimizer, data.
        start: makes the step from the program.
    """

    program: programs.Program
    start: Callable[[], Step]


def split_cpu(count: int) -> None:
    """Make sure that this process has virtual CPU devices; to be called before TensorFlow does anything."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < count:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)])


def prepare(how: str, name: str, replicas: int, *, tiny: bool = False) -> Contestant:
    """Make the program and its data for one of the ways in `HOW` and `LOCAL`."""
    if how == "strategy":
        return _in_strategy(name, replicas, tiny)
    import tensorflow as tf

    program = programs.build(name, tiny=tiny)
    x, y = tf.constant(program.x), tf.constant(program.y)
    step = programs.single_step(program)
    if how == "single":
        return Contestant(program, lambda: _called(tf.function(step), x, y))
    return Contestant(program, lambda: _called(_distributed(step, how, replicas, x, y), x, y))


def _called(function: Callable[..., Any], *args: Any) -> Step:
    return lambda: function(*args)


def config(how: str, replicas: int) -> dict[str, Any]:
    """Return the configuration of so many replicas in this process."""
    variables, _, statistics = how.partition("-")
    return {
        "devices": [f"CPU:{i}" for i in range(replicas)],
        "strategy": {"name": "AllReduce", "variables": variables},
        "semantics": {"batch_norm": statistics or "sync"},
    }


def _distributed(step: Callable[..., Any], how: str, replicas: int, x: Any, y: Any) -> Callable[..., Any]:
    import tensorflow as tf

    import autograph_rewrite as ar

    specs = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in (x, y)]
    function: Callable[..., Any] = ar.distribute(step, config(how, replicas), *specs)
    return function


def _in_strategy(name: str, replicas: int, tiny: bool) -> Contestant:
    """Follow TensorFlow's guide to custom training loops; every replica finds its part of the batch ready."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        program = programs.build(name, tiny=tiny)
    batch = len(program.y)
    rows = batch // replicas

    def part(array: Any) -> Any:
        def of(context: Any) -> Any:
            at = context.replica_id_in_sync_group * rows
            return tf.constant(array[at : at + rows])

        return strategy.experimental_distribute_values_from_function(of)

    def step(x: Any, y: Any) -> Any:
        losses = strategy.run(lambda a, b: program.train(a, b, batch), (x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    x, y = part(program.x), part(program.y)
    return Contestant(program, lambda: _called(tf.function(step), x, y))
