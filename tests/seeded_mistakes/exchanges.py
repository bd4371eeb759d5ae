"""Mistakes about what replicas exchange: sums and gathers dropped, doubled, of another value or in another order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograph_rewrite.ir.graph import Node, Select, Span, Value
from autograph_rewrite.ir.types import dtypes
from tests.seeded_mistakes.bench import Bench, Kind, gathers_all, is_float, is_join, is_sum, set_each


def sum_dropped(bench: Bench) -> str:
    """What should be summed is read as the first replica, or each for itself, holds it."""
    node = bench.pick(bench.where(is_sum))
    value = node.inputs[0]
    for use in node.output().uses:
        bench.read_instead(use, value)
    _anchors(bench, node.output(), value)
    return f"'{node.name}' is not summed"


def _anchors(bench: Bench, old: Value, new: Value) -> None:
    for name, value in bench.graph.anchors.items():
        if value is old:
            bench.graph.set_anchor(name, new)


def sum_doubled(bench: Bench) -> str:
    """A value that is whole is summed over the replicas once more."""
    node = bench.pick(bench.where(lambda node: is_sum(node) and is_float(node.output())))
    total = node.output()
    uses = bench.uses(total)
    if node.op == "CollectiveReduceV2" and node.inputs[2].node.op == "Const":
        attrs = dict(node.attrs)
        key = bench.const(np.asarray(node.inputs[2].node.attr("value")) + 100000, node.inputs[2])
        again = bench.graph.add(
            node.op, [total, node.inputs[1], key, *node.inputs[3:]], name=f"{node.name}/again", span=node.span
        )
        for name, raw in attrs.items():
            again.set_raw_attr(name, raw)
    else:
        again = bench.add("AddN", [total] * bench.instances, node)
    for use in uses:
        if use.node is not again:
            bench.read_instead(use, again.output())
    return f"'{node.name}' is summed again"


def other_way_to_combine(bench: Bench) -> str:
    """The maximum is taken instead of the sum, or the sum instead of the maximum."""
    node = bench.pick(bench.where(lambda n: n.op == "CollectiveReduceV2" or (n.op == "AddN" and gathers_all(n))))
    if node.op == "CollectiveReduceV2":
        merge = node.attr("merge_op")
        node.set_attr("merge_op", "Max" if merge == b"Add" else "Add")
        return f"'{node.name}' no longer combines by {merge.decode()}"
    stack = bench.graph.add(
        "Pack", node.inputs, name=f"{node.name}/Pack", selects={0: Select.ALL}, attrs={"axis": 0, "N": node.attr("N")}
    )
    axis = bench.graph.add("Const", name=f"{node.name}/axis", attrs={"value": np.int32(0), "dtype": dtypes.INT32})
    axis.add_control(stack)
    fold = bench.graph.add("Max", [stack.output(), axis.output()], name=f"{node.name}/Max")
    node.output().replace_all_uses_with(fold.output())
    return f"'{node.name}' takes the maximum"


def average_for_sum(bench: Bench) -> str:
    """A sum is divided by the number of replicas."""
    node = bench.pick(bench.where(lambda node: is_sum(node) and is_float(node.output())))
    _scale(bench, node.output(), 1 / bench.instances)
    return f"'{node.name}' is averaged"


def sum_for_average(bench: Bench) -> str:
    """A value is multiplied by the number of replicas."""
    node = bench.pick(
        bench.where(lambda node: node.op in ("RealDiv", "Mul", "AddV2", "Sub") and is_float(node.output()))
    )
    _scale(bench, node.output(), bench.instances)
    return f"'{node.name}' is multiplied by {bench.instances}"


def _scale(bench: Bench, value: Value, factor: float) -> None:
    uses = bench.uses(value)
    scaled = bench.add("Mul", [value, bench.const(factor, value)], value.node).output()
    for use in uses:
        bench.read_instead(use, scaled)


def contribution(bench: Bench, counts: tuple[int, ...]) -> str:
    """Let the last instance count as often as it says in a sum over replicas."""
    node = bench.pick(
        bench.where(lambda node: is_sum(node) and is_float(node.output()) and node.inputs[0].node.span is Span.EACH)
    )
    value = node.inputs[0]
    factor = bench.const(1, value)
    ones = [np.ones((), dtypes.numpy_dtype(value.dtype)) for _ in range(bench.instances)]
    ones[-1] = ones[-1] * counts[0]
    set_each(factor.node, "value", "tensor", ones)
    node.set_input(0, bench.add("Mul", [value, factor], value.node).output(), node.selects.get(0))
    return f"the last instance counts {counts[0]} times in '{node.name}'"


def contribution_lost(bench: Bench) -> str:
    """One replica, or micro-batch, does not count in a sum."""
    return contribution(bench, (0,))


def contribution_doubled(bench: Bench) -> str:
    """One replica, or micro-batch, counts twice in a sum."""
    return contribution(bench, (2,))


def partial_read_as_whole(bench: Bench) -> str:
    """One reader gets the value from before the sum."""
    node = bench.pick(bench.where(lambda node: is_sum(node) and bool(bench.uses(node.output()))))
    use = bench.pick(bench.uses(node.output()))
    bench.read_instead(use, node.inputs[0])
    return f"'{use.node.name}' reads '{node.inputs[0].name}' without the sum"


def other_value_summed(bench: Bench) -> str:
    """Two sums are of each other's value."""
    sums = bench.where(is_sum)
    found = [
        (a, b)
        for a in sums
        for b in sums
        if a.name < b.name and a.op == b.op and a.span is b.span and a.inputs[0].dtype == b.inputs[0].dtype
        and a.inputs[0].node.span is b.inputs[0].node.span and a.inputs[0] is not b.inputs[0]
    ]  # fmt: skip
    one, other = _trade_values(bench, found)
    return f"'{one.name}' and '{other.name}' sum each other's value"


def _trade_values(bench: Bench, pairs: Sequence[tuple[Node, Node]]) -> tuple[Node, Node]:
    """Let the nodes of one of the pairs read each other's first input; return them."""
    one, other = bench.pick(pairs)
    left, right = one.inputs[0], other.inputs[0]
    one.set_input(0, right, one.selects.get(0))
    other.set_input(0, left, other.selects.get(0))
    bench.keep_acyclic()
    return one, other


def gather_dropped(bench: Bench) -> str:
    """A block is read where all blocks are wanted."""
    node = bench.pick(bench.where(is_join))
    for use in node.output().uses:
        bench.read_instead(use, node.inputs[0])
    return f"'{node.name}' does not gather"


def gather_reversed(bench: Bench) -> str:
    """Blocks are joined in another order."""
    node = bench.pick(bench.where(is_join))
    value = node.output()
    uses = bench.uses(value)
    axis = bench.graph.add(
        "Const",
        name=f"{node.name}/reversed",
        attrs={"value": np.array([0], np.int32), "dtype": dtypes.INT32},
        span=node.span,
    )
    axis.add_control(node)
    turned = bench.add("ReverseV2", [value, axis.output()], node)
    for use in uses:
        bench.read_instead(use, turned.output())
    return f"the rows of '{node.name}' are turned round"


def gather_along_other_axis(bench: Bench) -> str:
    """Blocks are joined along another dimension."""
    node = bench.pick(bench.where(lambda node: node.op == "ConcatV2" and gathers_all(node)))
    axis = node.inputs[-1]
    number = int(axis.node.attr("value"))
    other = bench.graph.add(
        "Const", name=f"{node.name}/other_axis", attrs={"value": np.int32(number + 1), "dtype": dtypes.INT32}
    )
    other.add_control(node.inputs[0].node)
    node.set_input(len(node.inputs) - 1, other.output())
    return f"'{node.name}' joins along {number + 1}"


def other_block_gathered(bench: Bench) -> str:
    """Two gathers are of each other's value."""
    joins = bench.where(is_join)
    found = [
        (a, b)
        for a in joins
        for b in joins
        if a.name < b.name and a.op == b.op and a.span is b.span and a.inputs[0].dtype == b.inputs[0].dtype
        and a.inputs[0] is not b.inputs[0]
    ]  # fmt: skip
    one, other = _trade_values(bench, found)
    return f"'{one.name}' and '{other.name}' gather each other's value"


def bucket_parts_swapped(bench: Bench) -> str:
    """Two parts of a bucket are taken for each other."""
    found = []
    for node in bench.where(lambda node: node.op in ("SplitV", "Split")):
        sizes = {i: _elements(node.output(i)) for i in range(len(node.outputs))}
        found += [(node, a, b) for a in sizes for b in sizes if a < b and (sizes[a] == sizes[b] or node.op == "Split")]
    node, a, b = bench.pick(found)
    left, right = bench.uses(node.output(a)), bench.uses(node.output(b))
    for use in left:
        bench.read_instead(use, node.output(b))
    for use in right:
        bench.read_instead(use, node.output(a))
    return f"parts {a} and {b} of '{node.name}' have changed places"


def _elements(value: Value) -> int:
    if value.node.op == "SplitV" and value.node.inputs[1].node.op == "Const":
        return int(np.asarray(value.node.inputs[1].node.attr("value"))[value.index])
    return -1


def output_of_one_replica(bench: Bench) -> str:
    """An output is what the first replica has instead of what all have together."""
    outputs = [bench.graph.nodes[info.tensor.partition(":")[0]] for info in bench.item.outputs.values()]
    found = []
    for node in outputs:
        for index, value in enumerate(node.inputs):
            inner = value.node
            if inner.span is Span.ONCE and inner.inputs and inner.inputs[0].node.span is Span.EACH:
                found.append((node, index, inner.inputs[0]))
            if inner.op == "CollectiveReduceV2":
                found.append((node, index, inner.inputs[0]))
    node, index, value = bench.pick(found)
    node.set_input(index, value, Select.FIRST)
    return f"'{node.name}' is what the first replica has"


def output_of_another_value(bench: Bench) -> str:
    """An output is another value of its type and rank."""
    outputs = sorted(
        {bench.graph.nodes[info.tensor.partition(":")[0]] for info in bench.item.outputs.values()}, key=lambda n: n.name
    )
    found = [
        (a, b)
        for a in outputs
        for b in outputs
        if a is not b
        and a.inputs
        and b.inputs
        and a.inputs[0].dtype == b.inputs[0].dtype
        and a.op == b.op == "Identity"
    ]
    one, other = bench.pick(found)
    one.set_input(0, other.inputs[0], other.selects.get(0))
    bench.keep_acyclic()
    return f"'{one.name}' is '{other.inputs[0].name}'"


def narrow_sum(bench: Bench) -> str:
    """A sum is taken in a coarser type."""
    node: Node = bench.pick(bench.where(lambda node: is_sum(node) and node.output().dtype == dtypes.DOUBLE))
    value = node.inputs[0]
    narrow = bench.add("Cast", [value], value.node, DstT=dtypes.FLOAT)
    wide = bench.add("Cast", [narrow.output()], value.node, DstT=dtypes.DOUBLE)
    node.set_input(0, wide.output(), node.selects.get(0))
    return f"'{node.name}' is summed in single precision"


KINDS: tuple[Kind, ...] = (
    sum_dropped, sum_doubled, other_way_to_combine, average_for_sum, sum_for_average, contribution_lost,
    contribution_doubled, partial_read_as_whole, other_value_summed, gather_dropped, gather_reversed,
    gather_along_other_axis, other_block_gathered, bucket_parts_swapped, output_of_one_replica,
    output_of_another_value, narrow_sum,
)  # fmt: skip
