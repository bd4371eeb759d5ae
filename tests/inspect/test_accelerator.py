"""What a graph does on GPUs is read from their kernels: nodes that fall to the host, and what crosses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.inspect.accelerator import SIZE, AcceleratorUse, accelerator_use
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.files import from_printed

PROGRAM = """\
# input %x, batch axis 0
# output loss = %loss
# target %train
%x: float32[?,3] = Placeholder()
%w: resource = VarHandleOp() {dtype=float32, shape=[3,1], shared_name="w"}
%w/read: float32[3,1] = ReadVariableOp(%w)
%y = MatMul(%x, %w/read)
%axes: int32[2] = Const() {value=[0, 1]}
%loss = Mean(%y, %axes)
%dw = MatMul(%x, %y) {transpose_a=true}
%rate: float32 = Const() {value=0.1}
%train = ResourceApplyGradientDescent(%w, %rate, %dw)
"""


def program(more: str = "") -> GraphItem:
    """A step on three features; `more` is printed behind it."""
    return from_printed(PROGRAM + more, {})


def on_gpus(item: GraphItem, count: int = 4, **strategy: str) -> GraphItem:
    """The item rewritten to GPUs."""
    devices = [f"GPU:{i}" for i in range(count)]
    return ar.rewrite(
        item, {"devices": devices, "strategy": {"name": "AllReduce", "variables": "mirrored", **strategy}}
    )


def crossing(found: AcceleratorUse) -> Mapping[str, Any]:
    return {f"{one.value} to {one.to}": one for one in found.moved}


def test_inputs_and_outputs_cross_once_and_nothing_else() -> None:
    found = accelerator_use(program(), batch=16)
    assert {name: one.bytes for name, one in crossing(found).items()} == {"x to device": 192, "loss to host": 4}
    assert found.host_nodes == ()
    assert found.devices == ("/device:GPU:0",)


def test_an_op_without_a_kernel_falls_to_the_host_and_its_operand_crosses() -> None:
    found = accelerator_use(program("%text = AsString(%loss)\n# output text = %text\n"))
    assert [(one.op, one.nodes) for one in found.host_nodes] == [("AsString", ("text",))]


def test_integers_in_host_memory_on_both_ends_do_not_cross() -> None:
    graph = Graph()
    from autograph_rewrite.ir.types.dtypes import FLOAT

    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}).output()
    size = graph.add("Shape", [x], name="size").output()
    twice = graph.add("AddV2", [size, size], name="twice").output()
    graph.add("Reshape", [x, twice], name="y")
    assert accelerator_use(graph).moved == ()


def test_a_size_that_the_device_multiplies_goes_there_and_comes_back() -> None:
    more = """\
%shape: int32[2] = Shape(%y)
%zero: int32[1] = Const() {value=[0]}
%count: int32[] = Prod(%shape, %zero)
%one: int32[1] = Const() {value=[-1]}
%flat = Reshape(%y, %one)
%kept: float32 = Fill(%one, %rate)
%dims: int32[1] = ExpandDims(%count, %zero_axis)
%zero_axis: int32[] = Const() {value=0}
%all = Fill(%dims, %rate)
# target %all
"""
    moved = crossing(accelerator_use(program(more)))
    assert {"shape to device", "count to host"} <= moved.keys()
    rewritten = crossing(accelerator_use(on_gpus(program(more))))
    assert not {"shape to device", "count to host"} & rewritten.keys()


def test_each_replica_is_sent_its_own_block_and_not_the_whole_batch() -> None:
    new = on_gpus(program())
    found = accelerator_use(new, program(), batch=16)
    assert crossing(found)["x/block to device"].bytes == 16 * 3 * 4
    assert "x to device" not in crossing(found)


def test_what_a_rewrite_adds_is_told_apart_and_has_a_reason() -> None:
    found = accelerator_use(on_gpus(program()), program())
    nodes, crossings = found.added
    assert nodes == 0
    assert crossings > 0
    assert {one.why for one in found.moved if one.added} == {SIZE}
    assert "added" in str(found)
    assert "added" not in str(accelerator_use(program()))


def test_a_graph_on_the_cpu_crosses_nothing() -> None:
    new = ar.rewrite(program(), {"devices": ["CPU:0", "CPU:1"]})
    found = accelerator_use(new)
    assert found.moved == ()
    assert found.devices == ()
    assert "no GPU" in str(found)


@pytest.mark.parametrize("variables", ["mirrored", "shared"])
def test_nothing_without_a_kernel_is_left_on_a_gpu(variables: str) -> None:
    more = "%text = AsString(%loss)\n# output text = %text\n"
    new = on_gpus(program(more), variables=variables)
    assert {node.device for node in new.graph if node.op == "AsString"} == {"/device:CPU:0"}


def test_stages_of_a_pipeline_leave_to_the_host_what_has_no_kernel() -> None:
    config = {
        "devices": ["GPU:0", "GPU:1"],
        "strategy": {"name": "Pipeline"},
        "pipeline": {"stages": 2, "microbatches": 2, "boundaries": ["y"]},
    }
    new = ar.rewrite(program("%text = AsString(%loss)\n# output text = %text\n"), config)
    assert {node.device for node in new.graph if node.op == "AsString"} == {"/device:CPU:0"}
    assert {node.device for node in new.graph if node.op in ("MatMul", "Sum")} == {"/device:GPU:0", "/device:GPU:1"}


def test_data_of_the_table_is_plain() -> None:
    found = accelerator_use(on_gpus(program()), program()).data()
    assert found["devices"] == [f"/device:GPU:{i}" for i in range(4)]
    assert {one["to"] for one in found["crossings"]} == {"host", "device"}
    assert "added" not in accelerator_use(program()).data()["crossings"][0]


SAMPLE = [
    ("mlp", "AllReduce", "mirrored"),
    ("transformer", "FSDP", "mirrored"),
    ("language_model", "PartitionedAR", "shared"),
    ("masked", "AllReduce", "mirrored"),
    ("lstm_v2", "AllReduce", "mirrored"),
    ("keras_two_inputs", "Parallax", "shared"),
]


@pytest.mark.parametrize(("model", "strategy", "mode"), SAMPLE)
def test_rewrites_of_the_zoo_to_gpus_add_no_node_without_a_kernel_and_send_nothing_to_the_host(
    model: str, strategy: str, mode: str
) -> None:
    """A fast sample of what `python -m benchmarks.accelerators` prints."""
    from benchmarks.accelerators import rows

    (row,) = rows(model, [strategy], [mode])
    assert row.found is not None, row.refusal
    assert row.found.added[0] == 0
    assert row.added("host") <= row.reasons.get("servers", 0)
    assert "**unexplained**" not in row.reasons
