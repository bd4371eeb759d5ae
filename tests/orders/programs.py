"""Programs that read, write, draw, print, assert and look up in an order of their own, as automatic control
dependencies would write it down: whatever touches a resource waits for the write before it, a write also for the reads.

A rewrite that loses one of these edges gives other numbers, or prints in another order, as soon as something is late.
So each program is run several times, and each time other nodes of the rewritten graph are slow.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.runtime.engine.session import open_session
from autograph_rewrite.training_graph import EncodedGraph

v1 = tf.compat.v1
D = tf.float64
ROWS, WIDTH = 6, 3
STEPS = 3
SLOW, SECONDS = 20, 0.02
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    *(
        {"strategy": {"name": name, "variables": mode}}
        for name in ("AllReduce", "FSDP")
        for mode in ("shared", "mirrored")
    ),
    *({"strategy": {"name": name}} for name in ("PS", "PartitionedPS", "PartitionedAR", "Parallax")),
    {"strategy": {"name": "AllReduce"}, "microbatches": 3},
    {"strategy": {"name": "FSDP"}, "microbatches": 2},
    {"strategy": {"name": "AllReduce"}, "microbatches": 3, "accumulation": {"form": "loop"}},
    {"mesh": {"data": 1, "model": 2}, "strategy": {"name": "AllReduce", "variables": "mirrored"}, "sharding": "w"},
    {"mesh": {"data": 1, "model": 2}, "strategy": {"name": "AllReduce", "variables": "shared"}, "sharding": "w"},
    {"strategy": {"name": "AllReduce"}, "steps_per_run": 1},
)


def configuration(seed: int) -> dict[str, Any]:
    """Return the configuration of a program."""
    config = dict(CONFIGURATIONS[seed % len(CONFIGURATIONS)])
    if config.pop("sharding", None):
        config["sharding"] = [{"match": "w", "split": [1, 2]}, {"match": "table", "split": [2, 1]}]
    return {"devices": ["CPU:0", "CPU:1"], "timeout_seconds": 40, **config}


@dataclass
class Program:
    """A graph that one step runs.

    Attributes:
        seed: decides what it does.
        printed: the file that it prints to.
        values: what it has computed, by shape.
        last: what touched each resource last, and whether that was a write; then the reads since.
    """

    seed: int
    printed: Path
    values: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)
    _dice: random.Random = field(default_factory=random.Random)
    _written: dict[str, Any] = field(default_factory=dict)
    _reads: dict[str, list[Any]] = field(default_factory=dict)

    def build(self) -> Any:
        """Return the graph; `train` runs it all, and `out_0`, `out_1`, ... are what it gives."""
        self._dice = random.Random(f"order {self.seed}")
        graph = tf.Graph()
        with graph.as_default():
            v1.set_random_seed(self.seed)
            self.x = v1.placeholder(D, [None, WIDTH], "x")
            self.ids = v1.placeholder(tf.int64, [None], "ids")
            self.w = v1.get_variable(
                "w", initializer=np.linspace(-1, 1, WIDTH * 2).reshape(WIDTH, 2), use_resource=True
            )
            self.table = v1.get_variable("table", initializer=np.ones((4, 2)), use_resource=True)
            self.count = v1.get_variable("count", initializer=np.float64(1), trainable=False, use_resource=True)
            self.dictionary = tf.lookup.experimental.MutableHashTable(tf.int64, D, default_value=-1.0)
            self.values = {(): [tf.constant(0.5, D)], (WIDTH, 2): [], (4, 2): []}
            kinds = [
                self.read,
                self.write,
                self.add,
                self.train,
                self.draw,
                self.say,
                self.check,
                self.look_up,
                self.put,
            ]
            for _ in range(self._dice.randint(8, 16)):
                self._dice.choice(kinds)()
            self.train()
            for i, value in enumerate(self.outputs):
                tf.identity(value, name=f"out_{i}")
            tf.group(*self.done, name="train")
            tables = v1.tables_initializer()
            v1.group(v1.global_variables_initializer(), tables, name="init")
        return graph

    # Statements.

    def touch(self, names: Sequence[str], make: Callable[[], Any], *, writes: bool) -> Any:
        """Run a statement behind what touched the same before it."""
        waits = [self._written[name] for name in names if name in self._written]
        if writes:
            waits += [one for name in names for one in self._reads.get(name, [])]
        with tf.control_dependencies(waits):
            made = make()
        op = made if isinstance(made, tf.Operation) else made.op
        for name in names:
            if writes:
                self._written[name], self._reads[name] = op, []
            else:
                self._reads.setdefault(name, []).append(op)
        self.done.append(op)
        return made

    def scalar(self) -> Any:
        """Return a number that was computed, often one of all examples."""
        if self._dice.random() < 0.5:
            of = self._dice.choice([tf.reduce_mean, tf.reduce_max, tf.reduce_sum])
            value = 0.1 * of(self.x)
        else:
            value = self._dice.choice(self.values[()])
        return tf.math.sin(value)

    def of(self, variable: Any) -> Any:
        """Return a value of a variable's shape."""
        known = self.values[tuple(variable.shape)]
        return (self._dice.choice(known) if known else tf.ones_like(variable.initial_value)) * self.scalar()

    def variable(self) -> tuple[str, Any]:
        name = self._dice.choice(["w", "table", "count"])
        return name, getattr(self, name)

    def read(self) -> None:
        name, variable = self.variable()
        value = self.touch([name], lambda: variable.read_value(), writes=False)
        self.values[tuple(variable.shape)].append(value)
        self.outputs.append(tf.reduce_sum(value))

    def write(self) -> None:
        name, variable = self.variable()
        value = self.of(variable)
        self.touch([name], lambda: variable.assign(value, read_value=False), writes=True)

    def add(self) -> None:
        name, variable = self.variable()
        value = self.of(variable)
        self.touch([name], lambda: variable.assign_add(value, read_value=False), writes=True)

    def train(self) -> None:
        """Move the matrix or rows of the table along their gradients, which are sums over the examples."""
        if self._dice.random() < 0.6:
            w = self.touch(["w"], lambda: self.w.read_value(), writes=False)
            loss = tf.reduce_mean(tf.math.tanh(self.x @ w) ** 2)
            (slope,) = tf.gradients(loss, [w])
            self.touch(["w"], lambda: self.w.assign_sub(0.3 * slope, read_value=False), writes=True)
        else:
            rows = self.touch(["table"], lambda: tf.gather(self.table, self.ids), writes=False)
            loss = tf.reduce_mean(rows**2)
            (slope,) = tf.gradients(loss, [rows])
            update = tf.IndexedSlices(-0.3 * slope, self.ids)
            self.touch(["table"], lambda: self.table.scatter_add(update), writes=True)
        self.values[()].append(loss)
        self.outputs.append(loss)

    def draw(self) -> None:
        value = self.touch(
            ["random"], lambda: tf.random.uniform([], dtype=D, seed=self._dice.randint(1, 99)), writes=True
        )
        self.values[()].append(value)
        self.outputs.append(value)

    def say(self) -> None:
        value, number = self.scalar(), len(self.done)
        where = f"file://{self.printed}"
        self.touch(["printed"], lambda: tf.print(number, tf.round(value * 1e6), output_stream=where), writes=True)

    def check(self) -> None:
        value = self.scalar()
        self.touch(["printed"], lambda: tf.debugging.Assert(tf.abs(value) <= 1.0, [value]), writes=True)

    def look_up(self) -> None:
        key = tf.cast(self._dice.randint(0, 2), tf.int64)
        value = self.touch(["dictionary"], lambda: self.dictionary.lookup(key), writes=False)
        self.values[()].append(value)
        self.outputs.append(value)

    def put(self) -> None:
        key, value = tf.cast(self._dice.randint(0, 2), tf.int64), self.scalar()
        self.touch(["dictionary"], lambda: self.dictionary.insert(key, value), writes=True)


def feeds() -> list[dict[str, Any]]:
    """Return what the steps are fed."""
    dice = np.random.default_rng(7)
    return [{"x:0": dice.normal(size=(ROWS, WIDTH)), "ids:0": dice.integers(0, 4, ROWS)} for _ in range(STEPS)]


Results = dict[str, Any]


def run(item: Any, printed: Path) -> Results:
    """Return what the steps of an item give, what is in its variables after them, and what it has printed."""
    printed.write_text("")
    names = sorted(item.outputs)
    results: Results = {}
    with open_session(item, config=v1.ConfigProto(inter_op_parallelism_threads=4)) as session:
        session.run(item.init_op)
        for i, feed in enumerate(feeds()):
            got = session.run([*names, "train"], feed, timeout_ms=40000)
            results |= {f"step {i} {name}": value for name, value in zip(names, got, strict=False)}
        results |= {f"variable {name}": value for name, value in session.read_variables(item.variables).items()}
    return results | {"printed": printed.read_text()}


def with_delays(item: Any, seed: int) -> Any:
    """Return an item some of whose nodes wait for something slow; nodes of loops do not."""
    dice = random.Random(seed)
    graph = item.graph_def
    scratch = tf.Graph()
    with scratch.as_default():
        made = tf.numpy_function(lambda: time.sleep(SECONDS * dice.random()), [], [], name="late")
    token = next(node for node in scratch.as_graph_def().node if node.op in ("PyFunc", "EagerPyFunc"))
    is_looped = any(node.op in ("Enter", "RefEnter") for node in graph.node)
    late = [node for node in graph.node if node.op not in ("Const", "Placeholder", "VarHandleOp")]
    for i, node in enumerate([] if is_looped else dice.sample(late, min(SLOW, len(late)))):
        slow = graph.node.add()
        slow.CopyFrom(token)
        slow.name, slow.device = f"late_{i}", "/device:CPU:0"
        node.input.append(f"^late_{i}")
    delayed = replace(item, source=EncodedGraph(graph.SerializeToString(deterministic=True)))
    return delayed, (scratch, made)  # the function lives as long as its graph


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        verdict: equal, refused, wrong.
        detail: why it was refused, or what differs.
        edges: control edges of the original graph, and of the rewritten one for each replica.
    """

    seed: int
    verdict: str
    detail: str = ""
    edges: tuple[int, int] = (0, 0)


def outcome(seed: int, runs: int) -> Outcome:
    """Run a program on one device, and rewritten as often as asked for, late in other places each time."""
    with tempfile.TemporaryDirectory() as folder:
        printed, config = Path(folder, "printed"), configuration(seed)
        program = Program(seed, printed)
        graph = program.build()
        outputs = [f"out_{i}" for i in range(len(program.outputs))]
        batch = {"x": 0, "ids": 0}
        item = ar.GraphItem.from_graph(graph, train_op="train", outputs=outputs, init_op="init", batch_inputs=batch)
        expected = run(item, printed)
        try:
            new = ar.rewrite(item, config)
        except ar.RewriteError as error:
            return Outcome(seed, "refused", error.problem)
        edges = count_edges(item.graph), count_edges(new.graph) // 2
        for number in range(runs):
            delayed, alive = with_delays(new, number) if number else (new, None)
            found = run(delayed, printed)
            del alive
            if differing := difference(expected, found):
                return Outcome(seed, "wrong", f"run {number}: {differing}", edges)
    return Outcome(seed, "equal", "", edges)


def count_edges(graph: Any) -> int:
    """Return how many control edges a graph has."""
    return sum(len(node.controls) for node in graph)


def difference(expected: Results, found: Results) -> str:
    """Return what differs, empty where nothing does."""
    for name, value in expected.items():
        if isinstance(value, str):
            if value != found[name]:
                return f"{name}: {found[name]!r} instead of {value!r}"
        elif not np.allclose(value, found[name], rtol=1e-9, atol=1e-9):
            return f"{name}: {found[name]} instead of {value}"
    return ""
