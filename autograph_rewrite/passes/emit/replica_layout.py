"""The layout of instances: where each is, what it is called, and in which order they run.

    once       w                      replica    w, replica_1/w                  (w holds one value everywhere)
    each       replica_0/micro_1/x    replica    replica_0/dw/add_n              (each holds its own)

Nodes that hold the same value in every instance keep their name for the first, so variables are found under their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH, ONCE, PER_REPLICA, Mesh, Select, prefix
from autograph_rewrite.passes.base.instance_order import NO_ORDER, InstanceOrder


@dataclass(frozen=True)
class ReplicaLayout:
    """How nodes of several instances are run: on which devices, and in which order.

    Attributes:
        devices: by stage, the device of each instance; one entry where there are no stages.
        micro: how many instances belong to one replica.
        order: in which they follow each other.
        stages: of the nodes that are not in the first one.
        pinned_devices: the devices of nodes that are not where their replica is.
    """

    devices: tuple[tuple[str, ...], ...]
    micro: int = 1
    order: InstanceOrder = NO_ORDER
    stages: Mapping[Node, int] = field(default_factory=dict)
    pinned_devices: Mapping[Node, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.devices[0])

    @cached_property
    def mesh(self) -> Mesh:
        """The instances of a process."""
        return Mesh.of(len(self) // self.micro, self.micro)

    def of(self, node: Node) -> tuple[str, ...]:
        """Return the device of each micro-batch's instance of a node."""
        return self.devices[self.stages.get(node, 0)]

    def count(self, node: Node) -> int:
        """Return how many instances a node has."""
        return self.mesh.count(node.span)

    def device(self, node: Node, instance: int) -> str:
        """Return the device of an instance of a node that does not run once."""
        if node in self.pinned_devices:
            return self.pinned_devices[node]
        return self.of(node)[instance * len(self) // self.count(node)]

    def read(self, node: Node, instance: int, producer: Node, select: Select | None) -> list[int]:
        """Return which instances of a producer an instance of a node reads.

        Args:
            node: the reader.
            select: which of several.
        """
        return self.mesh.read(node.span, instance, producer.span, select)


def instance_name(node: Node, instance: int, common: Collection[Node], micro: int = 1) -> str:
    """Return the name of one instance of a node; nodes in `common` keep theirs for the first.

    Args:
        node: of the folded graph.
        instance: counted over replicas, and over the micro-batches of each, if it has one for each of them.
        common: nodes whose instances all hold one value.
        micro: micro-batches per replica.
    """
    if node.span == ONCE or (instance == 0 and node in common):
        return node.name
    return prefix(instance, micro if node.span == EACH else 1) + node.name


def sum_name(node: Node, instance: int, run: ReplicaLayout, common: Collection[Node]) -> str:
    """Return the name of a running sum once it has an instance, which is not the first of its replica.

    Args:
        node: the AddN of the folded graph.
        instance: the last that has been added.
        run: how instances are run.
        common: nodes whose instances all hold one value.
    """
    replica, micro = divmod(instance, run.micro)
    if micro + 1 == run.micro and (node.span == PER_REPLICA or len(run) == run.micro):
        return instance_name(node, replica, common)
    return f"{node.name}/with_{instance}"
