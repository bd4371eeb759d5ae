"""Configurations: every strategy, shared or mirrored, replicas, micro-batches in both forms, pipelines, remat."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

STRATEGIES = (
    "AllReduce",
    "PS",
    "PSLoadBalancing",
    "PartitionedPS",
    "UnevenPartitionedPS",
    "PartitionedAR",
    "RandomAxisPartitionAR",
    "Parallax",
    "FSDP",
    "Auto",
)
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Choice:
    """A configuration, and what a program has to know of it.

    Attributes:
        kind: replicas, micro, micro_loop, pipeline or pipeline_loop.
        config: what ar.rewrite takes; boundaries of stages are added when the program is known.
        stages: how many.
        by_cuts: stages end where the program says.
    """

    kind: str
    config: dict[str, Any]
    stages: int = 0
    by_cuts: bool = False

    def with_boundaries(self, cuts: list[str], dice: random.Random) -> dict[str, Any]:
        """Return the configuration for a program with these cuts."""
        if not self.by_cuts or len(cuts) < self.stages - 1:
            return self.config
        chosen = sorted(dice.sample(range(len(cuts)), self.stages - 1))
        return {**self.config, "pipeline": {**self.config["pipeline"], "boundaries": [cuts[i] for i in chosen]}}

    def __str__(self) -> str:
        """Return it in a few words."""
        strategy = self.config.get("strategy", {})
        words = [self.kind, strategy.get("name", "-"), strategy.get("variables", "-"), str(len(self.config["devices"]))]
        keys = ("microbatches", "accumulation", "pipeline", "remat")
        words += [f"{key}={self.config[key]}" for key in keys if key in self.config]
        return " ".join(words)


def draw(dice: random.Random) -> Choice:
    """Draw a configuration."""
    kinds = ("replicas", "micro", "micro_loop", "pipeline", "pipeline_loop")
    (kind,) = dice.choices(kinds, (52, 16, 10, 15, 7))
    if kind in ("pipeline", "pipeline_loop"):
        return _pipeline(dice, kind)
    replicas = dice.choice([2, 2, 3]) if kind == "replicas" else dice.choice([1, 1, 2])
    config: dict[str, Any] = {"devices": [f"CPU:{i}" for i in range(replicas)], "timeout_seconds": TIMEOUT_SECONDS}
    name = dice.choice(STRATEGIES) if kind == "replicas" or dice.random() < 0.4 else "AllReduce"
    mirrored = dice.random() < 0.5 and kind == "replicas"  # micro-batches share their variables
    config["strategy"] = {"name": name, "variables": "mirrored" if mirrored else "shared"}
    if dice.random() < 0.2:
        config["strategy"]["bucket_bytes"] = dice.choice([0, 64])
    if kind != "replicas":
        config["microbatches"] = dice.choice([2, 3, 4])
        layout = dice.choice(["contiguous", "contiguous", "interleaved"])
        config["accumulation"] = {"form": "loop" if kind == "micro_loop" else "unrolled", "layout": layout}
    return Choice(kind, config)


def extended(choice: Choice, dice: random.Random) -> Choice:
    """Return a choice with what the first seeds never draw: remat, mirrored micro-batches, servers with stages."""
    config = dict(choice.config)
    if dice.random() < 0.5:
        policies = ("sqrt", "every:1", "every:2", "save_matmuls", "budget:2KiB", "budget:64KiB", "budget:1MiB")
        config["remat"] = {"policy": dice.choice(policies)}
    if choice.kind in ("micro", "micro_loop") and dice.random() < 0.5:
        config["strategy"] = {**config["strategy"], "variables": "mirrored"}
    if choice.stages and dice.random() < 0.4:
        config["strategy"] = {"name": dice.choice(STRATEGIES[:6])}
    return replace(choice, config=config)


def _pipeline(dice: random.Random, kind: str) -> Choice:
    stages, replicas = dice.choice([(2, 1), (2, 1), (3, 1), (2, 2), (4, 1)])
    pipeline: dict[str, Any] = {"stages": stages, "microbatches": dice.choice([2, 3, 4])}
    if kind == "pipeline_loop":
        pipeline["form"] = "loop"
    else:
        pipeline["schedule"] = dice.choice(["gpipe", "1f1b"])
    if dice.random() < 0.2:
        pipeline["layout"] = "interleaved"
    devices = [f"CPU:{i}" for i in range(stages * replicas)]
    by_cuts = dice.random() < 0.6
    return Choice(kind, {"devices": devices, "pipeline": pipeline, "timeout_seconds": TIMEOUT_SECONDS}, stages, by_cuts)
