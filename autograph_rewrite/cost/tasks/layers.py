"""Sum up the cost of a step by layer: nodes by name scope, and gradients with the layer that they belong to.

layer_0/MatMul, gradients/layer_0/MatMul_grad/MatMul, gradient_tape/layer_0/MatMul_1      layer_0
gradients/AddN_3                                                                         gradients
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autograph_rewrite.diagnostics.amounts import duration, size

SHOWN = 16
"""The most layers that are shown."""
WORTH_OPENING = 0.25
"""A scope that takes more than this part of the step is replaced by its inner scopes."""
TOP, ITSELF = "(no scope)", "(itself)"
_GRADIENTS = re.compile(r"gradients(_\d+)?|gradient_tape")


@dataclass(frozen=True)
class NodeUse:
    """The cost of one node, and of the exchange of its outputs.

    Attributes:
        name: of the node in the original graph.
        seconds: time that it keeps the device busy; on a CPU, scaled as if it kept all cores busy.
        exchange_seconds: time in which links exchange its outputs.
        exchanged_bytes: bytes of its outputs that one member hands over.
        peak_bytes: bytes of its outputs on the fullest device at that device's peak; for a handle, of its variable.
    """

    name: str
    seconds: float
    exchange_seconds: float
    exchanged_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Layer:
    """A name scope, with the figures of `NodeUse` summed over all its nodes."""

    name: str
    depth: int
    nodes: int
    seconds: float
    exchange_seconds: float
    exchanged_bytes: int
    peak_bytes: int


COLUMNS = ("layer", "#nodes", "#computes", "#exchanges", "#handed over", "#at the peak")


def cells(one: Layer) -> tuple[str, ...]:
    """Return the row of a layer in a table."""
    exchanged = (duration(one.exchange_seconds), size(one.exchanged_bytes)) if one.exchanged_bytes else ("", "")
    peak = size(one.peak_bytes) if one.peak_bytes else ""  # of stages, memory is not known by node
    return one.name, f"{one.nodes:,}", duration(one.seconds), *exchanged, peak


def scope_of(name: str) -> tuple[str, ...]:
    """Return the name scopes of a node's layer, outermost first."""
    parts = name.split("/")
    marks = [at for at, part in enumerate(parts[:-1]) if _GRADIENTS.fullmatch(part)]
    if marks:
        parts = parts[marks[-1] + 1 :]
        ends = [at for at, part in enumerate(parts) if part.endswith("_grad")]
        parts = parts[: ends[0] + 1] if ends else parts
        return tuple(parts[:-1]) or ("gradients",)
    return tuple(parts[:-1]) or (TOP,)


@dataclass
class Scope:
    """A scope while its nodes are summed up."""

    path: tuple[str, ...] = ()
    children: dict[str, Scope] = field(default_factory=dict)
    nodes: int = 0
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    exchanged_bytes: int = 0
    peak_bytes: int = 0

    def add(self, one: NodeUse) -> None:
        """Add the cost of a node."""
        self.nodes += 1
        self.seconds += one.seconds
        self.exchange_seconds += one.exchange_seconds
        self.exchanged_bytes += one.exchanged_bytes
        self.peak_bytes += one.peak_bytes

    @property
    def cost(self) -> tuple[float, int]:
        """The sort key of scopes."""
        return -self.seconds - self.exchange_seconds, -self.peak_bytes

    @property
    def ordered(self) -> list[Scope]:
        """Its inner scopes, the most expensive first, each replaced by its `innermost`."""
        return sorted((one.innermost for one in self.children.values()), key=lambda one: (*one.cost, one.path))

    @property
    def innermost(self) -> Scope:
        """The scope itself, or the only one in it if that holds all of its nodes."""
        scope = self
        while len(scope.children) == 1 and (inner := next(iter(scope.children.values()))).nodes == scope.nodes:
            scope = inner
        return scope

    @property
    def parts(self) -> list[Scope]:
        """Its inner scopes, and the nodes that are in none of them as one more."""
        rest = Scope((*self.path, ITSELF))
        for key in ("nodes", "seconds", "exchange_seconds", "exchanged_bytes", "peak_bytes"):
            setattr(rest, key, getattr(self, key) - sum(getattr(one, key) for one in self.children.values()))
        return [*self.ordered, *([rest] if rest.nodes else [])]

    def layer(self, depth: int = 0) -> Layer:
        """Return its cost."""
        sums = self.nodes, self.seconds, self.exchange_seconds, self.exchanged_bytes, self.peak_bytes
        return Layer("/".join(self.path), depth, *sums)


def tree(nodes: Iterable[NodeUse]) -> Scope:
    """Return the root of the tree of scopes, with their costs."""
    root = Scope()
    for one in nodes:
        scope = root
        scope.add(one)
        for part in scope_of(one.name):
            scope = scope.children.setdefault(part, Scope((*scope.path, part)))
            scope.add(one)
    return root


def rows(scope: Scope, depth: int = 0) -> Iterator[Layer]:
    """Yield every scope inside a scope, outer scopes first, the most expensive first."""
    for one in scope.ordered:
        yield one.layer(depth)
        yield from rows(one, depth + 1)


def dearest(root: Scope) -> tuple[Layer, ...]:
    """Return the most expensive scopes, none of them within another; expensive scopes are replaced by inner ones."""
    shown = root.ordered
    while True:
        wide = [one for one in shown if one.cost[0] < WORTH_OPENING * root.cost[0] and one.children]
        if not wide or len(shown) + len(wide[0].children) > 2 * SHOWN:
            return tuple(one.layer() for one in shown[:SHOWN])
        shown = sorted([*(one for one in shown if one is not wide[0]), *wide[0].parts], key=lambda one: one.cost)
