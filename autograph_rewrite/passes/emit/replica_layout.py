"""Define the layout of instances: their devices, names and order.

    once       w                      replica    w, replica_1/w                  (w holds one value everywhere)
    each       replica_0/micro_1/x    replica    replica_0/dw/add_n              (each holds its own)

Nodes that hold the same value in every instance keep their name for the first, so variables keep their names.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH, MICRO, ONCE, PER_REPLICA, SERVER, WITHIN, Mesh, prefix
from autograph_rewrite.passes.base.instance_order import NO_ORDER, InstanceOrder


@dataclass(frozen=True)
class ReplicaLayout:
    """The devices and the order of the instances of nodes.

    Attributes:
        mesh: the instances of a process, and their devices.
    """

    mesh: Mesh
    order: InstanceOrder = NO_ORDER

    def __len__(self) -> int:
        return self.mesh.count(EACH)

    @cached_property
    def micro(self) -> int:
        """How many instances belong to one replica."""
        return self.mesh.size(MICRO)

    @cached_property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """The device of each micro-batch's instance, for each place that a node may have in a replica."""
        instances = [self.mesh.coordinates(EACH, i) for i in range(len(self))]
        return tuple(tuple(self.mesh.device({**place, **at}) for at in instances) for place in self.mesh.within())

    def cell(self, node: Node) -> int:
        """Return the number of a node's place in a replica."""
        places = WITHIN - self.mesh.along
        return self.mesh.number(places, {axis: node.at(axis) for axis in node.place}) if node.place else 0

    def of(self, node: Node) -> tuple[str, ...]:
        """Return the device of each micro-batch's instance of a node."""
        return self.cells[self.cell(node)]

    def shared(self, node: Node) -> str | None:
        """Return the shared device of a node; None if each replica has it on another device."""
        return self.mesh.shared[node.at(SERVER)] if SERVER in node.place else None

    def device(self, node: Node, instance: int) -> str:
        """Return the device of an instance of a node that does not run once."""
        return self.mesh.device(
            {**{axis: node.at(axis) for axis in node.place}, **self.mesh.coordinates(node.span, instance)}
        )


def instance_name(node: Node, instance: int, common: Collection[Node], micro: int = 1) -> str:
    """Return the name of one instance of a node; nodes in `common` keep theirs for the first.

    Args:
        instance: counted over replicas, and over the micro-batches of each if the node runs for each of them.
        common: nodes whose instances all hold one value.
        micro: micro-batches per replica.
    """
    if node.span == ONCE or (instance == 0 and node in common):
        return node.name
    return prefix(instance, micro if node.span == EACH else 1) + node.name


def sum_name(node: Node, instance: int, run: ReplicaLayout, common: Collection[Node]) -> str:
    """Return the name of a running sum up to an instance, which is not the first of its replica.

    Args:
        instance: the last one that is added.
        common: nodes whose instances all hold one value.
    """
    replica, micro = divmod(instance, run.micro)
    if micro + 1 == run.micro and (node.span == PER_REPLICA or len(run) == run.micro):
        return instance_name(node, replica, common)
    return f"{node.name}/with_{instance}"
