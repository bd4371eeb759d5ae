"""One line per model and optimizer: how often each gradient is reduced, and which ops have no rule.

    python -m tests.matrix.table [replicas]

Nothing is trained: this reads the reports of the rewrites.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import autograph_rewrite as ar
from tests.zoo import ZOO, Built, BuiltFunction, BuiltModel, Case, optimizers_for

from .report import Exchange, exchanges_in_all, exchanges_of, notes_of, report_of


@dataclass(frozen=True)
class Line:
    """What the rewrite of one model with one optimizer reports."""

    model: str
    optimizer: str
    exchanges: Mapping[str, Exchange]
    in_all: float  # of the variables and of the step (losses, norms, statistics, outputs)
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return whether every gradient is reduced exactly once and every op has a rule."""
        return bool(self.exchanges) and all(each.once for each in self.exchanges.values()) and not self.notes


def lines(cases: Iterable[Case] = tuple(ZOO.values()), replicas: int = 2) -> Iterator[Line]:
    """Rewrite every case with every optimizer that it can have."""
    config = {"devices": [f"CPU:{i}" for i in range(replicas)], "strategy": {"name": "AllReduce"}}
    for case in cases:
        for optimizer in optimizers_for(case.kind):
            report = report_of(rewritten(case.build(optimizer=optimizer, dtype=case.dtypes[0]), config))
            yield Line(case.name, optimizer, exchanges_of(report), exchanges_in_all(report), notes_of(report))


@singledispatch
def rewritten(built: Any, config: Mapping[str, Any]) -> Any:
    """Return the rewritten item of a zoo entry."""
    raise TypeError(f"not a zoo entry: {type(built).__name__}")


@rewritten.register
def _(built: Built, config: Mapping[str, Any]) -> Any:
    item = ar.GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs) or None,
    )
    return ar.rewrite(item, dict(config))


@rewritten.register
def _(built: BuiltFunction, config: Mapping[str, Any]) -> Any:
    item = ar.GraphItem.from_function(built.step, *built.specs, batch_inputs=dict(built.batch_inputs))
    return ar.rewrite(item, dict(config))


@rewritten.register
def _(built: BuiltModel, config: Mapping[str, Any]) -> Any:
    x, y = built.feeds(0, 4)
    return ar.rewrite(ar.GraphItem.from_keras(built.model, specs(x), specs(y)), dict(config))


def specs(arrays: Any) -> Any:
    """Return tensor specs of a nest of arrays, with an open batch dimension."""
    import tensorflow as tf

    return tf.nest.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), arrays)


def render(found: Iterable[Line]) -> str:
    """Lay the lines out as text."""
    rows = [
        f"{'model':<18}{'optimizer':<11}{'dense':>6}{'sparse':>7}{'in all':>7}  {'exchanged':<12} ops without a rule"
    ]
    for line in found:
        sparse = sum(each.gathers > 0 for each in line.exchanges.values())
        wrong = [name for name, each in line.exchanges.items() if not each.once]
        rows.append(
            f"{line.model:<18}{line.optimizer:<11}{len(line.exchanges) - sparse:>6}{sparse:>7}"
            f"{line.in_all:>7.1f}  "
            f"{'once each' if not wrong else ', '.join(wrong):<12} {'; '.join(line.notes) or 'none'}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(render(lines(replicas=int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
