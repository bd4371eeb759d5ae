"""The zoo rewritten to 8 GPUs: what has no kernel there, and what crosses between host and GPU, beyond one GPU.

    python -m benchmarks.accelerators [MODEL ...]          the table of docs/accelerators_zoo.md, in 20 minutes

A row is a graph under a strategy. `to host` counts what a step waits for; `reasons` are those of
`inspect.accelerator`, by their names in docs/accelerators.md.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import autograph_rewrite as ar
from autograph_rewrite.config.strategy_names import KNOWN
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.accelerator import INDICES, INTEGERS, SERVER, SIZE, AcceleratorUse, accelerator_use
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

    def added(self, to: str) -> int:
        """Return how many crossings were added, by way."""
        return sum(one.added for one in self.found.moved if one.to == to) if self.found is not None else 0

    @property
    def reasons(self) -> dict[str, int]:
        """How many crossings were added for each reason, by its name in the table."""
        found: Counter[str] = Counter()
        for one in self.found.moved if self.found is not None else ():
            found[NAMES[one.why]] += one.added
        return {name: count for name, count in found.items() if count}

    def __str__(self) -> str:
        head = f"| {self.model} | {self.strategy} | {self.mode} |"
        if self.found is None:
            return f"{head} refused: {self.refusal} | | | | |"
        cells = (
            self.found.added[0],
            f"{sum(one.count for one in self.found.moved)} ({GPUS} x {sum(one.count for one in self.base.moved)})",
            self.added("device"),
            self.added("host"),
            ", ".join(f"{name} {count}" for name, count in self.reasons.items()),
        )
        return f"{head} {' | '.join(map(str, cells))} |"


NAMES = {SIZE: "sizes", INDICES: "indices", INTEGERS: "32-bit integers", SERVER: "servers", "": "**unexplained**"}
HEAD = (
    "| graph | strategy | variables | nodes without kernel, added | crossings (of one GPU) | added to device | "
    "added to host | reasons |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
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
