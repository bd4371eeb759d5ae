"""Valid settings that this version does not support: rejected at their line, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autograph_rewrite.diagnostics.located_yaml import KeyPath

if TYPE_CHECKING:
    from autograph_rewrite.config.config import Config


def unavailable(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Each setting of `config` that asks for a feature to come, with the words for it."""
    if (
        config.remat.policy.startswith("budget")
        and config.pipeline is not None
        and config.pipeline.chunks != config.pipeline.stages
    ):
        yield ("remat", "policy"), f"remat.policy {config.remat.policy} with several stages per device"
    has_model_axis = config.mesh is not None and config.mesh.model_size > 1
    if has_model_axis and config.pipeline is not None and config.pipeline.form == "loop":
        yield ("mesh", "model"), "mesh.model above 1 with stages in a loop (pipeline.form)"
