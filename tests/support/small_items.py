"""Small items made in the IR, without TensorFlow, so that what is printed of them never changes with its version."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.item import GraphItem
from autograph_rewrite.training_graph import TensorInfo, Variable

FLOAT, INT32 = dtypes.FLOAT, dtypes.INT32
DEVICES = ("/device:CPU:0", "/device:CPU:1")
PREFIX = "replica_{}/"


def const(graph: Graph, name: str, value: Any, dtype: int = FLOAT, **options: Any) -> Value:
    """Add a constant."""
    array = np.asarray(value, dtype=dtypes.numpy_dtype(dtype))
    return graph.add("Const", name=name, attrs={"value": array, "dtype": dtype}, **options).output()


def variable(graph: Graph, name: str, shape: tuple[int, ...], device: str = "") -> Value:
    """Add a handle, its initializer and nothing else."""
    attrs = {"dtype": FLOAT, "shape": shape, "shared_name": name}
    handle = graph.add("VarHandleOp", name=name, attrs=attrs, device=device).output()
    zeros = const(graph, f"{name}/zeros", np.zeros(shape), device=device)
    graph.add("AssignVariableOp", [handle, zeros], name=f"{name}/Assign", device=device)
    return handle


def regression() -> GraphItem:
    """Return `loss = sum((x w)^2)`, trained with momentum; `w` has a slot."""
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT, "shape": (None, 3)}).output()
    w, slot = variable(graph, "w", (3, 1)), variable(graph, "w/Momentum", (3, 1))
    read = graph.add("ReadVariableOp", [w], name="w/Read", attrs={"dtype": FLOAT}).output()
    y = graph.add("MatMul", [x, read], name="y").output()
    axes = const(graph, "axes", [0, 1], INT32)
    graph.add("Sum", [graph.add("Square", [y], name="squares").output(), axes], name="loss")
    gradient = graph.add("MatMul", [x, y], name="gradient", attrs={"transpose_a": True}).output()
    rates = [const(graph, "rate", 0.1), gradient, const(graph, "momentum", 0.9)]
    update = graph.add("ResourceApplyMomentum", [w, slot, *rates], name="update")
    graph.add("NoOp", name="train", controls=[update])
    graph.add("NoOp", name="init", controls=[graph.node("w/Assign"), graph.node("w/Momentum/Assign")])
    return GraphItem(
        graph,
        {"x": TensorInfo("x", "x:0", "float32", (None, 3), 0)},
        {"loss": TensorInfo("loss", "loss:0", "float32", ())},
        ("train",),
        "init",
        {
            "w": Variable("w", "w", "float32", (3, 1), True, "w/Assign"),
            "w/Momentum": Variable("w/Momentum", "w/Momentum", "float32", (3, 1), False, "w/Momentum/Assign"),
        },
    )


@dataclass
class Mirrored:
    """The regression mirrored over two devices by hand, as a rewrite would do it."""

    graph: Graph = field(default_factory=Graph)

    def build(self) -> GraphItem:
        """Return the distributed item."""
        graph = self.graph
        graph.add("Placeholder", name="x", attrs={"dtype": FLOAT, "shape": (None, 3)}, device=DEVICES[0])
        graph.current_pass = "lower-reshards"
        keys = [const(graph, f"keys/{name}", n, INT32) for name, n in (("size", 2), ("group", 7), ("instance", 11))]
        losses, updates, inits = [], [], []
        for replica, device in enumerate(DEVICES):
            loss, update, assigns = self._replica(replica, device, keys)
            losses.append(loss)
            updates.append(update)
            inits += assigns
        graph.current_pass = "lower-reshards"
        graph.add("AddN", losses, name="loss", device=DEVICES[0], origin="loss")
        graph.current_pass = ""
        graph.add("NoOp", name="train", controls=updates, device=DEVICES[0])
        graph.add("NoOp", name="init", controls=inits, device=DEVICES[0])
        return replace(regression(), source=graph)

    def _replica(self, replica: int, device: str, keys: list[Value]) -> tuple[Value, Node, list[Node]]:
        graph = self.graph
        own, common = PREFIX.format(replica), PREFIX.format(replica) if replica else ""
        graph.current_pass = "lower-reshards"
        block = graph.add("Identity", [graph.value("x")], name=f"{own}x/block", device=device, origin="x").output()
        graph.current_pass = "expand" if replica else ""
        w, slot = variable(graph, f"{common}w", (3, 1), device), variable(graph, f"{common}w/Momentum", (3, 1), device)
        read = self.add("ReadVariableOp", [w], f"{common}w/Read", device, {"dtype": FLOAT})
        graph.current_pass = "expand"
        y = self.add("MatMul", [block, read], f"{own}y", device)
        squares = self.add("Square", [y], f"{own}squares", device)
        loss = self.add(
            "Sum", [squares, const(graph, f"{own}axes", [0, 1], INT32, device=device)], f"{own}loss", device
        )
        gradient = self.add("MatMul", [block, y], f"{own}gradient", device, {"transpose_a": True})
        graph.current_pass = "lower-reshards"
        attrs = {"merge_op": "Add", "final_op": "Id"}
        reduced = self.add(
            "CollectiveReduceV2", [gradient, *keys], f"{own}gradient/all_reduce", device, attrs, "gradient"
        )
        graph.current_pass = "expand" if replica else ""
        rates = [const(graph, f"{common}rate", 0.1, device=device), reduced]
        rates.append(const(graph, f"{common}momentum", 0.9, device=device))
        update = graph.add("ResourceApplyMomentum", [w, slot, *rates], name=f"{common}update", device=device)
        return loss, update, [graph.node(f"{common}w/Assign"), graph.node(f"{common}w/Momentum/Assign")]

    def add(
        self, op: str, inputs: list[Value], name: str, device: str, attrs: Any = None, origin: str | None = None
    ) -> Value:
        """Add a placed node, and return its value."""
        return self.graph.add(op, inputs, name=name, attrs=attrs, device=device, origin=origin).output()


def mirrored() -> GraphItem:
    """Return the regression mirrored over two devices."""
    return Mirrored().build()
