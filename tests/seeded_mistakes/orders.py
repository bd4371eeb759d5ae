"""Mistakes about when collectives run: their order, their chains, their loops and their branches.

Every graph is still well-formed by itself.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autograph_rewrite.ir.control_flow import frames_of, guards_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import ancestors, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.collective_groups import Collective, contracted_order
from tests.seeded_mistakes.job_bench import JobBench, JobKind, in_loop, is_branched, is_reduce, name_of


def swapped_order(bench: JobBench) -> str:
    one, two = bench.pair()
    other = bench.pick(rank for rank in range(len(bench.graphs)) if rank != bench.rank)
    for first, second, rank in ((one, two, bench.rank), (two, one, other)):
        for node in bench.of(second, rank):
            node.add_control(next(peer for peer in bench.of(first, rank) if peer.device == node.device))
    did = f"'{name_of(two)}' waits for '{name_of(one)}', on rank {other} the other way round"
    return bench.said(did, one, two)


def swapped_devices(bench: JobBench) -> str:
    one, two = bench.pair()
    devices = sorted({node.device for node in bench.of(one)})[:2]
    for first, second, device in ((one, two, devices[0]), (two, one, devices[1])):
        before, after = (next(n for n in bench.of(group) if n.device == device) for group in (first, second))
        after.add_control(before)
    did = f"'{name_of(two)}' waits for '{name_of(one)}' on one device, and the other way round on another"
    return bench.said(did, one, two)


def order_across_loop(bench: JobBench) -> str:
    """Wait for a loop on one rank, and let the loop wait on another: only its end tells that both cannot be."""
    inner = bench.pick(group for group in bench.groups if in_loop(group))
    loose = [group for group in bench.groups if is_reduce(group) and not in_loop(group)]
    order, _ = contracted_order(bench.nodes_of_all, bench.groups)
    outers = {node: 1 << i for i, group in enumerate(loose) for node in group.members}
    enters = {node: 1 << len(loose) for node in bench.nodes_of_all if node.op == "Enter"}
    met = dict.fromkeys(inner.members, 2 << len(loose))
    before = marks_before(order, outers | enters | met)
    tied = sum(1 << i for i, group in enumerate(loose) if any(before[n] >> len(loose) for n in group.members))
    for node in (*inner.members, *enters):
        tied |= before[node]
    outer = bench.pick(group for i, group in enumerate(loose) if not tied >> i & 1)
    other = (bench.rank + 1) % len(bench.graphs)
    leave = next(node for node in bench.graph if node.op == "Exit" and before[node] >> len(loose) & 2)
    for node in bench.of(outer):
        node.add_control(leave)
    enter = min((node for node in ancestors(bench.of(inner, other)) if node in enters), key=lambda node: node.name)
    for node in bench.of(outer, other):
        enter.add_control(node)
    did = f"'{name_of(outer)}' waits for the loop of '{name_of(inner)}', on rank {other} the loop waits for it"
    return bench.said(did, inner, outer)


def chained(bench: JobBench) -> list[Collective]:
    """Let every device run collectives one after the other, as an ordering chain does; return them in their order."""
    order, _ = contracted_order(bench.nodes_of_all, bench.groups)
    position = {node: at for at, node in enumerate(order)}
    loose = [group for group in bench.groups if not in_loop(group) and not is_branched(group)]
    device = bench.pick(sorted({node.device for group in loose for node in group.members}))
    places = {frozenset(node.device for node in group.members) for group in loose}
    widest = max(places, key=lambda some: (device in some, len(some)))
    line = [group for group in loose if frozenset(node.device for node in group.members) == widest]
    line.sort(key=lambda group: max(position[node] for node in group.members))
    for one, two in pairwise(line):
        for node in two.members:
            node.add_control(next(peer for peer in one.members if peer.device == node.device))
    return line


def missing_link(bench: JobBench) -> str:
    line = chained(bench)
    links = list(pairwise(line))
    bench.rng.shuffle(links)
    for one, two in links:
        node = bench.pick(bench.of(two))
        peer = next(peer for peer in bench.of(one) if peer.device == node.device)
        node.remove_control(peer)
        if peer not in ancestors([node]):
            did = f"'{node.name}' does not wait for '{peer.name}' in the chain"
            return bench.said(did, one, two)
        node.add_control(peer)
    raise LookupError("data order them all")


def give_token(bench: JobBench, node: Node) -> None:
    """Order a collective behind the others of its device by a token."""
    token = bench.add("VarHandleOp", [], node, dtype=dtypes.FLOAT, shape=(), shared_name=f"{node.device}/token")
    node.set_inputs([*node.inputs, token.output()])
    node.set_attr("Nordering_token", 1)


def missing_token(bench: JobBench) -> str:
    group, odd = bench.member()
    for node in group.members:
        if node is not odd:
            give_token(bench, node)
    return bench.said(f"'{odd.name}' lacks the ordering token of its device", group)


def other_frame(bench: JobBench) -> str:
    group, node = bench.member(in_loop)
    name = frames_of(topological_order(bench.graph))[node][-1].encode()
    for enter in bench.graph:
        if enter.op == "Enter" and enter.attr("frame_name") == name:
            enter.set_attr("frame_name", name + b"/other")
    return bench.said(f"the loop of '{node.name}' has another name", group)


def out_of_loop(bench: JobBench) -> str:
    group, node = bench.member(in_loop)
    const = next(n for n in bench.graph if n.op == "Const" and not n.controls).output()
    zero, *keys = (
        bench.const(value, const, dtype=dtypes.INT32, controls=())
        for value in (0, group.group_size, group.group_key, int(group.instance_key))
    )
    sent = bench.graph.add("Cast", [zero], name="broken/sent", attrs={"DstT": node.inputs[0].dtype}).output()
    frame = frames_of(topological_order(bench.graph))[node][-1]
    readers = list(node.output().uses)
    node.set_inputs([sent, *keys])
    for control in node.controls:
        node.remove_control(control)
    attrs = {"frame_name": frame.encode(), "is_constant": True}
    inside = bench.graph.add("Enter", [node.output()], name="broken/entered", attrs=attrs).output()
    for reader, index in readers:
        reader.set_input(index, inside)
    return bench.said(f"'{node.name}' runs once, before the loop", group)


def other_branch(bench: JobBench) -> str:
    group, node = bench.member(lambda group: not in_loop(group))
    sure = bench.const(True, node.output(), dtype=dtypes.BOOL, controls=())
    switch = bench.add("Switch", [node.inputs[0], sure], node)
    side = bench.rng.randrange(2)
    node.set_input(0, switch.output(side))
    merge = bench.add("Merge", [node.output(), switch.output(1 - side)], node, N=2)
    node.output().replace_all_uses_with(merge.output(), keep=[merge])
    return bench.said(f"'{node.name}' runs in one branch of a new condition only", group)


def turned_branch(bench: JobBench) -> str:
    group, _ = bench.member(is_branched)
    switches = [node for node in ancestors(bench.of(group)) if node.op == "Switch"]
    nots: dict[Value, Value] = {}
    for switch in [node for node in bench.graph if node.op == "Switch"] if switches else []:
        predicate = switch.inputs[1]
        if predicate not in nots:
            nots[predicate] = bench.add("LogicalNot", [predicate], switch).output()
        switch.set_input(1, nots[predicate])
    if not switches:
        raise LookupError("nothing decides about it")
    return bench.said(f"the branch of '{name_of(group)}' is taken when others do not", group)


def own_decision(bench: JobBench) -> str:
    """Let each rank decide by its own part of the batch: alike on all ranks, and yet not the same."""
    group, _ = bench.member(is_branched)
    fed = next(info for info in bench.job.original.inputs.values() if info.dtype.startswith("float"))
    for rank, graph in enumerate(bench.graphs):
        guards = guards_of(topological_order(graph), {})
        predicate = next(guard.predicate for node in bench.of(group, rank) for guard in guards[node])
        part = graph.value(fed.tensor)
        line, axis = (bench.const(number, part, dtype=dtypes.INT32) for number in ([-1], 0))
        flat = bench.add("Reshape", [part, line], part.node).output()
        total = bench.add("Sum", [flat, axis], part.node).output()
        zero = bench.add("ZerosLike", [total], part.node).output()
        negative = bench.add("Less", [total, zero], part.node).output()
        either = graph.add("LogicalOr", [predicate, negative], name="broken/either")
        predicate.replace_all_uses_with(either.output(), keep=[either])
    did = f"'{name_of(group)}' also runs where '{fed.name}' is negative"
    return bench.said(did, group, everywhere=True, named=["broken/either"])


def other_number(bench: JobBench) -> str:
    """Change a constant that decides: another number of iterations, or another branch."""
    frames = frames_of(topological_order(bench.graph))
    guards = guards_of(topological_order(bench.graph), frames)
    group, node = bench.member(lambda group: bool(guards.get(bench.of(group)[0])))
    predicate = min(guards[node], key=lambda guard: guard.predicate.name).predicate
    numbers = [one for one in ancestors([predicate.node], controls=False) if one.op == "Const"]
    odd = next(one for one in sorted(numbers, key=lambda one: one.name) if not np.shape(one.attr("value")))
    value = odd.attr("value")
    odd.set_attr("value", value + value.dtype.type(1))
    did = f"'{odd.name}' is no longer {value}, which decides whether '{node.name}' runs"
    return bench.said(did, group, named=[odd.name])


KINDS: tuple[JobKind, ...] = (
    swapped_order, swapped_devices, order_across_loop, missing_link, missing_token, other_frame, out_of_loop,
    other_branch, turned_branch, own_decision, other_number,
)  # fmt: skip
