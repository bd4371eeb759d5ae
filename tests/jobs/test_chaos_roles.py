"""Chaos by roles: whoever is absent, stopped, cut off or replaced by a stranger is named in time, in every mode.

The time is `timeout_seconds` and five more; what starting TensorFlow and tracing takes on a busy machine comes on top
where the trouble is there from the start.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.jobs.programs.disturbed import FAULTS, Trouble, run
from tests.jobs.programs.fixtures import Jobs

PATIENCE = 4.0
"""The timeout of the jobs."""
GRACE = float(os.environ.get("CHAOS_GRACE", "20"))
"""Seconds beyond it; 5 on a machine that does nothing else."""
START = float(os.environ.get("CHAOS_START", "45"))
"""Seconds for starting TensorFlow, building and tracing, on a busy machine."""
MODES = ("session", "function", "keras")
KINDS = {"replicas": ("chief", "worker"), "served": ("chief", "worker", "server"), "stages": ("chief", "worker")}

CHOSEN = (
    Trouble("function", "replicas", "chief", "absent", "start"),
    Trouble("keras", "replicas", "chief", "stopped", "step"),
    Trouble("session", "served", "server", "stopped", "start"),
    Trouble("function", "stages", "chief", "stranger", "step"),
    Trouble("session", "replicas", "chief", "stopped", "open"),
)
MATRIX = (
    tuple(
        Trouble(mode, kind, role, fault, when)
        for mode in MODES
        for kind, roles in KINDS.items()
        for role in roles
        for fault in FAULTS
        for when in ("start", "step")
    )
    + tuple(
        Trouble(mode, kind, "chief", fault, when)
        for mode, kind, when in (
            *((mode, kind, "met") for mode in MODES for kind in KINDS),
            *(("session", kind, "open") for kind in KINDS),
        )
        for fault in ("absent", "stopped")
    )
    + tuple(
        Trouble("function", "replicas", role, "stranger", "start", stranger)
        for role in ("chief", "worker")
        for stranger in ("web", "other")
    )
)


@pytest.mark.parametrize(
    "trouble",
    [
        *(pytest.param(trouble, id=trouble.__name__) for trouble in CHOSEN),
        *(pytest.param(t, id=t.__name__, marks=pytest.mark.full) for t in MATRIX if t not in CHOSEN),
    ],
)
def test_who_is_in_trouble_is_named_in_time(trouble: Trouble, jobs: Jobs) -> None:
    outcome = run(trouble, jobs, PATIENCE)
    outputs = "\n=====\n".join(worker.output[-2500:] for worker in outcome.left)
    named = re.compile(rf"ClusterError: worker \d waited (for|\S+ s for) .*{trouble.name} \(")
    limit = PATIENCE + GRACE + (0 if trouble.when == "step" else START)
    in_time = all(seconds <= limit for seconds in outcome.seconds)
    ends = all(worker.code == 1 and named.search(worker.output) for worker in outcome.left)
    table = os.environ.get("CHAOS_TABLE")
    if table:
        took = ", ".join(f"{seconds:.1f} s" for seconds in outcome.seconds)
        said = "named" if ends else "NOT NAMED"
        with Path(table).open("a") as file:
            file.write(f"{trouble.__name__}\t{took}\t{said}{'' if in_time else ' LATE'}\n")
    assert ends, outputs
    assert in_time, f"{outcome.seconds}\n{outputs}"
