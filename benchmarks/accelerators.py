"""The zoo rewritten to 8 GPUs: what has no kernel there, and what crosses between host and GPU, beyond one GPU.

    python -m benchmarks.accelerators [MODEL ...]          a few minutes; prints a table in Markdown; no GPU is needed

A row is a graph under a strategy. `to host` counts what a step waits for; `unexplained` what has no reason of
`inspect.accelerator`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import autograph_rewrite as ar
from autograph_rewrite.config.strategy_names import KNOWN
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.accelerator import SERVER, AcceleratorUse, accelerator_use
from tests.support.rank_jobs import item_of
from tests.zoo import ZOO

GPUS = 8
MODES = ("mirrored", "shared")
STAGES: Mapping[str, Any] = {"pipeline": {"stages": 2, "microbatches": 4}}


@dataclass(frozen=True)
class Row:
    """A graph under a strategy: its use of GPUs beside that of one GPU, or why it was refused."""

    model: str
    strategy: str
    mode: str
    base: AcceleratorUse
    found: AcceleratorUse | None = None
    refusal: str = ""

    def added(self, to: str, *, on_servers: bool) -> int:
        """Return how many crossings were added, by way and by whether the plan keeps variables on the host."""
        moved = self.found.moved if self.found is not None else ()
        return sum(one.added for one in moved if one.to == to and (one.why == SERVER) is on_servers)

    @property
    def unexplained(self) -> int:
        """How many crossings were added for no known reason."""
        return sum(one.added for one in self.found.moved if not one.why) if self.found is not None else 0

    def __str__(self) -> str:
        head = f"| {self.model} | {self.strategy} | {self.mode} |"
        if self.found is None:
            return f"{head} refused: {self.refusal} | | | | | |"
        total = sum(one.count for one in self.found.moved)
        cells = (
            self.found.added[0],
            f"{total} ({GPUS} x {sum(one.count for one in self.base.moved)})",
            self.added("device", on_servers=False),
            self.added("host", on_servers=False),
            self.added("device", on_servers=True) + self.added("host", on_servers=True),
            self.unexplained,
        )
        return f"{head} {' | '.join(map(str, cells))} |"


HEAD = (
    "| graph | strategy | variables | nodes without kernel, added | crossings (of one GPU) | added to device | "
    "added to host | added by servers | unexplained |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def rows(model: str, strategies: Sequence[str] = KNOWN, modes: Sequence[str] = MODES) -> Iterator[Row]:
    """Yield what each strategy makes of an entry of the zoo.

    Args:
        model: its name.
        strategies: builders by name.
        modes: of variables.
    """
    item = item_of(model, dtype="float32")
    base = accelerator_use(item)
    for strategy in strategies:
        for mode in ("shared",) if strategy == "Pipeline" else modes:
            config = {
                "devices": [f"GPU:{i}" for i in range(GPUS)],
                "strategy": {"name": strategy, "variables": mode},
                **(STAGES if strategy == "Pipeline" else {}),
            }
            try:
                yield Row(model, strategy, mode, base, accelerator_use(ar.rewrite(item, config), item))
            except RewriteError as error:
                yield Row(model, strategy, mode, base, refusal=error.problem.splitlines()[0])


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    print(HEAD)
    for model in sys.argv[1:] or ZOO:
        for row in rows(model):
            print(row, flush=True)


if __name__ == "__main__":
    main()
