"""Configurations: every strategy, shared or mirrored, replicas, micro-batches in both forms, pipelines, remat; and, in
combination, a model axis, several steps per run, policies of variables, local SGD, and a checkpoint restored elsewhere.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
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
SERVED = ("PS", "PS", "PSLoadBalancing", "PartitionedPS", "UnevenPartitionedPS", "Parallax", "Auto")
TIMEOUT_SECONDS = 30
JOB_TIMEOUT_SECONDS = 60  # several processes trace at once, on machines that have other work
MODEL_AXES = ((1, (2,)), (1, (2,)), (2, (2,)), (1, (3,)), (1, (4,)), (1, (2, 2)))
"""Replicas, and the axes of the mesh that each has."""
POLICIES = ("sqrt", "hierarchical", "every:1", "every:3", "save_matmuls", "names", "budget:2KiB", "budget:64KiB")
SYNCHRONIZATIONS = ("auto", "on_write", "on_write", "on_read")
AGGREGATIONS = ("sum", "mean", "only_first_replica")


@dataclass(frozen=True)
class Layout:
    """The processes of a job."""

    workers: int
    servers: int

    @staticmethod
    def draw(number: int) -> Layout:
        """Return those of a job with this number."""
        dice = random.Random(f"job {number}")
        return Layout(dice.choice([2, 2, 3]), dice.choice([0, 0, 1, 2]))


@dataclass(frozen=True)
class Choice:
    """A configuration, and what a program has to know of it.

    Attributes:
        kind: replicas, micro, micro_loop, pipeline or pipeline_loop.
        config: what ar.rewrite takes; boundaries of stages are added when the program is known.
        stages: how many.
        by_cuts: stages end where the program says.
        placed: how a model axis is placed: by `regex` in the configuration, in `code`, or `both`.
        evenly: dimensions are cut that come out even, where there are some.
        policies: how many entries of variable_policies there are, once the names of variables are known.
        save_after: the number of steps after which a checkpoint is saved, and all is begun anew from it.
        elsewhere: the configuration that goes on from the checkpoint; None: the original program.
    """

    kind: str
    config: dict[str, Any]
    stages: int = 0
    by_cuts: bool = False
    placed: str = ""
    evenly: bool = False
    policies: int = 0
    save_after: int = 0
    elsewhere: Choice | None = None

    @property
    def steps_per_run(self) -> int:
        return int(self.config.get("steps_per_run", 1))

    @property
    def replicas(self) -> int:
        """How many replicas there are in this process."""
        mesh = self.config.get("mesh", {})
        return int(mesh.get("data") or len(self.config["devices"]))

    @property
    def model(self) -> tuple[int, ...]:
        """The sizes of the model axis."""
        return tuple(self.config.get("mesh", {}).get("model", ()))

    def with_boundaries(self, cuts: list[str], dice: random.Random) -> dict[str, Any]:
        """Return the configuration for a program with these cuts."""
        if not self.by_cuts or len(cuts) < self.stages - 1:
            return self.config
        chosen = sorted(dice.sample(range(len(cuts)), self.stages - 1))
        return {**self.config, "pipeline": {**self.config["pipeline"], "boundaries": [cuts[i] for i in chosen]}}

    def completed(
        self, shapes: Mapping[str, tuple[int, ...]], trained: set[str], seed: int, given: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the configuration for a program with these variables: what names them is added.

        Args:
            shapes: of all variables, by name.
            trained: the names of those that an optimizer updates.
            seed: of the program.
            given: the configuration so far, if it is another one than this choice's.
        """
        dice, config = random.Random(f"names {seed}"), dict(self.config if given is None else given)
        names = sorted(shapes)
        if self.placed in ("regex", "both"):
            wide = [name for name in names if max(shapes[name], default=0) >= max(self.model) and name in trained]
            chosen = dice.sample(wide, min(len(wide), dice.choice([1, 2, 4, 4])))
            config["sharding"] = [self._sharding(name, shapes[name], dice) for name in chosen]
        if self.policies and names:
            pool = sorted(trained & {*names}) if dice.random() < 0.5 else names
            chosen = dice.sample(pool or names, min(len(pool or names), self.policies))
            config["variable_policies"] = [self._policy(name, dice) for name in chosen]
        return config

    def _sharding(self, name: str, shape: tuple[int, ...], dice: random.Random) -> dict[str, Any]:
        """Return an entry for a variable, most often for all of its kind."""
        rank = len(shape)
        match = re.escape(name)
        if dice.random() < 0.5:  # what has the same stem may have another rank, which is refused: now and then
            match = re.escape(name.rstrip("0123456789")) + r"\d*"
        if dice.random() < 0.1:
            return {"match": match, "replicate": True}
        axes = [-1] * rank
        for axis in dice.sample(range(len(self.model)), dice.choice([1, len(self.model)])):
            wide = [i for i, size in enumerate(shape) if axes[i] < 0 and size >= self.model[axis]]
            if self.evenly:
                wide = [i for i in wide if shape[i] % self.model[axis] == 0] or wide
            if wide:
                axes[dice.choice(wide)] = axis
        if len(self.model) > 1 or dice.random() < 0.3:
            return {"match": match, "axes": axes}
        return {"match": match, "split": [1 if axis < 0 else dice.choice([self.model[0], "model"]) for axis in axes]}

    def _policy(self, name: str, dice: random.Random) -> dict[str, Any]:
        match = re.escape(name) if dice.random() < 0.7 else re.escape(name.rstrip("0123456789")) + ".*"
        return {
            "match": match,
            "synchronization": dice.choice(SYNCHRONIZATIONS),
            "aggregation": dice.choice(AGGREGATIONS),
        }

    def __str__(self) -> str:
        """Return it in a few words."""
        strategy = self.config.get("strategy", {})
        words = [self.kind, strategy.get("name", "-"), strategy.get("variables", "-"), str(len(self.config["devices"]))]
        keys = ("microbatches", "accumulation", "pipeline", "remat", "mesh", "steps_per_run", "local_sgd", "input")
        words += [f"{key}={self.config[key]}" for key in keys if key in self.config]
        words += [f"placed by {self.placed}"] * bool(self.placed) + [f"{self.policies} policies"] * bool(self.policies)
        if self.save_after:
            words.append(f"after step {self.save_after - 1} restored into ({self.elsewhere or 'the original'})")
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


def copied(choice: Choice, dice: random.Random) -> Choice:
    """Return a choice of stages whose replicas may have variables of their own, with any strategy."""
    config = dict(choice.config)
    if dice.random() < 0.3:
        return choice
    if "mesh" not in config and len(config["devices"]) == choice.stages <= 3 and dice.random() < 0.7:
        config["devices"] = [f"CPU:{i}" for i in range(2 * choice.stages)]
    name = dice.choice(STRATEGIES) if dice.random() < 0.6 else config.get("strategy", {}).get("name", "AllReduce")
    config["strategy"] = {"name": name, "variables": "mirrored"}
    return replace(choice, config=config)


def combined(choice: Choice, dice: random.Random) -> Choice:
    """Return a choice with several of the newest features at once; what is refused in general is drawn rarely."""
    config = dict(choice.config)
    config.pop("remat", None)
    if dice.random() < 0.3:
        config["remat"] = {"policy": dice.choice(POLICIES), "offload": dice.choice(["none", "none", "none", "auto"])}
        if config["remat"]["policy"] == "names":
            config["remat"]["names"] = ["cut.*"]
    if dice.random() < 0.25 and len(config["devices"]) * 2 <= 4:
        choice = replace(choice, placed=dice.choice(["regex", "regex", "regex", "code", "code", "both"]))
        data, model = dice.choice(MODEL_AXES)
        if choice.stages:
            data, model = len(config["devices"]) // choice.stages, (2,)
        elif choice.kind != "replicas":
            data = dice.choice([1, 2])
            model = (2,) if data == 2 else model
        count = data * (choice.stages or 1) * (2 if model == (2,) else model[0] * (model[1] if model[1:] else 1))
        config |= {"devices": [f"CPU:{i}" for i in range(count)], "mesh": {"data": data, "model": list(model)}}
    if dice.random() < 0.2:
        config["steps_per_run"] = 2
    if dice.random() < 0.15:
        choice = replace(choice, policies=dice.choice([1, 1, 2]))
    if dice.random() < 0.08 and choice.kind == "replicas" and not choice.placed:
        config = _alone(config, dice)
        choice = replace(choice, policies=0)
    return replace(choice, config=config)


STRATEGIES = (
    "FSDP",
    "FSDP",
    "FSDP",
    "AllReduce",
    "PS",
    "PSLoadBalancing",
    "PartitionedPS",
    "PartitionedAR",
    "Parallax",
)
"""What is drawn for a mesh whose devices run one program."""


ONE_AXIS = ((1, (2,)), (1, (2,)), (2, (2,)), (1, (4,)))
SEVERAL_AXES = (*ONE_AXIS, *[(1, (2, 2)), (2, (2, 2)), (1, (2, 4)), (1, (3, 2))])
"""Meshes on which devices run one program: how many replicas, and the sizes of the model axes of each."""


def meshed(
    choice: Choice,
    dice: random.Random,
    strategies: Sequence[str] = ("AllReduce",),
    meshes: Sequence[tuple[int, tuple[int, ...]]] = ONE_AXIS,
) -> Choice:
    """Return a choice that has a model axis more often, and mirrors its variables there: devices run one program."""
    config = dict(choice.config)
    if choice.kind not in ("replicas", "micro") or "local_sgd" in config or dice.random() < 0.3:
        return choice
    if not choice.placed:
        data, model = dice.choice(meshes)
        devices = [f"CPU:{i}" for i in range(data * math.prod(model))]
        config |= {"devices": devices, "mesh": {"data": data, "model": list(model)}}
        choice = replace(choice, placed=dice.choice(["regex", "regex", "code", "both"]))
    choice = replace(choice, evenly=meshes != ONE_AXIS and dice.random() < 0.8)
    config["strategy"] = {"name": dice.choice(strategies), "variables": "mirrored"}
    return replace(choice, config=config, policies=0)


def _alone(config: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Return a configuration in which replicas train alone between averages."""
    kept = {key: value for key, value in config.items() if key in ("devices", "timeout_seconds", "steps_per_run")}
    local = {"period": dice.choice([1, 2, 2, 3]), "warmup_steps": dice.choice([0, 0, 1])}
    return {**kept, "strategy": {"name": "AllReduce", "variables": "mirrored"}, "local_sgd": local}


def resumed(choice: Choice, elsewhere: Choice | None, save_after: int) -> Choice:
    """Return a choice that is saved after some steps, and goes on elsewhere."""
    return replace(choice, save_after=save_after, elsewhere=elsewhere)


def in_job(layout: Layout, dice: random.Random) -> Choice:
    """Draw the configuration of each worker of a job."""
    served = layout.servers > 0
    kinds = ("replicas", "micro", "micro_loop", "pipeline", "mesh", "local_sgd")
    (kind,) = dice.choices(kinds, (90, 2, 2, 1, 3, 2) if served else (50, 12, 8, 12, 12, 6))
    config: dict[str, Any] = {"timeout_seconds": JOB_TIMEOUT_SECONDS, "devices": ["CPU:0"]}
    if kind == "pipeline":
        pipeline: dict[str, Any] = {"stages": layout.workers, "microbatches": dice.choice([2, 3, 4])}
        if dice.random() < 0.3:
            pipeline["form"] = "loop"
        config |= {"strategy": {"name": "Pipeline"}, "pipeline": pipeline}
        return Choice(kind, config, layout.workers, by_cuts=dice.random() < 0.6)
    if dice.random() < 0.5:
        config["devices"] = ["CPU:0", "CPU:1"]
    config["strategy"] = {"name": dice.choice(SERVED if served and dice.random() < 0.9 else STRATEGIES)}
    if dice.random() < 0.6:
        config["strategy"]["variables"] = dice.choice(["shared", "mirrored"])
    if dice.random() < 0.2:
        config["strategy"]["bucket_bytes"] = dice.choice([0, 64])
    if kind in ("micro", "micro_loop"):
        config["microbatches"] = dice.choice([2, 3])
        config["accumulation"] = {"form": "loop" if kind == "micro_loop" else "unrolled"}
    if kind == "local_sgd":
        return Choice(kind, _alone(config, dice))
    choice = Choice(kind, config)
    if kind == "mesh":
        config["devices"] = ["CPU:0", "CPU:1"]
        config["mesh"] = {"data": layout.workers, "model": [2]}
        if layout.workers == 2 and dice.random() < 0.3:  # a replica lies across both
            config |= {"devices": ["CPU:0"], "mesh": {"data": 1, "model": [2]}}
        choice = replace(choice, placed=dice.choice(["regex", "code", "both"]))
    if dice.random() < 0.15:
        config["remat"] = {"policy": dice.choice([one for one in POLICIES if one != "names"])}
    if dice.random() < 0.1 and not served:
        config["steps_per_run"] = 2
    if dice.random() < 0.08:
        choice = replace(choice, policies=1)
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
