"""Annotations of the graph, by ar.split or by XLA's own helpers, mean what `sharding` does, and have to agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.compiler.xla.experimental import xla_sharding

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.load.sharding_marks import MAXIMAL, OTHER, REPLICATED, OpSharding, read_op_sharding
from tests.support import split_models as models

MESH = {"devices": ["CPU:0", "CPU:1"], "mesh": {"data": 1, "model": 2}}
FIRST, SECOND = (np.random.default_rng(i).normal(size=shape) for i, shape in enumerate([(4, 8), (8, 4)]))
SPEC = tf.TensorSpec([None, models.WIDTH], tf.float64)
FILE = Path(__file__).name
Marks = Callable[[Any], Any]


def unmarked(tensor: Any) -> Any:
    """Return a tensor as it is."""
    return tensor


def item_of(first: Marks = unmarked, hidden: Marks = unmarked, second: Marks = unmarked) -> ar.GraphItem:
    """Return the item of a step of two layers with marks on its matrices and its hidden layer."""
    up, down = tf.Variable(FIRST, name="up"), tf.Variable(SECOND, name="down")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = hidden(tf.nn.relu(x @ first(up)))
            loss = tf.reduce_mean((h @ second(down) - y) ** 2)
        for variable, gradient in zip((up, down), tape.gradient(loss, (up, down)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return ar.GraphItem.from_function(step, SPEC, SPEC)


def cut(item: ar.GraphItem, config: Any = MESH) -> dict[str, int]:
    """Return the variables that are in blocks, with the dimension that is cut."""
    return {name: one.shards.axis for name, one in ar.rewrite(item, config).variables.items() if one.shards}


def assert_exact(item: ar.GraphItem, config: Any = MESH) -> None:
    report = ar.verify(item, config)
    assert report.ok, report
    assert max(row.error for row in report.rows) <= 1e-9


def xla_split(dim: int, *, op: bool = True) -> Marks:
    """Return TensorFlow's helper that splits along a dimension, with an op or as an attribute."""
    return lambda tensor: xla_sharding.split(tf.convert_to_tensor(tensor), dim, 2, use_sharding_op=op)


@pytest.mark.parametrize("op", [True, False])
def test_xla_s_split_of_a_variable_that_is_read_cuts_it(op: bool) -> None:
    item = item_of(xla_split(1, op=op))
    assert cut(item) == {"up": 1, "down": 0}
    assert_exact(item)


def test_an_annotation_of_what_is_cut_anyway_costs_nothing() -> None:
    edges = ar.rewrite(
        item_of(xla_split(1)), MESH
    ).report.plan.model_edges  # the gradient of an XlaSharding has one, too
    assert [edge.lowering for edge in edges] == ["add_n"]


@pytest.mark.parametrize("op", [True, False])
def test_xla_s_split_of_a_tensor_cuts_it_for_its_readers(op: bool) -> None:
    item = item_of(hidden=xla_split(1, op=op))
    assert "split(1)" in {edge.to for edge in ar.rewrite(item, MESH).report.plan.model_edges}
    assert_exact(item)


def test_xla_s_mesh_split_cuts_the_dimension_that_the_mesh_dimension_is_mapped_to() -> None:
    mesh = np.arange(2)
    item = item_of(lambda w: xla_sharding.mesh_split(tf.convert_to_tensor(w), mesh, [-1, 0], use_sharding_op=True))
    assert cut(item) == {"up": 1, "down": 0}
    assert_exact(item)


def test_xla_s_assign_device_puts_an_op_on_its_device() -> None:
    item = item_of(hidden=lambda h: xla_sharding.assign_device(h, 1))
    (node,) = [node for node in ar.rewrite(item, MESH).graph_def.node if node.op == "Relu"]
    assert node.device.endswith("CPU:1")
    assert_exact(item)


def test_xla_s_replicate_keeps_a_variable_whole() -> None:
    item = item_of(xla_split(1), second=lambda w: xla_sharding.replicate(tf.convert_to_tensor(w), use_sharding_op=True))
    assert cut(item) == {"up": 1}
    assert_exact(item)


@pytest.mark.parametrize("config", [{}, {"match": "Relu", "replicate": True}])
def test_a_tensor_that_is_replicated_is_whole_for_its_readers(config: Any) -> None:
    item = item_of(lambda w: ar.split(w, [1, 2]), hidden=unmarked if config else ar.replicate)
    given = {**MESH, "sharding": [config] if config else []}
    assert cut(item, given) == {"up": 1}  # what reads the hidden layer has no blocks of it, so `down` is not cut
    assert_exact(item, given)


def test_an_annotation_of_a_variable_s_handle_is_one_of_the_variable(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float64, [None, 4], name="x")
        w = tf.compat.v1.get_variable("w", initializer=FIRST, use_resource=True)
        xla_sharding.split(w, 1, 2)
        loss = tf.reduce_mean((x @ w) ** 2, name="loss")
        tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        init = tf.compat.v1.global_variables_initializer()
    (tmp_path / "graph.pb").write_bytes(graph.as_graph_def().SerializeToString())
    loaded = ar.GraphItem.load(tmp_path / "graph.pb", train_op="train", outputs=["loss"], init_op=init.name)
    for item in (ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op=init.name), loaded):
        assert cut(item) == {"w": 1}
        assert_exact(item)


def test_data_parallelism_runs_through_an_annotation_and_says_that_it_places_nothing() -> None:
    new = ar.rewrite(item_of(hidden=xla_split(1)), {"devices": ["CPU:0", "CPU:1"]})
    assert not new.report.notes
    assert any("there is no model axis" in note for note in new.report.plan.notes)


@pytest.mark.parametrize("helper", ["auto_to_manual_spmd_partition", "manual_to_auto_spmd_partition"])
def test_manual_partitioning_is_refused_by_name(helper: str) -> None:
    sharding = xla_sharding.Sharding.split(tf.zeros([4, 8]), 1, 2).proto.SerializeToString()

    def step(x: Any) -> Any:
        v.assign_sub(tf.reduce_mean(x, 0))
        return tf.reduce_sum(
            xla_sharding.auto_to_manual_spmd_partition(x, sharding)
            if helper.startswith("auto")
            else xla_sharding.manual_to_auto_spmd_partition(x, sharding, [4, 8])
        )

    v = tf.Variable(tf.zeros([8], tf.float64), name="v")
    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 8], tf.float64))
    with pytest.raises(GraphError, match=r"XlaSpmd\w+ switches between whole tensors and the shards"):
        ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"]})


def test_a_manual_annotation_is_refused() -> None:
    item = item_of(hidden=lambda h: xla_sharding.Sharding.manual().apply_to_tensor(h, use_sharding_op=True))
    with pytest.raises(GraphError, match="the sharding is manual"):
        ar.rewrite(item, MESH)


def test_two_splits_of_one_variable_that_disagree_are_named_with_both_lines() -> None:
    def both(w: Any) -> Any:
        ar.split(w, [2, 1])
        return ar.split(w, [1, 2])

    pattern = (
        rf"two placements of 'up' .* disagree: split \[2, 1\] \(.*{FILE}:\d+\) and split \[1, 2\] \(.*{FILE}:\d+\)"
    )
    with pytest.raises(ConfigError, match=pattern):
        ar.build_plan(item_of(both), MESH)


def test_two_splits_of_one_tensor_that_disagree_are_named_and_a_chain_is_none() -> None:
    def both(h: Any) -> Any:
        return ar.split(h, [1, 2]) + ar.replicate(h)

    with pytest.raises(ConfigError, match=r"two placements of 'Relu.*' on the model axis disagree"):
        ar.build_plan(item_of(hidden=both), MESH)
    assert_exact(item_of(hidden=lambda h: ar.replicate(ar.split(h, [1, 2]))))


@pytest.mark.parametrize("said", [{"split": [2, 1]}, {"axes": [0, -1]}])
def test_a_split_may_be_said_again_in_the_configuration_in_parts_or_axes(said: dict[str, Any]) -> None:
    item = item_of(lambda w: ar.split(w, ["model", 1]))
    plan = ar.build_plan(item, {**MESH, "sharding": [{"match": "up", **said}]})
    assert {one.name: one.split for one in plan.model.shardings} == {"up": (2, 1)}


def test_a_split_against_a_line_of_the_configuration_is_named_with_both(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "devices: [CPU:0, CPU:1]\nmesh: {model: 2}\nsharding:\n  - {match: down, split: [2, 1]}\n"
        "  - {match: up, split: [2, 1]}\n"
    )
    pattern = rf"{path}:5: two placements of 'up' .*\(.*{FILE}:\d+\) and split \[2, 1\] \({path}:5, sharding\[1\]\)"
    with pytest.raises(ConfigError, match=pattern):
        ar.build_plan(item_of(lambda w: ar.split(w, [1, 2])), path)


def test_placements_that_agree_may_be_said_twice() -> None:
    config = {**MESH, "sharding": [{"match": "up", "split": [1, 2]}]}
    assert cut(item_of(lambda w: ar.split(ar.split(w, [1, 2]), [1, 2])), config) == {"up": 1, "down": 0}


def test_a_mark_may_name_the_axis_instead_of_a_number() -> None:
    assert cut(item_of(lambda w: ar.split(w, [1, "model"]))) == {"up": 1, "down": 0}
    config = {**MESH, "sharding": [{"match": "up", "split": [1, "model"]}]}
    assert cut(item_of(), config) == {"up": 1, "down": 0}


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        (lambda w: ar.split(w, [1, 4]), rf"the parts of 'up' are 4, and a replica has 2 devices \(.*{FILE}:\d+\)"),
        (lambda w: ar.assign(w, 2), rf"there is no logical device 2 for 'up'.*\(.*{FILE}:\d+\)"),
        (lambda w: xla_sharding.assign_device(tf.convert_to_tensor(w), 5), "there is no logical device 5"),
    ],
)
def test_a_mark_that_the_mesh_does_not_fit_is_named_with_its_line(mark: Marks, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ar.build_plan(item_of(mark), MESH)


def test_an_assignment_below_0_is_refused_where_it_is_made() -> None:
    with pytest.raises(GraphError, match="there is no logical device -1"):
        ar.assign(tf.zeros([2]), -1)


def test_partial_replication_on_one_axis_is_refused_with_what_it_needs() -> None:
    config = {"devices": [f"CPU:{i}" for i in range(4)], "mesh": {"model": 4}}
    mesh = np.arange(4).reshape(2, 2)
    item = item_of(lambda w: xla_sharding.mesh_split(tf.convert_to_tensor(w), mesh, [-1, 0], use_sharding_op=True))
    with pytest.raises(ConfigError, match=r"'up' is cut into 2 tiles, each on 2 devices"):
        ar.build_plan(item, config)


@pytest.mark.parametrize(
    ("mapping", "expected"), [([-1, 0], (-1, 0)), ([1, -1], (1, -1)), ([0, 1], ()), ([1, 0], (1, 0))]
)
def test_mesh_split_on_a_mesh_of_two_axes_names_the_axes(mapping: list[int], expected: tuple[int, ...]) -> None:
    config = {"devices": [f"CPU:{i}" for i in range(4)], "mesh": {"model": [2, 2]}}
    mesh = np.arange(4).reshape(2, 2)
    item = item_of(lambda w: xla_sharding.mesh_split(tf.convert_to_tensor(w), mesh, mapping, use_sharding_op=True))
    plan = ar.build_plan(item, config)
    assert plan.model is not None
    assert {one.axes for one in plan.model.shardings} == {expected}  # of the gradient, too
    assert_exact(item, config)


@pytest.mark.parametrize(
    ("proto", "expected"),
    [
        (xla_sharding.Sharding.replicate(), OpSharding()),
        (xla_sharding.Sharding.assign_device(300), OpSharding(MAXIMAL, (1,), (300,))),
        (xla_sharding.Sharding.tile(np.array([[1, 0]])), OpSharding(OTHER, (1, 2), (1, 0))),
        (xla_sharding.Sharding.partial_tile(np.arange(4).reshape(2, 1, 2)), OpSharding(OTHER, (2, 1), (0, 1, 2, 3), 2)),
        (
            xla_sharding.Sharding.subgroup_tile(np.arange(4).reshape(2, 2), [xla_data_pb2.OpSharding.REPLICATED]),
            OpSharding(OTHER, (2,), (0, 1, 2, 3), 2),
        ),
    ],
)
def test_an_op_sharding_is_read_as_tensorflow_writes_it(proto: Any, expected: OpSharding) -> None:
    assert read_op_sharding(proto.proto.SerializeToString()) == expected


def test_an_op_sharding_in_the_iota_form_is_that_of_its_devices() -> None:
    proto = xla_data_pb2.OpSharding(
        type=xla_data_pb2.OpSharding.OTHER,
        tile_assignment_dimensions=[2, 3],
        iota_reshape_dims=[3, 2],
        iota_transpose_perm=[1, 0],
    )
    expected = tuple(np.arange(6).reshape(3, 2).transpose().ravel().tolist())
    assert read_op_sharding(proto.SerializeToString()) == OpSharding(OTHER, (2, 3), expected)
    assert REPLICATED == xla_data_pb2.OpSharding.REPLICATED


@pytest.mark.parametrize("data", [b"\x08", b"\x22\x05\x01", b"\x03"])
def test_bytes_that_are_no_op_sharding_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_op_sharding(data)
