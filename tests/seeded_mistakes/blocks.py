"""Mistakes about blocks, sizes and what replicas agree on: wrong limits, local sizes, masks drawn on each replica."""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from tests.seeded_mistakes.bench import Bench, Kind, each, is_float, set_each

BLOCKS = frozenset(("StridedSlice", "GatherV2", "Slice"))
RANDOM = ("Random", "Stateless", "Multinomial", "TruncatedNormal")


def _blocks(bench: Bench) -> list[Node]:
    """Return the nodes that cut a block out of a whole value."""

    def cuts(node: Node) -> bool:
        return (
            (node.op in BLOCKS and node.span == EACH and node.inputs[0].node.span == ONCE
            and node.name.endswith(("/block", "_block"))) or (node.op == "StridedSlice" and "/block" in node.name)
        )  # fmt: skip

    return bench.where(cuts)


def _limits(bench: Bench, node: Node) -> list[Value]:
    return list(node.inputs[1:3]) if node.op == "StridedSlice" else [node.inputs[1]]


def limit_off_by_one(bench: Bench) -> str:
    """Every block ends one row early, or begins one row late: a gap."""
    node = bench.pick(_blocks(bench))
    which = bench.rng.randrange(len(_limits(bench, node)))
    limit = _limits(bench, node)[which]
    node.set_input(1 + which, bench.computed("AddV2", limit, 1 if which == 0 else -1, node))
    return f"limit {which} of '{node.name}' is off by one"


def blocks_overlap(bench: Bench) -> str:
    """A block also has the first row of the next one."""
    node = bench.pick(node for node in _blocks(bench) if node.op == "StridedSlice")
    node.set_input(2, bench.computed("AddV2", node.inputs[2], 1, node))
    return f"'{node.name}' has a row of the next block as well"


def block_of_another_replica(bench: Bench) -> str:
    """Replicas take each other's blocks, of one input only."""
    node = bench.pick(_blocks(bench))
    found, seen = [], set[Value]()
    pending = list(node.inputs[1:3])
    while pending:  # limits in a loop of micro-batches depend on themselves
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.node.op == "Const" and any(isinstance(raw, PerInstance) for raw in value.node.attrs.values()):
            found.append(value.node)
        elif value.node.span == EACH:
            pending += value.node.inputs
    if not found:
        raise LookupError("no limits of its own")
    for const in found:
        contents = each(const, "value")
        set_each(const, "value", "tensor", [*contents[1:], contents[0]])
    return f"'{node.name}' is the block of the next replica"


def whole_for_block(bench: Bench) -> str:
    """A replica works on the whole batch."""
    node = bench.pick(_blocks(bench))
    bench.replace(node.output(), node.inputs[0])
    return f"'{node.inputs[0].name}' is read whole where '{node.name}' was"


def block_of_another_value(bench: Bench) -> str:
    """The block is cut out of another value of the same type."""
    nodes = _blocks(bench)
    found = [
        (node, other.inputs[0])
        for node in nodes
        for other in nodes
        if other.inputs[0] is not node.inputs[0] and other.inputs[0].dtype == node.inputs[0].dtype
    ]
    node, value = bench.pick(found)
    node.set_input(0, value)
    bench.keep_acyclic()
    return f"'{node.name}' is cut out of '{value.name}'"


def local_size_for_global(bench: Bench) -> str:
    """What counts the whole batch counts one block."""
    node = bench.pick(_counted(bench))
    origin = (node.attr("_autograph_origin") or b"").decode()
    own = bench.graph.nodes.get(origin)
    if own is None or own is node:
        raise LookupError("it is gone")
    fits = [v for v in own.outputs if v.dtype == node.output().dtype]
    for use in node.output().uses:
        bench.read_instead(use, bench.pick(fits))
    bench.keep_acyclic()
    return f"'{own.name}' is read as it is on one replica, without '{node.name}'"


def _counted(bench: Bench) -> list[Node]:
    return bench.where(lambda node: node.name.rpartition("/")[2].startswith(("counted", "global_size")))


def size_of_one_replica(bench: Bench) -> str:
    """The size of the batch is divided by the number of replicas."""
    node = bench.pick(_counted(bench))
    bench.replace(node.output(), bench.computed("FloorDiv", node.output(), bench.instances))
    return f"'{node.name}' is divided by {bench.instances}"


def global_size_for_local(bench: Bench) -> str:
    """What shapes a block is as large as the batch."""
    node = bench.one(lambda n: n.span == EACH and n.op in ("Shape", "Size") and bool(bench.uses(n.output())))
    value = node.output()
    use = bench.pick(bench.uses(value))
    bench.read_instead(use, bench.computed("Mul", value, bench.instances))
    return f"'{use.node.name}' takes {bench.instances} times the size '{node.name}'"


def term_on_every_replica(bench: Bench) -> str:
    """A term that is added to a partial sum counts on every replica."""
    node = bench.one(lambda node: node.op == "SelectV2" and node.name.rpartition("/")[2].startswith("term"))
    bench.replace(node.output(), node.inputs[1])
    return f"'{node.inputs[1].name}' counts on every replica"


def consumer_rewired(bench: Bench) -> str:
    """A reader gets another value of the same op and type."""
    values = [v for node in bench.nodes for v in node.read_outputs if is_float(v) and node.op not in ("Const", "Enter")]
    found = [
        (a, b)
        for a in values
        for b in values
        if a.name < b.name and a.dtype == b.dtype and a.node.op == b.node.op and a.node.span is b.node.span
    ]
    for _ in range(20):
        old, new = bench.pick(found)
        uses = bench.uses(old)
        if uses and not bench.depends(new.node, old.node):
            use = bench.pick(uses)
            bench.read_instead(use, new)
            return f"'{use.node.name}' reads '{new.name}' instead of '{old.name}'"
    raise LookupError("all depend on each other")


def operands_swapped(bench: Bench) -> str:
    """The operands of a difference, a quotient or a product of matrices change places."""
    node = bench.one(lambda n: n.op in ("Sub", "RealDiv", "MatMul", "BatchMatMulV2", "SquaredDifference"))
    left, right = node.inputs
    selects = {1 - index: select for index, select in node.selects.items()}
    node.set_inputs([right, left], selects)
    return f"the operands of '{node.name}' have changed places"


def _constants(bench: Bench, *types: int) -> list[Node]:
    """Return what is the same constant on all instances, and is read."""
    found = bench.where(lambda n: n.op == "Const" and n.output().dtype in types and bool(bench.uses(n.output())))
    return [node for node in found if isinstance(node.attrs.get("value"), bytes)]


def constant_scaled(bench: Bench) -> str:
    """A factor is 1/N of what it was."""
    node = bench.pick(_constants(bench, dtypes.FLOAT, dtypes.DOUBLE))
    array = np.asarray(node.attr("value"))
    node.set_attr("value", array / array.dtype.type(bench.instances))
    return f"'{node.name}' is divided by {bench.instances}"


def integer_changed(bench: Bench) -> str:
    """An integer constant, an axis or a size for example, is one more."""
    node = bench.pick(_constants(bench, dtypes.INT32, dtypes.INT64))
    array = np.asarray(node.attr("value"))
    if not array.size:
        raise LookupError("it is empty")
    node.set_attr("value", array + array.dtype.type(1))
    return f"'{node.name}' is one more"


def attribute_changed(bench: Bench) -> str:
    """A flag of an op is turned round."""
    flags = ("transpose_a", "transpose_b", "keep_dims", "use_nesterov", "adj_x", "adj_y", "exclusive", "reverse")
    node = bench.one(lambda node: any(flag in node.attrs for flag in flags))
    flag = bench.pick(flag for flag in flags if flag in node.attrs)
    node.set_attr(flag, not node.attr(flag))
    return f"'{flag}' of '{node.name}' is turned round"


def seed_changed(bench: Bench) -> str:
    """Something random has another seed."""
    node = bench.one(lambda node: "seed2" in node.attrs and node.op.startswith(RANDOM))
    node.set_attr("seed2", node.attr("seed2") + 1)
    return f"'{node.name}' has another seed"


def mask_of_its_own(bench: Bench) -> str:
    """Every replica draws for itself."""
    node = bench.one(lambda n: n.span == ONCE and n.op.startswith(RANDOM) and "seed2" in n.attrs)
    if any(value.node.span == EACH for value in node.inputs):
        raise LookupError("it reads replicas")
    node.set_span(EACH)
    for use in node.output().uses:
        if use.node.span == ONCE:
            use.node.set_input(use.index, use.node.inputs[use.index], Select.FIRST)
    return f"'{node.name}' is drawn on each replica"


def predicate_of_its_own(bench: Bench) -> str:
    """Every replica decides a branch by what it holds itself."""
    found = []
    for node in bench.where(lambda node: node.op == "Switch"):
        value = node.inputs[1]
        for _ in range(6):
            if value.node.op == "Identity" and value.node.inputs:
                value = value.node.inputs[0]
        if value.node.inputs and is_float(value.node.inputs[0]):
            found.append((node, value))
    node, value = bench.pick(found)
    number = value.node.inputs[0]
    if number.node.op not in ("AddN", "CollectiveReduceV2") or not number.node.inputs:
        raise LookupError("it is not a sum")
    bench.read_instead(next(use for use in number.uses if use.node is value.node), number.node.inputs[0])
    return f"'{node.name}' is decided by one replica's '{number.node.inputs[0].name}'"


def predicate_inverted(bench: Bench) -> str:
    """A branch is taken when it should not be."""
    node = bench.one(lambda node: node.op == "Switch" and node.inputs[1].node.op != "LoopCond")
    value = node.inputs[1]
    node.set_input(1, bench.add("LogicalNot", [value], value.node).output(), node.selects.get(1))
    return f"'{node.name}' takes the other branch"


def accumulator_not_empty(bench: Bench) -> str:
    """What is added up in a loop does not begin with zero."""
    found = []
    for node in bench.where(lambda node: node.op == "Merge" and is_float(node.output())):
        start = node.inputs[0].node
        inner = start.inputs[0] if start.op == "Enter" else node.inputs[0]
        found.append((start if start.op == "Enter" else node, inner))
    node, inner = bench.pick(found)
    node.set_input(0, bench.computed("AddV2", inner, 1), node.selects.get(0))
    return f"'{node.name}' begins with one more"


def iteration_lost(bench: Bench) -> str:
    """A loop runs once less."""
    ends = ("LoopCond", "LogicalAnd")
    node = bench.one(lambda n: n.op == "Less" and any(use.node.op in ends for use in n.output().uses))
    node.set_input(1, bench.computed("Sub", node.inputs[1], 1, node))
    return f"'{node.name}' ends one iteration early"


KINDS: tuple[Kind, ...] = (
    limit_off_by_one, blocks_overlap, block_of_another_replica, whole_for_block, block_of_another_value,
    local_size_for_global, size_of_one_replica, global_size_for_local, term_on_every_replica, consumer_rewired,
    operands_swapped, constant_scaled, integer_changed, attribute_changed, seed_changed, mask_of_its_own,
    predicate_of_its_own, predicate_inverted, accumulator_not_empty, iteration_lost,
)  # fmt: skip
