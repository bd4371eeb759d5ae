"""Build a TensorFlow v1 while-loop frame around nodes that run once per micro-batch.

    number = 0 ─► Enter ─► Merge ─► Switch ─► body ... + 1 ─► NextIteration ─► (Merge)
                             └─► Less(limit) ─► LoopCond        Exit

Every replica has a separate frame. An iteration begins when the one before it has ended. If a part of the body runs in
some iterations only, its loop variables keep their values in the others:

    old ─► Switch(runs) ─► grown ──► Merge ─► new          the other side of the Switch goes to the Merge as it is
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ANYWHERE, EACH, PerInstance, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode

SCOPE = "autograph_micro/loop"
UNROLL = "set form to unrolled, in accumulation or in pipeline"


class Loop:
    """Adds a loop to a folded graph, and the values that enter it, leave it or pass through it.

    Args:
        prefixes: of the replicas' names, which distinguish their frames.
        scope: begins the names of its nodes.
        span: ONCE for one loop that all replicas share.
        axis: of the places of the parts of its body; "": they have no place.

    Attributes:
        number: of the iteration.
        end: the number of iterations, once they are over.
    """

    def __init__(
        self,
        graph: Graph,
        prefixes: Sequence[str],
        count: int,
        scope: str = SCOPE,
        *,
        span: Span = EACH,
        axis: str = "",
    ) -> None:
        self._graph = graph
        self.scope, self.axis, self._span = scope, axis, span
        self._part = 0
        self._runs: Value | None = None
        self._turn: Value | None = None
        self._constants: dict[tuple[Value, int], Value] = {}
        self._made: dict[tuple[str, Value], Value] = {}
        self._numbers: dict[tuple[str, str, int], Value] = {}
        self._ran: dict[Node, Node] = {}
        self._slots: dict[Value, list[Value]] = {}
        frames = [encode("string", prefix + scope) for prefix in prefixes]
        self._frame = PerInstance(tuple(frames)) if len(frames) > 1 else frames[0]
        self._first = self._enter(self._outside(np.int32(0), "first"), "enter", constant=False)
        merged = self._merge(self._first.output(), "number")
        limit = self.constant(self._outside(np.int32(count), "limit"))
        self._condition = self._add("LoopCond", [self._add("Less", [merged.output(), limit], "less").output()], "cond")
        gone = self._add("Switch", [merged.output(), self._condition.output()], "switch")
        self.number = self._add("Identity", [gone.output(1)], "micro_batch").output()
        self._one = self._outside(np.int32(1), "one")
        self._increment = self._add("AddV2", [self.number, self.constant(self._one)], "next_number")
        self._back(merged, self._increment.output())
        self.end = self._add("Exit", [gone.output(0)], "end")

    @contextmanager
    def at(self, part: int, runs: Value | None = None, turn: Value | None = None) -> Iterator[None]:
        """Add nodes for a part of the body.

        Args:
            part: its number.
            runs: scalar bool, whether it runs in an iteration; None: in all of them.
            turn: the number of its micro-batch in each iteration; None: that of the iteration.
        """
        before = self._part, self._runs, self._turn
        self._part, self._runs, self._turn = part, runs, turn
        try:
            yield
        finally:
            self._part, self._runs, self._turn = before

    def wait_for(self, node: Node) -> None:
        """Let the loop begin after a node outside of it."""
        self._first.add_control(node)

    def finished(self, node: Node) -> Node:
        """Let a node of the body run in every iteration, even if nothing reads it; return the node that ends these."""
        self._increment.add_control(node)
        return self.end

    def ran(self, node: Node) -> Node:
        """Do the same as `finished` for a node that does not run in every iteration."""
        if node not in self._ran:
            mark = self._add("Identity", [self.constant(self._one)], f"{node.name}/ran")
            mark.add_control(node)
            self._ran[node] = self.total(mark.output()).node
        return self._ran[node]

    def constant(self, value: Value) -> Value:
        """Return a value from outside as a constant of the loop."""
        key = value, self._part
        if key not in self._constants:
            self._constants[key] = self._enter(value, f"{value.node.name}/enter", constant=True).output()
        return self._constants[key]

    def turn(self, table: Value, name: str) -> tuple[Value, Value, Value]:
        """Return a table's entry for this iteration, whether it is at least 0, and the entry again, dead if not."""
        found = self.entry(table, name)
        none = self.constant(self._outside(np.int32(0), "none"))
        runs = self._add("GreaterEqual", [found, none], f"{name}/runs").output()
        there = self._add("Switch", [found, runs], f"{name}/there").output(1)
        return found, runs, self._add("Identity", [there], f"{name}/micro_batch").output()

    def entry(self, table: Value, name: str, at: Value | None = None) -> Value:
        """Return an entry of a table: that of this iteration, unless a number is given.

        Args:
            table: [iterations, ...], outside of the loop.
            name: prefix of the nodes' names.
            at: scalar int32; None: the number of the iteration.
        """
        axis = self.constant(self._outside(np.int32(0), "axis"))
        inputs = [self.constant(table), self.number if at is None else at, axis]
        return self._add("GatherV2", inputs, f"{name}/entry").output()

    def chosen(self, condition: Value, value: Value, other: Value, name: str) -> Value:
        """Return one value where a scalar condition holds, else the other, of the same shape and type."""
        return self._add("SelectV2", [condition, value, other], name).output()

    def cast(self, value: Value, dtype: int, name: str) -> Value:
        """Return a value of the loop as another type."""
        return value if value.dtype == dtype else self._add("Cast", [value], f"{name}/cast", {"DstT": dtype}).output()

    def total(self, value: Value) -> Value:
        """Return the sum of a value over all iterations."""
        return self._once("total", value, self._zero(value, f"{value.node.name}/zero"), "AddV2", "added")

    def first(self, value: Value) -> Value:
        """Return a value of the first micro-batch; the last ones of a small batch are empty.

        Raises:
            PassError: it is a container.
        """
        _require_no_container(value)
        if ("first", value) not in self._made:
            name = f"{value.node.name}/first"
            zero = self.constant(self._outside(np.int32(0), "none"))
            at = self.number if self._turn is None else self._turn
            is_first = self._add("Equal", [at, zero], f"{name}/is_it").output()
            taken = self._add("Switch", [value, is_first], f"{name}/taken").output(1)
            with self.at(self._part, is_first):
                empty = self._zero(value, f"{name}/none")
                self._made["first", value] = self._carry(name, empty, lambda *_: taken)[1]
        return self._made["first", value]

    def later(self, value: Value, distance: int, step: int = 1) -> Value:
        """Return a value of some iterations ago; it moves through one slot per iteration.

        Args:
            value: of the part of the body to which nodes are added now.
            distance: number of iterations.
            step: number of parts from each slot to the next.

        Raises:
            PassError: it is a container.
        """
        _require_no_container(value)
        slots, name = self._slots.setdefault(value, []), f"{value.node.name}/slot"
        while len(slots) < distance:
            moved = slots[-1] if slots else value
            # The value exists only in iterations in which its part runs, a slot in every iteration.
            runs = None if slots else self._runs
            with self.at(self._part + step * (len(slots) + 1), runs):
                empty = self._zero(value, f"{name}/empty")
                slots.append(self._carry(name, empty, lambda *_, moved=moved: moved)[0])
        return slots[distance - 1]

    def kept(self, value: Value) -> Value:
        """Return the list of the values of all iterations.

        Raises:
            PassError: it is a handle, which stands for one container in all iterations.
        """
        _require_no_container(value, (dtypes.RESOURCE,))
        return self._list(value)[0]

    def item(self, kept: Value, value: Value, at: Value) -> Value:
        """Return an entry of a list that another loop has kept of a value.

        Args:
            kept: handle of the list, outside of this loop.
            value: the value in the other loop, for type and name.
            at: scalar int32, the number of the item.
        """
        inputs = [self.constant(kept), at, self.constant(self._outside(np.int32(-1), "any_shape"))]
        attrs = {"element_dtype": value.dtype}
        return self._add("TensorListGetItem", inputs, f"{value.node.name}/kept", attrs).output()

    def stacked(self, value: Value) -> Value:
        """Return the values of all iterations along a new first dimension."""
        handle, shape = self._list(value)
        build = self._build(f"{value.node.name}/stacked")
        return build.op("TensorListStack", handle, shape, element_dtype=value.dtype)

    def joined(self, value: Value) -> Value:
        """Return the values of all iterations, joined along their first dimension."""
        handle, shape = self._list(value)
        none = Builder(self._graph, self._named("lengths")).const(np.zeros(0), dtypes.INT64)
        build = self._build(f"{value.node.name}/joined")
        return build.op("TensorListConcatV2", handle, shape, none, element_dtype=value.dtype)

    def _list(self, value: Value) -> tuple[Value, Value]:
        shape = self._outside(np.int32(-1), "any_shape")
        if ("list", value) not in self._made:
            most = self._outside(np.int32(-1), "any_number")
            build = self._build(f"{value.node.name}/empty")
            empty = build.op("EmptyTensorList", shape, most, element_dtype=value.dtype, shape_type=dtypes.INT32)
            self._once("list", value, empty, "TensorListPushBack", "pushed", element_dtype=value.dtype)
        return self._made["list", value], shape

    def _once(self, kind: str, value: Value, first: Value, op: str, what: str, **attrs: Any) -> Value:
        """Add a loop variable to which an op adds the value in each iteration; return it at the end."""

        def grown(old: Value, name: str) -> Value:
            return self._add(op, [old, value], f"{name}/{what}", attrs).output()

        if (kind, value) not in self._made:
            self._made[kind, value] = self._carry(f"{value.node.name}/{kind}", first, grown)[1]
        return self._made[kind, value]

    def _carry(self, name: str, first: Value, grow: Callable[[Value, str], Value]) -> tuple[Value, Value]:
        """Add a loop variable; return its value in each iteration, and at the end."""
        merged = self._merge(self._enter(first, f"{name}/enter", constant=False).output(), name)
        gone = self._add("Switch", [merged.output(), self._condition.output()], f"{name}/switch")
        old = gone.output(1)
        if self._runs is None:
            new = grow(old, name)
        else:
            held = self._add("Switch", [old, self._runs], f"{name}/held")
            new = self._add("Merge", [held.output(0), grow(held.output(1), name)], f"{name}/kept").output()
        self._back(merged, new)
        return old, self._add("Exit", [gone.output(0)], f"{name}/exit").output()

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
        """Return a constant outside of the loop, one for each part that needs it."""
        array = np.asarray(content)
        key = name, f"{array.dtype.name} {array.tolist()}", self._part
        if key not in self._numbers:
            self._numbers[key] = Builder(self._graph, self._named(name)).const(array)
        return self._numbers[key]

    def _zero(self, value: Value, name: str) -> Value:
        """Return the first content of a loop variable for a value, outside of the loop."""
        dtype = dtypes.base(value.dtype)
        if dtype == dtypes.STRING:
            return self._outside(np.asarray(b"", object), name)
        known = dtypes.numpy_dtype(dtype)
        if known is not None:
            return self._outside(np.zeros((), known), name)
        zero = self._outside(np.float32(0), name)
        return Builder(self._graph, self._named(f"{name}/cast")).op("Cast", zero, DstT=dtype)

    def _build(self, name: str) -> Builder:
        """Return a builder of nodes with the span of the loop and the place of the current part of its body."""
        place = {self.axis: self._part} if self.axis else ANYWHERE
        return Builder(self._graph, self._named(name), span=self._span, place=place)

    def _named(self, name: str) -> str:
        """Return a name in the loop's scope."""
        return name if name.startswith(f"{self.scope}/") else f"{self.scope}/{name}"

    def _add(self, op: str, inputs: list[Value], name: str, attrs: dict[str, Any] | None = None) -> Node:
        return self._build(name).node(op, *inputs, **(attrs or {}))


def _require_no_container(value: Value, types: Container[int] = (dtypes.VARIANT, dtypes.RESOURCE)) -> None:
    if dtypes.base(value.dtype) in types:
        raise PassError(f"'{value.name}' is a container of each micro-batch", node=value.node, hint=UNROLL)
