"""The devices of function mode, and the end of a program: each test is a process of its own."""

from __future__ import annotations

from tests.jobs.programs.fixtures import Python

_PROGRAM = """
import numpy as np, tensorflow as tf, autograph_rewrite as ar
{early}
def make():
    w = tf.Variable(np.ones([2, 2]))
    def step(x):
        loss = tf.reduce_sum(x @ w)
        w.assign_sub(0.1 * tf.tanh(loss) * w)
        return loss
    return step
config = {{"devices": ["CPU:0", "CPU:1"], "strategy": {{"name": "AllReduce", "variables": "{mode}"}}}}
{late}
"""


def program(mode: str, early: str = "", late: str = "") -> str:
    return _PROGRAM.format(mode=mode, early=early, late=late)


def test_virtual_devices_are_made_while_tensorflow_has_not_started(forked_python: Python) -> None:
    late = """
w = []
def step(x):
    if not w: w.append(tf.Variable(np.ones([2, 2])))
    loss = tf.reduce_sum(x @ w[0])
    w[0].assign_sub(0.1 * loss * w[0])
    return loss
step = ar.distribute(step, config)
print(float(step(np.ones([4, 2]))), len(tf.config.list_logical_devices()))
"""
    run = forked_python(program("mirrored", late=late))
    assert run.stdout.split() == ["16.0", "2"], run.stderr[-2000:]


def test_a_missing_device_is_a_cluster_error_with_the_line_to_add(forked_python: Python) -> None:
    late = """
step = make()
try:
    ar.distribute(step, config)
except ar.ClusterError as error:
    print(error)
"""
    run = forked_python(program("mirrored", late=late))
    assert "has no CPU:1" in run.stdout, run.stderr[-2000:]
    line = next(text.strip() for text in run.stdout.splitlines() if "virtual_devices" in text)
    late = "step = ar.distribute(make(), config)\nprint(float(step(np.ones([4, 2]))))"
    run = forked_python(program("mirrored", early=line, late=late))  # and the line works
    assert run.stdout.split() == ["16.0"], run.stderr[-2000:]


def test_shared_variables_need_no_second_device(forked_python: Python) -> None:
    late = "step = ar.distribute(make(), config)\nprint(float(step(np.ones([4, 2]))))"
    run = forked_python(program("shared", late=late))
    assert run.stdout.split() == ["16.0"], run.stderr[-2000:]


def test_ctrl_c_ends_a_training_loop_between_steps(forked_python: Python) -> None:
    late = """
import os, signal, threading
step = ar.distribute(make(), config)
step(np.ones([4, 2]))
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        step(np.ones([4, 2]))
except KeyboardInterrupt:
    print("stopped", float(step(np.ones([4, 2]))) >= 0)
"""
    run = forked_python(program("mirrored", early="ar.virtual_devices(2)", late=late))
    assert run.stdout.split() == ["stopped", "True"], run.stderr[-2000:]


def test_blocks_come_back_in_order_from_more_devices_than_one_digit_can_number(forked_python: Python) -> None:
    """A collective gathers in the order of the devices' names, in which CPU:10 might come before CPU:2."""
    early = """
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 12)
"""
    late = """
config["devices"] = [f"CPU:{i}" for i in range(12)]
w = tf.Variable(np.ones([1, 1]))
def step(x):
    y = x @ w
    w.assign_sub(0.1 * tf.tanh(tf.reduce_sum(y)) * w)
    return {"y": y, "running": tf.cumsum(y)}
out = ar.distribute(step, config)(np.arange(30.0)[:, None])
print(np.array_equal(out["y"][:, 0], np.arange(30)), np.array_equal(out["running"][:, 0], np.cumsum(np.arange(30))))
"""
    run = forked_python(program("mirrored", early=early, late=late))
    assert run.stdout.split() == ["True", "True"], run.stderr[-2000:]


def test_a_plan_of_auto_gets_the_devices_that_it_needs_or_is_refused(forked_python: Python) -> None:
    """Auto chooses where variables live; on one device, replicas with separate variables would wait for ever."""
    mirrored = """
from autograph_rewrite.strategies import auto
auto.modes_of = lambda config: ("mirrored",)
config["strategy"] = {"name": "Auto"}
"""
    early = "w = []\ndef step(x):\n    if not w: w.append(tf.Variable(np.ones([2, 2])))\n"
    early += "    loss = tf.reduce_sum(x @ w[0])\n    w[0].assign_sub(0.1 * loss * w[0])\n    return loss\n"
    call = "print(float(ar.distribute(step, config)(np.ones([4, 2]))), len(tf.config.list_logical_devices()))"
    run = forked_python(program("shared", early=early, late=f"{mirrored}{call}"))
    assert run.stdout.split() == ["16.0", "2"], run.stderr[-2000:]
    refused = f"{mirrored}step = make()\ntry:\n    {call}\nexcept ar.ClusterError as error:\n    print(error)"
    run = forked_python(program("shared", late=refused))
    assert "has no CPU:1" in run.stdout, run.stderr[-2000:]
