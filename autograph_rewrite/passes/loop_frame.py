"""Loop: a frame of TensorFlow's own control flow around nodes that run once per micro-batch.

    number = 0 ─► Enter ─► Merge ─► Switch ─► body ... + 1 ─► NextIteration ─► (Merge)
                             └─► Less(limit) ─► LoopCond        Exit

Every replica has a frame of its own. Its iterations follow each other: one begins when the one before has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.attrs import encode
from autograph_rewrite.ir.graph import Graph, Node, PerInstance, Span, Value

SCOPE = "autograph_micro/loop"


class Loop:
    """Adds a loop to a folded graph, and what passes through it.

    Args:
        graph: the folded graph.
        prefixes: of the replicas' names, which tell their frames apart.
        count: how many iterations there are.
    """

    def __init__(self, graph: Graph, prefixes: Sequence[str], count: int) -> None:
        self._graph = graph
        self._own: set[Node] = set()
        self._constants: dict[Value, Value] = {}
        self._made: dict[tuple[str, Value], Value] = {}
        frames = [encode("string", prefix + SCOPE) for prefix in prefixes]
        self._frame = PerInstance(tuple(frames)) if len(frames) > 1 else frames[0]
        self._first = self._enter(self._outside(np.int32(0), "first"), "enter", constant=False)
        merged = self._merge(self._first.output(), "number")
        limit = self.constant(self._outside(np.int32(count), "limit"))
        self._condition = self._add("LoopCond", [self._add("Less", [merged.output(), limit], "less").output()], "cond")
        gone = self._add("Switch", [merged.output(), self._condition.output()], "switch")
        self.number = self._add("Identity", [gone.output(1)], "micro_batch").output()
        one = self.constant(self._outside(np.int32(1), "one"))
        self._increment = self._add("AddV2", [self.number, one], "next_number")
        self._back(merged, self._increment.output())
        self.end = self._add("Exit", [gone.output(0)], "end")

    def has(self, node: Node) -> bool:
        """Return whether a node belongs to the loop itself."""
        return node in self._own

    def wait_for(self, node: Node) -> None:
        """Let the loop begin after a node outside of it."""
        self._first.add_control(node)

    def run(self, node: Node) -> None:
        """Let a node of the body run in every iteration, whoever reads it."""
        self._increment.add_control(node)

    def constant(self, value: Value) -> Value:
        """Return a value from outside as one of every iteration."""
        if value not in self._constants:
            self._constants[value] = self._enter(value, f"{value.node.name}/enter", constant=True).output()
        return self._constants[value]

    def entry(self, table: Value, origin: Node) -> Value:
        """Return this iteration's entry of a table."""
        axis = self.constant(self._outside(np.int32(0), "axis"))
        inputs = [self.constant(table), self.number, axis]
        return self._add("GatherV2", inputs, f"{origin.name}/entry").output()

    def total(self, value: Value) -> Value:
        """Return the sum of a value over all iterations."""
        return self._once("total", value, self._outside(_zero(value), f"{value.node.name}/zero"))

    def last(self, value: Value) -> Value:
        """Return a value as the last iteration made it.

        Raises:
            PassError: it is a container.
        """
        if dtypes.base(value.dtype) in (dtypes.VARIANT, dtypes.RESOURCE):
            raise PassError(f"'{value.name}' is a container of each micro-batch", node=value.node)
        return self._once("last", value, self._outside(_zero(value), f"{value.node.name}/none"))

    def stacked(self, value: Value) -> Value:
        """Return the values of all iterations along a new first dimension."""
        handle, shape = self._list(value)
        attrs = {"element_dtype": value.dtype}
        return self._behind("TensorListStack", [handle, shape], f"{value.node.name}/stacked", attrs)

    def joined(self, value: Value) -> Value:
        """Return the values of all iterations, joined along their first dimension."""
        handle, shape = self._list(value)
        attrs = {"element_dtype": value.dtype, "value": np.zeros(0, np.int64), "dtype": dtypes.INT64}
        lengths = {key: attrs.pop(key) for key in ("value", "dtype")}
        none = self._graph.add("Const", name=f"{SCOPE}/lengths", attrs=lengths).output()
        return self._behind("TensorListConcatV2", [handle, shape, none], f"{value.node.name}/joined", attrs)

    def _list(self, value: Value) -> tuple[Value, Value]:
        shape = self._outside(np.int32(-1), "any_shape")
        if ("list", value) not in self._made:
            most = self._outside(np.int32(-1), "any_number")
            attrs = {"element_dtype": value.dtype, "shape_type": dtypes.INT32}
            empty = self._behind("EmptyTensorList", [shape, most], f"{value.node.name}/empty", attrs)
            self._once("list", value, empty)
        return self._made["list", value], shape

    def _once(self, kind: str, value: Value, first: Value) -> Value:
        """Carry something from iteration to iteration; return what it is at the end."""
        if (kind, value) not in self._made:
            name = f"{value.node.name}/{kind}"
            merged = self._merge(self._enter(first, f"{name}/enter", constant=False).output(), name)
            gone = self._add("Switch", [merged.output(), self._condition.output()], f"{name}/switch")
            if kind == "total":
                new = self._add("AddV2", [gone.output(1), value], f"{name}/added").output()
            elif kind == "list":
                attrs = {"element_dtype": value.dtype}
                new = self._add("TensorListPushBack", [gone.output(1), value], f"{name}/pushed", attrs).output()
            else:
                new = value
            self._back(merged, new)
            self._made[kind, value] = self._add("Exit", [gone.output(0)], f"{name}/exit").output()
        return self._made[kind, value]

    def _enter(self, value: Value, name: str, *, constant: bool) -> Node:
        attrs = {"is_constant": constant, "parallel_iterations": 1, "frame_name": ""}
        node = self._add("Enter", [value], name, attrs)
        node.set_raw_attr("frame_name", self._frame)
        return node

    def _merge(self, value: Value, name: str) -> Node:
        return self._add("Merge", [value, value], f"{name}/merge")

    def _back(self, merged: Node, value: Value) -> None:
        merged.set_input(1, self._add("NextIteration", [value], f"{merged.name}/next").output())

    def _outside(self, content: Any, name: str) -> Value:
        array = np.asarray(content)
        attrs = {"value": array, "dtype": dtypes.from_numpy(array.dtype)}
        return self._graph.add("Const", name=f"{SCOPE}/{name}", attrs=attrs).output()

    def _behind(self, op: str, inputs: list[Value], name: str, attrs: dict[str, Any]) -> Value:
        """Add a node outside of the loop, one for each replica."""
        return self._graph.add(op, inputs, name=f"{SCOPE}/{name}", attrs=attrs, span=Span.EACH).output()

    def _add(self, op: str, inputs: list[Value], name: str, attrs: dict[str, Any] | None = None) -> Node:
        node = self._graph.add(op, inputs, name=f"{SCOPE}/{name}", attrs=attrs, span=Span.EACH)
        self._own.add(node)
        return node


def _zero(value: Value) -> Any:
    dtype = dtypes.numpy_dtype(value.dtype)
    return np.zeros((), dtype if dtype is not None else np.dtype(object))
