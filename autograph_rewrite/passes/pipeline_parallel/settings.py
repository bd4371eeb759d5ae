"""Say why nothing reads a setting of pipelines or micro-batches (`passes.unused_settings`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autograph_rewrite.passes.unused_settings import Setting


def _with_micro(setting: Setting) -> str:
    if setting.plan.pipeline is not None:
        return "micro-batches of a pipeline are cut as the section `pipeline` says"
    return "" if setting.plan.microbatches > 1 else "there are no micro-batches"


def _microbatches(setting: Setting) -> str:
    pipeline = setting.config.pipeline
    given = pipeline is not None and (pipeline.microbatches or pipeline.microbatch_size)
    return "the section `pipeline` says how many there are" if given else ""


def _stages(setting: Setting) -> str:
    return "" if setting.value > 1 or setting.config.pipeline is None else "one stage is the whole model"


def _schedule(setting: Setting) -> str:
    if setting.plan.pipeline is not None and setting.plan.pipeline.stages == 1:
        return "there is one stage"
    return "" if setting.plan.microbatches > 1 else "there is one micro-batch"


def _assign(setting: Setting) -> str:
    pipeline = setting.config.pipeline
    said = pipeline is not None and (pipeline.boundaries is not None or pipeline.names is not None)
    return "boundaries or names say where stages begin" if said else ""


def _layout(setting: Setting) -> str:
    return "" if setting.plan.microbatches > 1 else "there is one micro-batch"


READERS: Mapping[str, Callable[[Setting], str]] = {
    "pipeline.stages": _stages,
    "pipeline.schedule": _schedule,
    "pipeline.form": _schedule,
    "pipeline.assign": _assign,
    "pipeline.layout": _layout,
    "microbatches": _microbatches,
    **dict.fromkeys((f"accumulation.{key}" for key in ("form", "layout", "uneven")), _with_micro),
}
