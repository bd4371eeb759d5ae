"""The ways to break when collectives run: their order, their chains, their loops and their branches.

Every graph is still well-formed by itself. A kind that finds nothing to break raises IndexError or StopIteration.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autograph_rewrite.ir.control_flow import frames_of, guards_of
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.traversal import ancestors, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.collective_groups import Collective, contracted_order
from tests.mutation.bench import Bench, Kind, Mutant, between, in_loop, is_branched, is_reduce, name_of, number


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
    frame = frames_of(topological_order(bench.graph))[node][-1]
    readers = list(node.output().uses)
    node.set_inputs([sent, *keys])
    for control in node.controls:
        node.remove_control(control)
    attrs = {"frame_name": frame.encode(), "is_constant": True}
    inside = bench.graph.add("Enter", [node.output()], name="broken/entered", attrs=attrs).output()
    for reader, index in readers:
        reader.set_input(index, inside)
    return bench.broken("different frame", [group], f"'{node.name}' runs once, before the loop")


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


def own_decision(bench: Bench) -> Mutant:
    """Let each rank decide by its own part of the batch: alike on all ranks, and yet not the same."""
    group, _ = bench.pick(is_branched)
    fed = next(info for info in bench.job.original.inputs.values() if info.dtype.startswith("float"))
    for rank, graph in enumerate(bench.graphs):
        guards = guards_of(topological_order(graph), {})
        predicate = next(guard.predicate for node in bench.of(group, rank) for guard in guards[node])
        readers = [use.node for use in predicate.uses]
        part = graph.value(fed.tensor)
        rank_of = graph.add("Rank", [part], name="broken/rank").output()
        none, one = (graph.add("Const", name="broken/axis", attrs=int32(i)).output() for i in (0, 1))
        axes = graph.add("Range", [none, rank_of, one], name="broken/axes").output()
        total = graph.add("Sum", [part, axes], name="broken/sum").output()
        zero = graph.add("ZerosLike", [total], name="broken/zero").output()
        negative = graph.add("Less", [total, zero], name="broken/negative").output()
        either = graph.add("LogicalOr", [predicate, negative], name="broken/either").output()
        for node in readers:
            for index, value in enumerate(node.inputs):
                if value is predicate:
                    node.set_input(index, either)
    did = f"'{name_of(group)}' also runs where '{fed.name}' is negative"
    return bench.broken("decided by one rank", [group], did, None, named=["broken/either"])


def other_number(bench: Bench) -> Mutant:
    """Change a constant that decides: another number of iterations, or another branch."""
    frames = frames_of(topological_order(bench.graph))
    guards = guards_of(topological_order(bench.graph), frames)
    group, node = bench.pick(lambda group: bool(guards.get(bench.of(group)[0])))
    predicate = min(guards[node], key=lambda guard: guard.predicate.name).predicate
    numbers = [one for one in ancestors([predicate.node], controls=False) if one.op == "Const"]
    odd = next(one for one in sorted(numbers, key=lambda one: one.name) if not np.shape(one.attr("value")))
    value = odd.attr("value")
    odd.set_attr("value", value + value.dtype.type(1))
    did = f"'{odd.name}' is no longer {value}, which decides whether '{node.name}' runs"
    return bench.broken("decided by one rank", [group], did, named=[odd.name])


def int32(value: int) -> dict[str, object]:
    return {"value": np.int32(value), "dtype": dtypes.INT32}


KINDS: tuple[Kind, ...] = (
    swapped_order,
    swapped_devices,
    order_across_loop,
    missing_link,
    missing_token,
    other_frame,
    out_of_loop,
    other_branch,
    turned_branch,
    own_decision,
    other_number,
)
