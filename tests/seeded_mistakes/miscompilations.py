"""Miscompilations that `bisect` and `reduce` have to find: one mistake behind one pass, made again in every rewrite.

Behind `order-accesses` the graph is folded and the mistakes are those of `seed`; behind `eliminate-dead-code` or
`decompose` it is still a graph of one device, and the mistakes are those that a pass of the user's own makes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.passes.base.pass_manager import RewriteObserver
from autograph_rewrite.passes.base.rewriting import Rewrite
from tests.seeded_mistakes.bench import Bench, Kind, attempt, is_float
from tests.seeded_mistakes.draws import Draw
from tests.seeded_mistakes.seed import KINDS

FIRST = "eliminate-dead-code"
"""The first pass of every rewrite."""


def gradient_scaled(bench: Bench) -> str:
    """What an update is given is doubled."""
    update, index = bench.pick(_operands_of_updates(bench))
    value = update.inputs[index]
    update.set_input(index, bench.computed("Mul", value, 2))
    return f"'{value.name}' is doubled for '{update.name}'"


def gradient_of_another_sign(bench: Bench) -> str:
    """What an update is given is negated."""
    update, index = bench.pick(_operands_of_updates(bench))
    value = update.inputs[index]
    update.set_input(index, bench.add("Neg", [value], value.node).output())
    return f"'{value.name}' is negated for '{update.name}'"


def activation_dropped(bench: Bench) -> str:
    """Who reads an activation reads what that is made of."""
    node = bench.one(lambda n: n.op in ("Tanh", "Relu", "Square", "Sigmoid", "Elu"))
    bench.replace(node.output(), node.inputs[0])
    return f"'{node.name}' is left out"


def operands_swapped(bench: Bench) -> str:
    """A difference is the wrong way round."""
    node = bench.one(lambda n: n.op in ("Sub", "RealDiv") and n.inputs[0] is not n.inputs[1])
    node.set_inputs(node.inputs[::-1])
    return f"the operands of '{node.name}' are swapped"


def sum_for_mean(bench: Bench) -> str:
    """A mean is a sum."""
    node = bench.one(lambda n: n.op == "Mean")
    node.op = "Sum"
    bench.graph.edits += 1
    return f"'{node.name}' is a sum"


def _operands_of_updates(bench: Bench) -> list[tuple[Node, int]]:
    found = [node for nodes in bench.updates().values() for node in nodes]
    dense = [(node, i) for node in found for i in variable_ops.dense_inputs(node)]
    return [(node, i) for node, i in dense if is_float(node.inputs[i]) and node.inputs[i].node.op != "Const"]


OWN_KINDS: tuple[Kind, ...] = (
    gradient_scaled,
    gradient_of_another_sign,
    activation_dropped,
    operands_swapped,
    sum_for_mean,
)
KNOWN: Mapping[str, Kind] = {kind.__name__: kind for kind in (*KINDS, *OWN_KINDS)}


@dataclass
class Miscompiler(RewriteObserver):
    """Makes a mistake behind a pass of every rewrite that it looks on at.

    Attributes:
        kind: which.
        behind: the pass.
        said: what it did in the last rewrite; empty where there was nothing to spoil.
    """

    kind: Kind
    behind: str
    said: str = field(default="", init=False)

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Make the mistake, if this is its pass."""
        if name == FIRST:
            self.said = ""
        if name != self.behind:
            return
        bench = Bench(rewrite.graph, rewrite.item, rewrite.instances, random.Random(self.kind.__name__))
        self.said = attempt(self.kind, bench)


@dataclass(frozen=True)
class Miscompilation:
    """A mistake, and the program in which it is made.

    Attributes:
        program: of `draws`.
        optimizer: likewise.
        config: likewise.
        kind: name of the mistake.
        behind: the pass behind which it is made, which is the one that `bisect` has to name.
    """

    program: str
    optimizer: str
    config: str
    kind: str
    behind: str = "order-accesses"

    def __str__(self) -> str:
        """Return its name."""
        return f"{self.draw}: {self.kind} behind {self.behind}"

    @property
    def draw(self) -> Draw:
        """Program and configuration."""
        return Draw(self.program, self.optimizer, self.config)

    def compiler(self) -> Miscompiler:
        """Return what makes the mistake."""
        return Miscompiler(KNOWN[self.kind], self.behind)


MISCOMPILATIONS: tuple[Miscompilation, ...] = (
    Miscompilation("counted", "own", "mirrored2", "gradient_scaled", FIRST),
    Miscompilation("ordered_updates", "own", "shared2", "gradient_of_another_sign", "decompose"),
    Miscompilation("random_and_branch", "own", "mirrored2", "activation_dropped", FIRST),
    Miscompilation("counted", "own", "shared2", "operands_swapped", FIRST),
    Miscompilation("contrastive", "own", "fsdp2", "sum_for_mean", FIRST),
    Miscompilation("ordered_updates", "own", "shared2", "stale_alias"),
    Miscompilation("ordered_updates", "own", "mirrored2", "updates_swapped"),
    Miscompilation("ordered_updates", "own", "shared2", "read_before_update"),
    Miscompilation("counted", "own", "shared2", "update_dropped"),
    Miscompilation("counted", "own", "mirrored2", "update_doubled"),
    Miscompilation("counted", "own", "mirrored2", "update_on_first_replica_only"),
    Miscompilation("ordered_updates", "own", "partitioned_ar2", "shards_swapped"),
    Miscompilation("ordered_updates", "own", "mirrored2", "copy_of_another_replica"),
    Miscompilation("counted", "own", "mirrored2", "sum_dropped"),
    Miscompilation("counted", "own", "shared2", "sum_doubled"),
    Miscompilation("counted", "own", "mirrored2", "contribution_lost"),
    Miscompilation("random_and_branch", "own", "mirrored2", "predicate_inverted"),
    Miscompilation("contrastive", "own", "shared2", "gather_along_other_axis"),
    Miscompilation("counted", "own", "shared2", "limit_off_by_one"),
    Miscompilation("counted", "own", "mirrored2", "blocks_overlap"),
    Miscompilation("counted", "own", "shared3", "size_of_one_replica"),
    Miscompilation("counted", "own", "shared3", "contribution_lost"),
    Miscompilation("counted", "own", "shared2", "constant_scaled"),
)
"""A wrong scale, a dropped edge, a swapped consumer, a lost order of updates, a wrong limit of a block, and others."""
