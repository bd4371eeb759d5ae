"""Random training graphs give on replicas what they give on one device: every value of the step, and every variable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import tensorflow as tf

from autograph_rewrite import GraphItem
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.normalize.normalize import normalise
from tests.support.models.random_graphs import FAMILIES, INPUTS, feed, grow
from tests.support.training import MODES, assert_trains_alike, distributed, make_item, v1

OPEN_LENGTH = 3
TOLERANCE = 1e-7  # outputs may be large: what differs is the order of sums


@dataclass(frozen=True)
class Case:
    """A graph, the batch that it is fed, and how it is distributed."""

    seed: int
    rows: int
    static: bool
    mode: str
    replicas: int

    @property
    def batch(self) -> int | None:
        return self.rows if self.static else None

    def __str__(self) -> str:
        """Return the test id."""
        return f"{self.seed}-{self.rows}{'static' if self.static else 'rows'}-{self.replicas}x{self.mode}"


# Graphs that TensorFlow runs to finite numbers as they are; together they use every way of making a value.
SEEDS: dict[tuple[bool, int, str], dict[int, int]] = {  # (static, replicas, mode): {seed: rows}
    (False, 2, "shared"): {82: 5, 33: 6, 78: 2},
    (False, 2, "mirrored"): {72: 5, 92: 6, 3: 2},
    (False, 3, "shared"): {46: 5, 70: 6, 6: 2},
    (False, 3, "mirrored"): {18: 5, 43: 6, 52: 2},
    (True, 2, "shared"): {24: 6, 95: 7, 85: 7},
    (True, 2, "mirrored"): {56: 6, 74: 7, 144: 7},
    (True, 3, "shared"): {136: 6, 48: 7, 145: 7},
    (True, 3, "mirrored"): {40: 6, 81: 7, 25: 7},
}
CASES = [
    Case(seed, rows, static, mode, replicas)
    for (static, replicas, mode), seeds in SEEDS.items()
    for seed, rows in seeds.items()
]
MANY = [Case(seed, 7, seed % 2 == 0, MODES[seed // 2 % 2], 2 + seed // 4 % 2) for seed in range(1000, 1200)]


def item_of(case: Case, version: int = 2) -> GraphItem:
    batch_inputs = dict.fromkeys(INPUTS, 0) if case.static else None
    return make_item(lambda: grow(case.seed, case.batch)[0], batch_inputs=batch_inputs, version=version)


def feed_of(case: Case) -> dict[str, Any]:
    return feed(case.seed, case.rows, OPEN_LENGTH)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_random_graph_computes_and_trains_as_on_one_device(case: Case) -> None:
    item, feeds = item_of(case), [feed_of(case)]
    assert_trains_alike(item, feeds, modes=[case.mode], replicas=case.replicas, tolerance=TOLERANCE)
    rewritten = distributed(item, case.mode, case.replicas)
    check_expanded(rewritten.graph_bytes, normalise(item), rewritten.report.plan.devices)


def test_the_random_graphs_use_every_way_of_making_a_value() -> None:
    used: set[str] = set()
    for case in CASES:
        with tf.Graph().as_default():
            used |= set(grow(case.seed, case.batch)[1])
    assert used == {f"{family}/{name}" for family, (_, ways) in FAMILIES.items() for name in ways}


@pytest.mark.full
@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_random_graphs_compute_and_train_as_on_one_device(case: Case) -> None:
    item, feeds = item_of(case, version=1 + case.seed // 8 % 2), [feed_of(case)]
    if not runs_unoptimised(item, feeds[0]):
        pytest.skip("TensorFlow itself cannot run this graph")
    assert_trains_alike(item, feeds, modes=[case.mode], replicas=case.replicas, tolerance=TOLERANCE)


def runs_unoptimised(item: GraphItem, values: dict[str, Any]) -> bool:
    """Return whether each op of the original can run: Grappler may remove one whose shapes do not fit."""
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(item.graph_def, name="")
    with v1.Session(graph=graph, config=config) as session:
        session.run(item.init_op)
        try:
            session.run([*(f"{name}:0" for name in item.outputs), "train"], {f"{k}:0": v for k, v in values.items()})
        except tf.errors.InvalidArgumentError:
            return False
    return True
