"""Apply moving-average updates sequentially, one per micro-batch, with the statistics of its examples.

    before   average = mean of all micro-batches' statistics        v += rate * (average - v)       once
    after    v += rate * (statistic_0 - v);  v += rate * (statistic_1 - v);  ...                    in their order

Training on small batches one after another does the same. Statistics of several replicas are averaged first. If a node
other than an update reads a statistic, all read the one average.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.copying import copy_node, select_first
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import ancestors, descendants, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.rules.marked import AVERAGE, OF_BLOCK, marked
from autograph_rewrite.ops.rules.normalization import is_of_block
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.order_accesses import Repeated
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.micro_batches.while_frame import Loop
from autograph_rewrite.passes.reshard.lower_reshards import LoweredReshards


@dataclass(frozen=True)
class Update:
    """The nodes by which one statistic updates variables.

    Attributes:
        total: the value that is read as the average of the statistic.
        chain: the nodes between the reads, the statistic and the writes; in order.
        reads: of the written variables.
    """

    total: Value
    writes: tuple[Node, ...]
    chain: tuple[Node, ...]
    reads: tuple[Node, ...]


@dataclass(frozen=True)
class Averages:
    """The averages of block statistics, each with the statistic before empty blocks are padded."""

    values: Mapping[Node, Value]


def _find(rewrite: Rewrite) -> None:
    """Find the averages of statistics of blocks, before empty blocks are padded."""
    found: dict[Node, Value] = {}
    for node in rewrite.state.order:
        if marked(node, OF_BLOCK) == AVERAGE:
            found[node] = node.inputs[0]
        elif node.op.startswith("FusedBatchNorm") and is_of_block(node) and "Grad" not in node.op:
            names = [(index, f"{node.name}/average_{index}") for index in (1, 2)]
            found |= {rewrite.graph.nodes[name]: node.output(i) for i, name in names if name in rewrite.graph.nodes}
    rewrite.put(Averages(found))


def _update(rewrite: Rewrite) -> None:
    """Apply moving-average updates sequentially, one per micro-batch."""
    rewrite.put(Repeated(frozenset(_repeated(rewrite) if rewrite.micro > 1 and rewrite.processes == 1 else ())))


def _repeated(rewrite: Rewrite) -> set[Node]:
    """Rewrite the updates of moving averages; return the reads and updates that now run once per micro-batch."""
    reshards, named = rewrite.get(LoweredReshards), (*rewrite.item.targets, *rewrite.item.keep)
    kept, repeated = {value.node for value in rewrite.outputs}, set[Node]()
    unconditional = unconditional_nodes(topological_order(rewrite.graph)) if rewrite.plan.looped else set()
    for average, statistic in rewrite.get(Averages).values.items():
        made = average.output()
        update = _update_by(made if average.span != EACH else reshards.whole(made, average), kept)
        if update is None:
            continue
        repeated.update(update.reads, update.writes)
        means, filled = _statistics(rewrite, reshards.asked.blocks_at(statistic.node), statistic)
        if rewrite.plan.looped and not rewrite.mirrored and _is_certain(update, unconditional):
            update_averages_in_loop(rewrite.graph, update, rewrite.micro, means, filled, named)
        else:
            _unroll(rewrite, update, _unpacked(rewrite, means, filled))
    return repeated


def _update_by(total: Value, kept: set[Node]) -> Update | None:
    """Return the update that reads a statistic; None if other nodes read it, too."""
    after = descendants([use.node for use in total.uses], controls=False)
    writes = [node for node in after if is_update(node)]
    if not writes or any(node.span == EACH or node in kept for node in after):
        return None
    before = ancestors(writes, controls=False)
    if any(node not in before for node in after):
        return None
    handles = {handle_node(value) for node in writes for value in node.inputs if value.dtype == dtypes.RESOURCE}
    reads = [n for n in before if has(n.op, "reads_whole") and handle_node(n.inputs[0]) in handles]
    reads.sort(key=lambda node: node.name)  # the same in every process
    chain = (after | descendants(reads, controls=False)) & before - set(reads)
    order = _in_order(chain)
    if any(node.span == EACH for node in order) or len(handles) != len(writes):
        return None
    return Update(
        total, tuple(n for n in order if is_update(n)), tuple(n for n in order if not is_update(n)), tuple(reads)
    )


def _is_certain(update: Update, unconditional: set[Node]) -> bool:
    """Return whether an update runs in every step: a loop cannot wait for a node in a branch."""
    own = (*update.reads, *update.chain, *update.writes)
    needed = [producer for node in own for producer in (*[value.node for value in node.inputs], *node.controls)]
    return all(node in unconditional or node is update.total.node for node in (*own, *needed))


def _in_order(nodes: set[Node]) -> list[Node]:
    """Return the nodes, producers first, otherwise by name."""
    order: dict[Node, None] = {}
    stack = sorted(nodes, key=lambda node: node.name, reverse=True)
    while stack:
        waiting = [v.node for v in stack[-1].inputs if v.node in nodes and v.node not in order]
        stack.extend(waiting)
        if not waiting:
            order.setdefault(stack.pop())
    return list(order)


def _statistics(rewrite: Rewrite, blocks: Blocks, value: Value) -> tuple[Value, Value | None]:
    """Return the statistic of each micro-batch, and whether it has examples; None if all have."""
    build = FoldedBuilder.of(rewrite, value, f"{value.node.name}/in_turn_{value.index}")
    replicas, micro = rewrite.local // rewrite.micro, rewrite.micro
    axis = build.const(0, dtypes.INT32, "axis")
    is_static = blocks.static is not None
    if not is_static:
        own = build.op("Greater", blocks.count, axis, what="has_examples")
        value = build.op("SelectV2", own, value, build.op("ZerosLike", value, what="zeros"), what="or_zeros")
    table = build.gather("Pack", value, what="all", axis=0)
    shape = build.const([replicas, micro, -1], dtypes.INT32, "shape")
    sums = build.common("Sum", build.common("Reshape", table, shape, what="by_replica"), axis, what="sums")
    numbers: Value = build.const(np.full((micro, 1), replicas), value.dtype, "replicas")
    filled = None
    if not is_static:
        one = build.const(1, dtypes.INT32, "one")
        flags = build.common("Minimum", blocks.lengths, one, what="filled")
        by_replica = build.const([replicas, micro, 1], dtypes.INT32, "flags")
        flags = build.common("Reshape", flags, by_replica, what="flags_of")
        count = build.common("Sum", flags, axis, what="count")
        filled = build.common("Greater", count, axis, what="is_filled")
        numbers = build.common("Cast", build.common("Maximum", count, one, what="at_least"), what="n", DstT=value.dtype)
    means = build.common("RealDiv", sums, numbers, what="means")
    return means, filled


def _unpacked(rewrite: Rewrite, means: Value, filled: Value | None) -> list[tuple[Value, Value | None]]:
    def rows(table: Value, what: str) -> list[Value]:
        site = Site(f"{means.node.name.rpartition('/')[0]}/{what}", table.node.span, table.node)
        node = rewrite.add("Unpack", [table], site, attrs={"num": rewrite.micro, "axis": 0})
        return [node.output(i) for i in range(rewrite.micro)]

    parts = rows(means, "parts")
    flags = rows(filled, "is_there") if filled is not None else [None] * rewrite.micro
    return list(zip(parts, flags, strict=True))


def _unroll(rewrite: Rewrite, update: Update, statistics: Sequence[tuple[Value, Value | None]]) -> None:
    """Copy an update for each micro-batch; the last one keeps the original writes."""
    before: list[Node] = []
    for number, (statistic, is_there) in enumerate(statistics):
        last = number == len(statistics) - 1
        made: dict[Node, Node] = {}
        for read in update.reads:
            controls, name = [*read.controls, *before], f"{read.name}/micro_{number}"
            made[read] = _copied(rewrite, read, read.inputs, name, controls)
        if is_there is not None:
            name = f"{update.total.node.name}/or_old_{number}"
            old = made[update.reads[0]].output() if update.reads else statistic
            if old.dtype != statistic.dtype:
                attrs = {"DstT": statistic.dtype}
                cast = rewrite.add("Cast", [old], Site(f"{name}/cast", old.node.span, update.total.node), attrs=attrs)
                old = cast.output()
            inputs = [is_there, statistic, old]
            statistic = rewrite.add("SelectV2", inputs, Site(name, rewrite.common_span, update.total.node)).output()
        for node in (*update.chain, *update.writes):
            inputs = [_moved(value, update.total, statistic, made) for value in node.inputs]
            if last and node in update.writes:
                node.set_inputs(inputs)
                select_first(node)
                for control in before:
                    node.add_control(control)
            else:
                controls = [*node.controls, *(before if is_update(node) else ())]
                name = f"{node.name}/micro_{number}"
                made[node] = _copied(rewrite, node, inputs, name, controls)
        before = [made[node] for node in update.writes if node in made]


def _copied(rewrite: Rewrite, node: Node, inputs: Sequence[Value], name: str, controls: Iterable[Node]) -> Node:
    copy = copy_node(rewrite.graph, node, inputs, name=name, controls=controls)
    select_first(copy)
    return copy


def _moved(value: Value, total: Value, statistic: Value, made: dict[Node, Node]) -> Value:
    if value is total:
        return statistic
    return made[value.node].output(value.index) if value.node in made else value


FIND_AVERAGES = Pass("find-averages", _find, needs=(Homes, LoweredReshards), gives=(Averages,))
SEQUENTIAL_AVERAGES = Pass("sequential-averages", _update, needs=(Homes, LoweredReshards, Averages), gives=(Repeated,))


# Apply moving-average updates sequentially in one loop, where the plan rolls micro-batches into a loop.
#
#     before   v += rate * (average - v)                                          once
#     after    loop m < M:  v += rate * (statistics[m] - v)                       the variable is read and written in it
#
# An iteration begins when the one before it has ended, so that it reads what that one has written. Nodes that waited
# for the update wait for the end of the loop.


def update_averages_in_loop(
    graph: Graph, update: Update, micro: int, means: Value, filled: Value | None, named: Collection[str]
) -> None:
    """Move an update into a loop over the micro-batches.

    Args:
        means: the statistic of each micro-batch, along the first dimension.
        filled: whether each has examples; None if all have.
        named: names of nodes that callers run.
    """
    scope = graph.unique_name(f"{update.total.node.name}/in_turn_{update.total.index}/loop")
    loop = Loop(graph, [""], micro, scope, span=ONCE)
    for read in _other_reads(graph, update):
        loop.wait_for(read)
    made: dict[Node, Node] = {}
    for read in update.reads:
        made[read] = _copy(graph, loop, read, [loop.constant(value) for value in read.inputs], made)
        made[read].add_control(loop.number.node)
    statistic = loop.entry(means, "statistic")
    if filled is not None and update.reads:
        old = loop.cast(made[update.reads[0]].output(), statistic.dtype, "old")
        statistic = loop.chosen(loop.entry(filled, "is_there"), statistic, old, "or_old")
    for node in update.chain:
        made[node] = _copy(graph, loop, node, _inputs(loop, node, update, statistic, made), made)
    for write in update.writes:
        write.set_inputs(_inputs(loop, write, update, statistic, made))
        _wait(loop, write, write.controls, made)
        _finish(graph, loop, write, named)


def _inputs(loop: Loop, node: Node, update: Update, statistic: Value, made: dict[Node, Node]) -> list[Value]:
    moved = [(value, _moved(value, update.total, statistic, made)) for value in node.inputs]
    return [loop.constant(value) if new is value else new for value, new in moved]


def _copy(graph: Graph, loop: Loop, node: Node, inputs: Iterable[Value], made: dict[Node, Node]) -> Node:
    copy = copy_node(graph, node, inputs, name=f"{node.name}/in_turn", controls=node.controls)
    copy.set_span(ONCE)
    _wait(loop, copy, node.controls, made)
    return copy


def _wait(loop: Loop, node: Node, controls: Iterable[Node], made: dict[Node, Node]) -> None:
    """Let a node wait for controls that are in the loop, and the loop for the others."""
    for control in controls:
        node.remove_control(control)
        if control in made:
            node.add_control(made[control])
        else:
            loop.wait_for(control)


def _finish(graph: Graph, loop: Loop, write: Node, named: Collection[str]) -> None:
    """Let nodes and callers that wait for a write wait for the last one."""
    waiting = write.control_users
    end = loop.finished(write)
    for user in waiting:
        user.remove_control(write)
        user.add_control(end)
    if write.name in named:
        name = write.name
        take_name(graph, write, graph.unique_name(f"{name}/in_turn"))
        Builder(graph, name, name).node("NoOp", controls=[end])


def _other_reads(graph: Graph, update: Update) -> list[Node]:
    """Return the other reads of the variables that no control edge orders: on one device they come first."""
    handles = {handle_node(read.inputs[0]) for read in update.reads}
    handles |= {handle_node(write.inputs[0]) for write in update.writes}
    after = descendants(update.writes)
    reads = (node for node in graph if has(node.op, "reads_whole") and handle_node(node.inputs[0]) in handles)
    return [read for read in reads if read not in update.reads and read not in after and not read.controls]
