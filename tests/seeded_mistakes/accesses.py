"""Mistakes about variables: accesses swapped, dropped or doubled, of another shard, slot or copy; effects repeated."""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, Select
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import has
from tests.seeded_mistakes.bench import Bench, Kind, alike, each, let_go, set_each


def updates_swapped(bench: Bench) -> str:
    """Two updates of one variable change places."""
    pairs = [pair for found in bench.updates().values() for pair in bench.pairs(found)]
    pairs = [(a, b) for a, b in pairs if not any(v.node is a for v in b.inputs) and _is_free(a, b)]
    first, second = bench.pick(pairs)
    behind = descendants([first])
    for node in ancestors(value.node for value in second.inputs):  # a learning rate may wait for the first update
        for control in node.controls:
            if control in behind:
                node.remove_control(control)
    ops, attrs, inputs = (first.op, second.op), (dict(first.attrs), dict(second.attrs)), (first.inputs, second.inputs)
    for node, other in ((first, 1), (second, 0)):
        node.op = ops[other]
        for key in node.attrs:
            node.drop_attr(key)
        for key, raw in attrs[other].items():
            node.set_raw_attr(key, raw)
        node.set_inputs(inputs[other])
    bench.keep_acyclic()
    return f"{second.op} of '{first.name}' and {first.op} of '{second.name}' have changed places"


def _is_free(first: Node, second: Node) -> bool:
    """Return whether what the second update writes is not made from what is read behind the first."""
    behind = descendants([first], controls=False)
    return first.span == second.span and all(value.node not in behind for value in second.inputs)


def read_behind_update(bench: Bench) -> str:
    """A read that came before an update comes behind it."""
    updates = bench.updates()
    found = []
    for handle, reads in bench.reads().items():
        for read in reads:
            needed = descendants([read], controls=False)
            for update in updates.get(handle, ()):
                if update not in needed and update.span is read.span and read in ancestors([update]):
                    found.append((read, update))
    read, update = bench.pick(found)
    for node in [n for n in ancestors([update]) if read in n.controls]:
        node.remove_control(read)
    let_go(read)
    read.add_control(update)
    bench.keep_acyclic()
    return f"'{read.name}' reads behind the update '{update.name}'"


def read_before_update(bench: Bench) -> str:
    """A read that came behind an update no longer waits for it."""
    found = [
        (update, read)
        for handle, reads in bench.reads().items()
        for update in bench.updates().get(handle, ())
        for read in reads
        if read in descendants([update])
    ]
    update, read = bench.pick(found)
    behind = descendants([update])
    for control in read.controls:
        if control in behind:
            read.remove_control(control)
    if read in descendants([update]):
        raise LookupError("it waits by other ways")
    waits = ancestors([update])
    if read not in waits and update.span is read.span:
        update.add_control(read)
    bench.keep_acyclic()
    return f"'{read.name}' reads before the update '{update.name}' that it was behind"


def stale_alias(bench: Bench) -> str:
    """What reads a variable behind an update gets what was read before it."""
    updates = bench.updates()
    found = []
    for handle, reads in bench.reads().items():
        for early in reads:
            for late in reads:
                between = [
                    u for u in updates.get(handle, ()) if late in descendants([u]) and early not in descendants([u])
                ]
                if between and late.op == early.op == "ReadVariableOp" and late.span is early.span:
                    found.append((early, late))
    early, late = bench.pick(found)
    bench.replace(late.output(), early.output())
    bench.keep_acyclic()
    return f"readers of '{late.name}' get '{early.name}', from before an update"


def update_dropped(bench: Bench) -> str:
    """An update does not happen."""
    update = bench.pick(bench.all_updates())
    stand_in = bench.graph.add("NoOp", name=f"{update.name}/lost", span=update.span, device=update.device)
    for value in update.inputs:
        stand_in.add_control(value.node)
    for control in update.controls:
        stand_in.add_control(control)
    for user in update.control_users:
        user.add_control(stand_in)
    let_go(update)
    return f"'{update.name}' is not run"


def update_doubled(bench: Bench) -> str:
    """An update happens twice."""
    update = bench.pick(bench.all_updates())
    again = bench.again(update, update.inputs, [update])
    for user in update.control_users:
        if user is not again:
            user.add_control(again)
    return f"'{update.name}' is run twice"


def update_on_first_replica_only(bench: Bench) -> str:
    """A copy of a variable is not updated with the others."""
    update = bench.pick(node for node in bench.all_updates() if node.span == EACH and len(node.inputs) > 1)
    index = max(i for i, value in enumerate(update.inputs) if value.dtype != dtypes.RESOURCE)
    value = update.inputs[index]
    mine = bench.const(0, value)
    array = np.zeros((), dtypes.numpy_dtype(value.dtype))
    set_each(mine.node, "value", "tensor", [array + (i == 0) for i in range(bench.instances)])
    update.set_input(index, bench.add("Mul", [value, mine], update).output())
    return f"'{update.name}' gets nothing on all replicas but the first"


def gradients_swapped(bench: Bench) -> str:
    """Two updates of alike variables get each other's operand."""
    one, other = bench.pick(
        (a, b)
        for a, b in alike(bench.all_updates())
        if _shape(a) == _shape(b) != ()
        and variable_ops.handle_node(a.inputs[0]) is not variable_ops.handle_node(b.inputs[0])
    )
    index = bench.pick(
        i for i, value in enumerate(one.inputs)
        if value.dtype != dtypes.RESOURCE and value is not other.inputs[i] and value.dtype == other.inputs[i].dtype
        and value.node.op != "Const"
    )  # fmt: skip
    bench.trade(one, other, index)
    return f"'{one.name}' and '{other.name}' have swapped operand {index}"


def _shape(node: Node) -> tuple[int, ...]:
    shape = variable_ops.handle_node(node.inputs[0]).attr("shape")
    return tuple(shape or ())


def slots_swapped(bench: Bench) -> str:
    """Two updates use each other's slot."""
    updates = [n for n in bench.all_updates() if n.op.startswith(("ResourceApply", "ResourceSparseApply"))]
    slots = {n: [i for i, v in enumerate(n.inputs) if i and v.dtype == dtypes.RESOURCE] for n in updates}
    one, other = bench.pick((a, b) for a, b in alike(updates) if slots[a] and _shape(a) == _shape(b))
    index = bench.pick(slots[one])
    if one.inputs[index] is other.inputs[index]:
        raise LookupError("they share it")
    bench.trade(one, other, index)
    return f"'{one.name}' and '{other.name}' have swapped slot {index}"


def other_variable_read(bench: Bench) -> str:
    """A read is of another variable, or shard, of the same shape."""
    reads = [node for found in bench.reads().values() for node in found]
    handles = [variable_ops.handle_node(node.inputs[0]) for node in reads]
    found = [
        (read, handle)
        for read in reads
        for handle in handles
        if handle is not read.inputs[0].node is variable_ops.handle_node(read.inputs[0])
        and handle.attr("shape") == read.inputs[0].node.attr("shape")
        and handle.attr("dtype") == read.inputs[0].node.attr("dtype")
        and handle.span is read.inputs[0].node.span
    ]
    read, handle = bench.pick(found)
    read.set_input(0, handle.output())
    return f"'{read.name}' reads '{handle.name}'"


def other_variable_updated(bench: Bench) -> str:
    """An update writes another variable, or shard, of the same shape."""
    updates = bench.updates()
    found = [
        (node, other)
        for handle, nodes in updates.items()
        for node in nodes
        for other in updates
        if other is not handle and node.inputs[0].node is handle and other.span is handle.span
        and other.attr("shape") == handle.attr("shape") and other.attr("dtype") == handle.attr("dtype")
    ]  # fmt: skip
    node, other = bench.pick(found)
    node.set_input(0, other.output())
    return f"'{node.name}' writes '{other.name}'"


def copy_of_another_replica(bench: Bench) -> str:
    """A replica uses the copy of a variable that is another one's."""
    handle = bench.one(lambda node: node.op == "VarHandleOp" and node.span == EACH)
    names = each(handle, "shared_name")
    set_each(handle, "shared_name", "string", [names[0]] * len(names))
    return f"all replicas use '{handle.name}' of the first"


def shards_swapped(bench: Bench) -> str:
    """Shards are joined in another order."""
    node = bench.one(
        lambda n: n.op == "ConcatV2" and len(n.inputs) > 2 and all(v.node.op in READ_OF_SHARD for v in n.inputs[:-1])
    )
    inputs = [*node.inputs]
    inputs[0], inputs[1] = inputs[1], inputs[0]
    node.set_inputs(inputs, node.selects)
    return f"'{node.name}' joins two shards the wrong way round"


READ_OF_SHARD = frozenset(("ReadVariableOp", "Identity", "CollectiveGatherV2", "CollectiveBcastRecvV2", "StridedSlice"))


def effect_repeated(bench: Bench) -> str:
    """What has to happen once happens on every replica."""
    plain = ("AssignAddVariableOp", "AssignSubVariableOp", "ResourceApplyGradientDescent")
    node = bench.pick(node for node in bench.all_updates() if node.span == ONCE and node.op in plain)
    if any(value.node.span == EACH for value in node.inputs):
        raise LookupError("it reads replicas")
    node.set_span(EACH)
    return f"'{node.name}' happens on each replica"


def target_waits_for_less(bench: Bench) -> str:
    """A target does not wait for what it waited for."""
    targets = [bench.graph.nodes[name] for name in bench.item.targets if name in bench.graph.nodes]
    found = []
    pending, seen = [*targets], set()
    while pending:  # groups of groups
        node = pending.pop()
        if node in seen or node.op != "NoOp":
            continue
        seen.add(node)
        found += [(node, control) for control in node.controls]
        pending += node.controls
    node, control = bench.pick(sorted(found, key=lambda pair: (pair[0].name, pair[1].name)))
    node.remove_control(control)
    return f"'{node.name}' does not wait for '{control.name}'"


def order_lost(bench: Bench) -> str:
    """A control edge between two accesses of one variable is gone, and with it their order."""
    accesses: dict[Node, list[Node]] = {}
    for table in (bench.reads(), bench.updates()):
        for handle, nodes in table.items():
            accesses.setdefault(handle, []).extend(nodes)
    found = []
    for nodes in accesses.values():
        for node in nodes:
            if has(node.op, "writes") or any(has(c.op, "writes") for c in ancestors(node.controls)):
                found += [(node, control) for control in node.controls]
    node, control = bench.pick(sorted(found, key=lambda pair: (pair[0].name, pair[1].name)))
    node.remove_control(control)
    return f"'{node.name}' does not wait for '{control.name}'"


def value_read_early(bench: Bench) -> str:
    """An update takes what another value of its kind is: the variable itself instead of what was made of it."""
    found: list[tuple[Node, int, Value]] = []
    for handle, nodes in bench.updates().items():
        for node in nodes:
            for read in bench.reads().get(handle, ()):
                for index, value in enumerate(node.inputs):
                    fits = value.dtype == read.output().dtype and node.span is read.span and index
                    if fits and value is not read.output() and read.op == "ReadVariableOp" and value.node.op != "Const":
                        found.append((node, index, read.output()))
    node, index, value = bench.pick(found)
    node.set_input(index, value, Select.FIRST if node.span == ONCE and value.node.span == EACH else None)
    bench.keep_acyclic()
    return f"operand {index} of '{node.name}' is '{value.name}'"


KINDS: tuple[Kind, ...] = (
    updates_swapped, read_behind_update, read_before_update, stale_alias, update_dropped, update_doubled,
    update_on_first_replica_only, gradients_swapped, slots_swapped, other_variable_read, other_variable_updated,
    copy_of_another_replica, shards_swapped, effect_repeated, target_waits_for_less, order_lost, value_read_early,
)  # fmt: skip
