"""What micro-batches and stages make of a small graph, as text: copies, two stages."""

from __future__ import annotations

from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.item import GraphItem
from autograph_rewrite.training_graph import TensorInfo, Variable
from tests.support.golden_text import check_golden
from tests.support.small_items import const, regression, variable

FORMS: dict[str, dict[str, Any]] = {
    "copies": {"microbatches": 3},
    "loop": {"microbatches": 3, "accumulation": {"form": "loop"}},
    "interleaved": {"microbatches": 2, "accumulation": {"layout": "interleaved"}},
}


def two_layers() -> GraphItem:
    """Return `loss = sum((x v) w)`, trained by gradient descent, with gradients named as TensorFlow names them."""
    graph, float_ = Graph(), {"dtype": dtypes.FLOAT}
    x = graph.add("Placeholder", name="x", attrs={**float_, "shape": (None, 3)}).output()
    v, w = variable(graph, "v", (3, 3)), variable(graph, "w", (3, 1))
    reads = [graph.add("ReadVariableOp", [one], name=f"{one.node.name}/Read", attrs=float_).output() for one in (v, w)]
    h = graph.add("MatMul", [x, reads[0]], name="h").output()
    y = graph.add("MatMul", [h, reads[1]], name="y").output()
    graph.add("Sum", [y, const(graph, "axes", [0, 1], dtypes.INT32)], name="loss")
    dy = graph.add("OnesLike", [y], name="gradients/loss_grad/OnesLike").output()
    dw = graph.add("MatMul", [h, dy], name="gradients/y_grad/MatMul_1", attrs={"transpose_a": True}).output()
    dh = graph.add("MatMul", [dy, reads[1]], name="gradients/y_grad/MatMul", attrs={"transpose_b": True}).output()
    dv = graph.add("MatMul", [x, dh], name="gradients/h_grad/MatMul_1", attrs={"transpose_a": True}).output()
    rate = const(graph, "rate", 0.1)
    updates = [
        graph.add("ResourceApplyGradientDescent", [handle, rate, slope], name=f"update_{handle.node.name}")
        for handle, slope in ((v, dv), (w, dw))
    ]
    graph.add("NoOp", name="train", controls=updates)
    return GraphItem(
        graph,
        {"x": TensorInfo("x", "x:0", "float32", (None, 3), 0)},
        {"loss": TensorInfo("loss", "loss:0", "float32", ())},
        ("train",),
        None,
        {
            name: Variable(name, name, "float32", shape, True, f"{name}/Assign")
            for name, shape in (("v", (3, 3)), ("w", (3, 1)))
        },
    )


@pytest.mark.parametrize("name", ["copies", "interleaved"])
def test_micro_batches_look_as_they_did(name: str) -> None:
    new = ar.rewrite(regression(), {"devices": ["CPU:0"], **FORMS[name]})
    check_golden(f"micro_{name}.text.txt", ar.dump(new))


def test_two_stages_look_as_they_did() -> None:
    pipeline = {"stages": 2, "microbatches": 2, "boundaries": ["h"]}
    new = ar.rewrite(two_layers(), {"devices": ["CPU:0"], "pipeline": pipeline})
    check_golden("micro_stages.text.txt", ar.dump(new))


def test_a_rewrite_gives_the_same_bytes_every_time() -> None:
    for config in ({"devices": ["CPU:0"], **how} for how in FORMS.values()):
        first, second = (ar.rewrite(regression(), config).graph_bytes for _ in range(2))
        assert first == second
