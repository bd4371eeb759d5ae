"""Mistakes about the members of collectives: one of them gone, doubled, elsewhere, of another sort, key or shape.

Every graph is still well-formed by itself.
"""

from __future__ import annotations

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_specs import process
from autograph_rewrite.ir.verify.collective_groups import Collective
from tests.seeded_mistakes.bench import let_go
from tests.seeded_mistakes.job_bench import (
    GROUP_KEY,
    GROUP_SIZE,
    INSTANCE_KEY,
    JobBench,
    JobKind,
    is_reduce,
    is_sized,
    name_of,
)


def _bypass(node: Node) -> None:
    node.output().replace_all_uses_with(node.inputs[0])
    let_go(node)


def deleted_member(bench: JobBench) -> str:
    group, node = bench.member()
    _bypass(node)
    bench.graph.erase(node)
    return bench.said(f"'{node.name}' is gone", group)


def unread_member(bench: JobBench) -> str:
    group, node = bench.member(lambda group: any(use for value in group.members[0].read_outputs for use in value.uses))
    _bypass(node)
    return bench.said(f"nothing reads '{node.name}'", group)


def pruned_target(bench: JobBench) -> str:
    wanted = [bench.graph.nodes[name] for name in bench.job.original.targets]
    outputs = [bench.graph.value(info.tensor).node for info in bench.job.original.outputs.values()]
    needed = ancestors([*outputs])
    group, node = bench.member(lambda group: not any(member in needed for member in bench.of(group)))
    for target in wanted:
        for control in target.controls:
            if node in ancestors([control]):
                target.remove_control(control)
    if node in ancestors(wanted) or node in wanted:
        raise LookupError("the step still needs it")
    did = f"the train op does not wait for what '{node.name}' updates"
    return bench.said(did, group, named=[f"target '{target.name}'" for target in wanted])


def wrong_size(bench: JobBench) -> str:
    group, node = bench.member()
    size = group.group_size + bench.pick((-1, 1))
    bench.rewire(node, GROUP_SIZE, size)
    return bench.said(f"'{node.name}' expects {size} members, not {group.group_size}", group)


def wrong_size_everywhere(bench: JobBench) -> str:
    group, _ = bench.member()
    for node in group.members:
        bench.rewire(node, GROUP_SIZE, group.group_size + 1)
    return bench.said(f"'{name_of(group)}' expects a member more than there are", group, everywhere=True)


def wrong_dtype(bench: JobBench) -> str:
    group, node = bench.member(lambda group: group.members[0].attr("T") in (dtypes.FLOAT, dtypes.DOUBLE))
    sent = node.inputs[0]
    other = dtypes.DOUBLE if sent.dtype == dtypes.FLOAT else dtypes.FLOAT
    back = bench.add("Cast", [node.output()], node, DstT=sent.dtype)
    node.output().replace_all_uses_with(back.output(), keep=[back])
    node.set_input(0, bench.add("Cast", [sent], node, DstT=other).output())
    node.set_attr("T", other)
    back.set_attr("SrcT", other)
    return bench.said(f"'{node.name}' sends {dtypes.dtype_name(other)}", group)


def wrong_merge(bench: JobBench) -> str:
    group, node = bench.member(is_reduce)
    op = bench.pick(op for op in (b"Add", b"Max", b"Min", b"Mul") if op != node.attr("merge_op"))
    node.set_attr("merge_op", op)
    return bench.said(f"'{node.name}' merges by {op.decode()}", group)


def wrong_final(bench: JobBench) -> str:
    group, node = bench.member(is_reduce)
    node.set_attr("final_op", b"Div")
    return bench.said(f"'{node.name}' divides in the end", group)


def wrong_hint(bench: JobBench) -> str:
    group, node = bench.member()
    node.set_attr("communication_hint", b"ring" if node.attr("communication_hint") != b"ring" else b"nccl")
    return bench.said(f"'{node.name}' communicates by {node.attr('communication_hint')}", group)


def wrong_op(bench: JobBench) -> str:
    group, node = bench.member(is_reduce)
    gather = bench.graph.add(
        "CollectiveGatherV2", node.inputs, name=node.name, device=node.device, controls=node.controls,
        attrs={"communication_hint": node.attr("communication_hint")},
    )  # fmt: skip
    bench.graph.replace(node, gather)
    return bench.said(f"'{gather.name}' gathers instead of reducing", group)


def duplicate_key(bench: JobBench) -> str:
    one, two = two_static(bench)
    node = bench.pick(bench.of(one))
    bench.rewire(node, INSTANCE_KEY, int(two.instance_key))
    return bench.said(f"'{node.name}' has the instance key of '{name_of(two)}'", one, two)


def duplicate_key_everywhere(bench: JobBench) -> str:
    one, two = two_static(bench)
    for node in one.members:
        bench.rewire(node, INSTANCE_KEY, int(two.instance_key))
    did = f"'{name_of(one)}' has the instance key of '{name_of(two)}'"
    return bench.said(did, one, two, everywhere=True)


def two_static(bench: JobBench) -> tuple[Collective, Collective]:
    one, _ = bench.member(lambda group: not is_sized(group))
    two, _ = bench.member(lambda group: not is_sized(group) and group is not one and group.group_key == one.group_key)
    return one, two


def duplicate_row(bench: JobBench) -> str:
    """Let two keys that follow from sizes follow in one way: equal sizes would give equal keys."""
    one, _ = bench.member(is_sized)
    two, _ = bench.member(lambda group: is_sized(group) and group is not one and group.group_key == one.group_key)
    row = two.members[0].inputs[INSTANCE_KEY].node.inputs[1]
    for node in one.members:
        bench.rewire(node.inputs[INSTANCE_KEY].node, 1, int(row.node.attr("value")))
    did = f"keys of '{name_of(one)}' are in the row of '{name_of(two)}'"
    return bench.said(did, one, two, everywhere=True)


def other_row(bench: JobBench) -> str:
    group, node = bench.member(is_sized)
    key = node.inputs[INSTANCE_KEY].node
    bench.rewire(key, 1, int(key.inputs[1].node.attr("value")) + 1)
    return bench.said(f"the key of '{node.name}' is one row further", group)


def other_size(bench: JobBench) -> str:
    one, node = bench.member(is_sized)
    two, _ = bench.member(lambda group: is_sized(group) and group is not one)
    node.set_input(INSTANCE_KEY, bench.of(two)[0].inputs[INSTANCE_KEY])
    did = f"the key of '{node.name}' follows from what '{name_of(two)}' sends"
    return bench.said(did, one, two)


def other_size_everywhere(bench: JobBench) -> str:
    """Tie the key to a shape that is not sent, on all ranks alike."""
    group, _ = bench.member(is_sized)
    for node in group.members:
        size = next(use.node for use in node.inputs[0].uses if use.node.op == "Size")
        size.set_input(0, bench.add("Shape", [node.inputs[0]], node).output())
        size.set_attr("T", dtypes.INT32)
    did = f"keys of '{name_of(group)}' follow from the rank of what is sent, not from its size"
    return bench.said(did, group, everywhere=True)


def narrow_rows(bench: JobBench) -> str:
    """Let keys that follow from sizes leave their row."""
    one, _ = bench.member(is_sized)
    bench.member(lambda group: is_sized(group) and group is not one and group.group_key == one.group_key)
    for node in one.members:
        key = node.inputs[INSTANCE_KEY].node
        spread = key.inputs[0].node
        bench.rewire(spread, 1, 1 if spread.inputs[1].node.attr("value") > 1 else 0)
        bench.rewire(key, 1, 2**30)
    return bench.said(f"keys of '{name_of(one)}' run through all rows", one, everywhere=True)


def duplicate_member(bench: JobBench) -> str:
    group, node = bench.member()
    again = bench.again(node, node.inputs)
    for use in node.output().uses:
        use.node.add_control(again)
    return bench.said(f"'{node.name}' is there twice", group)


def same_device(bench: JobBench) -> str:
    group, node = bench.member(lambda group: len(bench.of(group)) > 1)
    peer = next(other for other in bench.of(group) if other is not node)
    node.set_device(peer.device)
    return bench.said(f"'{node.name}' shares a device with '{peer.name}'", group)


def other_group(bench: JobBench) -> str:
    group, node = bench.member()
    bench.rewire(node, GROUP_KEY, group.group_key % 2**30 + 1)
    return bench.said(f"'{node.name}' is in another group", group)


def shared_group(bench: JobBench) -> str:
    one, _ = bench.member(lambda group: len({other.group_key for other in bench.groups}) > 1)
    two, _ = bench.member(lambda group: group.group_key != one.group_key)
    for node in one.members:
        bench.rewire(node, GROUP_KEY, two.group_key)
    did = f"'{name_of(one)}' has the group key of '{name_of(two)}', which is on other devices"
    return bench.said(did, one, two, everywhere=True)


def sliced(bench: JobBench) -> str:
    group, node = bench.member()
    sent = node.inputs[0]
    wider = bench.sent(node, "ExpandDims", [sent], 0)
    node.set_input(0, bench.sent(node, "StridedSlice", [wider], 0, 1, 1))
    return bench.said(f"'{node.name}' sends '{sent.name}' with a dimension more", group)


def no_rows(bench: JobBench) -> str:
    group, node = bench.member()
    sent = node.inputs[0]
    flat = bench.sent(node, "Reshape", [sent], -1)
    node.set_input(0, bench.sent(node, "StridedSlice", [flat], 0, 0, 1))
    return bench.said(f"'{node.name}' sends no element of '{sent.name}'", group)


def doubled(bench: JobBench) -> str:
    group, node = bench.member(lambda group: not is_reduce(group) or "bucket" in name_of(group))
    sent = node.inputs[0]
    axis = bench.const(0, sent, dtype=dtypes.INT32)
    node.set_input(0, bench.add("ConcatV2", [sent, sent, axis], node, N=2).output())
    return bench.said(f"'{node.name}' sends its value twice over", group)


def other_task(bench: JobBench) -> str:
    group, node = bench.member()
    other = (bench.rank + 1) % len(bench.graphs)
    here, there = process(node.device), process(bench.of(group, other)[0].device)
    node.set_device(node.device.replace(here, there))
    return bench.said(f"'{node.name}' is placed in the process of rank {other}", group)


def other_task_wholly(bench: JobBench) -> str:
    group, node = bench.member()
    other = (bench.rank + 1) % len(bench.graphs)
    here, there = process(node.device), process(bench.of(group, other)[0].device)
    for one in bench.graph:
        one.set_device(one.device.replace(here, there))
    return bench.said(f"everything is placed in the process of rank {other}", *bench.groups)


def aliased(bench: JobBench) -> str:
    handles = bench.where(lambda node: node.op == "VarHandleOp" and bool(node.attr("shape")))
    one = bench.pick(handles)
    two = bench.pick(node for node in handles if node.device == one.device and node is not one)
    two.set_attr("shared_name", one.attr("shared_name") or one.name.encode())
    return bench.said(f"'{two.name}' is stored where '{one.name}' is")


KINDS: tuple[JobKind, ...] = (
    deleted_member, unread_member, pruned_target, wrong_size, wrong_size_everywhere, wrong_dtype, wrong_merge,
    wrong_final, wrong_hint, wrong_op, duplicate_key, duplicate_key_everywhere, duplicate_row, other_row,
    other_size, other_size_everywhere, narrow_rows, duplicate_member, same_device, other_group, shared_group,
    sliced, no_rows, doubled, other_task, other_task_wholly, aliased,
)  # fmt: skip
