"""The ways to break a job: each changes one thing in its graphs, and says in a sentence what.

Every graph is still well-formed by itself. A kind that finds nothing to break raises IndexError or StopIteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.collectives import Collective, contracted_order
from autograph_rewrite.ir.devices import process
from autograph_rewrite.ir.frames import frames_of
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.walk import ancestors, marks_before, topological_order
from tests.mutation_bench import (
    GROUP_KEY,
    GROUP_SIZE,
    INSTANCE_KEY,
    Bench,
    Mutant,
    between,
    in_loop,
    is_branched,
    is_reduce,
    is_sized,
    name_of,
    number,
    numbers,
    rewire,
)

Kind = Callable[[Bench], Mutant]


def swapped_order(bench: Bench) -> Mutant:
    one, two = bench.pair()
    other = bench.rng.choice([rank for rank in range(len(bench.graphs)) if rank != bench.rank])
    for first, second, rank in ((one, two, bench.rank), (two, one, other)):
        for node in bench.of(second, rank):
            node.add_control(next(peer for peer in bench.of(first, rank) if peer.device == node.device))
    did = f"'{name_of(two)}' waits for '{name_of(one)}', on rank {other} the other way round"
    return bench.broken("swapped order", [one, two], did)


def swapped_devices(bench: Bench) -> Mutant:
    one, two = bench.pair()
    devices = sorted({node.device for node in bench.of(one)})[:2]
    for first, second, device in ((one, two, devices[0]), (two, one, devices[1])):
        before, after = (next(n for n in bench.of(group) if n.device == device) for group in (first, second))
        after.add_control(before)
    did = f"'{name_of(two)}' waits for '{name_of(one)}' on one device, and the other way round on another"
    return bench.broken("swapped order", [one, two], did)


def order_across_loop(bench: Bench) -> Mutant:
    """Wait for a loop on one rank, and let the loop wait on another: only its end tells that both cannot be."""
    inner = bench.rng.choice([group for group in bench.groups if in_loop(group)])
    loose = [group for group in bench.groups if is_reduce(group) and not in_loop(group)]
    order, _ = contracted_order(bench.nodes, bench.groups)
    outers = {node: 1 << i for i, group in enumerate(loose) for node in group.members}
    enters = {node: 1 << len(loose) for node in bench.nodes if node.op == "Enter"}
    met = dict.fromkeys(inner.members, 2 << len(loose))
    before = marks_before(order, outers | enters | met)
    tied = sum(1 << i for i, group in enumerate(loose) if any(before[n] >> len(loose) for n in group.members))
    for node in (*inner.members, *enters):
        tied |= before[node]
    outer = bench.rng.choice([group for i, group in enumerate(loose) if not tied >> i & 1])
    other = (bench.rank + 1) % len(bench.graphs)
    leave = next(node for node in bench.graph if node.op == "Exit" and before[node] >> len(loose) & 2)
    for node in bench.of(outer):
        node.add_control(leave)
    enter = min((node for node in ancestors(bench.of(inner, other)) if node in enters), key=lambda node: node.name)
    for node in bench.of(outer, other):
        enter.add_control(node)
    did = f"'{name_of(outer)}' waits for the loop of '{name_of(inner)}', on rank {other} the loop waits for it"
    return bench.broken("swapped order", [inner, outer], did)


def deleted_member(bench: Bench) -> Mutant:
    group, node = bench.pick()
    node.output().replace_all_uses_with(node.inputs[0])
    for user in node.control_users:
        user.remove_control(node)
    bench.graph.erase(node)
    return bench.broken("missing member", [group], f"'{node.name}' is gone")


def unread_member(bench: Bench) -> Mutant:
    group, node = bench.pick(lambda group: any(use for value in group.members[0].read_outputs for use in value.uses))
    node.output().replace_all_uses_with(node.inputs[0])
    for user in node.control_users:
        user.remove_control(node)
    return bench.broken("member not needed", [group], f"nothing reads '{node.name}'")


def pruned_target(bench: Bench) -> Mutant:
    wanted = [bench.graph.nodes[name] for name in bench.job.original.targets]
    outputs = [bench.graph.value(info.tensor).node for info in bench.job.original.outputs.values()]
    needed = ancestors([*outputs])
    group, node = bench.pick(lambda group: not any(member in needed for member in bench.of(group)))
    for target in wanted:
        for control in target.controls:
            if node in ancestors([control]):
                target.remove_control(control)
    if node in ancestors(wanted) or node in wanted:
        raise IndexError("the step still needs it")
    mutant = bench.broken("member not needed", [group], f"the train op does not wait for what '{node.name}' updates")
    return replace(mutant, named=(*mutant.named, *(f"target '{target.name}'" for target in wanted)))


def wrong_size(bench: Bench) -> Mutant:
    group, node = bench.pick()
    size = group.group_size + bench.rng.choice((-1, 1))
    rewire(node, GROUP_SIZE, size)
    return bench.broken("wrong group size", [group], f"'{node.name}' expects {size} members, not {group.group_size}")


def wrong_size_everywhere(bench: Bench) -> Mutant:
    group, _ = bench.pick()
    for node in group.members:
        rewire(node, GROUP_SIZE, group.group_size + 1)
    return bench.broken("wrong group size", [group], f"'{name_of(group)}' expects a member more than there are", None)


def wrong_dtype(bench: Bench) -> Mutant:
    group, node = bench.pick(lambda group: group.members[0].attr("T") in (dtypes.FLOAT, dtypes.DOUBLE))
    sent = node.inputs[0]
    other = dtypes.DOUBLE if sent.dtype == dtypes.FLOAT else dtypes.FLOAT
    back = between(node, "Cast", [node.output()], DstT=sent.dtype)
    node.output().replace_all_uses_with(back, keep=[back.node])
    node.set_input(0, between(node, "Cast", [sent], DstT=other))
    node.set_attr("T", other)
    back.node.set_attr("SrcT", other)
    return bench.broken("wrong dtype", [group], f"'{node.name}' sends {dtypes.dtype_name(other)}")


def wrong_merge(bench: Bench) -> Mutant:
    group, node = bench.pick(is_reduce)
    op = bench.rng.choice([op for op in (b"Add", b"Max", b"Min", b"Mul") if op != node.attr("merge_op")])
    node.set_attr("merge_op", op)
    return bench.broken("wrong merge op", [group], f"'{node.name}' merges by {op.decode()}")


def wrong_final(bench: Bench) -> Mutant:
    group, node = bench.pick(is_reduce)
    node.set_attr("final_op", b"Div")
    return bench.broken("wrong merge op", [group], f"'{node.name}' divides in the end")


def wrong_hint(bench: Bench) -> Mutant:
    group, node = bench.pick()
    node.set_attr("communication_hint", b"ring" if node.attr("communication_hint") != b"ring" else b"nccl")
    return bench.broken("wrong hint", [group], f"'{node.name}' communicates by {node.attr('communication_hint')}")


def wrong_op(bench: Bench) -> Mutant:
    group, node = bench.pick(is_reduce)
    gather = bench.graph.add(
        "CollectiveGatherV2",
        node.inputs,
        name=node.name,
        attrs={"communication_hint": node.attr("communication_hint")},
        device=node.device,
        controls=node.controls,
    )
    bench.graph.replace(node, gather)
    return bench.broken("wrong op", [group], f"'{gather.name}' gathers instead of reducing")


def duplicate_key(bench: Bench) -> Mutant:
    one, two = two_static(bench)
    node = bench.rng.choice(bench.of(one))
    rewire(node, INSTANCE_KEY, int(two.instance_key))
    return bench.broken("duplicate key", [one, two], f"'{node.name}' has the instance key of '{name_of(two)}'")


def duplicate_key_everywhere(bench: Bench) -> Mutant:
    one, two = two_static(bench)
    for node in one.members:
        rewire(node, INSTANCE_KEY, int(two.instance_key))
    did = f"'{name_of(one)}' has the instance key of '{name_of(two)}'"
    return bench.broken("duplicate key", [one, two], did, None)


def two_static(bench: Bench) -> tuple[Collective, Collective]:
    one, _ = bench.pick(lambda group: not is_sized(group))
    two, _ = bench.pick(lambda group: not is_sized(group) and group is not one and group.group_key == one.group_key)
    return one, two


def duplicate_row(bench: Bench) -> Mutant:
    """Let two keys that follow from sizes follow in one way: equal sizes would give equal keys."""
    one, _ = bench.pick(is_sized)
    two, _ = bench.pick(lambda group: is_sized(group) and group is not one and group.group_key == one.group_key)
    row = two.members[0].inputs[INSTANCE_KEY].node.inputs[1]
    for node in one.members:
        key = node.inputs[INSTANCE_KEY].node
        key.set_input(1, number(key.inputs[1], int(row.node.attr("value"))))
    did = f"keys of '{name_of(one)}' are in the row of '{name_of(two)}'"
    return bench.broken("duplicate key", [one, two], did, None)


def other_row(bench: Bench) -> Mutant:
    group, node = bench.pick(is_sized)
    key = node.inputs[INSTANCE_KEY].node
    key.set_input(1, number(key.inputs[1], int(key.inputs[1].node.attr("value")) + 1))
    return bench.broken("key from another row", [group], f"the key of '{node.name}' is one row further")


def other_size(bench: Bench) -> Mutant:
    one, node = bench.pick(is_sized)
    two, _ = bench.pick(lambda group: is_sized(group) and group is not one)
    node.set_input(INSTANCE_KEY, bench.of(two)[0].inputs[INSTANCE_KEY])
    did = f"the key of '{node.name}' follows from what '{name_of(two)}' sends"
    return bench.broken("key from another row", [one, two], did)


def duplicate_member(bench: Bench) -> Mutant:
    group, node = bench.pick()
    raw = {key: node.attr(key) for key in node.attrs if key[0] != "_"}
    again = bench.graph.add(node.op, node.inputs, name=f"{node.name}/again", attrs=raw, device=node.device)
    for use in node.output().uses:
        use.node.add_control(again)
    return bench.broken("duplicate member", [group], f"'{node.name}' is there twice")


def same_device(bench: Bench) -> Mutant:
    group, node = bench.pick(lambda group: len(bench.of(group)) > 1)
    peer = next(other for other in bench.of(group) if other is not node)
    node.set_device(peer.device)
    return bench.broken("wrong device", [group], f"'{node.name}' shares a device with '{peer.name}'")


def other_group(bench: Bench) -> Mutant:
    group, node = bench.pick()
    rewire(node, GROUP_KEY, group.group_key % 2**30 + 1)
    return bench.broken("different group key", [group], f"'{node.name}' is in another group")


def shared_group(bench: Bench) -> Mutant:
    one, _ = bench.pick(lambda group: len({other.group_key for other in bench.groups}) > 1)
    two, _ = bench.pick(lambda group: group.group_key != one.group_key)
    for node in one.members:
        rewire(node, GROUP_KEY, two.group_key)
    did = f"'{name_of(one)}' has the group key of '{name_of(two)}', which is on other devices"
    return bench.broken("different group key", [one, two], did, None)


def sliced(bench: Bench) -> Mutant:
    group, node = bench.pick()
    sent = node.inputs[0]
    ends = [numbers(node, what, place) for what, place in (("begin", 0), ("end", 1), ("by", 1))]
    node.set_input(0, between(node, "StridedSlice", [between(node, "ExpandDims", [sent, ends[0]]), *ends]))
    return bench.broken("different shape", [group], f"'{node.name}' sends '{sent.name}' with a dimension more")


def no_rows(bench: Bench) -> Mutant:
    group, node = bench.pick()
    sent = node.inputs[0]
    flat = between(node, "Reshape", [sent, numbers(node, "line", -1)])
    ends = [numbers(node, what, place) for what, place in (("begin", 0), ("end", 0), ("by", 1))]
    node.set_input(0, between(node, "StridedSlice", [flat, *ends]))
    return bench.broken("different shape", [group], f"'{node.name}' sends no element of '{sent.name}'")


def doubled(bench: Bench) -> Mutant:
    group, node = bench.pick(lambda group: not is_reduce(group) or "bucket" in name_of(group))
    axis = numbers(node, "axis", 0)
    at = between(node, "Squeeze", [axis])
    node.set_input(0, between(node, "ConcatV2", [node.inputs[0], node.inputs[0], at], N=2))
    return bench.broken("different shape", [group], f"'{node.name}' sends its value twice over")


def chained(bench: Bench) -> list[Collective]:
    """Let every device run collectives one after the other, as an ordering chain does; return them in their order."""
    order, _ = contracted_order(bench.nodes, bench.groups)
    position = {node: at for at, node in enumerate(order)}
    loose = [group for group in bench.groups if not in_loop(group) and not is_branched(group)]
    device = bench.rng.choice(sorted({node.device for group in loose for node in group.members}))
    places = {frozenset(node.device for node in group.members) for group in loose}
    widest = max(places, key=lambda some: (device in some, len(some)))
    line = [group for group in loose if frozenset(node.device for node in group.members) == widest]
    line.sort(key=lambda group: max(position[node] for node in group.members))
    for one, two in pairwise(line):
        for node in two.members:
            node.add_control(next(peer for peer in one.members if peer.device == node.device))
    return line


def missing_link(bench: Bench) -> Mutant:
    line = chained(bench)
    links = list(pairwise(line))
    bench.rng.shuffle(links)
    for one, two in links:
        node = bench.rng.choice(bench.of(two))
        peer = next(peer for peer in bench.of(one) if peer.device == node.device)
        node.remove_control(peer)
        if peer not in ancestors([node]):
            did = f"'{node.name}' does not wait for '{peer.name}' in the chain"
            return bench.broken("missing link", [one, two], did)
        node.add_control(peer)
    raise IndexError("data order them all")


def missing_token(bench: Bench) -> Mutant:
    group, odd = bench.pick()
    for node in group.members:
        attrs = {"dtype": dtypes.FLOAT, "shape": (), "shared_name": f"{node.device}/token"}
        token = node.graph.add("VarHandleOp", name=f"{node.name}/token", attrs=attrs, device=node.device).output()
        if node is not odd:
            node.set_inputs([*node.inputs, token])
            node.set_attr("Nordering_token", 1)
    return bench.broken("missing token", [group], f"'{odd.name}' lacks the ordering token of its device")


def other_frame(bench: Bench) -> Mutant:
    group, node = bench.pick(in_loop)
    name = frames_of(topological_order(bench.graph))[node][-1].encode()
    for enter in bench.graph:
        if enter.op == "Enter" and enter.attr("frame_name") == name:
            enter.set_attr("frame_name", name + b"/other")
    return bench.broken("different frame", [group], f"the loop of '{node.name}' has another name")


def out_of_loop(bench: Bench) -> Mutant:
    group, node = bench.pick(in_loop)
    zero = number(next(n for n in bench.graph if n.op == "Const" and not n.controls).output(), 0)
    sent = bench.graph.add("Cast", [zero], name="broken/sent", attrs={"DstT": node.inputs[0].dtype}).output()
    keys = [number(zero, int(value)) for value in (group.group_size, group.group_key, int(group.instance_key))]
    node.set_inputs([sent, *keys])
    for control in node.controls:
        node.remove_control(control)
    return bench.broken("different frame", [group], f"'{node.name}' runs once, before the loop")


def other_task(bench: Bench) -> Mutant:
    group, node = bench.pick()
    other = (bench.rank + 1) % len(bench.graphs)
    here, there = process(node.device), process(bench.of(group, other)[0].device)
    node.set_device(node.device.replace(here, there))
    return bench.broken("wrong task", [group], f"'{node.name}' is placed in the process of rank {other}")


def other_task_wholly(bench: Bench) -> Mutant:
    group, node = bench.pick()
    other = (bench.rank + 1) % len(bench.graphs)
    here, there = process(node.device), process(bench.of(group, other)[0].device)
    for one in bench.graph:
        one.set_device(one.device.replace(here, there))
    return bench.broken("wrong task", bench.groups, f"everything is placed in the process of rank {other}")


def other_branch(bench: Bench) -> Mutant:
    group, node = bench.pick(lambda group: not in_loop(group))
    attrs = {"value": np.True_, "dtype": dtypes.BOOL}
    sure = bench.graph.add("Const", name=f"{node.name}/sure", attrs=attrs, device=node.device).output()
    switch = between(node, "Switch", [node.inputs[0], sure]).node
    node.set_input(0, switch.output(bench.rng.randrange(2)))
    readers = node.output()
    merge = between(node, "Merge", [readers, switch.output(1 - node.inputs[0].index)], N=2)
    readers.replace_all_uses_with(merge, keep=[merge.node])
    return bench.broken("moved into a branch", [group], f"'{node.name}' runs in one branch of a new condition only")


def turned_branch(bench: Bench) -> Mutant:
    group, _ = bench.pick(is_branched)
    switches = [node for node in ancestors(bench.of(group)) if node.op == "Switch"]
    nots: dict[Value, Value] = {}
    for switch in [node for node in bench.graph if node.op == "Switch"] if switches else []:
        predicate = switch.inputs[1]
        if predicate not in nots:
            nots[predicate] = between(switch, "LogicalNot", [predicate])
        switch.set_input(1, nots[predicate])
    if not switches:
        raise IndexError("nothing decides about it")
    return bench.broken("moved into a branch", [group], f"the branch of '{name_of(group)}' is taken when others do not")


def aliased(bench: Bench) -> Mutant:
    handles = [node for node in bench.graph if node.op == "VarHandleOp" and node.attr("shape")]
    one = bench.rng.choice(handles)
    two = bench.rng.choice([node for node in handles if node.device == one.device and node is not one])
    two.set_attr("shared_name", one.attr("shared_name") or one.name.encode())
    return bench.broken("alias", [], f"'{two.name}' is stored where '{one.name}' is")


KINDS: tuple[Kind, ...] = (
    swapped_order, swapped_devices, order_across_loop, deleted_member, unread_member, pruned_target, wrong_size,
    wrong_size_everywhere, wrong_dtype, wrong_merge, wrong_final, wrong_hint, wrong_op, duplicate_key,
    duplicate_key_everywhere, duplicate_row, other_row, other_size, duplicate_member, same_device, other_group,
    shared_group, sliced, no_rows, doubled, missing_link, missing_token, other_frame, out_of_loop, other_task,
    other_task_wholly, other_branch, turned_branch, aliased,
)  # fmt: skip
