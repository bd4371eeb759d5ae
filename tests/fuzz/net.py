"""A network while it grows: its dice, inputs and variables, the same calls for a graph as for a function.

    net = Net.of(seed, Style(function=False, ...))
    x = net.input("x", 4)                 a placeholder, or an argument of the function
    w = net.variable("w", (4, 3))         a v1 variable, or a tf.Variable that outlives the trace
    net.update(average, value)            an update that the step makes besides the optimizer's

Nothing here reads anything but its own dice, so that what a seed gives never changes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar

v1 = tf.compat.v1
D = tf.float64
TIME = "T"
"""The dimension of time in the shape of an input."""


@dataclass(frozen=True)
class Style:
    """How a program is written.

    Attributes:
        function: a function over tf.Variables instead of a v1 graph.
        reference: v1 reference variables instead of resources.
        version: of control flow in a v1 graph.
        batch: the static batch size; None leaves it open.
        time: the static length of sequences; None leaves it open.
        alike: layers that could be stages of a loop.
        apart: examples rather stay apart, as micro-batches in a loop and pipelines need it.
        newest: what only the newest seeds draw.
        model: the sizes of a model axis that the program itself places variables and activations on.
        loops: recurrent layers are drawn more often, also where examples rather stay apart.
    """

    function: bool
    reference: bool = False
    version: int = 2
    batch: int | None = None
    time: int | None = None
    alike: bool = False
    apart: bool = False
    newest: bool = False
    model: tuple[int, ...] = ()
    loops: bool = False


@dataclass(frozen=True)
class Input:
    """What is fed under one name.

    Attributes:
        tail: the shape behind the batch dimension.
        dtype: of the elements.
        kind: normal, ids, lengths, mask, positive, scalar, or ragged: rows of ids, each of a length of its own.
        below: what ids stay below.
        axis: which dimension is the batch; None for what all replicas share.
        trimmed_by: the lengths behind which it is padding, which nothing sees.
    """

    tail: tuple[int | str, ...]
    dtype: Any
    kind: str
    below: int
    axis: int | None
    trimmed_by: str = ""

    def shape(self, batch: int | None, time: int | None) -> list[int | None]:
        """Return the shape with these sizes."""
        sizes = [time if size == TIME else int(size) for size in self.tail]
        if self.axis is not None:
            sizes.insert(self.axis, batch)
        return sizes

    def values(self, numbers: np.random.Generator, batch: int, time: int) -> Any:
        """Return an array for one step."""
        if self.kind == "ragged":
            lengths = numbers.integers(0, time + 1, batch)
            rows = numbers.integers(0, self.below, int(lengths.sum()))
            return tf.RaggedTensor.from_row_lengths(rows.astype(self.dtype.as_numpy_dtype), lengths)
        shape = [size or 0 for size in self.shape(batch, time)]
        kind = np.dtype(self.dtype.as_numpy_dtype)
        if self.kind == "ids":
            return numbers.integers(0, self.below, shape).astype(kind)
        if self.kind == "lengths":
            return numbers.integers(1, time + 1, shape).astype(kind)
        if self.kind == "mask":
            drawn = numbers.random(shape) < 0.7
            drawn.flat[:1] = True
            return drawn.astype(kind)
        if self.kind == "positive":
            return (numbers.random(shape) + 0.2).astype(kind)
        return numbers.normal(size=shape).astype(kind)


@dataclass
class Net:
    """The network so far.

    Attributes:
        given: the arguments of the function that is being traced; None: placeholders are made.
        inputs: what is fed, by name.
        variables: by name; those of a function outlive its trace.
        updates: ops that the step runs besides the optimizer's.
        late: the same, behind the gradients.
        losses: terms that blocks add to the loss.
        outputs: what the step returns besides the loss, by name.
        cuts: where stages may end.
        loose: whether something computes in less than float64.
        draws: whether something draws from a state that a checkpoint does not have.
        parts: what was drawn, to be read by people.
    """

    seed: str
    style: Style
    dice: random.Random
    numbers: np.random.Generator
    given: dict[str, Any] | None = None
    inputs: dict[str, Input] = field(default_factory=dict)
    fed: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    trained: list[Any] = field(default_factory=list)
    updates: list[Any] = field(default_factory=list)
    late: list[tuple[Any, Any]] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    loose: bool = False
    draws: bool = False
    parts: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(seed: str, style: Style, given: dict[str, Any] | None = None, variables: Any = None) -> Net:
        """Return an empty network; `variables` are those of an earlier trace of the same function."""
        dice = random.Random(seed)
        return Net(
            seed,
            style,
            dice,
            np.random.default_rng(dice.getrandbits(64)),
            given,
            variables={} if variables is None else variables,
        )

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def name(self, stem: str) -> str:
        """Return a name that is new."""
        self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}{self.counts[stem]}"

    def input(
        self,
        stem: str,
        *tail: int | str,
        dtype: Any = D,
        kind: str = "normal",
        below: int = 0,
        axis: int | None = 0,
        trimmed_by: str = "",
    ) -> Any:
        """Return a new input."""
        name = self.name(stem)
        self.inputs[name] = Input(tail, dtype, kind, below, axis, trimmed_by)
        if self.given is not None:
            self.fed[name] = self.given[name]
        elif kind == "ragged":
            rows, splits = (v1.placeholder(kind, [None]) for kind in (dtype, tf.int64))
            self.fed[name] = tf.RaggedTensor.from_row_splits(rows, splits, validate=False)
        else:
            shape = self.inputs[name].shape(self.style.batch, self.style.time)
            self.fed[name] = v1.placeholder(dtype, shape, name=name)
        return self.fed[name]

    def sequence(self, stem: str, *tail: int) -> Any:
        """Return a new input [batch, time, ...]; now and then it is fed time first."""
        if self.chance(0.12):
            steps = self.input(stem, TIME, *tail, axis=1)
            return tf.transpose(steps, [1, 0, *range(2, len(tail) + 2)])
        return self.input(stem, TIME, *tail)

    def ids(self, stem: str, below: int, *tail: int | str) -> Any:
        """Return a new input of row numbers."""
        dtype = self.dice.choice([tf.int32, tf.int64])
        return self.input(stem, *tail, dtype=dtype, kind="ids", below=below)

    def variable(
        self, stem: str, shape: tuple[int, ...], *, scale: float = 0.4, mean: float = 0.0, trainable: bool = True
    ) -> Any:
        """Return a new variable with random initial values, or what is cut of it on the model axis."""
        made = self.stored(stem, self.numbers.normal(size=shape) * scale + mean, trainable=trainable)
        return self._placed(made, shape, 0.5)

    def stored(self, stem: str, value: Any, *, trainable: bool = False) -> Any:
        """Return a new variable that begins with `value`."""
        name = self.name(stem)
        if not self.style.function:
            made = v1.get_variable(
                name, initializer=np.asarray(value), trainable=trainable, use_resource=not self.style.reference
            )
        elif name in self.variables:
            made = self.variables[name]
        else:
            with tf.init_scope():
                made = tf.Variable(np.asarray(value), trainable=trainable, name=name)
        self.variables[name] = made
        if trainable:
            self.trained.append(made)
        return made

    def update(self, variable: Any, value: Any) -> None:
        """Let the step assign a value, whenever that is."""
        self.updates.append(v1.assign(variable, value))

    def update_behind(self, variable: Any, value: Any) -> None:
        """Let the step assign a value after everything has read the variable."""
        self.late.append((variable, value))

    def cut(self, value: Any) -> Any:
        """Mark where a stage may end."""
        marked = tf.identity(value, name=self.name("cut"))
        self.cuts.append(marked.op.name)
        return self._placed(marked, tuple(marked.shape), 0.15)

    def _placed(self, value: Any, shape: tuple[int | None, ...], share: float) -> Any:
        """Return a value as the program places it on the model axis; the dice of everything else do not notice."""
        dice = random.Random(f"{self.seed} placed {self.name('placed')}")
        if not self.style.model or dice.random() > share:
            return value
        count = math.prod(self.style.model)
        wide = [i for i, size in enumerate(shape) if (size or 0) >= count]
        if dice.random() < 0.15 or not wide:
            return ar.replicate(value)
        parts: list[Any] = [1] * len(shape)
        if len(self.style.model) > 1 and len(shape) > 1 and dice.random() < 0.6:
            parts[:2] = self.style.model
        else:
            parts[dice.choice(wide)] = "model"
        return ar.split(value, parts)

    def note(self, part: str) -> None:
        self.parts.append(part)
