"""Two workers and a parameter server: what a step costs in function mode, in a session, and with less on the server.

function   ar.distribute: the program's own tf.Variables are as the step has left them whenever Python reads them
session    the same traced function in a session: variables are on the server, and nobody asks for them
parallax   as function, but every worker has what is not looked up by row: its gradients go by collectives

Each worker has half of the batch, and a core; the server runs on both. Each contestant is a job of its own; all are
there from the beginning, and take turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.child import ROOT, environment_of
from benchmarks.dist import environments, free_addresses, pin
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import Crew, times

TITLE = "two workers and a parameter server: function mode beside a session, Parallax beside PS"
CONTESTANTS = {
    "mlp": ("function", "session"),
    "sixty": ("function", "session"),
    "table": ("function", "session"),
    "table with layers": ("parallax", "function"),
}
"""By program, what is measured, and beside what."""
TARGETS = {"function": 1.3, "parallax": None}
LAYERS = {"table": 0, "table with layers": 3}
_SERVER = "import autograph_rewrite as ar; ar.distribute(abs, {})"


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    found = {name: steps(name, effort) for name in effort.some(tuple(CONTESTANTS))}
    return [_figure(name, seconds) for name, seconds in found.items()], found


def _figure(name: str, seconds: Mapping[str, Sequence[float]]) -> Figure:
    both = CONTESTANTS[name]
    how = " / ".join(milliseconds(median(seconds[one])) for one in both)
    title = f"{name}, a step: {' / '.join(both)}"
    return Figure(title, ratio(*(seconds[one] for one in both)), at_most=TARGETS[both[0]], how=how)


def steps(name: str, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant, one number per round."""
    with ExitStack() as stack:
        crews = {how: stack.enter_context(crew(how, name, tiny=effort.tiny)) for how in CONTESTANTS[name]}
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

    train, batch = _table(tiny, LAYERS[name]) if name in LAYERS else _program(name, tiny)
    half = len(batch[0]) // 2
    own = [part[half:] if worker else part[:half] for part in batch]
    config = {"devices": ["CPU:0"], "strategy": {"name": "Parallax" if how == "parallax" else "PS"}}
    if how != "session":
        function, given = ar.distribute(train, config), [tf.constant(part) for part in own]
        return lambda: function(*given)
    from autograph_rewrite.runtime.function.session_step import unbind

    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in own]
    item, values = unbind(ar.GraphItem.from_function(train, *specs))
    session = ar.rewrite(item, config).session()
    session.write_variables(values)
    names = dict(zip((info.tensor for info in item.inputs.values()), own, strict=True))
    fetches = [*item.outputs, *item.targets]
    return lambda: session.run(fetches, names)


def _program(name: str, tiny: bool) -> tuple[Callable[..., Any], Sequence[Any]]:
    from benchmarks import programs

    program = programs.build(name, tiny=tiny)
    return programs.single_step(program), (program.x, program.y)


def _table(tiny: bool, layers: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a step that looks a few rows up in a large table and trains those, and its batch.

    Args:
        tiny: only to show that it works.
        layers: of 512 units each, between the table and the classes.
    """
    import numpy as np
    import tensorflow as tf

    rows, width, size, units = (50, 4, 8, 8) if tiny else (100_000, 32, 64, 512)
    rng = np.random.RandomState(0)
    widths = [width, *[units] * layers, 10]
    table = tf.Variable(rng.standard_normal((rows, width)).astype(np.float32))
    weights = [
        tf.Variable((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)) for shape in pairwise(widths)
    ]

    def train(ids: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1) @ weights[0]
            for weight in weights[1:]:
                logits = tf.nn.relu(logits) @ weight
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_sum(losses) / size
        rows_slope, *slopes = tape.gradient(loss, [table, *weights])
        table.scatter_sub(tf.IndexedSlices(0.1 * rows_slope.values, rows_slope.indices))
        for weight, slope in zip(weights, slopes, strict=True):
            weight.assign_sub(0.1 * slope)
        return loss

    return train, (rng.randint(0, rows, (size, 10)), rng.randint(0, 10, size))
