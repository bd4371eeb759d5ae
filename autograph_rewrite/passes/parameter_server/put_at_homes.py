"""Put nodes where variables live: on which device each of them stands, and what runs there once for the whole job."""

from __future__ import annotations

from autograph_rewrite.ir.mesh import PROCESS
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.resolve.server_region import find_server_region


def put_at_homes(rewrite: Rewrite) -> None:
    """Give each node of the server region its place."""
    region = find_server_region(rewrite.plan, rewrite.state, rewrite.item.variables)
    rewrite.put(Homes(region.homes, sorted(set(region.homes.values()))))
    for node, device in region.devices.items():
        node.set_place(rewrite.on(device))
    for node in region.nodes:
        node.put(PROCESS, 0)
