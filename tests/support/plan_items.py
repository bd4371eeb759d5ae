"""A graph item with gradients to reduce, and resolved plans for it: what the tests of plans start from."""

from __future__ import annotations

from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types.dtypes import FLOAT, INT32
from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.parts.collective_keys import with_keys
from autograph_rewrite.plan.parts.messages import Axis, BatchInput, EdgePlan, VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TensorInfo, Variable

TWO_DEVICES = ("/device:CPU:0", "/device:CPU:1")


def small_item() -> GraphItem:
    """An input, two float32 gradients, an int32 one, and four variables."""
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}).output()
    n = graph.add("Placeholder", name="n", attrs={"dtype": INT32}).output()
    graph.add("Neg", [x], name="grad/kernel")
    graph.add("Neg", [x], name="grad/bias")
    graph.add("Neg", [n], name="grad/count")
    inputs = {
        "x": TensorInfo("x", "x:0", "float32", (None, 3), 0),
        "n": TensorInfo("n", "n:0", "int32", (), None),
    }
    variables = {
        "dense/kernel": Variable("dense/kernel", "k", "float32", (3, 2), trainable=True),
        "dense/bias": Variable("dense/bias", "b", "float32", (2,), trainable=True),
        "count": Variable("count", "c", "int32", ()),
        "dense/kernel/momentum": Variable("dense/kernel/momentum", "m", "float32", (3, 2), trainable=False),
    }
    for variable in variables.values():
        dtype = INT32 if variable.dtype == "int32" else FLOAT
        graph.add("VarHandleOp", name=variable.handle, attrs={"dtype": dtype, "shape": variable.shape})
    return GraphItem(graph, inputs, {}, variables=variables)


def reduce_edge(
    value: str = "grad/kernel", owner: str = "dense/kernel", *, dtype: str = "float32", bucket: int = 0
) -> EdgePlan:
    """The all-reduce of a gradient, without keys."""
    return EdgePlan(
        value,
        "partial(sum)",
        "replicated",
        owner,
        lowering="collective_reduce",
        dtype=dtype,
        bytes=24,
        bucket=bucket,
        reason="the update reads the whole gradient",
    )


def mirrored_plan(*edges: EdgePlan) -> Plan:
    """A sound plan with these edges, their keys filled in."""
    return Plan(
        TWO_DEVICES,
        "mirrored",
        mesh=(Axis("data", 2),),
        batch_inputs=(BatchInput("x", 0),),
        variables=(VariableRequest("dense/kernel"), VariableRequest("dense/bias")),
        edges=with_keys(edges, lambda crosses, logical: TWO_DEVICES),
    )
