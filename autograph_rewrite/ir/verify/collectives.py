"""Checks the collectives of a job: no deadlock, and members agree on types, shapes and group size.

    rank 0    x ──► all_reduce (group 7, instance 11) ──►     the same op, type, shape and keys on all ranks,
    rank 1    x ──► all_reduce (group 7, instance 11) ──►     on devices of their own, in one order, on one condition

The graphs of all ranks are checked as one. A graph may also stand for equal graphs of several processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any, NamedTuple

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.traversal import grouped, marks_before
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ir.verify.collective_groups import (
    SENT,
    Collective,
    deadlock,
    input_names,
    is_collective,
    key_range,
    keys_of,
    names_in,
    sent_by,
)
from autograph_rewrite.ir.verify.folded import Fault
from autograph_rewrite.ir.verify.job import SAME_PLAN, SHOWN, Job, odd_one
from autograph_rewrite.ir.verify.nccl import nccl_has_device_and_type, nccl_has_one_order
from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.rules.inference import Shapes, differ, shape_text
from autograph_rewrite.ops.traits import BACK_EDGES, has

# Control flow around collectives: all members are in the same loop and branch, under predicates that agree.
#
# rank 0   step % 2 == 0 ──► branch ──► all_reduce      the same on all ranks: they meet, or nobody comes
# rank 1   sum(x) > 0    ──► branch ──► all_reduce      one rank's own part of the batch: it may come alone


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
    """All ranks compute whether, or how often, a collective runs in the same way, from values that all have."""
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
                problem = f"whether {job.say(member)} runs is decided by '{name}', which follows from its rank's own"
                hint = "decide by what all ranks have: a sum or a gather over all of them, or a variable"
                yield Fault(f"{problem} part of the batch, '{origin.own}'", member, hint)
        makings = {predicate.node: origin.making for predicate, origin in origins.items()}
        if len(set(makings.values())) > 1:
            odd = odd_one(makings)
            other = next(node for node in makings if makings[node] != makings[odd])
            apart = sorted({part[0] for part in makings[odd] ^ makings[other]})
            member = next(member for predicate, member in predicates.items() if predicate.node is odd)
            problem = f"what decides whether {job.say(member)} runs, {job.say(odd)}, is computed in another way than"
            yield Fault(f"{problem} {job.say(other)}: see '{apart[0]}'", odd, SAME_PLAN)


class _Origin(NamedTuple):
    """The origin of a value: an input that differs by rank, if any, and the ops and constants that make it."""

    own: str
    making: frozenset[tuple[str, str, Hashable]]


def _origin(value: Value, own_inputs: frozenset[str]) -> _Origin:
    """Follow a value back to values that all ranks have: variables, collectives and inputs that all feed alike."""
    making: set[tuple[str, str, Hashable]] = set()
    own = ""
    seen = {value.node}
    stack = [value.node]
    while stack:
        node = stack.pop()
        making.add((common_name(node.name), node.op, node.attrs.get("value") if has(node.op, "constant") else None))
        if node.name in own_inputs:
            own = node.name
        # Their results agree on all ranks: a local size that decides anything was made global before.
        if is_collective(node.op) or has(node.op, "measures"):
            continue
        more = [one.node for one in node.inputs if one.node not in seen]
        seen.update(more)
        stack += more
    return _Origin(own, frozenset(making))


Invariant = Callable[[Job], Iterable[Fault]]


def collective_faults(job: Job) -> Iterator[Fault]:
    """Yield every broken invariant of the collectives of a job."""
    for invariant in ALIKE:
        yield from invariant(job)
    if job.ordered[1]:
        yield from one_order_exists(job)
        return
    for invariant in ORDERED:
        yield from invariant(job)


def keys_are_known(job: Job) -> Iterator[Fault]:
    """The keys of every member are constants, or follow from a size."""
    for node in job.collected[1]:
        problem = f"the keys of {job.say(node)} are not constants, so nobody can tell who meets whom"
        yield Fault(problem, node, "compute them from constants, or from the size of what is sent")


def members_are_complete(job: Job) -> Iterator[Fault]:
    """A collective has as many members as its group size says, and all members state the same size."""
    names: dict[tuple[int, str], Node] = {}
    for node in chain.from_iterable(group.members for group in job.found):
        names.setdefault((job.rank(node), common_name(node.name)), node)
    for group in job.found:
        count = len(group.members) * job.each
        is_within = len(group.members) == group.group_size  # the devices of one replica, which are in one process
        if count != group.group_size and not is_within:
            problem = f"{group.name} has {count} members; it needs {group.group_size} ({_census(job, group, names)})"
            yield Fault(problem, group.members[0], "every rank must have as many members; " + SAME_PLAN)
        yield from _disagreement(job, group, "group size", lambda node: (keys_of(node) or (0,))[0])


def _census(job: Job, group: Collective, names: Mapping[tuple[int, str], Node]) -> str:
    """Say which members each rank has, odd ranks first, and which collective a missing member is in."""
    if len(job.graphs) == 1:
        return "there is: " + ", ".join(node.name for node in group.members[:SHOWN])
    members: dict[int, list[Node]] = {rank: [] for rank in range(len(job.graphs))}
    for node in group.members:
        members[job.rank(node)].append(node)
    usual = group.group_size / len(job.graphs)
    group_of = {node: other for other in job.found for node in other.members}
    told = []
    for rank, nodes in sorted(members.items(), key=lambda item: len(item[1]) == usual):
        astray = names.get((rank, common_name(group.members[0].name)))
        if nodes:
            told.append(f"rank {rank} has " + ", ".join(f"'{node.name}'" for node in nodes[:SHOWN]))
        elif astray is not None:
            told.append(f"rank {rank} has none: its '{astray.name}' is in {group_of[astray].name}")
        else:
            told.append(f"rank {rank} has none")
    return "; ".join(told[:SHOWN]) + ("; ..." if len(told) > SHOWN else "")


def _disagreement(job: Job, group: Collective, what: str, of: Callable[[Node], Any]) -> Iterator[Fault]:
    """Yield a fault where the members differ in a property."""
    values = {node: of(node) for node in group.members}
    if len(set(values.values())) > 1:
        problem = f"the members of {group.name} differ in their {what}: {job.sides(values)}"
        yield Fault(problem, odd_one(values), SAME_PLAN)


def members_have_devices(job: Job) -> Iterator[Fault]:
    """Every member is on a separate device, whose name includes the process where there are several ranks."""
    for group in job.found:
        places = grouped((device_specs.canonical(node.device), node) for node in group.members)
        for device, nodes in places.items():
            spec = device_specs.parse(device)
            if not device:
                yield Fault(f"a member of {group.name} has no device: {job.say(nodes[0])}", nodes[0], SAME_PLAN)
            elif len(nodes) > 1:
                who = " and ".join(job.say(node) for node in nodes[:SHOWN])
                problem = f"{group.name} has {len(nodes)} members on '{nodes[0].device}'; each needs its own device"
                yield Fault(f"{problem} ({who})", nodes[-1], "place each member on the device of its replica")
            if device and len(job.graphs) > 1 and spec is not None and not spec.task:
                problem = f"{job.say(nodes[0])}, a member of {group.name}, is on '{device}', which names no process"
                yield Fault(problem, nodes[0], SAME_PLAN)


def members_are_alike(job: Job) -> Iterator[Fault]:
    """The members of a collective are one op with the same attributes; a broadcast has one sender."""
    for group in job.found:
        first = group.members[0]
        ops = Counter(node.op for node in group.members)
        sends = sum(count for op, count in ops.items() if "BcastSend" in op)
        if any("Bcast" in op for op in ops):
            if sends != 1 and job.each == 1:
                yield Fault(f"{group.name} has {sends} senders; a broadcast has one", first, SAME_PLAN)
        elif len(ops) > 1:
            sides = job.sides({node: node.op for node in group.members})
            problem = f"the members of {group.name} are of different ops: {', '.join(sorted(ops))} ({sides})"
            yield Fault(problem, first, SAME_PLAN)
        raws = {tuple(sorted((k, raw) for k, raw in node.attrs.items() if k[0] != "_")) for node in group.members}
        if len(raws) == 1 and len(ops) == 1:
            continue
        declared = [set(op.attrs) if (op := find_op(name)) is not None else set() for name in ops]
        for attr in sorted(set.intersection(*declared)):
            yield from _disagreement(job, group, f"'{attr}'", partial(_readable, attr))


def _readable(attr: str, node: Node) -> Hashable:
    value = node.attr(attr)
    if isinstance(value, bytes):
        return f"'{value.decode(errors='replace')}'"
    op = find_op(node.op)
    if op is not None and op.attrs[attr].kind == "type" and isinstance(value, int):
        return dtypes.dtype_name(value)
    return value if isinstance(value, Hashable) else str(value)


def groups_have_one_set_of_devices(job: Job) -> Iterator[Fault]:
    """A group key stands for one set of devices, and for its size: TensorFlow resolves each key once."""
    # `members_are_complete` reports the others
    complete = (group for group in job.found if len(group.members) * job.each == group.group_size)
    for key, same in grouped((group.group_key, group) for group in complete).items():
        sets = {
            group.members[0]: frozenset(device_specs.canonical(node.device) for node in group.members) for group in same
        }
        if len(set(sets.values())) > 1:
            odd = odd_one(sets)
            other = next(group for group in same if sets[group.members[0]] != sets[odd])
            mine = next(group for group in same if group.members[0] is odd)
            apart = ", ".join(f"'{device}'" for device in sorted(sets[odd] ^ sets[other.members[0]])[:SHOWN])
            problem = f"group key {key} stands for two sets of devices: that of {mine.name} ({job.say(odd)}) and"
            hint = "give each set of devices its own group key"
            yield Fault(f"{problem} that of {other.name} differ in {apart}", odd, hint)


def keys_never_meet(job: Job) -> Iterator[Fault]:
    """Two collectives of a group never have one instance key, whatever the sizes that their keys are computed from."""
    for same in grouped((group.group_key, group) for group in job.found).values():
        if all(isinstance(group.symbol, int) for group in same):
            continue
        ranges = [(group, key_range(group.symbol)) for group in same]
        for (one, first), (other, second) in combinations(ranges, 2):
            if (first.step or second.step) and first.meets(second):
                odd = other.members[0]
                problem = f"{one.name} and {other.name} can get the same instance key in some step"
                where = f"{job.say(one.members[0])} and {job.say(odd)}"
                yield Fault(f"{problem} ({where})", odd, "keys that follow from sizes need a row of their own each")


def keys_measure_what_is_sent(job: Job) -> Iterator[Fault]:
    """An instance key that depends on a size depends on the size of the value that its member sends."""
    for group in job.found:
        others = [name for name in names_in(group.symbol) if name != SENT]
        for node in group.members if others else ():
            problem = f"the key of {job.say(node)} in {group.name} follows from '{others[0]}'"
            hint = "TensorFlow ties a key to the shape that is sent: measure that"
            yield Fault(f"{problem}, but it sends '{node.inputs[0].name}'", node, hint)


def shapes_are_equal(job: Job) -> Iterator[Fault]:
    """The members of a collective send values of one shape; in a gather, too."""
    shapes = Shapes()
    for group in job.found:
        sent: dict[Node, Shape | str] = {node: shapes(node.inputs[0]) for node in group.members if sent_by(node)}
        if len(set(sent.values())) <= 1:
            continue
        texts = {node: shape_text(shape) for node, shape in sent.items()}
        if any(differ(one, other) for one, other in combinations(set(sent.values()), 2)):
            problem = f"the members of {group.name} send different shapes: {job.sides(texts)}"
            yield Fault(problem, odd_one(texts), "all members of a collective send one shape; blocks are padded first")
            continue
        made = {node: f"what {value.node.op} '{value.name}' gives" for node in sent for value in [node.inputs[0]]}
        problem = f"nothing shows that the members of {group.name} send one shape: {job.sides(made)}"
        yield Fault(problem, odd_one(sent), "all members must make what they send in one way; " + SAME_PLAN)


def one_order_exists(job: Job) -> Iterator[Fault]:
    """There is an order of all collectives that every rank can follow."""
    circle = deadlock(job.found, job.ordered[1])
    hint = "run collectives in one order on all devices: remove the edges that turn it round"
    if len(circle) == 1:
        group, chain_ = circle[0]
        problem = f"{group.name}: its member {job.say(chain_[0])} needs the result of its member {job.say(chain_[-1])}"
        yield Fault(problem, chain_[0], hint)
    elif circle:
        names = " and ".join(group.name for group, _ in circle[:2])
        steps = "; ".join(_step(job, chain_) for _, chain_ in circle[:SHOWN])
        yield Fault(f"{names} wait for each other: {steps}", circle[0][1][0], hint)
    else:
        stuck = job.ordered[1][0]
        yield Fault(f"{job.say(stuck)} and {len(job.ordered[1]) - 1} more nodes wait for each other", stuck, hint)


def _step(job: Job, waits: Sequence[Node]) -> str:
    between = [f"'{node.name}'" for node in waits[1:-1]]
    if len(between) > SHOWN:
        between = [*between[: SHOWN - 1], "...", between[-1]]
    through = f" through {', '.join(between)}" if between else ""
    waiter, other = waits[0], waits[-1]
    return f"{job.say(waiter)} on {device_specs.short(waiter.device)} comes after {job.say(other)}{through}"


def chains_agree(job: Job) -> Iterator[Fault]:
    """Where one rank orders two collectives by a control edge or a token, all ranks order them."""
    group_of = {node: group for group in job.found for node in group.members}
    asked: dict[tuple[int, int], tuple[Node, Node]] = {}
    for node in group_of:
        for earlier in _chained(node, group_of):
            asked.setdefault((id(group_of[earlier]), id(group_of[node])), (earlier, node))
    if not asked:
        return
    listed = {id(group): group for group in job.found}
    marks = {node: 1 << i for i, node in enumerate(dict.fromkeys(n for one, _ in asked for n in listed[one].members))}
    before = marks_before(job.ordered[0], marks)
    for (one, two), (earlier, later) in asked.items():
        here = {device_specs.canonical(node.device): node for node in listed[one].members}
        for node in listed[two].members:
            other = here.get(device_specs.canonical(node.device))
            if other is not None and not before[node] & marks[other]:
                problem = f"{job.say(node)} in {listed[two].name} does not wait for '{other.name}' in"
                rest = f"{listed[one].name}, as {job.say(later)} does for '{earlier.name}'"
                yield Fault(f"{problem} {rest}", node, "order collectives on all devices, or on none; " + SAME_PLAN)


def _chained(node: Node, group_of: Mapping[Node, Collective]) -> Iterator[Node]:
    """Yield the collectives that a member waits for by control edges and tokens, not by data."""
    names = input_names(node.op)
    tokens = node.inputs[names.index("ordering_token") :] if "ordering_token" in names else ()
    stack = [*node.controls, *(value.node for value in tokens)]
    seen = set(stack)
    while stack:
        other = stack.pop()
        if other in group_of:
            yield other
        elif has(other.op, "groups"):
            more = [*other.controls, *(value.node for value in other.inputs)]
            stack += [one for one in more if one not in seen]
            seen.update(more)


def runs_are_whole(job: Job) -> Iterator[Fault]:
    """A fetch, run on all ranks, needs all members of a collective, or none."""
    order = job.ordered[0]
    bits = {node: 1 << i for i, node in enumerate(chain.from_iterable(group.members for group in job.found))}
    masks: dict[Node, int] = {}
    loops = any(node.op in BACK_EDGES for node in order)
    for _ in range(2 if loops else 1):  # the second round propagates members from a loop's body to its entry
        for node in order:
            mask = bits.get(node, 0)
            for value in node._inputs:
                mask |= masks.get(value.node, 0)
            for control in node._controls:
                mask |= masks[control]
            masks[node] = mask
    wholes = [sum(bits[node] for node in group.members) for group in job.found]
    for what, nodes, _ in job.roots:
        mask = 0
        for node in nodes:
            mask |= masks[node]
        cut = [group for group, whole in zip(job.found, wholes, strict=True) if mask & whole not in (0, whole)]
        missing = [node for group in cut for node in group.members if not mask & bits[node]]
        if missing:
            problem = f"running {what} alone hangs: it needs {cut[0].name}, but not {job.say(missing[0])}"
            others = [job.say(node) for node in missing[1:]]
            rest = f" (nor {', '.join(others[: 2 * SHOWN])}{', ...' if others[2 * SHOWN :] else ''})" if others else ""
            yield Fault(problem + rest, missing[0], "let it wait for all members: on every rank, of every replica")


ALIKE: tuple[Invariant, ...] = (
    keys_are_known,
    members_are_complete,
    members_have_devices,
    members_are_alike,
    groups_have_one_set_of_devices,
    keys_never_meet,
    keys_measure_what_is_sent,
    shapes_are_equal,
    conditions_are_equal,
    decisions_are_alike,
    nccl_has_device_and_type,
)
ORDERED: tuple[Invariant, ...] = (chains_agree, runs_are_whole, nccl_has_one_order)
