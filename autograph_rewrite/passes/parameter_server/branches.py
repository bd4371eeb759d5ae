"""Branches of workers in which server ops run: who waits for those, and that the rest stays in its branch.

    worker 0   update @ ps ──^──► constant ──► Merge          what the branch ends with waits for the update
    worker 1   Switch:1    ──^──► constant ──► Merge          it has no update, and must not be alive in both branches

A server op in a branch hands over nothing by itself, for it may not run: where branches meet, one token says that it
has, or never will. Where only the server knows which branch is taken, that is handed over, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import Guard, Guards, frames_of, guards_of, opened
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import dependencies, users
from autograph_rewrite.ops.traits import MERGES, SWITCHES

_NONE: Guards = frozenset()


class Branches:
    """The branches and loops of one worker's graph, before server ops leave it.

    Args:
        graph: of all replicas and the servers.
        order: its nodes, producers first.
        on_server: those that worker 0 runs.

    Attributes:
        unconditional: the nodes that run in every step, once.

    Raises:
        PassError: only a branch or loop of the server tells whether something of this worker runs.
    """

    def __init__(self, graph: Graph, order: Sequence[Node], on_server: set[Node]) -> None:
        self._graph, self._order, self._on_server = graph, order, on_server
        self._frames = frames_of(order)
        self._guards = guards_of(order, self._frames)
        self.unconditional = {node for node in order if node not in self._frames and node not in self._guards}
        self._lost = self._find_lost()
        self._switches: dict[tuple[Guard, Guards], Node | None] = {}
        for node, lost in self._lost.items():
            for guard in lost:
                self._switches[guard, self._guards[node]] = self._switch_of(node, guard)
        self._pivots: dict[tuple[Guard, Guards], Node] = {}

    def _find_lost(self) -> dict[Node, Guards]:
        """Return what nodes of the worker run behind only because they wait for server ops.

        What leads to nothing that the worker does in every step is left out with those.
        """
        matters: set[Node] = set()
        for node in reversed(self._order):
            if node not in self._on_server and (node in self.unconditional or not matters.isdisjoint(users(node))):
                matters.add(node)
        found: dict[Node, Guards] = {}
        for node in self._order:
            controls = [control for control in node.controls if control not in self._on_server]
            if node not in matters or node.op in MERGES or len(controls) == len(node.controls):
                continue
            alive = [opened(value, self._frames, self._guards.get(value.node, _NONE)) for value in node.inputs]
            kept = _NONE.union(*alive, *(self._guards.get(control, _NONE) for control in controls))
            lost = self._guards.get(node, _NONE) - kept
            if lost:
                found[node] = lost
        return found

    def _switch_of(self, node: Node, guard: Guard) -> Node | None:
        """Return a Switch of the worker that decides about a node; None: its predicate does, which is in no branch."""
        wanted = self._guards.get(node, _NONE)
        local = (node for node in self._order if node.op in SWITCHES and node not in self._on_server)
        for switch in local:
            opens = opened(switch.output(guard.taken), self._frames, _NONE)
            if guard in opens and self._guards.get(switch, _NONE) <= wanted:
                return switch
        if guard.predicate.node in self.unconditional:
            return None
        raise PassError(
            f"'{node.name}' runs on every worker, in a branch inside of another that only a parameter server knows of",
            node=node,
            hint="give the variables that are updated in this branch synchronizer: all_reduce",
        )

    def predicates(self) -> list[Value]:
        """Return the values on servers that decide what the worker runs."""
        needed = dict.fromkeys(guard.predicate for (guard, _), switch in self._switches.items() if switch is None)
        return [value for value in needed if value.node in self._on_server]

    def joined(self) -> dict[Node, list[Node]]:
        """Return the nodes of workers in which branches meet, with the last server ops that the branches wait for."""
        behind: dict[Node, dict[Node, None]] = {}
        found: dict[Node, list[Node]] = {}
        for node in self._order:
            if node in self._on_server:
                continue
            awaited: dict[Node, None] = {}
            for producer in dependencies(node):
                if producer in self._on_server:
                    awaited |= {} if producer in self.unconditional else {producer: None}
                else:
                    awaited |= behind.get(producer, {})
            if awaited and node not in self.unconditional:
                behind[node] = awaited
            elif awaited and node.op in MERGES:
                found[node] = list(awaited)
        return found

    def leave_out(self, node: Node, awaited: Sequence[Node], handed: Mapping[Value, Value]) -> None:
        """Let a node in a branch no longer wait for server ops, and run in no other branch.

        Args:
            node: it.
            awaited: the server ops.
            handed: what the worker reads instead of values on servers.
        """
        for control in awaited:
            node.remove_control(control)
        for guard in sorted(self._lost.get(node, _NONE), key=lambda guard: (len(guard.frame), guard.predicate.name)):
            key = guard, self._guards[node]
            if key not in self._pivots:
                self._pivots[key] = self._pivot(guard, handed.get(guard.predicate, guard.predicate), node)
            node.add_control(self._pivots[key])

    def _pivot(self, guard: Guard, predicate: Value, node: Node) -> Node:
        """Return a node of the worker that runs where a predicate has a value."""
        name = f"{node.name}/{'taken' if guard.taken else 'else'}"
        switch = self._switches[guard, self._guards[node]]
        where = switch or node
        if switch is None:
            switch = self._graph.add(
                "Switch",
                (predicate, predicate),
                name=self._graph.unique_name(f"{name}/switch"),
                device=where.device,
                span=where.span,
                origin=where,
            )
        return self._graph.add(
            "Identity",
            (switch.output(guard.taken),),
            name=self._graph.unique_name(name),
            device=where.device,
            span=where.span,
            origin=where,
        )
