"""Mistakes about what replicas exchange: sums and gathers dropped, doubled, of another value or in another order."""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, Select
from autograph_rewrite.ir.types import dtypes
from tests.seeded_mistakes.bench import Bench, Kind, alike, gathers_all, is_float, is_join, is_sum, set_each


def sum_dropped(bench: Bench) -> str:
    """What should be summed is read as the first replica, or each for itself, holds it."""
    node = bench.one(is_sum)
    value = node.inputs[0]
    bench.replace(node.output(), value)
    bench.graph.move_anchors(node.output(), value)
    return f"'{node.name}' is not summed"


def sum_doubled(bench: Bench) -> str:
    """A value that is whole is summed over the replicas once more."""
    node = bench.one(lambda node: is_sum(node) and is_float(node.output()))
    total = node.output()
    if node.op == "CollectiveReduceV2" and node.inputs[2].node.op == "Const":
        key = bench.const(np.asarray(node.inputs[2].node.attr("value")) + 100000, node.inputs[2])
        again = bench.again(node, [total, node.inputs[1], key, *node.inputs[3:]])
    else:
        again = bench.add("AddN", [total] * bench.instances, node)
    bench.replace(total, again.output())
    return f"'{node.name}' is summed again"


def other_way_to_combine(bench: Bench) -> str:
    """The maximum is taken instead of the sum, or the sum instead of the maximum."""
    node = bench.one(lambda n: n.op == "CollectiveReduceV2" or (n.op == "AddN" and gathers_all(n)))
    if node.op == "CollectiveReduceV2":
        merge = node.attr("merge_op")
        node.set_attr("merge_op", "Max" if merge == b"Add" else "Add")
        return f"'{node.name}' no longer combines by {merge.decode()}"
    stack = bench.graph.add(
        "Pack", node.inputs, name=f"{node.name}/Pack", selects={0: Select.ALL}, attrs={"axis": 0, "N": node.attr("N")}
    )
    axis = bench.const(0, stack.output(), dtype=dtypes.INT32)
    fold = bench.graph.add("Max", [stack.output(), axis], name=f"{node.name}/Max")
    node.output().replace_all_uses_with(fold.output())
    return f"'{node.name}' takes the maximum"


def average_for_sum(bench: Bench) -> str:
    """A sum is divided by the number of replicas."""
    node = bench.one(lambda node: is_sum(node) and is_float(node.output()))
    bench.replace(node.output(), bench.computed("Mul", node.output(), 1 / bench.instances))
    return f"'{node.name}' is averaged"


def sum_for_average(bench: Bench) -> str:
    """A value is multiplied by the number of replicas."""
    ops = ("RealDiv", "Mul", "AddV2", "Sub")
    node = bench.one(lambda node: node.op in ops and is_float(node.output()))
    bench.replace(node.output(), bench.computed("Mul", node.output(), bench.instances))
    return f"'{node.name}' is multiplied by {bench.instances}"


def _contribution(bench: Bench, times: int) -> str:
    """Let the last instance count that often in a sum over replicas."""
    node = bench.one(lambda node: is_sum(node) and is_float(node.output()) and node.inputs[0].node.span == EACH)
    value = node.inputs[0]
    factor = bench.const(1, value)
    ones = [np.ones((), dtypes.numpy_dtype(value.dtype)) for _ in range(bench.instances)]
    ones[-1] = ones[-1] * times
    set_each(factor.node, "value", "tensor", ones)
    node.set_input(0, bench.add("Mul", [value, factor], value.node).output(), node.selects.get(0))
    return f"the last instance counts {times} times in '{node.name}'"


def contribution_lost(bench: Bench) -> str:
    """One replica, or micro-batch, does not count in a sum."""
    return _contribution(bench, 0)


def contribution_doubled(bench: Bench) -> str:
    """One replica, or micro-batch, counts twice in a sum."""
    return _contribution(bench, 2)


def partial_read_as_whole(bench: Bench) -> str:
    """One reader gets the value from before the sum."""
    node = bench.one(lambda node: is_sum(node) and bool(bench.uses(node.output())))
    use = bench.pick(bench.uses(node.output()))
    bench.read_instead(use, node.inputs[0])
    return f"'{use.node.name}' reads '{node.inputs[0].name}' without the sum"


def other_value_summed(bench: Bench) -> str:
    """Two sums are of each other's value."""
    found = [(a, b) for a, b in _of_one_type(bench.where(is_sum)) if a.inputs[0].node.span == b.inputs[0].node.span]
    one, other = bench.pick(found)
    bench.trade(one, other)
    return f"'{one.name}' and '{other.name}' sum each other's value"


def _of_one_type(nodes: list[Node]) -> list[tuple[Node, Node]]:
    """Return the pairs of nodes of one op whose first inputs are two values of one type."""
    pairs = [(a, b, a.inputs[0], b.inputs[0]) for a, b in alike(nodes)]
    return [(a, b) for a, b, left, right in pairs if left is not right and left.dtype == right.dtype]


def gather_dropped(bench: Bench) -> str:
    """A block is read where all blocks are wanted."""
    node = bench.one(is_join)
    bench.replace(node.output(), node.inputs[0])
    return f"'{node.name}' does not gather"


def gather_reversed(bench: Bench) -> str:
    """Blocks are joined in another order."""
    node = bench.one(is_join)
    value = node.output()
    turned = bench.add("ReverseV2", [value, bench.const([0], value, dtype=dtypes.INT32)], node)
    bench.replace(value, turned.output())
    return f"the rows of '{node.name}' are turned round"


def gather_along_other_axis(bench: Bench) -> str:
    """Blocks are joined along another dimension."""
    node = bench.one(lambda node: node.op == "ConcatV2" and gathers_all(node))
    axis = int(node.inputs[-1].node.attr("value")) + 1
    # Not beside what is joined: that is there once per instance.
    other = bench.const(axis, node.inputs[-1], controls=[node.inputs[0].node])
    node.set_input(len(node.inputs) - 1, other)
    return f"'{node.name}' joins along {axis}"


def other_block_gathered(bench: Bench) -> str:
    """Two gathers are of each other's value."""
    one, other = bench.pick(_of_one_type(bench.where(is_join)))
    bench.trade(one, other)
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


def _outputs(bench: Bench) -> list[Node]:
    return [bench.graph.nodes[info.tensor.partition(":")[0]] for info in bench.item.outputs.values()]


def output_of_one_replica(bench: Bench) -> str:
    """An output is what the first replica has instead of what all have together."""
    found = []
    for node in _outputs(bench):
        for index, value in enumerate(node.inputs):
            inner = value.node
            if inner.span == ONCE and inner.inputs and inner.inputs[0].node.span == EACH:
                found.append((node, index, inner.inputs[0]))
            if inner.op == "CollectiveReduceV2":
                found.append((node, index, inner.inputs[0]))
    node, index, value = bench.pick(found)
    node.set_input(index, value, Select.FIRST)
    return f"'{node.name}' is what the first replica has"


def output_of_another_value(bench: Bench) -> str:
    """An output is another value of its type and rank."""
    outputs = sorted({node for node in _outputs(bench) if node.op == "Identity"}, key=lambda n: n.name)
    found = [(a, b) for a in outputs for b in outputs if a is not b and a.inputs[0].dtype == b.inputs[0].dtype]
    one, other = bench.pick(found)
    one.set_input(0, other.inputs[0], other.selects.get(0))
    bench.keep_acyclic()
    return f"'{one.name}' is '{other.inputs[0].name}'"


def narrow_sum(bench: Bench) -> str:
    """A sum is taken in a coarser type."""
    node = bench.one(lambda node: is_sum(node) and node.output().dtype == dtypes.DOUBLE)
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
