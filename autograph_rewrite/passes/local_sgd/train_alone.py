"""The pass that lets replicas train by themselves, and what the report says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.analysis.variables.uses import variable_uses
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.order_accesses import access_order
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable
from autograph_rewrite.passes.local_sgd.averages import SCOPE, Averages, add_averages, wait_for
from autograph_rewrite.passes.local_sgd.own_steps import OwnSteps, find_own_steps, let_out
from autograph_rewrite.plan.parts.messages import LocalSgd
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.training_graph import Variable


@dataclass(frozen=True)
class Alone:
    """What replicas train by themselves.

    Attributes:
        own: their steps.
        averages: where they meet.
        how: as the plan says.
    """

    own: OwnSteps
    averages: Averages
    how: LocalSgd


def train_alone(rewrite: Rewrite) -> None:
    """Let each replica take steps with its part of the batch, and average variables every so many (`local_sgd`)."""
    state, plan, variables = rewrite.get(Propagation), rewrite.plan, rewrite.item.variables
    assert plan.local_sgd is not None
    graph, outputs = rewrite.graph, rewrite.outputs
    slots = set() if plan.local_sgd.average_slots else _slots(state, rewrite)
    own = find_own_steps(state, variables)
    let_out(state, set(outputs), own, plan.replicas)
    averaged = {name: variables[name] for name in own.variables if _has_mean(variables[name]) and name not in slots}
    targets = rewrite.targets
    together = rewrite.item.binding is not None
    groups: Sequence[Sequence[Node]] = [targets] if together else [[target] for target in targets]
    averages = add_averages(state, plan.local_sgd, plan.replicas, averaged, groups)
    for waiting, done in averages.done:
        if together:  # a function runs all of its targets, by their names
            rewrite.item = replace(rewrite.item, targets=(*rewrite.item.targets, done.name))
        else:
            wait_for(graph, waiting, done)
    rewrite.put(revise(state))
    rewrite.put(access_order(graph, rewrite.targets))
    rewrite.put(Alone(own, averages, plan.local_sgd))


def trains_alone(rewrite: Rewrite) -> bool:
    """Return whether replicas train by themselves."""
    return rewrite.plan.local_sgd is not None and rewrite.plan.replicas > 1


def _slots(state: Propagation, rewrite: Rewrite) -> set[str]:
    step = ancestors(rewrite.targets) | set(rewrite.targets)
    uses = variable_uses(state, rewrite.item.variables, step=step)
    return {name for name, use in uses.items() if use.owner is not None}


def _has_mean(variable: Variable) -> bool:
    return dtypes.NUMBERS.get(variable.dtype, 0) in dtypes.INEXACT


def notes_of(alone: Alone, variables: Mapping[str, Variable]) -> Iterator[Note]:
    """Yield what is not as on one device: each variable that replicas write by themselves.

    Args:
        alone: what they do.
        variables: of the item.
    """
    how = alone.how
    first = f", and after each of the first {how.warmup_steps}" if how.warmup_steps else ""
    when = f"every {how.period} steps{first}" if how.period > 1 else "after each step"
    for name in alone.own.variables:
        if name in alone.averages.averaged:
            text = f"each replica updates its own with its part of the batch; averaged {when}"
        else:
            why = "as average_slots says" if _has_mean(variables[name]) else f"{variables[name].dtype} has no mean"
            text = f"each replica updates its own with its part of the batch; never averaged, {why}"
        yield Note(name, "local_sgd", text)


TRAIN_ALONE = Pass("train-alone", train_alone, trains_alone, (Propagation,), (Propagation, Alone))


# What local steps need of the runtime: a counter that is kept from step to step, and a part of each batch.
#
# before   step = Identity(0)                     next = step + 1
# after    step = Identity(ReadVariableOp(n))     next = step + 1 ──► n


TOO_FEW = (
    "with local_sgd each replica trains on its part of the batch, and this batch has fewer examples than replicas: "
    "drop the last one (drop_remainder=True), or leave local_sgd out"
)


def keep_counts(rewrite: Rewrite, blocks: Blocks, alone: Alone) -> None:
    """Keep the counters of steps, and refuse a batch that leaves a replica without examples.

    Args:
        alone: what replicas train by themselves.
    """
    for counter in alone.averages.counters:
        near = counter.before.output()
        kept = AuxiliaryVariable(rewrite, f"{SCOPE}/steps", (), dtypes.INT64, near=near)
        counter.before.set_input(0, kept.before)
        kept.becomes(counter.after, counter.after)
    parts = [node for node in alone.own.parts if node.name in rewrite.graph.nodes]
    if not parts:
        return
    build = FoldedBuilder.of(rewrite, blocks.source, f"{SCOPE}/examples", span=ONCE)
    enough = build.op("GreaterEqual", blocks.part, build.const(rewrite.local, dtypes.INT32, "replicas"), what="suffice")
    text = {"value": np.asarray(TOO_FEW.encode(), object), "dtype": dtypes.STRING}
    said = rewrite.add("Const", [], Site(f"{SCOPE}/too_few", ONCE, blocks.source.node), attrs=text)
    site = Site(f"{SCOPE}/check", ONCE, blocks.source.node)
    check = rewrite.add("Assert", [enough, said.output()], site, attrs={"T": (dtypes.STRING,)})
    for node in parts:
        node.add_control(check)


def _run(rewrite: Rewrite) -> None:
    """Count the steps between averages, and give each replica examples (`local_sgd`)."""
    keep_counts(rewrite, rewrite.get(Blocks), rewrite.get(Alone))


COUNT_STEPS = Pass("count-steps", _run, lambda rewrite: rewrite.has(Alone), (Homes, Blocks))
