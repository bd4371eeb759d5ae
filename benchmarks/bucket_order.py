"""Two towers over a link of 1 Gbit/s: buckets in the order that was measured, beside that which the graph lets expect.

slow   4 small kernels, used at 512 positions of each example: few nodes, a second's tenth
fast   20 large ones, used once: five times as many nodes, done in no time

Nobody has told of the link, so a bucket takes 4 MiB: in the graph's order the first has the slow gradients and most of
the fast ones, which wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks import contestants
from benchmarks.dist import environments, free_ports
from benchmarks.dist_link import ADDRESSES, GIGABITS, HOSTS, hosts
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import Crew, times

TITLE = "two processes and a link of 1 Gbit/s: the order of buckets"
ORDERS = ("measured", "from the graph")
SLOW, FAST = (64, 4), (256, 20)
"""Width and number of the kernels of each tower."""
ROWS, POSITIONS = 64, 512
LEARNT = 6
"""Steps after which the order is known."""


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    with hosts(GIGABITS):
        found = _steps(effort)
    how = " / ".join(milliseconds(median(found[order])) for order in ORDERS)
    name = "a step: order measured / from the graph"
    return [Figure(name, ratio(found["measured"], found["from the graph"]), at_most=1.0, how=how)], found


def _steps(effort: Effort) -> dict[str, list[float]]:
    """Return the seconds per step of each, one number per round."""
    with ExitStack() as stack:
        crews = {}
        for order in ORDERS:
            addresses = [f"{a}:{p}" for a, p in zip(ADDRESSES, free_ports(2), strict=True)]
            given = [{"order": order, "addresses": addresses, "tiny": effort.tiny, "worker": i} for i in range(2)]
            told = environments({"worker": addresses})
            prefixes = [("ip", "netns", "exec", host) for host in HOSTS]
            crews[order] = stack.enter_context(Crew("benchmarks.bucket_order:step", given, told, prefixes))
            crews[order].ready()
        return times(crews, rounds=effort.rounds(15), calls=2 if effort.tiny else 10)


def step(order: str, addresses: list[str], tiny: bool, worker: int) -> Callable[[], Any]:
    """Return the training step of one worker on its part of the batch (in its process)."""
    contestants.split_cpu(1)
    import tensorflow as tf

    import autograph_rewrite as ar
    from autograph_rewrite.runtime.function import step as steps

    if order == "from the graph":
        steps.ready_order = lambda item: None
    towers = [[tf.Variable(tf.eye(width) * 0.9) for _ in range(count)] for width, count in (SLOW, FAST)]

    def train(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = 0.0
            for value, kernels in zip(inputs, towers, strict=True):
                for kernel in kernels:
                    value = tf.tanh(tf.tensordot(value, kernel, 1))
                loss += tf.reduce_mean(tf.square(value - 1))
        variables = [kernel for kernels in towers for kernel in kernels]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    distributed = ar.distribute(train, {"devices": ["CPU:0"], "cluster": {"workers": addresses}})
    shapes = ([2 if tiny else ROWS, POSITIONS, SLOW[0]], [2 if tiny else ROWS, FAST[0]])
    parts = [tf.random.stateless_normal(shape, [worker, len(shape)]) for shape in shapes]
    for _ in range(LEARNT):
        distributed(*parts)
    if not tiny:
        assert bool(distributed.items[0].report.plan.bucket_order) == (order == "measured")
    return lambda: distributed(*parts)
