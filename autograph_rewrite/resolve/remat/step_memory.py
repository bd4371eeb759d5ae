"""Compute the static peak of a step on one device for some recomputed segments: liveness over a schedule, no edits.

    schedule   x  a  b  c  loss  dc  [a' b']  db  da          copies run just before the first gradient that reads one
    a          └──┘                                            its last reader in the forward
    a'                               └────────────┘            its last reader among copies and gradients

The schedule is the order in which a queue of ready nodes runs, as in TensorFlow's executor with one thread. Buffers are
those of `analysis.liveness`, as in the simulation of a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograph_rewrite.analysis.list_elements import future_splits
from autograph_rewrite.analysis.liveness import Buffers, Lives, buffers_of
from autograph_rewrite.analysis.op_work import executed
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import ancestors, dependencies, grouped, reachable
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.traits import MERGES, has
from autograph_rewrite.plan.parts.messages import STEP
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.spans import differs_by_replica
from autograph_rewrite.training_graph import Variable

TIMES = 500
"""Most times of a step at which a floor is computed."""


@dataclass(frozen=True)
class StepRun:
    """The nodes and sizes of a step.

    Attributes:
        roots: the nodes that it is run for: updates, and the makers of its outputs.
        sizes: the numbers for symbols, of one device.
        kept: bytes that are always alive: variables, sums of micro-batches.
        together: how many replicas are on one device, each with separate values.
    """

    roots: tuple[Node, ...]
    outputs: frozenset[Value]
    sizes: Sizes
    kept: int = 0
    together: int = 1


class StepMemory:
    """Computes peaks of one step for any choice of recomputation, before the graph is edited."""

    def __init__(self, acts: Activations, step: StepRun) -> None:
        needed = ancestors(step.roots)
        order = executed((node for node in acts.state.order if node in needed), step.outputs)
        made = buffers_of(acts.state, order, frames_of(acts.state.order), step.sizes)
        self._buffers = _of_replicas(acts.state, made, step.together)
        self._at = {node: i for i, node in enumerate(_queued(order))}
        self._of: dict[Value, int] = {}  # the buffer of a value
        self._maker: list[int] = []
        self._nbytes: list[int] = []
        self._reads: list[tuple[int, int, bool, Node | None]] = []
        self.kept = step.kept
        for node in order:
            self._make(acts, node)
        self._held = [self._of[value] for value in step.outputs if value in self._of]
        self._moved = {  # the readers that would read a copy
            node: [(use.node.inputs[use.index], use.node) for use in acts.readers(node) if use.node in self._at]
            for node in acts.repeatable
            if node in self._at
        }
        self._late = _late_places(acts, self._at)
        self._early = _early_readers(acts, self._late)
        self._read = tuple(np.array(column) for column in zip(*(one[:3] for one in self._reads), strict=True))

    @property
    def work(self) -> int:
        """About how many nodes one peak visits."""
        return len(self._at)

    def nbytes(self, node: Node) -> float:
        """Return the bytes that a node makes on this device; a view makes none."""
        found = self._buffers.get(node)
        return 0.0 if found is None or found.hands_on else float(sum(found.nbytes))

    def peak(self, segments: Iterable[Sequence[Node]]) -> int:
        """Return the most bytes that are alive at a time.

        Args:
            segments: the nodes that are recomputed, by segment, producers first.
        """
        return self.lives(segments).peak

    def lives(self, segments: Iterable[Sequence[Node]]) -> Lives:
        """Return when each buffer is made and freed; those of copies come last."""
        parts = [[node for node in nodes if node in self._at] for nodes in segments]
        inside = {node for nodes in parts for node in nodes}
        places = np.arange(len(self._at), dtype=float)
        for node in inside:  # a reader of a copy waits for it
            for reader in self._early.get(node, ()):
                places[self._at[reader]] = self._late[reader]
        born = 2 * places[self._maker]
        freed = born + 1
        of, readers, reuses = self._read
        stays = np.array([node not in inside for *_, node in self._reads]) if inside else slice(None)
        np.maximum.at(freed, of[stays], (2 * places[readers] + 1 - reuses)[stays])
        freed[self._held] = np.inf
        made, ends, sizes = born.tolist(), freed.tolist(), list(self._nbytes)
        for nodes in parts:
            self._copies(nodes, places, (made, ends, sizes))
        return Lives(np.array(made), np.array(ends), np.array(sizes, dtype=np.int64), self.kept)

    def floors(self, nodes: Sequence[Node]) -> tuple[Any, Any]:
        """Return bytes that are alive at some times in any case, and the bytes that each of some nodes adds if kept.

        Args:
            nodes: activations; all others count as recomputed at no cost.
        """
        early, number = np.arange(len(self._at), dtype=float), {node: i for i, node in enumerate(nodes)}
        late = early.copy()
        for node, place in self._late.items():
            late[self._at[node]] = place
        # a floor must hold wherever these gradients run: count them as made as late, and read as early, as possible
        early, late = np.minimum(early, late), np.maximum(early, late)
        born = 2 * late[self._maker]
        unread, read = 2 * early[self._maker] + 1, np.stack([np.full(len(born), np.inf), np.zeros(len(born))])
        for i, reader, reuses, moved in self._reads:
            end = 2 * early[reader] + 1 - reuses
            if moved is not None and root_of(moved) in number:
                read[:, i] = min(read[0, i], 2 * late[reader]), max(read[1, i], end)
            else:
                unread[i] = max(unread[i], end)
        unread[self._held] = np.inf
        times = np.unique(born)
        times = times[:: len(times) // TIMES + 1, None]
        again = ((born <= times) & (times < unread)) | ((read[0] <= times) & (times < read[1]))
        kept = (born <= times) & (times < np.maximum(unread, read[1]))
        by_place, added = list(self._at), np.zeros((len(nodes), len(times)))
        for i, maker in enumerate(self._maker):
            if (at := number.get(by_place[maker])) is not None:
                added[at] += self._nbytes[i] * (kept[:, i].astype(float) - again[:, i])
        return again @ np.array(self._nbytes, dtype=float), added

    def _copies(self, nodes: Sequence[Node], places: Any, lists: tuple[list[float], list[float], list[int]]) -> None:
        """Add the buffers of a segment's copies, and extend the lives of the buffers that they read."""
        born, freed, nbytes = lists
        readers = [read for node in nodes for read in self._moved[node]]
        if not readers:
            return
        step = 0.5 / (len(nodes) + 1)
        now = 2.0 * min(places[self._at[node]] for _, node in readers) - 0.5
        own: dict[Value, int] = {}
        for node in nodes:
            now, made = now + step, self._buffers[node]
            sources = [own.get(value, self._of.get(value)) for value in node.inputs]
            for i in sources:
                if i is not None:
                    freed[i] = max(freed[i], now if made.reuses else now + step / 2)
            for j, size in enumerate(made.nbytes):
                if not made.hands_on:
                    own[node.output(j)] = len(born)
                    born.append(now)
                    freed.append(now + step / 2)
                    nbytes.append(size)
                elif sources and sources[0] is not None:
                    own[node.output(j)] = sources[0]
        for value, node in readers:
            if value in own:
                end = 2 * places[self._at[node]] + 1 - self._buffers[node].reuses
                freed[own[value]] = max(freed[own[value]], end)

    def _make(self, acts: Activations, node: Node) -> None:
        """Note the buffers that a node makes, and those that it reads."""
        made: Buffers = self._buffers[node]
        sources = [self._of.get(value) for value in node.inputs]
        for value, i in zip(node.inputs, sources, strict=True):
            if i is not None and not (node in acts.backward and has(node.op, "sizes")):  # these run in the forward
                moves = node in acts.backward and not has(value.node.op, "sizes")
                self._reads.append((i, self._at[node], made.reuses, value.node if moves else None))
        # a Merge of a condition takes the input from the branch that counts: the other input has no buffer
        handed = [i for i in sources if i is not None] if node.op in MERGES else sources[:1]
        for j, nbytes in enumerate(made.nbytes):
            if has(node.op, "held"):
                self.kept += nbytes
            elif not made.hands_on:
                self._of[node.output(j)] = len(self._maker)
                self._maker.append(self._at[node])
                self._nbytes.append(nbytes)
            elif handed and handed[0] is not None:
                self._of[node.output(j)] = handed[0]


def _of_replicas(state: Propagation, buffers: dict[Node, Buffers], together: int) -> dict[Node, Buffers]:
    """Return the buffers of all replicas on a device: values that differ between replicas, or are fed, count each."""
    if together == 1:
        return buffers
    lists, fed = future_splits(state), {value.node for value in state.whole_inputs}
    found = dict(buffers)
    for node, made in buffers.items():
        if node in fed or differs_by_replica(state, node, lists):
            found[node] = made._replace(nbytes=tuple(together * nbytes for nbytes in made.nbytes))
    return found


def _late_places(acts: Activations, at: Mapping[Node, int]) -> dict[Node, float]:
    """Return the places at which gradients that need no other gradient run if they read a copy.

    Without copies they run during the forward, like the 2 a in the gradient of a square; after a copy, just before
    their first reader.
    """
    end = max((at[node] for node in acts.repeatable if node in at), default=0)
    early = [node for node in sorted(acts.backward & at.keys(), key=at.__getitem__) if at[node] < end]
    late: dict[Node, float] = {}
    for node in reversed(early):
        users = {use.node for value in node.read_outputs for use in value.uses}
        first = min((late.get(user, float(at[user])) for user in users if user in at), default=float(at[node]))
        late[node] = first - 0.1 / (len(early) + 1)
    return late


def _early_readers(acts: Activations, late: Mapping[Node, float]) -> dict[Node, set[Node]]:
    """Return, by forward node, the gradients that can run during the forward and depend on it, also indirectly."""
    found: dict[Node, set[Node]] = {}
    for node in late:
        made_of = reachable([node], lambda one: [value.node for value in one.inputs if value.node in late])
        for value in (value for one in made_of for value in one.inputs if value.node in acts.repeatable):
            found.setdefault(value.node, set()).add(node)
    return found


def _queued(order: Sequence[Node]) -> list[Node]:
    """Return nodes in the order in which a queue of ready nodes runs them."""
    inside = set(order)
    before = {node: [one for one in dict.fromkeys(dependencies(node)) if one in inside] for node in order}
    users = grouped((producer, node) for node, producers in before.items() for producer in producers)
    waits = Counter({node: len(producers) for node, producers in before.items()})
    ready, found = deque(node for node in order if not waits[node]), []
    while ready:
        node = ready.popleft()
        found.append(node)
        for user in users.get(node, ()):
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return found


def variable_bytes(plan: Plan, variables: Mapping[str, Variable]) -> int:
    """Return the bytes of variables on the device that holds most of them.

    Args:
        variables: by name; each shard is a separate variable.
    """
    homes, everywhere = Counter[str](), 0
    for name, variable in variables.items():
        if name in plan.homes:
            homes[plan.homes[name]] += variable.nbytes
        else:
            everywhere += variable.nbytes
    return everywhere + max((homes[device] for device in plan.devices), default=0)


def gradients_of_variables(graph: Graph, resolved: Plan) -> list[Value]:
    """Return the gradients of variables, each once."""
    return list(dict.fromkeys(graph.value(edge.value) for edge in resolved.edges if edge.owner != STEP))
