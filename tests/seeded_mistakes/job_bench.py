"""What breaking a job takes: copies of the graphs of all its ranks, and the collectives in which they meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cached_property

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.traversal import marks_before
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.collective_groups import Collective, collect, contracted_order
from tests.seeded_mistakes.bench import Bench
from tests.support.rank_jobs import Job

GROUP_SIZE, GROUP_KEY, INSTANCE_KEY = 1, 2, 3  # inputs of a collective


class JobBench(Bench):
    """The graphs of a job, one of which is going to be broken; some kinds break all.

    Args:
        job: which is not changed.
        rng: chooses.

    Attributes:
        blamed: what a fault has to name one of: collectives, without replicas, or whatever else a kind names.
        blamed_rank: the rank that it has to name; None where all were changed.
    """

    def __init__(self, job: Job, rng: random.Random) -> None:
        self.job = job.clone()
        self.graphs = self.job.graphs
        self.rank = rng.randrange(len(self.graphs))
        super().__init__(self.graphs[self.rank], job.original, 1, rng)
        self.nodes_of_all = [node for graph in self.graphs for node in graph]
        self.groups = sorted(collect(self.nodes_of_all)[0], key=name_of)
        self.blamed: tuple[str, ...] = ()
        self.blamed_rank: int | None = self.rank

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes of this rank: also what its step does not need can be broken."""
        return [*self.graph]

    def of(self, group: Collective, rank: int | None = None) -> list[Node]:
        """Return the members of a collective in one rank's graph."""
        graph = self.graph if rank is None else self.graphs[rank]
        return [node for node in group.members if node.graph is graph]

    def member(self, fits: Callable[[Collective], bool] = lambda group: True) -> tuple[Collective, Node]:
        """Choose a collective that fits, and one of this rank's members.

        Raises:
            LookupError: none does.
        """
        group = self.pick(group for group in self.groups if fits(group))
        return group, self.pick(self.of(group))

    def pair(self) -> tuple[Collective, Collective]:
        """Choose two collectives that run on the same devices, neither of which has to wait for the other.

        Raises:
            LookupError: there are none.
        """
        order, _ = contracted_order(self.nodes_of_all, self.groups)
        marks = {node: 1 << i for i, group in enumerate(self.groups) for node in group.members}
        before = marks_before(order, marks)
        behind = [0] * len(self.groups)
        for i, group in enumerate(self.groups):
            for node in group.members:
                behind[i] |= before[node]
        places = [{node.device for node in group.members} for group in self.groups]
        one, other = self.pick(
            (one, two)
            for i, one in enumerate(self.groups)
            for j, two in enumerate(self.groups[:i])
            if places[i] == places[j] and not behind[i] >> j & 1 and not behind[j] >> i & 1
            and not in_loop(one) and not in_loop(two)
        )  # fmt: skip
        return (one, other) if self.rng.random() < 0.5 else (other, one)

    def key(self, value: int, like: Value) -> Value:
        """Return another number for a key; it is in the loop that the old one is in."""
        return self.const(value, like, controls=like.node.controls)

    def rewire(self, node: Node, index: int, value: int) -> None:
        """Give a key operand another number."""
        node.set_input(index, self.key(value, node.inputs[index]))

    def sent(self, node: Node, op: str, inputs: Sequence[Value], *ends: int) -> Value:
        """Add a node beside a collective, with numbers as its last inputs; they are in the loop of what is sent."""
        numbers = [self.const([end], node.inputs[0], dtype=dtypes.INT32) for end in ends]
        return self.add(op, [*inputs, *numbers], node).output()

    def said(self, did: str, *groups: Collective, everywhere: bool = False, named: Sequence[str] = ()) -> str:
        """Return the sentence for what was done, and note what a fault has to name."""
        names = dict.fromkeys(common_name(node.name) for group in groups for node in group.members)
        self.blamed = (*names, *named)
        self.blamed_rank = None if everywhere else self.rank
        return f"{self.job.name}: on {'all ranks' if everywhere else f'rank {self.rank}'}, {did}"


JobKind = Callable[[JobBench], str]


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
    """Tell whether a collective reduces."""
    return group.members[0].op == "CollectiveReduceV2"


def is_branched(group: Collective) -> bool:
    """Tell whether a collective is for the gradient of a branch."""
    return any("cond" in node.name and "grad" in node.name for node in group.members)
