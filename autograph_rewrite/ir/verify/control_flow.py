"""Control flow around collectives: all members are in the same loop and branch, under predicates that agree.

rank 0   step % 2 == 0 ──► branch ──► all_reduce      the same on all ranks: they meet, or nobody comes
rank 1   sum(x) > 0    ──► branch ──► all_reduce      one rank's own part of the batch: it may come alone
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replication import common_name
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ir.verify.folded import Fault
from autograph_rewrite.ir.verify.job import SAME_PLAN, Job, odd_one
from autograph_rewrite.ops.traits import has

# What they give is one on all ranks, as far as it decides anything: sizes that differ are made global before.


def conditions_are_equal(job: Job) -> Iterator[Fault]:
    """The members of a collective run in one loop and in one branch."""
    frames, guards = job.conditions
    if not frames and not guards:
        return
    for group in job.found:
        loops = {node: " in ".join(f"'{name}'" for name in frames.get(node, ())[::-1]) for node in group.members}
        if len(set(loops.values())) > 1:
            told = {node: f"in loop {loop}" if loop else "in no loop" for node, loop in loops.items()}
            problem = f"the members of {group.name} run in different loops: {job.sides(told)}"
            yield Fault(problem, odd_one(loops), "nobody leaves a loop in which another still waits for it")
        branches = {
            node: frozenset((common_name(guard.predicate.name), guard.taken) for guard in guards.get(node, ()))
            for node in group.members
        }
        if len(set(branches.values())) > 1:
            told = {node: _behind(branch) for node, branch in branches.items()}
            problem = f"the members of {group.name} run on different conditions: {job.sides(told)}"
            yield Fault(problem, odd_one(branches), "put all members of a collective in the same branch")


def _behind(branch: frozenset[tuple[str, bool]]) -> str:
    said = " and ".join(f"'{name}' is {str(taken).lower()}" for name, taken in sorted(branch))
    return f"where {said}" if said else "always"


def decisions_are_alike(job: Job) -> Iterator[Fault]:
    """What decides whether, or how often, a collective runs is computed alike on all ranks, from what all have."""
    _, guards = job.conditions
    decided: dict[str, dict[Value, Node]] = {}  # by predicate without replica: those of the ranks, and who waits
    for group in job.found:
        for node in group.members:
            for guard in guards.get(node, ()):
                decided.setdefault(common_name(guard.predicate.name), {}).setdefault(guard.predicate, node)
    for name, predicates in decided.items():
        origins = {predicate: _origin(predicate, job.own_inputs) for predicate in predicates}
        for predicate, origin in origins.items():
            if origin.own and job.processes > 1:
                member = predicates[predicate]
                problem = (
                    f"whether {job.say(member)} runs is decided by '{name}', which follows from its rank's own part"
                )
                hint = "decide by what all ranks have: a sum or a gather over all of them, or a variable"
                yield Fault(f"{problem} of the batch, '{origin.own}'", member, hint)
        makings = {predicate.node: origin.making for predicate, origin in origins.items()}
        if len(set(makings.values())) > 1:
            odd = odd_one(makings)
            other = next(node for node in makings if makings[node] != makings[odd])
            apart = sorted({part[0] for part in makings[odd] ^ makings[other]})
            member = next(member for predicate, member in predicates.items() if predicate.node is odd)
            problem = f"what decides whether {job.say(member)} runs, {job.say(odd)}, is computed in another way than"
            yield Fault(f"{problem} {job.say(other)}: see '{apart[0]}'", odd, SAME_PLAN)


class _Origin(NamedTuple):
    """What a value is computed from: an input of its rank's own, if there is one, and the ops and constants."""

    own: str
    making: frozenset[tuple[str, str, Hashable]]


def _origin(value: Value, own_inputs: frozenset[str]) -> _Origin:
    """Follow a value back to what all ranks have: variables, collectives and inputs that are fed alike."""
    making: set[tuple[str, str, Hashable]] = set()
    own = ""
    seen = {value.node}
    stack = [value.node]
    while stack:
        node = stack.pop()
        making.add((common_name(node.name), node.op, node.attrs.get("value") if node.op == "Const" else None))
        if node.name in own_inputs:
            own = node.name
        if is_collective(node.op) or has(node.op, "measures"):
            continue
        more = [one.node for one in node.inputs if one.node not in seen]
        seen.update(more)
        stack += more
    return _Origin(own, frozenset(making))
