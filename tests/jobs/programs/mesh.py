"""Workers that hold logical devices of replicas, and the single process they are compared with: `mesh.py CASES OUT`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import autograph_rewrite as ar
from tests.jobs.programs.job import Case, Job, Results
from tests.jobs.programs.worker import run, split_cpu, write
from tests.support import split_models

SIZES = (8, 11, 8)


def function(job: Job) -> Results:
    """Train a function: each process is given its part of a batch, unless replicas lie across processes."""
    each, data, model = map(int, os.environ.get("JOB_MESH", "1,1,1").split(","))
    variables = split_models.variables()
    step: Any = tf.function(split_models.step_of(variables))
    if job.is_rewritten:
        config = {**split_models.config(data, model), "devices": [f"CPU:{i}" for i in range(each)]}
        step = ar.distribute(split_models.step_of(variables), {**config, "timeout_seconds": 30})
    found = {}
    for number, size in enumerate(SIZES):
        x, y = split_models.batch(number, size)
        if job.is_rewritten and each % model == 0:
            x, y = job.part(x), job.part(y)
        found[f"loss {number}"] = step(tf.constant(x), tf.constant(y)).numpy()
    return {**found, **{f"variable {name}": one.numpy() for name, one in variables.items()}}


CASES: dict[str, Case] = {"function": function}


def main(names: Sequence[str], out: Path) -> None:
    """Run as what TF_CONFIG says this process is."""
    who = Job.here(out / "files")
    if who.is_rewritten:
        split_cpu(int(os.environ["JOB_MESH"].split(",")[0]))
    name = f"worker{who.task}" if who.is_rewritten else "single"
    write(out / f"{name}.pkl", run(list(names), who, CASES))


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
