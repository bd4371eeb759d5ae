"""Interpret the loops that a rewrite has made on sample data, per replica and iteration.

    t = 0, 1, ...   Merge      takes what entered, later what NextIteration handed on
                    Switch     hands on one way; what reads the other one does not run
                    LoopCond   says whether there is another iteration
                    Exit       gives the one thing that arrives there, when the loop ends

An original node in it is not computed. Its k-th run on a replica stands for the k-th micro-batch there, whatever the
number of the iteration: in a pipeline a stage begins late. That is a name and no assumption: the run has to read what
this micro-batch reads, there has to be one for each, and what becomes of its values is compared like everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autograph_rewrite.certify.baseline import Leaf, Unknown
from autograph_rewrite.certify.op_kinds import BACK_EDGES, ENTERS, EXITS, writes_variable
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.control_flow import by_loops, frames_of
from autograph_rewrite.ir.graph import Node, PerInstance, Span, Value

IDLE = 64
"""So many iterations behind each other may work on no micro-batch: a stage of a pipeline waits for those before it."""
FORWARDED = frozenset(("Identity", "LoopCond", "NextIteration"))
"""What hands on what it reads, as it is held."""


class _Dead:
    """What a node gives that does not run."""


DEAD = _Dead()


class NotUnderstoodError(Exception):
    """A loop is of a kind that this module does not run."""


class Outside(Protocol):
    """What a loop needs of the simulation that it is part of."""

    @property
    def matches(self) -> Mapping[Node, Node | None]:
        """The original node that each node is, if it is one."""

    def item(self, value: Value, copy: int) -> Any:
        """Return what a replica holds of a value from outside."""

    def leaf(self, node: Node, index: int, instance: int) -> Leaf:
        """Return what an instance of an original node gives.

        Args:
            node: of the rewritten graph.
            index: of its output.
            instance: which replica, or micro-batch of a replica.
        """

    def data(self, item: Any, instance: int) -> Any:
        """Make data of what is held."""

    def computed(self, node: Node, copy: int, items: Sequence[Any]) -> Sequence[Any]:
        """Return what a node that is not original makes of what is held of its operands.

        Args:
            node: of the loop's body.
            copy: which instance of the loop.
            items: what is held of each operand.
        """


def parts_of(order: Sequence[Node], matches: Mapping[Node, Node | None]) -> list[tuple[Sequence[Node], bool]]:
    """Return the nodes in runs, producers first, each with whether it is a loop that the rewrite has made.

    Args:
        order: the nodes, producers first.
        matches: by node, the original one.
    """
    frames = frames_of(order)
    made = {
        frame[0]
        for node, frame in frames.items()
        if node.op == "LoopCond" and node.span is Span.EACH and matches[node] is None and len(frame) == 1
    }
    if not made:
        return [(order, False)]
    return [(run, run[0] in frames and frames[run[0]][0] in made) for run in by_loops(order)]


class Loop:
    """One loop, which every replica runs for itself.

    Args:
        outside: the simulation that it is part of.
        nodes: of the loop, producers first.
        copies: how many replicas there are.
        micro: how many micro-batches each of them has.

    Attributes:
        read: by original node, what each instance holds of each of its operands.
        given: by value that leaves the loop, what each replica holds of it.
    """

    def __init__(self, outside: Outside, nodes: Sequence[Node], copies: int, micro: int) -> None:
        self._outside, self._nodes, self._copies, self._micro = outside, nodes, copies, micro
        inside = set(nodes)
        self._exits = [use.node for node in nodes for value in node.read_outputs for use in value.uses]
        self._exits = [node for node in dict.fromkeys(self._exits) if node.op in EXITS]
        if any(node.span is not Span.EACH for node in inside):
            raise NotUnderstoodError("replicas share a part of it")
        if sum(node.op == "LoopCond" for node in nodes) != 1:
            raise NotUnderstoodError("it is not one loop")
        self.read: dict[Node, list[Sequence[Any]]] = {node: [] for node in nodes if outside.matches[node] is not None}
        self.given: dict[Value, list[Any]] = {node.output(): [] for node in self._exits}

    def run(self) -> None:
        """Run it on every replica.

        Raises:
            VerifyError: it does not end, writes a variable, leaves out a micro-batch, gives two things or none, or is
                one loop for several replicas.
            NotUnderstoodError: it is of another kind.
        """
        self._check_frames()
        for node in self.read:
            if writes_variable(node.op):
                raise VerifyError(f"'{node.name}' writes in every iteration of a loop", node=node)
        for copy in range(self._copies):
            one = _Replica(self._outside, self._nodes, copy, self._micro)
            given: dict[Node, Any] = {}
            for now in one.iterations():
                for node in self._exits:
                    item = now.get(node.inputs[0], DEAD)
                    if item is not DEAD and node in given:
                        raise VerifyError(f"'{node.name}' leaves its loop twice", node=node)
                    if item is not DEAD:
                        given[node] = item
            for node in self._exits:
                if node not in given:
                    raise VerifyError(f"'{node.name}' never leaves its loop", node=node)
                self.given[node.output()].append(given[node])
            for node, runs in self.read.items():
                if len(one.read.get(node, ())) != self._micro:
                    count = len(one.read.get(node, ()))
                    raise VerifyError(f"'{node.name}' runs for {count} of {self._micro} micro-batches", node=node)
                runs += one.read[node]

    def _check_frames(self) -> None:
        for node in self._nodes:
            if node.op in ENTERS:
                raw = node.attrs["frame_name"]
                names = raw.raws if isinstance(raw, PerInstance) else (raw,)
                if len(set(names)) < self._copies:
                    raise VerifyError(f"'{node.name}' enters one loop on all replicas", node=node)


class _Replica:
    """One replica's run of a loop."""

    def __init__(self, outside: Outside, nodes: Sequence[Node], copy: int, micro: int) -> None:
        self._outside, self._nodes, self._copy, self._micro = outside, nodes, copy, micro
        self.read: dict[Node, list[Sequence[Any]]] = {}
        self._now: dict[Value, Any] = {}
        self._before: Mapping[Value, Any] | None = None  # what the iteration before handed on
        self._goes_on = False

    def iterations(self) -> Any:
        """Run the iterations; yield what is held in each.

        Raises:
            VerifyError: there are always more.
            NotUnderstoodError: something goes on when the condition says that it is over.
        """
        idle = 0
        while idle <= IDLE:
            known = sum(map(len, self.read.values()))
            self._iteration()
            yield self._now
            carried = {value: item for value, item in self._now.items() if value.node.op in BACK_EDGES}
            carried = {value: item for value, item in carried.items() if item is not DEAD}
            if not self._goes_on and carried:
                raise NotUnderstoodError("something goes on after its last iteration")
            if not self._goes_on:
                return
            self._before = carried
            idle = 0 if sum(map(len, self.read.values())) > known else idle + 1
        raise VerifyError(f"the loop of '{self._nodes[0].name}' does not end", node=self._nodes[0])

    def _iteration(self) -> None:
        self._now, self._goes_on = {}, False
        dead: set[Node] = set()
        for node in self._nodes:
            items = [self._item(node, value) for value in node.inputs]
            if any(control in dead for control in node.controls):
                items = [DEAD]
            results = self._results(node, items)
            if not results:
                dead.add(node)
            for value in node.read_outputs:
                self._now[value] = results[value.index] if value.index < len(results) else DEAD

    def _item(self, node: Node, value: Value) -> Any:
        if node.op in ENTERS:
            first = self._before is None or bool(node.attr("is_constant", False))
            return self._outside.item(value, self._copy) if first else DEAD
        if value.node.op in BACK_EDGES:
            return DEAD if self._before is None else self._before.get(value, DEAD)
        if value not in self._now:
            raise NotUnderstoodError(f"'{node.name}' reads '{value.name}' by no door")
        return self._now[value]

    def _results(self, node: Node, items: Sequence[Any]) -> Sequence[Any]:
        """Return what a node gives; nothing if it does not run."""
        if node.op == "Merge" and self._outside.matches[node] is None:
            return self._merged(node, items)
        if any(item is DEAD for item in items):
            return ()
        if self._outside.matches[node] is not None:
            return self._original(node, items)
        if node.op in ENTERS or node.op in FORWARDED:
            if node.op == "LoopCond":
                self._goes_on = self._holds(items[0])
            return items
        if node.op == "Switch":
            return [DEAD, items[0]] if self._holds(items[1]) else [items[0], DEAD]
        if node.op == "NoOp":
            return [None]
        return self._outside.computed(node, self._copy, items)

    def _merged(self, node: Node, items: Sequence[Any]) -> Sequence[Any]:
        alive = [index for index, item in enumerate(items) if item is not DEAD]
        if len(alive) > 1:
            raise VerifyError(f"'{node.name}' gets two values in one iteration", node=node)
        return [items[alive[0]], alive[0]] if alive else ()

    def _holds(self, item: Any) -> bool:
        if isinstance(item, Unknown):
            raise NotUnderstoodError(item.why)
        return bool(self._outside.data(item, self._copy))

    def _original(self, node: Node, items: Sequence[Any]) -> Sequence[Any]:
        runs = self.read.setdefault(node, [])
        outputs = range(max((value.index for value in node.read_outputs), default=0) + 1)
        if len(runs) == self._micro:
            return [Unknown(f"'{node.name}' after the last micro-batch") for _ in outputs]
        runs.append(items)
        instance = self._copy * self._micro + len(runs) - 1
        return [self._outside.leaf(node, index, instance) for index in outputs]
