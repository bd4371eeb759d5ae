"""An item with variables of many shapes: what the tests of strategy builders place and split."""

from __future__ import annotations

from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ir.types.dtypes import FLOAT, INT32
from autograph_rewrite.item import GraphItem
from autograph_rewrite.training_graph import TensorInfo, Variable
from tests.support.small_items import const, variable

SHAPES = {
    "table": (12, 4),  # only looked up
    "tied": (9, 4),  # looked up, and multiplied with
    "kernel": (4, 6),
    "prime": (7, 4),
    "row": (1, 4),
    "bias": (6,),
    "scale": (),
    "branched": (12, 4),  # read inside a branch
}


def tables(*, trainable: bool | None = True) -> GraphItem:
    """Return an item with a trained variable of each of `SHAPES` and a slot of `kernel`; it is not for running."""
    graph = Graph()
    ids = graph.add("Placeholder", name="ids", attrs={"dtype": INT32, "shape": (None,)}).output()
    handles = {name: variable(graph, name, shape) for name, shape in SHAPES.items()}
    slot = variable(graph, "kernel/Momentum", SHAPES["kernel"])
    used = [_used(graph, name, handle, ids) for name, handle in handles.items()]
    graph.add("AddN", used, name="loss")
    rate = const(graph, "rate", 0.1)
    updates = []
    for name, handle in handles.items():
        gradient = graph.add("Neg", [graph.value("loss")], name=f"{name}/gradient").output()
        if name == "kernel":
            more = [slot, rate, gradient, const(graph, "momentum", 0.9)]
            updates.append(graph.add("ResourceApplyMomentum", [handle, *more], name=f"{name}/update"))
        else:
            updates.append(graph.add("ResourceApplyGradientDescent", [handle, rate, gradient], name=f"{name}/update"))
    graph.add("NoOp", name="train", controls=updates)
    slots = {"kernel/Momentum": (SHAPES["kernel"], None if trainable is None else False)}
    kinds = {**{name: (shape, trainable) for name, shape in SHAPES.items()}, **slots}
    return GraphItem(
        graph,
        {"ids": TensorInfo("ids", "ids:0", "int32", (None,), 0)},
        {"loss": TensorInfo("loss", "loss:0", "float32", ())},
        ("train",),
        None,
        {name: Variable(name, name, "float32", shape, trained) for name, (shape, trained) in kinds.items()},
    )


def _used(graph: Graph, name: str, handle: Value, ids: Value) -> Value:
    """Add what the forward pass does with a variable."""
    attrs = {"dtype": FLOAT}
    if name == "table":
        return graph.add("ResourceGather", [handle, ids], name=f"{name}/rows", attrs=attrs).output()
    if name == "branched":
        yes = graph.add("Placeholder", name="yes", attrs={"dtype": 10, "shape": ()}).output()
        handle = graph.add("Switch", [handle, yes], name=f"{name}/switch").output(1)
    read = graph.add("ReadVariableOp", [handle], name=f"{name}/Read", attrs=attrs).output()
    if name == "tied":
        rows = graph.add("GatherV2", [read, ids, const(graph, "axis", 0, INT32)], name=f"{name}/rows").output()
        read = graph.add("MatMul", [rows, read], name=f"{name}/logits", attrs={"transpose_b": True}).output()
    return graph.add("Square", [read], name=f"{name}/used").output()
