"""What a step on accelerators does on its host: nodes without a kernel there, and tensors that cross.

x (fed) ══ host link ══► MatMul        words = AsString(h)    on the host's cores, h crosses first
"""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.analysis.accelerator.device_placement import host_of, is_accelerator, place
from autograph_rewrite.analysis.accelerator.host_crossings import crossings
from autograph_rewrite.analysis.accelerator.host_nodes import host_nodes
from autograph_rewrite.cost.hardware.topology import Topology
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep
from autograph_rewrite.ir.graph import Node, Value

LINK = "host link of "
"""And the lane of the devices: each has a link of its own."""


@dataclass(frozen=True)
class HostUse:
    """Where the host takes part in a step on accelerators.

    Attributes:
        nodes: what it computes.
        moved: values that cross on their way to a reader.
    """

    nodes: frozenset[Node] = frozenset()
    moved: frozenset[tuple[Value, Node]] = frozenset()


def host_use(folded: AnalyzedStep, topology: Topology) -> HostUse:
    """Return what a folded step does on the host; nothing where replicas are on CPUs, or kernels are not known.

    Args:
        folded: the step.
        topology: its devices.
    """
    device = topology.plan.devices_of(0)[0]
    if not is_accelerator(device):
        return HostUse()
    home, nodes, named = host_of(device), folded.order, folded.item.inputs.values()
    fed = {node for node in nodes if node.name in {info.tensor.partition(":")[0] for info in named}}

    def requested(node: Node) -> str:
        return home if "CPU" in node.device.upper() else device

    there = host_nodes(nodes, requested, fed, folded.frames)
    placed = place(nodes, lambda node: home if node in there else requested(node), fed)
    found = crossings(dict.fromkeys(nodes), placed, fed, ())
    computed = (node for node, one in placed.items() if not is_accelerator(one.device) and node not in fed)
    return HostUse(frozenset(computed), frozenset((one.value, reader) for one in found for reader in one.readers))
