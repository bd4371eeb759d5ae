"""Fully sharded variables: each replica holds one shard (ZeRO, FSDP).

The stages are those of Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020).
"""

from __future__ import annotations

from autograph_rewrite.strategies.builder.choice import Choice, Parts, TrainedVariable


def over_replicas(trained: TrainedVariable, replicas: int, *, stage: int, axis: int | None = None) -> Choice:
    """Return the choice that splits a variable over the replicas; it stays whole where it is too small.

    Args:
        trained: the variable.
        replicas: how many there are.
        stage: what is split (`messages.VariableRequest.stage`).
        axis: the axis; left out, the first that the replicas divide evenly, else the first that is long enough.
    """
    sizes = [size or 0 for size in trained.shape]
    possible = [0] if trained.role.sparse else list(range(len(sizes)))
    if axis is not None:
        possible = [axis]
    possible = [one for one in possible if one < len(sizes) and sizes[one] >= replicas]
    even = [one for one in possible if sizes[one] % replicas == 0]
    if replicas < 2:
        return Choice(because="there is one replica only")
    if not possible:
        rows = "it is only looked up by row, so only rows can be split, and " if trained.role.sparse else ""
        asked = f"axis {axis} is" if axis is not None else "no axis is"
        long = "shorter than" if axis is not None else "as long as"
        return Choice(because=f"{rows}{asked} {long} there are replicas ({replicas}): its shape is {sizes}")
    return Choice(parts=Parts((even or possible)[0], replicas), stage=stage)
