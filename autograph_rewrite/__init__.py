"""Rewrite an unmodified single-device training graph into an exact distributed one.

Importing this package is cheap: each public name is loaded at its first use, and only code that runs a graph imports
TensorFlow. Where the environment (TF_CONFIG, torchrun, MPI, SLURM) describes a job, this process must join the job
before TensorFlow starts. It joins when it imports TensorFlow (`runtime.job.join_on_import`), and then also creates the
devices that `--config` names.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from autograph_rewrite.cluster.launchers import is_told
from autograph_rewrite.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    GraphError,
    PassError,
    PlanError,
    Preempted,
    RewriteError,
    VerifyError,
)

if TYPE_CHECKING:
    from autograph_rewrite.api import (
        allow_code,
        build_plan,
        distribute,
        distribute_datasets_from_function,
        join,
        on_preemption,
        on_resize,
        register_compressor,
        register_op,
        register_pass,
        rewrite,
        shard_dataset,
        virtual_devices,
    )
    from autograph_rewrite.config.config import Config
    from autograph_rewrite.inspect.diff import diff
    from autograph_rewrite.inspect.dump import dump
    from autograph_rewrite.item import GraphItem
    from autograph_rewrite.load.marks import (
        all_gather,
        all_reduce,
        checkpoint_name,
        num_replicas,
        recompute_grad,
        replica_id,
    )
    from autograph_rewrite.load.sharding_marks import assign, replicate, split
    from autograph_rewrite.plan.plan import Plan
    from autograph_rewrite.runtime.checkpoints import CheckpointManager
    from autograph_rewrite.runtime.profile import ProfileCallback, profile
    from autograph_rewrite.views import bisect, explain, reduce, report, simulate, verify

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "ClusterError",
    "Config",
    "ConfigError",
    "GraphError",
    "GraphItem",
    "PassError",
    "Plan",
    "PlanError",
    "Preempted",
    "ProfileCallback",
    "RewriteError",
    "VerifyError",
    "all_gather",
    "all_reduce",
    "allow_code",
    "assign",
    "bisect",
    "build_plan",
    "checkpoint_name",
    "diff",
    "distribute",
    "distribute_datasets_from_function",
    "dump",
    "explain",
    "join",
    "num_replicas",
    "on_preemption",
    "on_resize",
    "profile",
    "recompute_grad",
    "reduce",
    "register_compressor",
    "register_op",
    "register_pass",
    "replica_id",
    "replicate",
    "report",
    "rewrite",
    "shard_dataset",
    "simulate",
    "split",
    "verify",
    "virtual_devices",
]

_LAZY = {
    name: module
    for module, names in {
        "api": "allow_code build_plan distribute distribute_datasets_from_function join on_preemption on_resize "
        "register_compressor register_op register_pass rewrite shard_dataset virtual_devices",
        "config.config": "Config",
        "inspect.diff": "diff",
        "inspect.dump": "dump",
        "item": "GraphItem",
        "load.marks": "all_gather all_reduce checkpoint_name num_replicas recompute_grad replica_id",
        "load.sharding_marks": "assign replicate split",
        "plan.plan": "Plan",
        "runtime.checkpoints": "CheckpointManager",
        "runtime.profile": "ProfileCallback profile",
        "views": "bisect explain reduce report simulate verify",
    }.items()
    for name in names.split()
}

if not TYPE_CHECKING:  # a type checker that saw this function would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name from its module, once (PEP 562)."""
        if name not in _LAZY:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        from autograph_rewrite.ir.gc_pause import no_garbage_collection

        with no_garbage_collection():  # a collection would visit TensorFlow's many objects
            value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value  # later reads do not call this function
        return value


if is_told(os.environ):
    from autograph_rewrite.runtime.job.join_on_import import join_on_import

    join_on_import()


def __dir__() -> list[str]:
    """List the public names, loaded or not, without the submodules that happen to be imported."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
