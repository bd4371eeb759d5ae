"""Write the reproducer of a failed pass: the graph as text, the plan, and the command that runs up to that pass.

    reproducer: autograph-rewrite opt /tmp/autograph-rewrite-x1/graph.txt --plan /tmp/autograph-rewrite-x1/plan.yaml \
        --stop-after insert-reshards

Only bugs of this package get one: broken invariants and unexpected errors.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autograph_rewrite.compile import request, with_processes
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError, VerifyError, add_note
from autograph_rewrite.inspect.dump import dump
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.pass_manager import failed_pass
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


@contextmanager
def reproducible(item: TrainingGraph, chosen: Config | Plan, task: int = 0) -> Iterator[None]:
    """Run a block of passes; if one fails by a bug, write a reproducer and name it in the error."""
    try:
        yield
    except Exception as error:
        name = failed_pass(error)
        if name is not None and (isinstance(error, VerifyError) or not isinstance(error, RewriteError | OSError)):
            with suppress(Exception):  # the bug may also be in the code that writes the reproducer
                add_note(error, f"reproducer: {_keep(item, chosen, task, name)}")
        raise


def _keep(item: TrainingGraph, chosen: Config | Plan, task: int, name: str) -> str:
    """Write graph and plan into a new folder; return the command."""
    flat = normalise_original(item)
    plan = chosen if isinstance(chosen, Plan) else request(flat, with_processes(chosen))
    folder = Path(tempfile.mkdtemp(prefix="autograph-rewrite-"))
    (folder / "graph.txt").write_text(dump(flat, full=True), encoding="utf-8")
    plan.save(folder / "plan.yaml")
    command = ["autograph-rewrite", "opt", str(folder / "graph.txt"), "--plan", str(folder / "plan.yaml")]
    return shlex.join([*command, "--stop-after", name, *(["--task", str(task)] if task else [])])
