"""Remove the recomputed nodes of `tf.recompute_grad`, and mark the nodes of which they are copies as a segment.

    before   c = Tanh(b)                      b' = Identity(b) ^dd;  c' = Tanh(b');  dc = TanhGrad(c', dd)
    after    c = Tanh(b) {segment 0}                                                 dc = TanhGrad(c, dd)

Rematerialisation adds copies of marked segments again, per replica, micro-batch and stage, and with edges that
TensorFlow's optimizers keep. (They merge the original copies as soon as they find that x + 0 is x.)

Value numbering finds the copies: a node after a barrier with the same op and equal operands as a node before it. Reads
of a variable are equal between the same writes. Nodes with state or effects, nodes in loops or branches, and all nodes
that depend on them, stay and keep waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import is_number
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import descendants, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses
from autograph_rewrite.load.marks import SEGMENT_ATTR
from autograph_rewrite.ops.traits import has


def merge_copies(graph: Graph, barriers: Sequence[Barrier]) -> int:
    """Make the readers of copies read the originals, in place; return the number of copies.

    Args:
        graph: without reference variables, and with one handle of each variable.
    """
    barriers = [Barrier(there, one.gradient) for one in barriers if (there := _there(graph, one.entries))]
    if not barriers:
        return 0
    entries = {entry: number for number, one in enumerate(barriers) for entry in one.entries}
    equal = _Numbering(graph, entries).originals()
    segments, readers = _segments(equal, entries), _waits(equal, entries)
    for copy, original in equal.items():
        for value in copy.read_outputs:
            value.replace_all_uses_with(original[value.index])
        node = original[0].node
        if copy not in entries and is_pure(node.op) and SEGMENT_ATTR not in node.attrs:
            node.set_raw_attr(SEGMENT_ATTR, encode("string", str(segments[copy])))
    _keep_waiting(graph, barriers, readers)
    return len(equal) - len(entries)


def _there(graph: Graph, entries: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(entry for entry in entries if graph.nodes.get(entry.name) is entry and entry.op == "Identity")


class _Numbering:
    """Finds equal values; the first of them represents the others.

    Args:
        entries: the Identities of barriers.
    """

    def __init__(self, graph: Graph, entries: Mapping[Node, int]) -> None:
        self._order = topological_order(graph)
        self._entries = entries
        self._sure = unconditional_nodes(self._order)
        self._same: dict[Value, Value] = {}
        self._first: dict[object, Node] = {}
        writes = [node for node in self._order if _may_write(node)]
        self._bits = {node: 1 << i for i, node in enumerate(writes)}
        self._before = marks_before(self._order, self._bits)
        self._writes: dict[Node, int] = {}

    def originals(self) -> dict[Node, list[Value]]:
        """Return the values that equal those of each copy, by copy, producers first."""
        after = descendants(self._entries)
        copied = descendants(self._entries, controls=False)
        for node in self._order:
            if node not in after:
                self._number(node)
        found: dict[Node, list[Value]] = {}
        for node in self._order:
            if node not in after:
                continue
            if node in self._entries:
                self._same[node.output()] = self._of(node.inputs[0])
            else:
                self._find(node)
            same = [self._of(value) for value in node.outputs]
            if node in copied and same and all(value.node not in after for value in same):
                found[node] = same
        return found

    def _of(self, value: Value) -> Value:
        return self._same.get(value, value)

    def _number(self, node: Node) -> None:
        """Number a node before the barriers."""
        if has(node.op, "forwards") and not _is_handle(node):
            self._same[node.output()] = self._of(node.inputs[0])
        elif (key := self._key(node)) is not None:
            first = self._first.setdefault(key, node)
            if first is not node:
                self._same |= zip(node.outputs, first.outputs, strict=True)

    def _find(self, node: Node) -> None:
        """Look for the equal of a node after a barrier, which must have the node's control inputs, too."""
        if has(node.op, "forwards") and not node.controls and not _is_handle(node):
            source = node.inputs[0]
            if source in self._same or source.node in self._sure:
                self._same[node.output()] = self._of(source)
            return
        first = self._first.get(self._key(node)) if node in self._sure else None
        if first is not None and set(node.controls) <= set(first.controls):
            self._same |= zip(node.outputs, first.outputs, strict=True)

    def _key(self, node: Node) -> object | None:
        """Return a key that is equal for nodes with equal values; None if another run may give other values."""
        if node not in self._sure or has(node.op, "routes") or not node.outputs:
            return None
        reads = has(node.op, "reads")
        if not reads and (not is_pure(node.op) or _is_handle(node)):
            return None
        attrs = frozenset((key, raw) for key, raw in node.attrs.items() if not key.startswith("_"))
        written: tuple[object, ...] = ()
        operands = [self._of(value) for value in node.inputs]
        if reads:
            handle = handle_node(node.inputs[0])
            written = (handle, self._before[node] & self._writes_of(handle))
            operands = operands[1:]
        return node.op, node.device, attrs, written, *operands

    def _writes_of(self, handle: Node) -> int:
        if handle not in self._writes:
            bits = 0
            for use in handle_uses(handle):
                bits |= self._bits.get(use.node, 0)
            self._writes[handle] = bits
        return self._writes[handle]


def _may_write(node: Node) -> bool:
    """Return whether a node takes a handle and may write its variable."""
    if has(node.op, "routes", "forwards", "reads", "inspects"):
        return False
    return any(value.dtype == dtypes.RESOURCE for value in node.inputs)


def _is_handle(node: Node) -> bool:
    return any(dtype in (dtypes.RESOURCE, dtypes.VARIANT) or dtype > dtypes.REF_OFFSET for dtype in node.output_dtypes)


def _segments(equal: Iterable[Node], entries: Mapping[Node, int]) -> dict[Node, int]:
    """Return the segment of each copy; nested barriers belong to the outermost segment."""
    found: dict[Node, int] = {}
    outer: dict[int, int] = {}
    for node in equal:
        inside = [found[value.node] for value in node.inputs if value.node in found]
        number = entries.get(node)
        found[node] = min(inside) if number is None else outer.setdefault(number, min(inside, default=number))
    return found


def _waits(equal: Iterable[Node], entries: Mapping[Node, int]) -> dict[Node, int]:
    """Return the barriers, as bits, for which each reader of copies that is no copy has to wait."""
    found: dict[Node, int] = {}
    readers: dict[Node, int] = {}
    for node in (copies := dict.fromkeys(equal)):
        bits = 1 << entries[node] if node in entries else 0
        for value in node.inputs if node not in entries else ():
            bits |= found.get(value.node, 0)
        found[node] = bits
        for value in node.read_outputs:
            for user, _ in value.uses:
                if user not in copies and not has(user.op, "sizes"):
                    readers[user] = readers.get(user, 0) | bits
    return readers


def _keep_waiting(graph: Graph, barriers: Sequence[Barrier], readers: Mapping[Node, int]) -> None:
    """Make readers that are no copies wait for the gradients that their operands waited for, unless they already do."""
    bits: dict[Node, int] = {}
    for number, one in enumerate(barriers):
        if one.gradient is not None:
            bits[one.gradient] = bits.get(one.gradient, 0) | 1 << number
    before = marks_before(topological_order(graph), bits)
    for user, wanted in readers.items():
        for gradient, mark in bits.items():
            if mark & wanted & ~before[user]:
                user.add_control(gradient)


# Turn the barrier of `tf.recompute_grad` (zero added to its inputs) into a control edge from the gradient.
#
#     before   x' = x + where(b == b, 0, nan),  b = cast(max(reshape(dy, [-1])[:1]), bool)      the first row of all
#     after    x' = Identity(x) ^dy                                                             each block its gradient
#
# TensorFlow adds the zero for XLA, which ignores control edges. It depends on the first element of the whole batch, for
# which neither a micro-batch nor a stage can wait. In graphs of TensorFlow 1, b == b compares Python objects, so the
# condition is a constant and there is no gradient to wait for. Source: `recompute_grad` of
# tensorflow/python/ops/custom_gradient.py.

FIRST_ELEMENT = ("Cast", "Max", "StridedSlice", "Reshape")
"""The ops between a gradient and the truth value of its first element, the last op first."""


@dataclass(frozen=True)
class Barrier:
    """The barrier before a recomputed segment.

    Attributes:
        entries: the Identities of its inputs.
        gradient: the node for which they wait; None if the graph does not show it.
    """

    entries: tuple[Node, ...]
    gradient: Node | None


def wait_by_control_edges(graph: Graph) -> list[Barrier]:
    """Replace the additions of zero by control edges, in place; return the barriers."""
    found = []
    for node in [node for node in graph if node.op == "SelectV2"]:
        if not (is_number(node.inputs[1], 0.0) and is_number(node.inputs[2], np.nan)):
            continue
        gradient = _awaited(node.inputs[0])
        if gradient is None and not is_number(node.inputs[0], True):
            continue
        entries = []
        for add, other in _additions(node.output()):
            become(add, "Identity", [other], {"T": add.input_dtypes[0]})
            if gradient is not None:
                add.add_control(gradient.node)
            entries.append(add)
        if entries:
            found.append(Barrier(tuple(entries), None if gradient is None else gradient.node))
    return found


def _awaited(condition: Value) -> Value | None:
    """Return the gradient whose first element a condition compares with itself; None for other conditions."""
    equal = condition.node
    if equal.op != "Equal" or equal.inputs[0] is not equal.inputs[1] or equal.inputs[0].dtype != dtypes.BOOL:
        return None
    value = equal.inputs[0]
    for op in FIRST_ELEMENT:
        if value.node.op != op:
            return None
        value = value.node.inputs[0]
    return value


def _additions(zero: Value) -> Iterator[tuple[Node, Value]]:
    """Yield the additions of the zero to a number, each with the number."""
    for user, index in zero.uses:
        if user.op == "Cast":
            yield from _additions(user.output())
        elif user.op == "AddV2" and user.input_dtypes[0] in dtypes.INEXACT | dtypes.INTEGER:
            yield user, user.inputs[1 - index]
