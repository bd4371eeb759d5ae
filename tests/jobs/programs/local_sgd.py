"""Two workers of one or two replicas that train by themselves, as a function, session and model; `local_sgd.py OUT`.

The function's batches are given in parts, the model's whole. Worker 1 is compared with what a process would have that
trains four (or two) models apart: `tests.jobs.test_local_sgd` has them.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

import autograph_rewrite as ar
from tests.jobs.programs.job import Job
from tests.jobs.programs.worker import split_cpu

JOB = Job.here(Path(sys.argv[1]))
REPLICAS = int(os.environ.get("JOB_REPLICAS", "2"))
split_cpu(REPLICAS)

from tests.runtime.test_local_sgd import SPECS, batches, momentum, network, small_graph  # noqa: E402

CONFIG = {**JOB.config(replicas=REPLICAS), "local_sgd": {"period": 2}, "timeout_seconds": 20}


def function() -> dict[str, Any]:
    """Train a function; average in the end, which is behind an odd step."""
    variables, step = momentum()
    distributed = ar.distribute(step, CONFIG, *SPECS)
    losses = [float(distributed(JOB.part(x), JOB.part(y))["loss"]) for x, y in batches(3, 8)]
    between = [variable.numpy() for variable in variables]
    distributed.average_variables()
    return {"losses": losses, "between": between, "w": [v.numpy() for v in variables]}


def session() -> dict[str, Any]:
    """Train a graph of which only the train op is run."""
    graph, names = small_graph()
    item = ar.GraphItem.from_graph(graph, train_op=names["train"], outputs=["loss:0"], init_op=names["init"])
    new = ar.rewrite(item, CONFIG)
    with new.session() as running:
        running.run(names["init"])
        for x, y in batches(4, 8):
            running.run(names["train"], {"x:0": JOB.part(x), "y:0": JOB.part(y)})
        return {"w": [running.read_variable("w")]}


def model() -> dict[str, Any]:
    """Fit a model for an epoch of three steps."""
    trained = ar.distribute(network(), CONFIG)
    x, y = (np.concatenate(parts) for parts in zip(*batches(3, 8), strict=True))
    logs = trained.fit(x, y, 8, epochs=1, shuffle=False, verbose=0).history
    edges = [edge.to for edge in trained.train_function.items[0].report.plan.edges]
    return {"loss": logs["loss"], "w": trained.get_weights(), "edges": edges}


(JOB.folder / f"worker{JOB.task}.pkl").write_bytes(
    pickle.dumps({"function": function(), "session": session(), "model": model()})
)
