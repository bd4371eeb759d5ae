"""What the lowerings of all functional ops share.

Copying a body into the graph, handing results over, keeping the node's name resolvable and its side effects run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.format.function_library import Library
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types.attrs import FunctionName
from autograph_rewrite.normalize.functions.bodies import (
    DATASET_LOOP,
    Body,
    CallSite,
    Entry,
    instantiate,
    is_invariant,
)
from autograph_rewrite.ops.traits import has


@dataclass
class Lowering:
    """The state of one run: the graph, what waits to be lowered, and what was inserted only as a precaution."""

    graph: Graph
    library: Library
    has_routing: bool  # the original graph holds v1 control flow, which a call may stand inside
    run_only: frozenset[str]  # names that outsiders run, but whose results nobody outside reads
    loops_over_data: bool = False  # whether loops over datasets are lowered
    pending: deque[tuple[Node, Node | None, tuple[str, ...]]] = field(default_factory=deque)
    gates: list[Node] = field(default_factory=list)
    frames: set[str] = field(default_factory=set)
    predicates: dict[Node, Value] = field(default_factory=dict)  # of each Merge of an If, else side first
    chain: tuple[str, ...] = ()  # the functions that the node in work came from

    def body(self, node: Node, function: FunctionName, part: str, arguments: Sequence[Value], entry: Entry) -> Body:
        """Copy a function that `node` names into the graph, and queue what it holds itself.

        Args:
            function: its name and attributes.
            part: between the node's name and those of the copies, such as "then"; "" for none.
            arguments: one value per parameter.
            entry: what the body's first nodes wait for.

        Raises:
            GraphError: the function is missing, or calls itself.
        """
        if function.name not in self.library:
            raise GraphError(
                f"'{node.name}' calls '{function.name}', which the function library does not have", node=node
            )
        if function.name in self.chain:
            cycle = " -> ".join((*self.chain, function.name))
            raise GraphError(f"the function '{function.name}' calls itself ({cycle})", node=node)
        attrs = {**{k: v for k, v in node.attrs.items() if isinstance(v, bytes)}, **dict(function.attrs)}
        site = CallSite(arguments, f"{node.name}/{part}" if part else node.name, attrs, entry, node.device)
        body = instantiate(self.graph, self.library, self.library.get(function.name), site)
        chain = (*self.chain, function.name)
        self.pending.extend((new, entry.pivot, chain) for new in body.nodes if self.is_functional(new))
        return body

    def is_functional(self, node: Node) -> bool:
        """Whether a node calls functions in a way that can be lowered."""
        if node.op == DATASET_LOOP:
            return self.loops_over_data
        return has(node.op, "functional") or node.op in self.library

    def gated(self, node: Node, index: int, value: Value, effects: Sequence[Node]) -> Value:
        """Make the readers of a result also run the effects; undone in the end where something else runs them.

        Args:
            node: which is lowered.
            effects: nodes of the body that must run.
        """
        if not effects or not node.output(index).uses:
            return value
        gate = Builder.at(node).node(
            "Identity", value, what=f"output_{index}", controls=effects, T=node.output_dtypes[index]
        )
        self.gates.append(gate)
        return gate.output()

    def tied(self, node: Node, index: int, value: Value, pivot: Node | None) -> Value:
        """Tie a loop constant that a node passes through to the iteration: its readers lose their tie, the node.

        Args:
            node: which is lowered.
            index: of its result.
            value: the result.
            pivot: node that is alive in each iteration; None: there is no loop.
        """
        if pivot is None or not is_invariant(value):
            return value
        name = f"{node.name}/through_{index}"
        return Builder(self.graph, name, node).op("Identity", value, controls=[pivot])

    def finish(self, node: Node, results: Sequence[Value], effects: Sequence[Node], done: Sequence[Node]) -> None:
        """Let `results` take the place of a lowered node, keep its name resolvable, and remove it.

        Args:
            node: the functional node.
            results: a value per output.
            effects: what its name, when it is run, must run.
            done: what its waiters wait for now.
        """
        dtypes = node.output_dtypes
        name, origin, is_named = node.name, node, not self.chain
        done = list(dict.fromkeys(done))
        users = node.control_users
        if users and len(done) > 1:
            done = [Builder(self.graph, f"{name}/done", origin).node("NoOp", controls=done)]
        for user in users:
            user.remove_control(node)
            for one in done:
                user.add_control(one)
        for value in node.read_outputs:
            value.replace_all_uses_with(results[value.index])
        self.graph.erase(node)
        if is_named:
            self._alias(name, results, dtypes, effects, done)

    def _alias(
        self, name: str, results: Sequence[Value], dtypes: Sequence[int], effects: Sequence[Node], done: Sequence[Node]
    ) -> None:
        """Keep a name of the original graph; nobody inside the graph reads it."""
        if not results or name in self.run_only:
            Builder(self.graph, name).node("NoOp", controls=effects or done)
        elif len(results) == 1:
            Builder(self.graph, name).node("Identity", *results, controls=effects, T=dtypes[0])
        else:
            Builder(self.graph, name).node("IdentityN", *results, controls=effects, T=tuple(dtypes))
