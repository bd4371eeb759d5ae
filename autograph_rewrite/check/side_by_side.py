"""Train two graphs side by side, and find the largest deviation of every tensor and how much of it is rounding.

An error over the tolerance may still be rounding: where a gradient is zero in theory, Adam turns its rounding errors
into steps of full length. So then the original is also compared with itself, with its variables changed in the last
bit. An error counts only if it is far above the error of that comparison. The bit is that of the coarsest type in
which the graph computes, half precision for example.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from autograph_rewrite.check.report import Array, ComparedTensor, Deviation, deviation, epsilon, is_all_finite
from autograph_rewrite.diagnostics.amounts import few
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import GraphError, VerifyError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import has
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine.session import open_session
from autograph_rewrite.runtime.engine.variable_copies import Copy, copies_of
from autograph_rewrite.training_graph import TrainingGraph, Variable

Feeds = Sequence[Mapping[Any, Any]] | Mapping[Any, Any]

TRIES = 3
"""How often the original is compared with a copy of itself whose variables differ in the last bit."""
SLOWER = 10.0
"""A rewritten step counts as hung after the time limit plus this many times the duration of the original's step."""

_COARSE = {dtypes.HALF: 2.0**-10, dtypes.BFLOAT16: 2.0**-7}


@dataclass(frozen=True)
class Training:
    """The feeds, initial values and number of steps of a training.

    Attributes:
        feeds: one dict of values by input name per step (repeated if there are more steps), or one for all.
        values: initial values by variable; other variables get those of their initialisers.
        seed: for initial values of variables that have neither.
    """

    feeds: Feeds
    steps: int = 3
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def feeds_of(self, step: int) -> Mapping[Any, Any]:
        """Return the feeds of a step, counted from 0."""
        return self.feeds if isinstance(self.feeds, Mapping) else self.feeds[step % len(self.feeds)]


@dataclass(frozen=True)
class Tolerance:
    """The error that a tensor may have.

    Attributes:
        rtol: relative to its largest value.
        atol: of a tensor that is nearly zero; None: 1e-5 times `rtol`, for float64 1e-9 times `rtol`.
    """

    rtol: float = 1e-5
    atol: float | None = None

    def deviation(self, actual: Array, expected: Array) -> Deviation:
        """Compare an array with the expected one."""
        return deviation(actual, expected, self.rtol, self.atol)


@dataclass(frozen=True)
class TrialSettings:
    """How `verify`, `bisect` and `reduce` are asked to train and compare.

    Attributes:
        steps: how many to train.
        feeds: one dict of values by input name per step (repeated if there are more steps), or one for all; None:
            random ones.
        rtol: allowed error, relative to the largest value of each tensor.
        atol: allowed error of tensors that are nearly zero, as in `Tolerance`.
        seed: of random feeds, and of random ops that have none.
        batch: examples per step of random feeds; None: an odd prime, so that replicas get uneven blocks.
    """

    steps: int = 3
    feeds: Feeds | None = None
    rtol: float = 1e-5
    atol: float | None = None
    seed: int = 0
    batch: int | None = None

    @property
    def allowed(self) -> Tolerance:
        """The error that a tensor may have."""
        return Tolerance(self.rtol, self.atol)


class Comparison:
    """Compares one original with other graphs; every comparison trains both from the start.

    Args:
        original: an item without captures.
        timeout: seconds that a run may take.

    Attributes:
        broken: where and how the other graph failed; empty if it did not.
        is_meaningless: no variable of the original stays finite, so that equality proves nothing.
    """

    def __init__(self, original: TrainingGraph, training: Training, allowed: Tolerance, timeout: float) -> None:
        self._original, self._training, self._allowed, self._timeout = original, training, allowed, timeout
        if not isinstance(training.feeds, Mapping) and not training.feeds:
            raise GraphError("feeds is empty", hint="give one dict of values by input name per step, or leave it out")
        self._epsilon = _coarsest(original.graph)
        self._deterministic = not any(has(node.op, "unrepeatable") for node in original.graph)
        self._invented: list[str] = []
        self._not_finite: set[str] = set()
        self.broken = ""
        self.is_meaningless = False

    def against(self, other: TrainingGraph, change: Callable[[Array], Array] | None = None) -> dict[str, Deviation]:
        """Return the worst deviation over all steps, by "variable NAME" and "output NAME".

        Args:
            other: the rewritten item, or the original again.
            change: applied to each initial value of the other item.

        Raises:
            GraphError: the original fails.
            ClusterError: a step hangs.
        """
        worst: dict[str, Deviation] = {}
        self.broken = ""
        with TrainedGraph(self._original, self._timeout) as left:
            try:
                opened = TrainedGraph(other, self._timeout)
            except VerifyError as error:
                self.broken = f"import: {error.problem}"
                return worst
            with opened as right:
                self._train(left, right, change, worst)
        return worst

    def _train(
        self,
        left: TrainedGraph,
        right: TrainedGraph,
        change: Callable[[Array], Array] | None,
        worst: dict[str, Deviation],
    ) -> None:
        """Train both from the start, and record the largest deviations in `worst`."""
        given = self._start(left)
        self._start_other(right, given)
        if not self.broken and change is None and self._deterministic:
            self._compare_variables(left, right, "at the start", worst, set(given))
        initial = {name: copies[0] for name, copies in left.read()}
        right.write(initial if change is None else {name: change(value) for name, value in initial.items()})
        for step in range(self._training.steps):
            if self.broken:
                break
            self._step(left, right, step, worst)

    def noise(self) -> dict[str, float]:
        """Return the error of the original against itself with its variables changed in the last bit."""
        found: dict[str, float] = {}
        broken = self.broken
        for attempt in range(TRIES):
            rng = np.random.default_rng([self._training.seed, attempt])
            change = partial(nudged, rng=rng, least=self._epsilon)
            for name, each in self.against(self._original, change).items():
                found[name] = max(found.get(name, 0.0), each.error)
        self.broken = broken
        return found

    def notes(self, rows: Sequence[ComparedTensor]) -> list[str]:
        """Return the notes that limit the verdict."""
        notes = []
        if self._invented:
            notes.append(f"without an initial value, so given a random one: {_few(self._invented)}")
        if self._not_finite:
            names = _few(sorted(self._not_finite))
            notes.append(f"not finite in the original either: {names}; pass feeds that the model can be trained on")
        rounding = [row.name for row in rows if row.ok and row.error > self._allowed.rtol]
        if rounding:
            notes.append(f"over the tolerance, but explained by rounding (compare in float64): {_few(rounding)}")
        return notes

    def _start(self, left: TrainedGraph) -> dict[str, Any]:
        """Initialise the original; return the values of variables that its initialisers did not set."""
        try:
            values, self._invented = left.start(self._training)
        except left.failures as error:
            raise GraphError(f"the original graph cannot be initialised: {first_line(error)}") from error
        return values

    def _start_other(self, right: TrainedGraph, given: Mapping[str, Any]) -> None:
        """Initialise the other graph; it breaks if it leaves a variable unset that the original sets."""
        self._other(right, right.initialise, "initialisation")
        unset = sorted(right.unset - set(given))
        if unset and not self.broken:
            self.broken = f"initialisation: leaves {_few(unset)} without a value"
        right.write(given)

    def _step(self, left: TrainedGraph, right: TrainedGraph, step: int, worst: dict[str, Deviation]) -> None:
        """Train both one step and compare."""
        feeds, place = self._training.feeds_of(step), f"step {step + 1}"
        stage("%s of %s, original and rewritten graph", place, self._training.steps)
        began = time.perf_counter()
        try:
            expected = left.step(feeds)
        except left.failures as error:
            raise GraphError(
                f"the original graph fails in {place}: {first_line(error)}",
                hint="pass feeds that it can be trained on: feeds=[{'x': array, ...}, ...]",
            ) from error
        right.timeout = self._timeout + SLOWER * (time.perf_counter() - began)
        actual = self._other(right, lambda: right.step(feeds), place)
        if self.broken:
            return
        for name, value in expected.items():
            _keep(worst, f"output {name}", self._allowed.deviation(actual[name], value), place)
        self._compare_variables(left, right, place, worst, set())

    def _other(self, right: TrainedGraph, run: Callable[[], Any], place: str) -> Any:
        """Run the other graph; a failure is a finding, recorded in `broken`, and no error."""
        try:
            return run()
        except right.failures as error:
            self.broken = f"{place}: {first_line(error)}"
            return None

    def _compare_variables(
        self, left: TrainedGraph, right: TrainedGraph, place: str, worst: dict[str, Deviation], skip: set[str]
    ) -> None:
        finite = 0
        for (name, (expected, *_)), (_, copies) in zip(left.read(), right.read(), strict=True):
            if name in skip:
                continue
            if is_all_finite(expected):
                finite += 1
            else:
                self._not_finite.add(name)
            for replica, actual in enumerate(copies):
                at = place if not replica else f"{place}, replica {replica}"
                _keep(worst, f"variable {name}", self._allowed.deviation(actual, expected), at)
        self.is_meaningless = self.is_meaningless or bool(self._not_finite and not finite)


def _coarsest(graph: Graph) -> float:
    """Return the relative distance of neighbouring numbers of the coarsest 16-bit type in a graph's casts; 0: none."""
    types = {node.attr("DstT") for node in graph if node.op == "Cast"}
    return max((size for dtype, size in _COARSE.items() if dtype in types), default=0.0)


def _keep(worst: dict[str, Deviation], name: str, found: Deviation, place: str) -> None:
    if name not in worst or found.error > worst[name].error:
        worst[name] = found._replace(where=", ".join(filter(None, (place, found.where))) if found.error else "")


def first_line(error: Any) -> str:
    """Return the message of an error, without the Python stack that TensorFlow puts before it."""
    lines = [line for line in str(getattr(error, "message", error)).splitlines() if line.strip()]
    said = [
        line
        for line in lines
        if not line.startswith((" ", "\t", "Graph execution", "Detected at", "Node:", "Original"))
    ]
    return f"{type(error).__name__}: {(said or lines or [''])[0].strip()[:300]}"


def _few(names: Sequence[str]) -> str:
    return few([f"'{name}'" for name in names], 3)


def nudged(value: Array, rng: np.random.Generator, least: float = 0.0) -> Array:
    """Return values changed up or down in the last bit, or by the factor `least` where that is more."""
    if value.dtype.kind != "f":
        return value
    step = max(epsilon(value), least) * rng.choice((-1.0, 1.0), value.shape)
    return np.asarray(value * (1 + step), value.dtype)


def invent(variable: Variable, rng: np.random.Generator) -> Array:
    """Return values for a variable without an initialiser; positive, because some slots have to be."""
    if variable.shape is None or None in variable.shape:
        raise GraphError(
            f"the variable '{variable.name}' has neither an initial value nor a known shape",
            hint="name the op that initialises the graph: init_op",
        )
    dtype = tensorflow().as_dtype(variable.dtype)
    shape = tuple(size for size in variable.shape if size is not None)
    values = rng.uniform(0.01, 0.1, shape) if dtype.is_floating or dtype.is_complex else np.zeros(shape)
    return np.asarray(values).astype(dtype.as_numpy_dtype)


# A graph under comparison: its variables are all initialised and read at once.

SCOPE = "autograph_rewrite_verify"


class TrainedGraph:
    """An original or rewritten item in a separate session. Use it as a context manager.

    Args:
        timeout: seconds after which a run counts as hung.
        config: a tf.compat.v1.ConfigProto for the session.

    Attributes:
        failures: the errors that a run raises if the graph or a feed is wrong.
        unset: the variables that the initialisers left without a value.
    """

    def __init__(self, item: TrainingGraph, timeout: float, config: Any = None) -> None:
        self.item = item
        self.timeout = timeout
        self.unset: set[str] = set()
        stage("opening a session of TensorFlow")
        self._session = open_session(item, config=config)
        self._session.first.done()
        self._tf = tensorflow()
        self.failures: tuple[type[Exception], ...] = (self._tf.errors.OpError, ValueError, TypeError)
        self._outputs = {name: info.tensor for name, info in item.outputs.items()}
        self._reads: dict[str, tuple[Any, ...]] = {}
        self._are_set: dict[str, Any] = {}
        with self._session.graph.as_default(), self._tf.name_scope(SCOPE):
            for name in item.variables:
                self._add_variable(name)

    def __enter__(self) -> TrainedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _add_variable(self, name: str) -> None:
        """Add the ops that read and test one variable, in all its copies."""
        variable, graph = self.item.variables[name], self._session.graph
        copies = [Copy(graph, handles, variable) for handles in copies_of(self.item, variable)]
        self._are_set[name] = copies[0].is_initialized()
        self._reads[name] = tuple(copy.read() for copy in copies)

    def _run(self, fetches: Any, feeds: Mapping[Any, Any] | None = None) -> Any:
        return self._session.run(fetches, feeds, timeout_ms=int(self.timeout * 1e3))

    def initialise(self) -> None:
        """Run the initialisers."""
        names = [v.initializer for v in self.item.variables.values() if v.initializer is not None]
        names = [self.item.init_op] if self.item.init_op is not None else list(dict.fromkeys(names))
        if names:
            self._run(names)
        if self._are_set:
            self.unset = {name for name, is_set in self._run(self._are_set).items() if not is_set}

    def start(self, training: Training) -> tuple[dict[str, Any], list[str]]:
        """Initialise all variables; return values that no initialiser set, and the names of those made up."""
        self.initialise()
        rng = np.random.default_rng([training.seed, 1])
        invented = sorted(self.unset - set(training.values))
        values = {**training.values, **{name: invent(self.item.variables[name], rng) for name in invented}}
        self.write(values)
        return values, invented

    def read(self) -> Iterator[tuple[str, list[Array]]]:
        """Yield every variable, by name in order, with the values of its copies."""
        values = self._run(self._reads) if self._reads else {}
        for name in sorted(values):
            yield name, [np.asarray(value) for value in values[name]]

    def write(self, values: Mapping[str, Any]) -> None:
        """Set variables in all their copies."""
        if values:
            self._session.write_variables(values)

    def step(self, feeds: Mapping[Any, Any]) -> dict[str, Array]:
        """Train one step; return the declared outputs."""
        outputs, _ = self._run([self._outputs, list(self.item.targets)], feeds)
        return {name: np.asarray(value) for name, value in outputs.items()}

    def observe(self, feeds: Mapping[Any, Any], tensors: Sequence[str]) -> list[Array]:
        """Train one step; return the values of tensors in it."""
        values, _ = self._run([list(tensors), list(self.item.targets)], feeds)
        return [np.asarray(value) for value in values]
