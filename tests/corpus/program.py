"""What a program of the corpus is: how it is built, what it is fed, and where its like is found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.corpus.configurations import BY_NAME
from tests.support.chosen_keras import keras

Array = np.ndarray[Any, Any]
BATCH = 8
"""Examples of programs whose batch has to be static."""


@dataclass(frozen=True)
class Feed:
    """An argument, and what it is made of.

    Attributes:
        shape: without the batch.
        kind: normal, unit (0..1), binary (0 or 1), ids (below `limit`) or one_hot (of `limit` classes).
        limit: of ids and classes.
        dtype: left out: the program's for numbers, int32 for ids.
        whole: it has no batch.
    """

    shape: tuple[int, ...] = ()
    kind: str = "normal"
    limit: int = 0
    dtype: str = ""
    whole: bool = False

    def spec(self, floats: str, batch: int | None, name: str | None = None) -> Any:
        """Return the spec of the argument."""
        shape = self._item_shape if self.whole else (batch, *self._item_shape)
        return tf.TensorSpec(shape, self._type(floats), name)

    def values(self, rng: np.random.Generator, floats: str, batch: int) -> Array:
        """Return values for one step."""
        shape = self.shape if self.whole else (batch, *self.shape)
        return self._made(rng, shape).astype(self._type(floats))

    def _made(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        match self.kind:
            case "normal":
                return rng.normal(size=shape)
            case "unit":
                return rng.uniform(size=shape)
            case "binary":
                return rng.integers(0, 2, shape)
            case "one_hot":
                return np.eye(self.limit)[rng.integers(0, self.limit, shape)]
            case "ids":
                return rng.integers(0, self.limit, shape)
        raise ValueError(f"there is no kind of feed called {self.kind}")

    @property
    def _item_shape(self) -> tuple[int, ...]:
        return (*self.shape, self.limit) if self.kind == "one_hot" else self.shape

    def _type(self, floats: str) -> str:
        return self.dtype or ("int32" if self.kind == "ids" else floats)


def images(side: int = 16, channels: int = 3) -> Feed:
    """Return images with values from 0 to 1."""
    return Feed((side, side, channels), "unit")


def ids(limit: int, *shape: int) -> Feed:
    """Return numbers of words, items or classes."""
    return Feed(shape, "ids", limit)


@dataclass(frozen=True)
class Built:
    """A program that can be trained.

    Attributes:
        trace: makes its graph.
        feeds: the feed of each of its inputs by public name.
        target: its model or function, which `ar.distribute` takes; None: it has a graph only.
        nests: what the target is given, by argument: feeds, or nests of them.
    """

    trace: Callable[[], ar.GraphItem]
    feeds: Mapping[str, Feed]
    target: Any = None
    nests: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def item(self) -> ar.GraphItem:
        """Its graph."""
        return self.trace()


@dataclass(frozen=True)
class Program:
    """An entry of the corpus.

    Attributes:
        build: makes it.
        source: what it is written after.
        floats: the type that it computes in: float64 where the library can.
        batch: the number of examples where that is static.
        steps: how many are trained.
        why: what makes it slow, or keeps it from running, by nature.
    """

    build: Callable[[], Built]
    source: str
    floats: str = "float64"
    batch: int | None = None
    steps: int = 2
    why: str = ""

    @property
    def name(self) -> str:
        """The name of the function that builds it."""
        return self.build.__name__.strip("_")

    def sizes(self, wanted: tuple[int, ...]) -> list[int]:
        """Return the number of examples of each step."""
        return [self.batch or wanted[step % len(wanted)] for step in range(self.steps)]


@dataclass(frozen=True)
class Library:
    """Programs that need the same packages.

    Attributes:
        name: for the table.
        programs: its programs.
        needs: modules beyond TensorFlow and Keras.
        environment: variables that have to stand before TensorFlow is imported.
        has_jobs: whether its programs are also trained by jobs of two processes, which take long to start.
    """

    name: str
    programs: tuple[Program, ...]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    has_jobs: bool = False

    def takes(self, names: Iterable[str]) -> list[str]:
        """Return those of some configurations on which its programs are trained."""
        return [name for name in names if self.has_jobs or not BY_NAME[name].is_job]


def trained(model: Any, x: Any, y: Any = None, batch: int | None = None) -> Built:
    """Return the training step of a compiled Keras model; x and y are feeds, or nests of feeds."""
    floats = _floats()
    given = {"x": x} if y is None else {"x": x, "y": y}
    specs = [mapped(one, lambda feed: feed.spec(floats, batch)) for one in given.values()]
    feeds = {name: feed for top, one in given.items() for name, feed in _leaves(top, one)}
    trace = functools.partial(ar.GraphItem.from_keras, model, *specs, batch_inputs=_axes(feeds, batch))
    return Built(trace, feeds, model, given)


def stepped(step: Callable[..., Any], batch: int | None = None, **given: Any) -> Built:
    """Return a training function of named arguments; each is a feed, or a nest of feeds."""
    floats = _floats()
    specs = [mapped(one, lambda feed: feed.spec(floats, batch)) for one in given.values()]
    named = [
        tf.TensorSpec(spec.shape, spec.dtype, name) if isinstance(spec, tf.TensorSpec) else spec
        for name, spec in zip(given, specs, strict=True)
    ]
    feeds = {name: feed for top, one in given.items() for name, feed in _leaves(top, one)}
    trace = functools.partial(ar.GraphItem.from_function, step, *named, batch_inputs=_axes(feeds, batch))
    return Built(trace, feeds, step, given)


def graphed(graph: Any, loss: Any, train: Any, **feeds: Feed) -> Built:
    """Return a v1 graph with placeholders that are named like their feeds."""
    with graph.as_default():
        v1 = tf.compat.v1
        init = tf.group(v1.global_variables_initializer(), v1.local_variables_initializer(), name="init_all")
    batch = next((graph.get_tensor_by_name(f"{n}:0").shape[0] for n, feed in feeds.items() if not feed.whole), None)
    item = ar.GraphItem.from_graph(
        graph, train_op=train, outputs=[loss], init_op=init, batch_inputs=_axes(feeds, batch)
    )
    return Built(lambda: item, feeds)


def placeholders(**feeds: Feed) -> list[Any]:
    """Return the placeholders of a v1 graph, in float64, with an open batch."""
    v1 = tf.compat.v1
    made = {name: feed.spec("float64", None) for name, feed in feeds.items()}
    return [v1.placeholder(spec.dtype, spec.shape, name) for name, spec in made.items()]


def update(tape: Any, loss: Any, variables: Any, optimizer: Any) -> None:
    """Apply gradients, as loops with a GradientTape end."""
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients([(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None])


def _axes(feeds: Mapping[str, Feed], batch: int | None) -> dict[str, int | None] | None:
    """Say what is a batch where the shapes do not."""
    if batch is None and not any(feed.whole for feed in feeds.values()):
        return None
    return {name: None if feed.whole else 0 for name, feed in feeds.items()}


def _floats() -> str:
    found: str = keras.backend.floatx()
    return found


def mapped(nest: Any, change: Callable[[Feed], Any]) -> Any:
    """Return a nest of feeds with each of them changed."""
    if isinstance(nest, Feed):
        return change(nest)
    if isinstance(nest, Mapping):
        return {key: mapped(one, change) for key, one in nest.items()}
    return type(nest)(mapped(one, change) for one in nest)


def _leaves(path: str, nest: Any) -> Iterator[tuple[str, Feed]]:
    if isinstance(nest, Feed):
        yield path, nest
        return
    for key, one in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
        yield from _leaves(f"{path}/{key}", one)
