"""Two workers and a parameter server: what a step costs in function mode, beside the same step in a session.

function   ar.distribute: the program's own tf.Variables are as the step has left them whenever Python reads them
session    the same traced function in a session: variables are on the server, and nobody asks for them

Each worker has half of the batch, and a core; the server runs on both. Each contestant is a job of its own; all are
there from the beginning, and take turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from benchmarks.child import ROOT, environment_of
from benchmarks.dist import environments, free_addresses, pin
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import Crew, times

TITLE = "two workers and a parameter server: function mode beside a session"
HOW = ("function", "session")
PROGRAMS = ("mlp", "sixty", "table")
TARGET = 1.3
_SERVER = "import autograph_rewrite as ar; ar.distribute(abs, {})"


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    found = {name: steps(name, effort) for name in effort.some(PROGRAMS)}
    return [_figure(name, seconds) for name, seconds in found.items()], found


def _figure(name: str, seconds: Mapping[str, Sequence[float]]) -> Figure:
    how = " / ".join(milliseconds(median(seconds[one])) for one in HOW)
    return Figure(f"{name}, a step: function / session", ratio(*(seconds[one] for one in HOW)), at_most=TARGET, how=how)


def steps(name: str, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant, one number per round."""
    with ExitStack() as stack:
        crews = {how: stack.enter_context(crew(how, name, tiny=effort.tiny)) for how in HOW}
        for each in crews.values():
            each.ready()
        return times(crews, rounds=effort.rounds(15), calls=2 if effort.tiny else 20)


@contextmanager
def crew(how: str, name: str, *, tiny: bool) -> Iterator[Crew]:
    """Start the workers and the server of a contestant."""
    first, second, server = free_addresses(3)
    *workers, of_server = environments({"worker": [first, second], "ps": [server]})
    given = [{"how": how, "name": name, "tiny": tiny, "worker": worker} for worker in range(2)]
    serving = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=ROOT,
        env=environment_of(of_server),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with Crew("benchmarks.dist_servers:step", given, workers) as started:
            yield started
    finally:
        serving.kill()
        serving.wait()


def step(how: str, name: str, tiny: bool, worker: int) -> Callable[[], Any]:
    """Return the training step of one worker on its half of the batch (in its process)."""
    pin(worker)
    import tensorflow as tf

    import autograph_rewrite as ar

    train, batch = _table(tiny) if name == "table" else _program(name, tiny)
    half = len(batch[0]) // 2
    own = [part[half:] if worker else part[:half] for part in batch]
    config = {"devices": ["CPU:0"], "strategy": {"name": "PS"}}
    if how == "function":
        function, given = ar.distribute(train, config), [tf.constant(part) for part in own]
        return lambda: function(*given)
    from autograph_rewrite.runtime.function.lift_captures import unbind

    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in own]
    alone = unbind(ar.GraphItem.from_function(train, *specs))
    session = ar.rewrite(alone.item, config).session()
    session.write_variables(alone.values)
    names = dict(zip((info.tensor for info in alone.item.inputs.values()), own, strict=True))
    fetches = [*alone.item.outputs, *alone.item.targets]
    return lambda: session.run(fetches, names)


def _program(name: str, tiny: bool) -> tuple[Callable[..., Any], Sequence[Any]]:
    from benchmarks import programs

    program = programs.build(name, tiny=tiny)
    return programs.single_step(program), (program.x, program.y)


def _table(tiny: bool) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a step that looks a few rows up in a large table and trains those, and its batch."""
    import numpy as np
    import tensorflow as tf

    rows, width, size = (50, 4, 8) if tiny else (100_000, 32, 64)
    rng = np.random.RandomState(0)
    table = tf.Variable(rng.standard_normal((rows, width)).astype(np.float32))
    weights = tf.Variable(rng.standard_normal((width, 10)).astype(np.float32))

    def train(ids: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1) @ weights
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_sum(losses) / size
        slopes = tape.gradient(loss, [table, weights])
        table.scatter_sub(tf.IndexedSlices(0.1 * slopes[0].values, slopes[0].indices))
        weights.assign_sub(0.1 * slopes[1])
        return loss

    return train, (rng.randint(0, rows, (size, 10)), rng.randint(0, 10, size))
