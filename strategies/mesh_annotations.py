"""Annotations for a configuration: which meshes its devices can be, and what to cut on each.

    4 devices     2 x 2: searched     1 x 4: what was found for 2, as far as 4 devices divide it

A mesh or a `sharding` that the user has written stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from autograph_rewrite.config.config import Config
from autograph_rewrite.load.sharding_marks import mark_of
from autograph_rewrite.strategies.mesh_search import Cuts, MeshSearch, annotated, on_mesh
from autograph_rewrite.strategies.mesh_seeds import can_be_cut
from autograph_rewrite.training_graph import TrainingGraph

KEPT = 4
"""So many of what was the best, one after another, are tried on other meshes, and with recomputation."""


def wants_annotations(item: TrainingGraph, config: Config) -> bool:
    """Return whether there is a model axis, and nobody has said what to cut on it."""
    is_open = config.model_size > 1 and config.mesh is not None and len(config.mesh.model_axes) == 1
    return is_open and not config.sharding and not any(mark_of(name) for name in item.graph.nodes)


def meshes_of(item: TrainingGraph, config: Config) -> list[Config]:
    """Return the configurations of meshes with a model axis, the smallest first; none where the user rules it out."""
    if config.mesh is not None:
        return [config] if wants_annotations(item, config) else []
    devices, count = config.devices or (), len(config.devices or ())
    alone = config.cluster is None and config.workers == 1 and len(set(devices)) == count
    is_open = alone and config.pipeline is None and not config.sharding
    if not is_open or any(mark_of(name) for name in item.graph.nodes):
        return []
    return [on_mesh(config, count // model, model) for model in range(2, count + 1) if count % model == 0]


def annotated_configs(search: MeshSearch, others: list[Config]) -> Iterator[Config]:
    """Yield configurations with annotations: of the searched mesh what was the best, then the same on others.

    Args:
        search: of the first mesh.
        others: the other meshes.
    """
    found = [one.cuts for one in search.run() if one.cuts][-KEPT:]
    for cuts in found:
        yield annotated(search.config, search.item, cuts)
    for config in others:
        for cuts in found:
            if _fits(search.item, cuts, config.model_size):
                yield annotated(config, search.item, cuts)


def _fits(item: TrainingGraph, cuts: Cuts, devices: int) -> bool:
    return all(can_be_cut(item.variables[name].shape or (), dim, devices) for name, dim in cuts.items())
