"""What breaking a job takes: a copy of it to work on, choices that never change, and the mutant that comes out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replication import common_name
from autograph_rewrite.ir.traversal import marks_before
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.collective_groups import Collective, collect, contracted_order
from tests.support.rank_jobs import Job

GROUP_SIZE, GROUP_KEY, INSTANCE_KEY = 1, 2, 3  # inputs of a collective


@dataclass(frozen=True)
class Mutant:
    """A broken job.

    Attributes:
        kind: of damage.
        job: the graphs, all of them its own.
        rank: the one that was changed; None where all were.
        named: what a fault has to name one of: collectives, without replicas.
        sentence: what was done.
    """

    kind: str
    job: Job
    rank: int | None
    named: tuple[str, ...]
    sentence: str

    def is_named_in(self, text: str) -> bool:
        """Tell whether a fault says on which rank something is wrong, and with what."""
        ranked = self.rank is None or f"rank {self.rank}" in text
        return ranked and (not self.named or any(name in text for name in self.named))


class Bench:
    """A copy of a job on which one thing is going to be broken.

    Args:
        job: which is not changed.
        rng: chooses.
    """

    def __init__(self, job: Job, rng: random.Random) -> None:
        self.job = job.clone()
        self.rng = rng
        self.graphs = self.job.graphs
        self.nodes = [node for graph in self.graphs for node in graph]
        self.groups = sorted(collect(self.nodes)[0], key=name_of)
        self.rank = rng.randrange(len(self.graphs))
        self.graph = self.graphs[self.rank]

    def of(self, group: Collective, rank: int | None = None) -> list[Node]:
        """Return the members of a collective in one rank's graph."""
        graph = self.graph if rank is None else self.graphs[rank]
        return [node for node in group.members if node.graph is graph]

    def pick(self, fits: Callable[[Collective], bool] = lambda group: True) -> tuple[Collective, Node]:
        """Choose a collective that fits, and one of this rank's members.

        Raises:
            IndexError: none does.
        """
        group = self.rng.choice([group for group in self.groups if fits(group)])
        return group, self.rng.choice(self.of(group))

    def pair(self) -> tuple[Collective, Collective]:
        """Choose two collectives that run on the same devices, neither of which has to wait for the other.

        Raises:
            IndexError: there are none.
        """
        order, _ = contracted_order(self.nodes, self.groups)
        marks = {node: 1 << i for i, group in enumerate(self.groups) for node in group.members}
        before = marks_before(order, marks)
        behind = [0] * len(self.groups)
        for i, group in enumerate(self.groups):
            for node in group.members:
                behind[i] |= before[node]
        places = [{node.device for node in group.members} for group in self.groups]
        pairs = [
            (one, two)
            for i, one in enumerate(self.groups)
            for j, two in enumerate(self.groups[:i])
            if places[i] == places[j] and not behind[i] >> j & 1 and not behind[j] >> i & 1
            and not in_loop(one) and not in_loop(two)
        ]  # fmt: skip
        found = self.rng.choice(pairs)
        return found if self.rng.random() < 0.5 else found[::-1]

    def broken(
        self, kind: str, groups: Sequence[Collective], did: str, rank: int | None = -1, *, named: Sequence[str] = ()
    ) -> Mutant:
        """Return the mutant; `rank` is this bench's own unless it is given; a fault may also name one of `named`."""
        own = self.rank if rank == -1 else rank
        where = "on all ranks" if own is None else f"on rank {own}"
        names = dict.fromkeys(common_name(node.name) for group in groups for node in group.members)
        return Mutant(kind, self.job, own, (*names, *named), f"{self.job.name}: {where}, {did}")


Kind = Callable[[Bench], Mutant]


def name_of(group: Collective) -> str:
    """Return what the members of a collective are called on every replica."""
    return common_name(group.members[0].name)


def in_loop(group: Collective) -> bool:
    """Tell whether a collective runs in a loop: its keys come in through an Enter."""
    return any(value.node.op == "Enter" or value.node.controls for value in group.members[0].inputs[1:])


def is_sized(group: Collective) -> bool:
    """Tell whether the instance key follows from a size."""
    return isinstance(group.instance_key, str)


def is_reduce(group: Collective) -> bool:
    return group.members[0].op == "CollectiveReduceV2"


def number(near: Value, value: int) -> Value:
    """Return a constant like `near`, with another value."""
    node = near.node
    attrs = {"value": np.int32(value), "dtype": dtypes.INT32}
    return node.graph.add(
        "Const", name=f"{node.name}/broken", attrs=attrs, device=node.device, controls=node.controls
    ).output()


def rewire(node: Node, index: int, value: int) -> None:
    """Give a key operand another value."""
    node.set_input(index, number(node.inputs[index], value))


def between(node: Node, op: str, inputs: Sequence[Value], **attrs: object) -> Value:
    """Add a node beside a collective."""
    return node.graph.add(op, inputs, name=f"{node.name}/{op}", attrs=attrs, device=node.device).output()


def numbers(node: Node, what: str, value: int) -> Value:
    attrs = {"value": np.array([value], np.int32), "dtype": dtypes.INT32}
    # It waits for what is sent, which keeps it in the loop that this is in.
    controls = [node.inputs[0].node]
    return node.graph.add(
        "Const", name=f"{node.name}/{what}", attrs=attrs, device=node.device, controls=controls
    ).output()


def is_branched(group: Collective) -> bool:
    return any("cond" in node.name and "grad" in node.name for node in group.members)
