"""Agreement: before the first step all workers compare what they are about to run, and adopt what the chief has.

Every worker rewrites the graph on its own. Equal graphs and plans give equal keys and orders, so the collectives meet;
where somebody runs another program, or another version of it, they would wait for each other for ever.
"""

from __future__ import annotations

import difflib
import hashlib
from importlib import metadata
from itertools import islice

import numpy as np

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.membership import Membership
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.rendezvous import Rendezvous

LINES = 12
"""How many lines of a difference a message shows."""


def require_the_same(member: Membership, plan: Plan) -> None:
    """Compare plan, graph and versions with those of the other workers.

    Raises:
        ClusterError: they differ, or somebody is missing.
    """
    job = Rendezvous(member, plan.timeout_seconds)
    digest = hashlib.sha256(f"{plan.digest()}\n{_versions()}".encode()).digest()
    rows = job.rows(np.frombuffer(digest, np.int32), "compare what they run")
    odd = [task for task in range(len(rows)) if not np.array_equal(rows[task], rows[0])]
    if not odd:
        return
    texts = job.texts(f"{_versions()}\n{plan.to_yaml()}", "compare what they run")
    names = ", ".join(f"worker {task} ({member.workers[task]})" for task in odd)
    lines = difflib.unified_diff(
        texts[0].splitlines(), texts[odd[0]].splitlines(), "worker 0", f"worker {odd[0]}", n=0, lineterm=""
    )
    shown = "\n".join(f"         {line[:160]}" for line in islice(lines, LINES))
    raise ClusterError(
        f"{names} would run something else than worker 0, and their collectives would wait for each other for ever\n{shown}",
        hint="start the same program with the same configuration and versions everywhere",
    )


def _versions() -> str:
    """Return the versions that the rewritten graph depends on."""
    names = ("autograph_rewrite", "tensorflow", "tensorflow-cpu", "keras", "numpy")
    return "\n".join(f"{name} {version}" for name in names if (version := _version(name)))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
