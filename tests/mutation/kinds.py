"""The ways to break a job: each changes one thing in its graphs, and says in a sentence what.

Every graph is still well-formed by itself. A kind that finds nothing to break raises IndexError or StopIteration.
"""

from __future__ import annotations

from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_specs import process
from autograph_rewrite.ir.verify.collective_groups import Collective
from tests.mutation.bench import (
    GROUP_KEY,
    GROUP_SIZE,
    INSTANCE_KEY,
    Bench,
    Kind,
    Mutant,
    between,
    is_reduce,
    is_sized,
    name_of,
    number,
    numbers,
    rewire,
)


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
    did = f"the train op does not wait for what '{node.name}' updates"
    return bench.broken("member not needed", [group], did, named=[f"target '{target.name}'" for target in wanted])


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


def other_size_everywhere(bench: Bench) -> Mutant:
    """Tie the key to a shape that is not sent, on all ranks alike."""
    group, _ = bench.pick(is_sized)
    for node in group.members:
        size = next(use.node for use in node.inputs[0].uses if use.node.op == "Size")
        size.set_input(0, between(node, "Shape", [node.inputs[0]]))
        size.set_attr("T", dtypes.INT32)
    did = f"keys of '{name_of(group)}' follow from the rank of what is sent, not from its size"
    return bench.broken("key from another row", [group], did, None)


def narrow_rows(bench: Bench) -> Mutant:
    """Let keys that follow from sizes leave their row."""
    one, _ = bench.pick(is_sized)
    bench.pick(lambda group: is_sized(group) and group is not one and group.group_key == one.group_key)
    for node in one.members:
        key = node.inputs[INSTANCE_KEY].node
        spread = key.inputs[0].node
        rows = 1 if spread.inputs[1].node.attr("value") > 1 else 0
        spread.set_input(1, number(spread.inputs[1], rows))
        key.set_input(1, number(key.inputs[1], 2**30))
    return bench.broken("duplicate key", [one], f"keys of '{name_of(one)}' run through all rows", None)


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


def aliased(bench: Bench) -> Mutant:
    handles = [node for node in bench.graph if node.op == "VarHandleOp" and node.attr("shape")]
    one = bench.rng.choice(handles)
    two = bench.rng.choice([node for node in handles if node.device == one.device and node is not one])
    two.set_attr("shared_name", one.attr("shared_name") or one.name.encode())
    return bench.broken("alias", [], f"'{two.name}' is stored where '{one.name}' is")


KINDS: tuple[Kind, ...] = (
    deleted_member,
    unread_member,
    pruned_target,
    wrong_size,
    wrong_size_everywhere,
    wrong_dtype,
    wrong_merge,
    wrong_final,
    wrong_hint,
    wrong_op,
    duplicate_key,
    duplicate_key_everywhere,
    duplicate_row,
    other_row,
    other_size,
    other_size_everywhere,
    narrow_rows,
    duplicate_member,
    same_device,
    other_group,
    shared_group,
    sliced,
    no_rows,
    doubled,
    other_task,
    other_task_wholly,
    aliased,
)
