"""Who a test process is: one worker of a job, or the single process that the job is compared with.

Job(0, 1)               trains on the whole batch, unrewritten
Job(1, 2)               worker 1 of 2: rewritten, takes its part of every batch
Job(0, 2, alone=True)   unrewritten on worker 0's part: what comes out if nothing is exchanged
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Results = dict[str, Array]
Case = Callable[["Job"], Results]


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        task: which one.
        count: how many there are.
        alone: whether it takes its part and does not know of the others.
        folder: where it may write files.
        more: what its configuration says besides.
    """

    task: int = 0
    count: int = 1
    alone: bool = False
    folder: Path = Path()
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def here(cls, folder: Path) -> Job:
        """Return what TF_CONFIG says."""
        if not os.environ.get("TF_CONFIG"):
            return cls(folder=folder)
        said = json.loads(os.environ["TF_CONFIG"])
        return cls(said["task"]["index"], len(said["cluster"]["worker"]), folder=folder)

    @property
    def is_rewritten(self) -> bool:
        """Whether this is a worker of several."""
        return self.count > 1 and not self.alone

    @property
    def in_stages(self) -> bool:
        """Whether the workers hold the stages of one model, as JOB_STAGES says, and not a replica each."""
        return self.is_rewritten and bool(os.environ.get("JOB_STAGES"))

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0."""
        return self.task == 0

    def limits(self, size: int, *, lopsided: bool = False) -> tuple[int, int]:
        """Return where this process's part of a batch begins and ends; a lopsided one is all the last worker's."""
        if lopsided:
            return (0, size) if self.task == self.count - 1 else (0, 0)
        each, more = divmod(size, self.count)
        begin = self.task * each + min(self.task, more)
        return begin, begin + each + (self.task < more)

    def part(self, value: Array, axis: int = 0, *, lopsided: bool = False) -> Array:
        """Return this process's part of a batch; where workers hold stages, all of it."""
        if self.in_stages:
            return value
        begin, end = self.limits(value.shape[axis], lopsided=lopsided)
        return np.take(value, range(begin, end), axis)

    def config(self, mode: str = "mirrored", replicas: int = 1, **more: Any) -> Mapping[str, Any]:
        """Return a configuration; where workers hold stages, one with a stage for each."""
        if self.in_stages:
            pipeline = {"stages": self.count, "microbatches": 2}
            strategy = {"name": "Pipeline"}
            return {"devices": ["CPU:0"], "strategy": strategy, "pipeline": pipeline, "timeout_seconds": 30, **more}
        strategy = {"name": os.environ.get("JOB_STRATEGY", "AllReduce"), "variables": mode}
        devices = [f"CPU:{i}" for i in range(replicas)]
        return {"devices": devices, "strategy": strategy, "timeout_seconds": 30, **self.more, **more}
