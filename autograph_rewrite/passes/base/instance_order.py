"""The order of instances in time (happens-after edges and barriers), as plain data that expansion writes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH, Select

GATE = "autograph_micro/gate"


class HappensAfter(NamedTuple):
    """A node, and the micro-batch whose instance of it has to run first."""

    node: Node
    micro: int


class Gate(NamedTuple):
    """What waits for some nodes of a micro-batch, what passes that on, and the sums that have to have grown by then."""

    gate: Node
    passed: Node
    sums: tuple[Node, ...]


@dataclass(frozen=True)
class InstanceOrder:
    """What expansion has to add to the instances.

    Attributes:
        roots: nodes that wait for something, with what the instance of each micro-batch waits for.
        sums: by gate, the sums over all micro-batches for whose partial result it waits.
        meetings: the first nodes of which none can run before all micro-batches have come so far.
    """

    roots: Mapping[Node, tuple[HappensAfter | None, ...]] = field(default_factory=dict)
    sums: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    meetings: tuple[Node, ...] = ()


NO_ORDER = InstanceOrder()


def is_running_sum(node: Node) -> bool:
    """Return whether a node adds up all instances, or a replica's: expansion adds each as soon as it is there."""
    if node.op != "AddN" or node.selects != {0: Select.ALL} or len(node.inputs) != 1:
        return False
    return node.inputs[0].node.span == EACH
