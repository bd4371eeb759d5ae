"""What seeding a mistake takes: a graph, ways to find something in it to spoil, and ways to spoil it.

A kind of mistake is a function of a bench, and has the function's name. It edits the graph in place and says in one
sentence what it did; where there is nothing to spoil in that way, it raises LookupError or StopIteration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, PerInstance, Select
from autograph_rewrite.ir.traversal import ancestors, descendants, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.item import GraphItem
from autograph_rewrite.ops.traits import READS


class Bench:
    """A folded graph on which one mistake is going to be made.

    Args:
        graph: which is changed.
        item: what it was made of, normalised.
        instances: how many instances an EACH node has.
        rng: chooses.
    """

    def __init__(self, graph: Graph, item: GraphItem, instances: int, rng: random.Random) -> None:
        self.graph, self.item, self.instances, self.rng = graph, item, instances, rng

    @cached_property
    def step(self) -> set[Node]:
        """The nodes that a step runs: ancestors of targets and outputs."""
        names = [*self.item.targets, *(info.tensor.partition(":")[0] for info in self.item.outputs.values())]
        return ancestors(self.graph.nodes[name] for name in names if name in self.graph.nodes)

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes of the step, in an order that only their names decide."""
        return sorted(self.step, key=lambda node: node.name)

    @cached_property
    def order(self) -> list[Node]:
        """The nodes of the step, producers first."""
        return [node for node in topological_order(self.graph) if node in self.step]

    def where(self, fits: Callable[[Node], bool]) -> list[Node]:
        """Return the nodes of the step that fit."""
        return [node for node in self.nodes if fits(node)]

    def pick(self, among: Iterable[Any]) -> Any:
        """Choose one.

        Raises:
            LookupError: there is none.
        """
        return self.rng.choice(list(among))

    def one(self, fits: Callable[[Node], bool]) -> Node:
        """Choose a node of the step that fits.

        Raises:
            LookupError: there is none.
        """
        return self.rng.choice(self.where(fits))

    def updates(self) -> dict[Node, list[Node]]:
        """Return the updates of the step by the variable's handle."""
        return variable_ops.updates(self.order)

    def all_updates(self) -> list[Node]:
        """Return the updates of the step."""
        return [node for found in self.updates().values() for node in found]

    def reads(self) -> dict[Node, list[Node]]:
        """Return the reads of the step by the variable's handle."""
        found: dict[Node, list[Node]] = {}
        for node in self.order:
            if node.op in READS:
                found.setdefault(variable_ops.handle_node(node.inputs[0]), []).append(node)
        return found

    def uses(self, value: Value) -> list[Use]:
        """Return the readers of a value within the step."""
        return [use for use in value.uses if use.node in self.step]

    def add(self, op: str, inputs: Sequence[Value], near: Node, **attrs: Any) -> Node:
        """Add a node beside another one, as often as that runs."""
        once = near.span == ONCE
        selects = {i: Select.FIRST for i, v in enumerate(inputs) if once and v.node.span == EACH}
        name = f"{near.name}/{op}"
        return near.graph.add(op, inputs, name=name, span=near.span, selects=selects, attrs=attrs, device=near.device)

    def again(self, node: Node, inputs: Sequence[Value], controls: Iterable[Node] = ()) -> Node:
        """Add a node that does what another one does."""
        declared = {key: raw for key, raw in node.attrs.items() if key[0] != "_" and not isinstance(raw, PerInstance)}
        again = node.graph.add(
            node.op, inputs, name=f"{node.name}/again", attrs={key: node.attr(key) for key in declared},
            device=node.device, controls=controls, span=node.span, selects=node.selects,
        )  # fmt: skip
        for key, raw in node.attrs.items():
            again.set_raw_attr(key, raw)
        return again

    def const(
        self, content: Any, like: Value, *, dtype: int | None = None, controls: Iterable[Node] | None = None
    ) -> Value:
        """Return a constant beside a value and of its type, unless another is given.

        It waits for the value: by itself it would be outside of the loop that the value may be in.
        """
        dtype = like.dtype if dtype is None else dtype
        node = self.add("Const", [], like.node, value=np.asarray(content, dtypes.numpy_dtype(dtype)), dtype=dtype)
        for control in [like.node] if controls is None else controls:
            node.add_control(control)
        return node.output()

    def computed(self, op: str, value: Value, number: float, near: Node | None = None) -> Value:
        """Return what an op makes of a value and a number."""
        return self.add(op, [value, self.const(number, value)], near or value.node).output()

    def read_instead(self, use: Use, value: Value) -> None:
        """Let a reader read another value."""
        crosses = use.node.span == ONCE and value.node.span == EACH
        use.node.set_input(use.index, value, Select.FIRST if crosses else None)

    def replace(self, old: Value, new: Value) -> None:
        """Let all who read a value read another one, but for what was added to make that."""
        for use in self.uses(old):
            self.read_instead(use, new)

    def trade(self, one: Node, other: Node, index: int = 0) -> None:
        """Let two nodes have each other's input."""
        left, right = one.inputs[index], other.inputs[index]
        select = one.selects.get(index)
        one.set_input(index, right, other.selects.get(index))
        other.set_input(index, left, select)
        self.keep_acyclic()

    def keep_acyclic(self) -> None:
        """Refuse an edit that closed a cycle.

        Raises:
            LookupError: it did.
        """
        try:
            topological_order(self.graph)
        except GraphError as error:
            raise LookupError("that closes a cycle") from error

    def depends(self, node: Node, on: Node, *, controls: bool = True) -> bool:
        """Return whether one node runs behind another."""
        return node is not on and node in descendants([on], controls=controls)

    def pairs(self, nodes: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
        """Yield pairs of nodes of which the second runs behind the first."""
        for first in nodes:
            behind = descendants([first])
            for second in nodes:
                if second is not first and second in behind:
                    yield first, second


B = TypeVar("B", bound=Bench)
Kind = Callable[[Bench], str]


def attempt(kind: Callable[[B], str], bench: B) -> str:
    """Make a mistake, and say it in a sentence; that is empty where there is nothing to spoil in that way."""
    try:
        return kind(bench)
    except (LookupError, StopIteration):
        return ""


def alike(nodes: Iterable[Node]) -> list[tuple[Node, Node]]:
    """Return the pairs of nodes of one op that run equally often."""
    nodes = list(nodes)
    return [(a, b) for a in nodes for b in nodes if a.name < b.name and a.op == b.op and a.span == b.span]


def let_go(node: Node) -> None:
    """Let nobody wait for a node."""
    for user in node.control_users:
        user.remove_control(node)


def is_float(value: Value) -> bool:
    """Return whether a value consists of floating point numbers."""
    return value.dtype in (dtypes.FLOAT, dtypes.DOUBLE)


def gathers_all(node: Node) -> bool:
    """Return whether a node reads all instances of a value."""
    return Select.ALL in node.selects.values()


def is_sum(node: Node) -> bool:
    """Return whether a node adds up what replicas hold."""
    if node.op == "CollectiveReduceV2":
        return bool(node.attr("merge_op") == b"Add")
    return node.op == "AddN" and gathers_all(node)


def is_join(node: Node) -> bool:
    """Return whether a node puts blocks one behind the other."""
    return node.op == "CollectiveGatherV2" or (node.op == "ConcatV2" and gathers_all(node))


def each(node: Node, attr: str) -> list[Any]:
    """Return what an attribute is on each instance.

    Raises:
        LookupError: it is the same on all.
    """
    raw = node.attrs.get(attr)
    if not isinstance(raw, PerInstance):
        raise LookupError(attr)
    return [decode(one) for one in raw.raws]


def set_each(node: Node, attr: str, kind: str, contents: Sequence[Any]) -> None:
    """State an attribute for each instance."""
    node.set_raw_attr(attr, PerInstance(tuple(encode(kind, content) for content in contents)))
