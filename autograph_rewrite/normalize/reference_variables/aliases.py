"""Alias analysis of TensorFlow 1 graphs: which values are the buffer of a reference variable, and which copies.

    w = VariableV2 ─► w/read = Identity ─► Reshape ─► Switch ─► Merge        all one buffer
                                              └─► Mul                         reads it, when it runs

Kernels of the ops below hand their input's buffer on (measured on TensorFlow 2.21), so a reader behind an update sees
the new value, however early `w/read` ran.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.shapes.recorded import static_shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import BACK_EDGES, has

_SINGLE = {"Pack": ("N", 0), "AddN": ("N", 0), "Split": ("num_split", 1), "SplitV": ("num_split", 0)}


def is_reference(node: Node, index: int) -> bool:
    """Return whether a node takes an input as a legacy reference."""
    return node.input_dtypes[index] > dtypes.REF_OFFSET


def is_loop_head(node: Node) -> bool:
    """Return whether a Merge joins a loop's iterations."""
    return any(value.node.op in BACK_EDGES for value in node.inputs)


def handed_on(node: Node, index: int) -> Iterable[Value]:
    """Return the outputs that are the buffer of an input."""
    op = node.op
    if has(op, "keeps_buffer"):
        return [node.output()] if index == 0 else ()
    if has(op, "switches") or op == "RefEnter":
        return node.outputs if index == 0 else ()
    if op == "IdentityN":
        return [node.output(index)]
    if op == "Merge":
        return () if is_loop_head(node) else [node.output()]
    if op == "Enter":
        return [node.output()] if node.attr("is_constant") else ()
    if op in _SINGLE:
        count, place = _SINGLE[op]
        return [node.output()] if index == place and node.attr(count) == 1 else ()
    if op == "Cast":
        return [node.output()] if node.attr("SrcT") == node.attr("DstT") else ()
    if has(op, "keeps_buffer_of_size") and index == 0:
        return [node.output()] if _size(node.inputs[0]) == _size(node.output()) is not None else ()
    if has(op, "writes") and is_reference(node, index):
        return node.outputs if index == 0 else ()
    return ()


def _size(value: Value) -> int | None:
    shape = static_shape(value)
    return None if shape is None or None in shape else math.prod(size or 0 for size in shape)


class Aliases:
    """The aliases of every reference variable of a graph.

    Attributes:
        variables: the variables whose buffer a value may be.
        readers: the inputs of nodes that read a buffer: node, index.
        updates: the nodes that write each variable.
    """

    def __init__(self, graph: Graph) -> None:
        self.variables: dict[Value, tuple[Node, ...]] = {}
        self.readers: dict[tuple[Node, int], None] = {}
        self.updates: dict[Node, list[Node]] = {}
        pending = deque(node.output() for node in graph if has(node.op, "reference_variables"))
        self.variables |= {value: (value.node,) for value in pending}
        while pending:
            value = pending.popleft()
            for node, index in value.uses:
                if has(node.op, "writes") and is_reference(node, index):
                    self._updated_by(node, value)
                outputs = handed_on(node, index)
                pending.extend(out for out in outputs if self._is_new(out, value))
                if not outputs and not is_reference(node, index):
                    self.readers[node, index] = None

    def _updated_by(self, node: Node, value: Value) -> None:
        for variable in self.variables[value]:
            known = self.updates.setdefault(variable, [])
            if node not in known:
                known.append(node)

    def _is_new(self, out: Value, value: Value) -> bool:
        known = self.variables.get(out, ())
        joined = tuple(dict.fromkeys((*known, *self.variables[value])))
        self.variables[out] = joined
        return joined != known

    def sources(self, value: Value) -> Iterator[Value]:
        """Yield the references, which are no values yet, that a value comes from without a node that reads them."""
        stack, seen = [value], {value}
        while stack:
            one = stack.pop()
            if one.dtype > dtypes.REF_OFFSET:
                yield one
                continue
            for given in one.node.inputs:
                if given in self.variables and given not in seen:
                    seen.add(given)
                    stack.append(given)

    def unchanged(self, variable: Node) -> Iterator[Value]:
        """Yield what holds just the value of a variable: itself, updates of it, and what repeats them."""
        stack, seen = [variable.output()], {variable.output()}
        while stack:
            value = stack.pop()
            yield value
            for node, index in value.uses:
                updates = has(node.op, "writes") and is_reference(node, index)
                for out in handed_on(node, index) if has(node.op, "keeps_value") or updates else ():
                    if out not in seen:
                        seen.add(out)
                        stack.append(out)
