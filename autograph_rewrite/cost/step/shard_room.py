"""A budget for recomputation in a simulated step whose variables are split, though the simulation has them whole.

budget 30 MiB, of it 9 for shards          the rewrite: variables are cut first
budget 39 MiB, of it 18 for variables      the simulation: variables are whole, and tensors have the same room
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autograph_rewrite.plan.parts.residence import REPLICATED, Sharded
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.remat.step_memory import variable_bytes
from autograph_rewrite.training_graph import Variable


def with_same_room(whole: Plan, plan: Plan, variables: Mapping[str, Variable], owners: Mapping[str, str]) -> Plan:
    """Return the request without shards, with a budget that leaves tensors the room that they have beside shards.

    Args:
        whole: the request without shards.
        plan: the request.
        variables: by name.
        owners: of the slots that an optimizer keeps, the variables that they are for.
    """
    if whole.remat is None or whole.remat.limit is None:
        return whole
    more = variable_bytes(whole, variables) - _held(plan, variables, owners)
    return replace(whole, remat=replace(whole.remat, policy=f"budget:{whole.remat.limit + more}"))


def _held(plan: Plan, variables: Mapping[str, Variable], owners: Mapping[str, str]) -> int:
    """Return the bytes of variables and slots on the device that holds most of them."""
    residences, everywhere, homes = plan.residences, 0, Counter[str]()
    for name, variable in variables.items():
        owner = owners.get(name, name)
        found = residences.get(owner, REPLICATED)
        if not isinstance(found, Sharded) or not found.servers or (0 < found.stage < 3 and name == owner):
            if name in plan.homes:
                homes[plan.homes[name]] += variable.nbytes
            else:
                everywhere += variable.nbytes
            continue
        for server, size in zip(found.servers, found.sizes, strict=True):
            homes[server] += variable.nbytes * size // sum(found.sizes)
    return everywhere + max((homes[device] for device in plan.devices), default=0)
