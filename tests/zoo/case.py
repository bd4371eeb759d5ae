"""What a zoo entry is: a training step that some user could have written for one device, and its data.

Three kinds, as users have three kinds: a v1 graph, a function over `tf.Variable`s, a compiled Keras model.
All of them are seeded, so that building an entry twice gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from autograph_rewrite import GraphItem

Array = np.ndarray[Any, Any]
DTYPES = ("float64", "float32")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices that every entry understands."""

    optimizer: str = "sgd"
    dtype: str = "float64"
    reduction: str = "mean"  # of the loss over the examples: mean or sum
    batch: int | None = None  # a static batch dimension; None leaves it open
    size: str = "tiny"  # tiny for tests, large for benchmarks
    ref_variables: bool = False  # VariableV2 instead of resource variables (v1 graphs only)
    seed: int = 7


@dataclass(frozen=True, kw_only=True)
class Built:
    """A v1 training graph, the names a user would use for it, and its data."""

    graph: Any  # tf.Graph
    train_op: str
    init_op: str
    loss: str
    outputs: tuple[str, ...]  # declared outputs, the loss first
    variables: tuple[str, ...]  # every global variable, slots included
    gradients: Mapping[str, tuple[str, ...]]  # variable -> raw gradient tensor(s), as backprop made them
    batch_inputs: Mapping[str, int]  # placeholder -> batch axis
    feeds: Callable[[int, int], dict[str, Array]]  # (step, batch size) -> feed dict

    @property
    def nodes(self) -> int:
        """Size of the graph."""
        return len(self.graph.get_operations())

    def item(self) -> GraphItem:
        """Return it as a user would wrap it."""
        return GraphItem.from_graph(
            self.graph,
            train_op=self.train_op,
            outputs=list(self.outputs),
            init_op=self.init_op,
            batch_inputs=dict(self.batch_inputs) or None,
        )


@dataclass(frozen=True, kw_only=True)
class BuiltFunction:
    """A training function over captured `tf.Variable`s, its argument specs and its data."""

    step: Callable[..., Any]  # returns a dict of outputs, "loss" among them
    specs: tuple[Any, ...]  # tf.TensorSpec per argument
    variables: Mapping[str, Any]  # name -> tf.Variable or Keras variable, the optimizer's included
    batch_inputs: Mapping[str, int]  # argument -> batch axis
    feeds: Callable[[int, int], tuple[Array, ...]]


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A compiled Keras model and its data."""

    model: Any  # keras.Model
    feeds: Callable[[int, int], tuple[Any, Any]]  # (step, batch size) -> x, y


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named zoo entry; `build` makes one, the same every time: a graph once for all, which nobody can add to."""

    name: str
    kind: str  # graph, function or keras
    family: str  # what is hard about it: dense, conv, attention, sparse, loop, branch
    builder: Callable[[Options], Any]
    dtypes: tuple[str, ...] = DTYPES
    loose: Mapping[str, float] = field(default_factory=dict)  # dtype -> rtol, if not the usual

    def build(self, options: Options | None = None, **changes: Any) -> Any:
        """Return a Built, BuiltFunction or BuiltModel, by `kind`."""
        options = replace(options or Options(), **changes)
        return _graph_of(self.builder, options) if self.kind == "graph" else self.builder(options)


@lru_cache(maxsize=32)
def _graph_of(builder: Callable[[Options], Any], options: Options) -> Any:
    built = builder(options)
    built.graph.finalize()
    return built
