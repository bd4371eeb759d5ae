"""Consensus before the first step: workers compare graph and plan, and take the chief's initial values.

Every worker rewrites the graph on its own. Equal graphs and plans give equal keys and orders, so the collectives meet;
where somebody runs another program, or another version of it, they would wait for each other for ever.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import islice

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.job.digests import described
from autograph_rewrite.runtime.job.liveness import listed, name_of
from autograph_rewrite.runtime.job.rendezvous import Array, Rendezvous

COMPARE = "compare what they run"
CARRY_ON = "carry on after an error, too"
LINES = 14
"""How many lines of a difference a message shows."""
WIDTH = 160


def require_consensus(
    member: Membership,
    plan: Plan,
    graph: bytes = b"",
    captured: Iterable[Array] = (),
    *,
    what: str = COMPARE,
) -> None:
    """Compare plan, graph and versions with those of the other workers.

    Args:
        member: this process.
        graph: the `contents` of what was rewritten.
        captured: values that have to be equal, too.
        what: it is done for, for messages.

    Raises:
        ClusterError: they differ, or somebody is missing.
    """
    job = Rendezvous(member, plan.timeout_seconds)
    values = [f"captured {v.dtype.name}{list(v.shape)} #{zlib.crc32(described(v).encode()):08x}" for v in captured]
    parts = [plan.digest(), _versions(), *values, zlib.decompress(graph).decode() if graph else ""]
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    rows = job.rows(np.frombuffer(digest, np.int32), what)
    odd = [task for task in range(len(rows)) if not np.array_equal(rows[task], rows[0])]
    if not odd:
        return
    request = replace(plan, id="", graph_digest="", notes=(), edges=())
    said = [_versions(), request.to_yaml(), *parts[2:], replace(plan, id="", graph_digest="", notes=()).to_yaml()]
    texts = job.texts("\n".join(said), what)
    names = listed(name_of("worker", task, member.workers[task]) for task in odd)
    pair = texts[0].splitlines(), texts[odd[0]].splitlines()
    lines = list(difflib.unified_diff(*pair, "worker 0", f"worker {odd[0]}", n=0, lineterm=""))
    some = {i for sign in "-+" for i in islice((i for i, line in enumerate(lines) if line[0] == sign), LINES // 2)}
    shown = [f"         {lines[i][:WIDTH]}" for i in sorted(some)]
    problem = (
        f"{names} would run something else than worker 0, and their collectives would wait for each other for ever"
    )
    raise ClusterError.of_difference(
        "\n".join([problem, *shown]),
        hint="start the same program with the same configuration and versions everywhere; what it draws by chance "
        "while it builds the graph needs a seed",
    )


def adopt_from_chief(member: Membership, seconds: float, values: Sequence[Array]) -> list[Array]:
    """Return the values that the chief's variables have: models are initialised by chance.

    Args:
        member: this process.
        seconds: to wait for the others.
        values: of this worker's variables.

    Raises:
        ClusterError: somebody is missing.
    """
    return Rendezvous(member, seconds).of_chief(values, "adopt the variables of worker 0")


def common_seed(member: Membership, seconds: float, own: int | None) -> int:
    """Return the random seed of all workers: the one that they have set, or else one that the chief draws.

    Args:
        member: this process.
        seconds: to wait for the others.
        own: seed that the program has set; None: none.

    Raises:
        ClusterError: they have set different ones.
    """
    drawn = int.from_bytes(os.urandom(4), "big")
    rows = Rendezvous(member, seconds).rows(np.array([own is not None, own or 0, drawn], np.int64), "agree on a seed")
    said = {int(seed) for is_set, seed, _ in rows if is_set}
    if len(said) > 1:
        raise ClusterError.of_difference(
            f"the workers have set different random seeds ({listed(map(str, sorted(said)))}), so they would shuffle "
            "the data differently, of which each is to take its part",
            hint="set the same seed everywhere, or give each worker its own data with input: per_worker",
        )
    return said.pop() if said else int(rows[0][2])


def common_name(member: Membership, seconds: float) -> str:
    """Return a text that the chief draws: no other session, of this or another start of the job, has it.

    Raises:
        ClusterError: somebody is missing.
    """
    drawn = int.from_bytes(os.urandom(6), "big")
    if len(member.workers) > 1:
        drawn = int(Rendezvous(member, seconds).rows(np.array(drawn, np.int64), "open a session")[0])
    return f"{drawn:012x}"


def _versions() -> str:
    """Return the versions that the rewritten graph depends on."""
    names = ("autograph_rewrite", "tensorflow", "tensorflow-cpu", "keras", "numpy")
    return "\n".join(f"{name} {version}" for name in names if (version := _version(name)))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
