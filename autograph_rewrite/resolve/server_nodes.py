"""Nodes that run on the server of a variable instead of on a replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from autograph_rewrite.ir.graph import Node


@dataclass
class ServerRegion:
    """The nodes of servers.

    Attributes:
        homes: device by variable, the state of optimizers included.
        handles: device by the node that gives the variable's handle.
        nodes: those that run once per job; passes add to them.
        devices: of all nodes that are not where their replica is.
        pushes: by variable, the nodes that hand this process's contribution over.
    """

    homes: dict[str, str] = field(default_factory=dict)
    handles: dict[Node, str] = field(default_factory=dict)
    nodes: set[Node] = field(default_factory=set)
    devices: dict[Node, str] = field(default_factory=dict)
    pushes: dict[str, list[Node]] = field(default_factory=dict)
