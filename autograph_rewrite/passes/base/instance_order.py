"""Describe the order of instances in time (happens-after edges and barriers) as plain data; expansion writes it out."""

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
    """The node that waits for a micro-batch, the node that the next one waits for, and the running sums to wait for."""

    gate: Node
    passed: Node
    sums: tuple[Node, ...]


@dataclass(frozen=True)
class InstanceOrder:
    """The waits that expansion adds to the instances.

    Attributes:
        roots: nodes that wait, each with what its instance of each micro-batch waits for.
        sums: by gate, the running sums whose partial result it waits for.
        meetings: for each barrier, the first node after it: no micro-batch runs it before all have reached the barrier.
    """

    roots: Mapping[Node, tuple[HappensAfter | None, ...]] = field(default_factory=dict)
    sums: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    meetings: tuple[Node, ...] = ()


NO_ORDER = InstanceOrder()


def is_running_sum(node: Node) -> bool:
    """Return whether a node sums all instances, or those of a replica: expansion then adds one term after another."""
    if node.op != "AddN" or node.selects != {0: Select.ALL} or len(node.inputs) != 1:
        return False
    return node.inputs[0].node.span == EACH
