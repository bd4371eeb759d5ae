"""Mistakes about the loop that runs micro-batches: what it starts with, carries, counts, looks up and hands out."""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from tests.seeded_mistakes.bench import Bench, Kind, is_float


def _merges(bench: Bench) -> list[Node]:
    """Return the loop variables that hold values: not the number of the iteration."""
    found = bench.where(lambda n: n.op == "Merge" and n.span == EACH and _next(n) is not None)
    return [node for node in found if is_float(node.output())]


def _next(merge: Node) -> Node | None:
    return next((value.node for value in merge.inputs if value.node.op == "NextIteration"), None)


def _number(bench: Bench) -> Node:
    """Return the loop variable that counts."""
    return bench.one(lambda n: n.op == "Less" and n.output().uses[0].node.op == "LoopCond").inputs[0].node


def _added(bench: Bench) -> Node:
    """Return what adds an iteration's value to a running sum."""
    return bench.one(lambda n: n.op == "AddV2" and n.name.endswith("/added") and is_float(n.output()))


def _outside(bench: Bench, value: Value) -> Node:
    """Return the constant that enters a loop."""
    while value.node.op in ("Enter", "Cast"):
        value = value.node.inputs[0]
    if value.node.op != "Const":
        raise LookupError(value.name)
    return value.node


def _enter(bench: Bench, value: Value, like: Node, *, constant: bool) -> Value:
    """Bring a value from outside into the loop of another Enter."""
    node = bench.graph.add("Enter", [value], name=f"{value.node.name}/brought", span=EACH, attrs={"frame_name": ""})
    for key in ("frame_name", "parallel_iterations"):
        node.set_raw_attr(key, like.attrs[key])
    node.set_attr("is_constant", constant)
    return node.output()


def _own_constant(bench: Bench, value: Value, content: object) -> None:
    """Let an Enter bring in another constant; nobody else's changes."""
    enter, old = value.node, _outside(bench, value)
    array = np.asarray(content, old.attr("value").dtype)
    attrs = {"value": array, "dtype": old.attr("dtype")}
    new = bench.graph.add("Const", name=f"{old.name}/other", attrs=attrs, span=old.span).output()
    if enter.inputs[0].dtype != new.dtype:
        new = bench.graph.add("Cast", [new], name=f"{old.name}/cast", attrs={"DstT": enter.inputs[0].dtype}).output()
    enter.set_input(0, new)


def sum_begins_with_one(bench: Bench) -> str:
    """What is carried is not empty at first."""
    merge = bench.pick(_merges(bench))
    _own_constant(bench, merge.inputs[0], 1)
    return f"'{merge.name}' begins with one"


def addend_lost(bench: Bench) -> str:
    """A running sum stays as it is."""
    node = _added(bench)
    node.output().replace_all_uses_with(node.inputs[0])
    return f"'{node.name}' adds nothing"


def addend_doubled(bench: Bench) -> str:
    """A running sum gets each value twice."""
    node = _added(bench)
    twice = bench.add("AddV2", [node.output(), node.inputs[1]], node).output()
    node.output().replace_all_uses_with(twice, keep={twice.node})
    return f"'{node.name}' adds twice"


def only_the_last_kept(bench: Bench) -> str:
    """A running sum is forgotten in each iteration."""
    node = _added(bench)
    node.set_input(0, bench.add("ZerosLike", [node.inputs[0]], node).output())
    return f"'{node.name}' forgets what it has"


def other_addend(bench: Bench) -> str:
    """Two running sums of one type get each other's values."""
    one = _added(bench)
    others = bench.where(
        lambda n: n.op == "AddV2" and n.name.endswith("/added") and n.output().dtype == one.output().dtype
    )
    other = bench.pick(node for node in others if node is not one)
    bench.trade(one, other, 1)
    return f"'{one.name}' and '{other.name}' add each other's values"


def one_iteration_more(bench: Bench) -> str:
    """The loop runs once more."""
    return _count(bench, 1)


def one_iteration_less(bench: Bench) -> str:
    """The last micro-batch is left out."""
    return _count(bench, -1)


def _count(bench: Bench, by: int) -> str:
    number = _number(bench)
    less = next(use.node for use in number.output().uses if use.node.op == "Less")
    count = int(_outside(bench, less.inputs[1]).attr("value"))
    _own_constant(bench, less.inputs[1], count + by)
    return f"'{less.name}' says {count + by}"


def begins_with_the_second(bench: Bench) -> str:
    """The first micro-batch is left out."""
    number = _number(bench)
    _own_constant(bench, number.inputs[0], 1)
    return f"'{number.name}' begins with 1"


def every_other_one(bench: Bench) -> str:
    """The number grows by two."""
    following = _next(_number(bench))
    assert following is not None
    _own_constant(bench, following.inputs[0].node.inputs[1], 2)
    return f"'{following.name}' grows by two"


def condition_inverted(bench: Bench) -> str:
    """The loop goes on where it should end."""
    cond = bench.one(lambda n: n.op == "LoopCond")
    cond.set_input(0, bench.add("LogicalNot", [cond.inputs[0]], cond.inputs[0].node).output())
    return f"'{cond.name}' is inverted"


def _entries(bench: Bench) -> list[Node]:
    return bench.where(lambda n: n.op == "GatherV2" and n.span == EACH and n.name.endswith("/entry"))


def entry_of_first_micro_batch(bench: Bench) -> str:
    """What belongs to each micro-batch is that of the first one."""
    node = bench.pick(_entries(bench))
    node.set_input(1, bench.add("ZerosLike", [node.inputs[1]], node).output())
    return f"'{node.name}' is always the first"


def entry_of_another_micro_batch(bench: Bench) -> str:
    """A table is read from its end."""
    node = bench.pick(_entries(bench))
    node.set_input(0, bench.add("ReverseV2", [node.inputs[0], node.inputs[2]], node).output())
    return f"'{node.name}' reads its table from the end"


def table_shuffled(bench: Bench) -> str:
    """A table has two entries the other way round."""
    node = bench.pick(_entries(bench))
    table = node.inputs[0].node.inputs[0].node
    content = table.attr("value")
    if isinstance(content, tuple) or len(content) < 2 or np.array_equal(content[0], content[-1]):
        raise LookupError(table.name)
    content = np.array(content)
    content[[0, -1]] = content[[-1, 0]]
    table.set_attr("value", content)
    return f"'{table.name}' has two entries the other way round"


def value_of_earlier_iteration(bench: Bench) -> str:
    """A node reads what another one made in the iteration before."""
    cond = bench.one(lambda n: n.op == "LoopCond")
    like = bench.pick(n for n in bench.order if n.op == "Enter" and n.output().uses and _reads(cond, n))
    values = [n.output() for n in bench.nodes if n.span == EACH and _is_of_body(bench, n)]
    value = bench.pick(value for value in values if is_float(value) and bench.uses(value))
    use = bench.pick(bench.uses(value))
    zero = {"value": np.zeros((), dtypes.numpy_dtype(value.dtype)), "dtype": value.dtype}
    first = _enter(
        bench, bench.graph.add("Const", name=f"{value.node.name}/none", attrs=zero).output(), like, constant=False
    )
    merge = bench.graph.add("Merge", [first, first], name=f"{value.node.name}/carried", span=EACH)
    gone = bench.graph.add("Switch", [merge.output(), cond.output()], name=f"{merge.name}/switch", span=EACH)
    following = bench.graph.add("NextIteration", [value], name=f"{merge.name}/next", span=EACH)
    merge.set_input(1, following.output())
    use.node.set_input(use.index, gone.output(1))
    return f"input {use.index} of '{use.node.name}' is '{value.name}' of the iteration before"


def _reads(cond: Node, enter: Node) -> bool:
    less = cond.inputs[0].node
    return enter in (value.node for value in less.inputs)


def _is_of_body(bench: Bench, node: Node) -> bool:
    return node.name in bench.item.graph.nodes and any(v.node.span == EACH for v in node.inputs)


def _exits(bench: Bench) -> list[Node]:
    return bench.where(lambda n: n.op == "Exit" and n.span == EACH and is_float(n.output()))


def exits_swapped(bench: Bench) -> str:
    """What two loop variables were at the end is confused."""
    exits = _exits(bench)
    one = bench.pick(exits)
    other = bench.pick(n for n in exits if n is not one and n.output().dtype == one.output().dtype)
    bench.trade(one, other)
    return f"'{one.name}' and '{other.name}' are swapped"


def total_averaged(bench: Bench) -> str:
    """What the loop has summed is divided by the number of micro-batches."""
    total = bench.pick(_exits(bench)).output()
    half = bench.computed("Mul", total, 0.5)
    total.replace_all_uses_with(half, keep=[half.node])
    return f"'{total.name}' is halved"


def total_of_one_replica(bench: Bench) -> str:
    """What all replicas' loops have made is taken from the first."""
    node = bench.one(lambda n: n.name.endswith("/looped") and Select.ALL in n.selects.values())
    value = node.inputs[0]
    bench.replace(node.output(), value)
    return f"'{value.name}' is that of the first replica"


def pushed_twice(bench: Bench) -> str:
    """A list gets the value of each micro-batch twice."""
    node = bench.one(lambda n: n.op == "TensorListPushBack" and n.span == EACH)
    again = bench.again(node, [node.output(), node.inputs[1]])
    node.output().replace_all_uses_with(again.output(), keep={again})
    return f"'{node.name}' is pushed twice"


def list_reversed(bench: Bench) -> str:
    """The rows that a loop has kept are the other way round."""
    node = bench.one(lambda n: n.op in ("TensorListConcatV2", "TensorListStack") and n.span == EACH)
    turned = bench.add("ReverseV2", [node.output(), bench.const([0], node.output(), dtype=dtypes.INT32)], node)
    node.output().replace_all_uses_with(turned.output(), keep=[turned])
    return f"'{node.name}' is the other way round"


def other_list(bench: Bench) -> str:
    """A list gets the values of another one."""
    pushes = bench.where(lambda n: n.op == "TensorListPushBack" and n.span == EACH)
    one = bench.pick(pushes)
    other = bench.pick(n for n in pushes if n is not one and n.inputs[1].dtype == one.inputs[1].dtype)
    one.set_input(1, other.inputs[1])
    bench.keep_acyclic()
    return f"'{one.name}' keeps what '{other.name}' keeps"


def item_of_another_micro_batch(bench: Bench) -> str:
    """A backward stage reads what the first micro-batch has left for it."""
    node = bench.one(lambda n: n.op == "TensorListGetItem" and n.span == EACH)
    node.set_input(1, bench.add("ZerosLike", [node.inputs[1]], node).output())
    return f"'{node.name}' is always that of the first"


def slot_skipped(bench: Bench) -> str:
    """A stage of a pipeline reads what the one before it makes in the same iteration."""
    merge = bench.pick(m for m in _merges(bench) if "/slot" in m.name)
    following = _next(merge)
    assert following is not None
    slot = next(u.node for u in merge.output().uses if u.node.op == "Switch")
    made = following.inputs[0]
    readers = [use for use in slot.output(1).uses if use.node.op != "Switch"]
    if not readers:
        raise LookupError(merge.name)
    for use in readers:
        use.node.set_input(use.index, made)
    bench.keep_acyclic()
    return f"who reads '{slot.name}' does not wait an iteration"


def one_loop_for_all(bench: Bench) -> str:
    """The loops of all replicas have one name: they are one loop."""
    found = [n for n in bench.nodes if n.op == "Enter" and isinstance(n.attrs["frame_name"], PerInstance)]
    if not found:
        raise LookupError("frame_name")
    for node in found:
        raw = node.attrs["frame_name"]
        assert isinstance(raw, PerInstance)
        node.set_raw_attr("frame_name", raw.raws[0])
    return f"'{found[0].name}' and {len(found) - 1} more enter one loop on all replicas"


KINDS: tuple[Kind, ...] = (
    one_loop_for_all, sum_begins_with_one, addend_lost, addend_doubled, only_the_last_kept, other_addend,
    one_iteration_more, one_iteration_less, begins_with_the_second, every_other_one, condition_inverted,
    entry_of_first_micro_batch, entry_of_another_micro_batch, table_shuffled, value_of_earlier_iteration,
    exits_swapped, total_averaged, total_of_one_replica, pushed_twice, list_reversed, other_list,
    item_of_another_micro_batch, slot_skipped,
)  # fmt: skip
