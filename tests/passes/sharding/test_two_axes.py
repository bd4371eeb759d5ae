"""A model axis of two dimensions: blocks along two dimensions of a variable train as on one device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.compile import request
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import PlanError, RewriteError, VerifyError
from autograph_rewrite.inspect.communication import meetings
from autograph_rewrite.ir.mesh import Axis, Mesh
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.passes.collectives.along_model import AlongModel
from autograph_rewrite.passes.pass_pipeline import rewrite
from autograph_rewrite.passes.sharding.unroll import Unroll
from autograph_rewrite.plan.parts.messages import TensorSharding
from autograph_rewrite.plan.shardings import axes_of_tiles
from autograph_rewrite.resolve.model_axis import cut_dimensions
from tests.support import split_models as models
from tests.support.covering import covering
from tests.support.model_axis import descent, variables_of, worst_difference

EXACT = 1e-9
MESHES = {
    "2 x 2 devices": models.on_two_axes(1),
    "two replicas": models.on_two_axes(2),
    "two replicas, mirrored": models.on_two_axes(2, strategy={"variables": "mirrored"}),
    "two stages": models.on_two_axes(1, 2),
    "micro-batches": models.on_two_axes(2, microbatches=2),
    "ZeRO of what is whole": models.on_two_axes(2, strategy={"name": "FSDP"}),
    "four blocks in a row": {**models.on_two_axes(2), "sharding": models.shardings(4)},
    "both first dimensions on one axis": {
        **models.on_two_axes(1),
        "sharding": [{"match": r"(up|down)\d", "split": [2, 2]}],
    },
    "each matrix on an axis of its own": {
        **models.on_two_axes(1),
        "sharding": [{"match": r"up\d", "axes": [-1, 0]}, {"match": r"down\d", "axes": [-1, 1]}],
    },
    "3 x 2 devices": {
        "devices": [f"CPU:{i}" for i in range(6)],
        "mesh": {"data": 1, "model": [3, 2]},
        "sharding": models.on_two_axes(1)["sharding"],
    },
}


ONE_PROGRAM = {
    f"{name}, one program for all devices": {
        **mesh,
        "strategy": {**mesh.get("strategy", {}), "variables": "mirrored"},  # type: ignore[dict-item]
    }
    for name, mesh in MESHES.items()
    if name not in ("two replicas, mirrored", "two stages")
}
ONE_PROGRAM |= {
    strategy: models.on_two_axes(2, strategy={"name": strategy, "variables": "mirrored"})
    for strategy in ("PS", "PartitionedPS", "PartitionedAR", "Parallax")
}
ONE_PROGRAM |= {
    "ZeRO of what an axis has copies of": {
        **models.on_two_axes(2, strategy={"name": "FSDP", "variables": "mirrored"}),
        "sharding": [{"match": r"up\d", "axes": [-1, 1]}, {"match": r"down\d", "axes": [1, -1]}],
    },
    "steps in one run": models.on_two_axes(2, strategy={"variables": "mirrored"}, steps_per_run=2),
    "nothing on an axis, and nothing on the other": models.on_two_axes(
        1, strategy={"variables": "mirrored"}, sharding=[]
    ),
}


@pytest.mark.parametrize("mesh", ONE_PROGRAM)
def test_devices_along_two_axes_run_one_program_that_computes_what_one_device_does(mesh: str) -> None:
    new = ar.rewrite(models.item(), ONE_PROGRAM[mesh])
    assert not any("on the first device of each replica only" in note for note in new.report.notes)
    report = ar.verify(models.item(), ONE_PROGRAM[mesh])
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


def test_tables_are_looked_up_and_updated_where_both_axes_cut_their_rows() -> None:
    def loss(v: Any, ids: Any, y: Any) -> Any:
        return tf.reduce_mean((tf.tanh(tf.gather(v["table"], ids)) @ v["up"] - y) ** 2)

    shapes, rng = {"table": (12, 4), "up": (4, 2)}, np.random.default_rng(0)
    data = rng.integers(0, 12, 6), rng.normal(size=(6, 2))
    mesh = models.on_two_axes(1, strategy={"variables": "mirrored"}, sharding=[{"match": "table", "split": [4, 1]}])
    assert worst_difference(shapes, descent(loss), data, mesh) <= EXACT


@pytest.mark.parametrize("axes", [[1, -1], [0, -1]])
def test_rows_that_an_optimizer_updates_may_be_cut_along_either_axis_where_devices_run_apart(axes: list[int]) -> None:
    """What the update reads has been joined on an axis that propagation knows only the blocks of."""
    with tf.Graph().as_default() as graph:
        ids, y = tf.compat.v1.placeholder(tf.int64, [6], "ids"), tf.compat.v1.placeholder(tf.float64, [6, 2], "y")
        table = tf.compat.v1.get_variable("table", initializer=np.arange(48.0).reshape(12, 4) / 50, use_resource=True)
        up = tf.compat.v1.get_variable("up", initializer=np.ones((4, 2)), use_resource=True)
        loss = tf.reduce_mean((tf.tanh(tf.gather(table, ids)) @ up - y) ** 2)
        train = tf.compat.v1.train.RMSPropOptimizer(0.1).minimize(loss)
        init = tf.compat.v1.global_variables_initializer()
    item = ar.GraphItem.from_graph(graph, train_op=train, outputs=[loss], init_op=init, batch_inputs={"ids": 0, "y": 0})
    sharding = [{"match": "table", "split": [4, 1]}, {"match": "up", "axes": axes}]
    report = ar.verify(item, models.on_two_axes(2, strategy={"variables": "shared"}, sharding=sharding))
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


def test_a_row_that_one_axis_has_left_alone_is_not_cut_by_the_next() -> None:
    def loss(v: Any, x: Any, y: Any) -> Any:
        return tf.reduce_mean((tf.tanh(x @ v["up"]) @ v["down"] - y) ** 2)

    shapes, rng = {"up": (3, 4), "down": (4, 2)}, np.random.default_rng(0)
    mesh = {
        **MESHES["3 x 2 devices"],
        "sharding": [{"match": "up", "axes": [-1, 0]}, {"match": "down", "axes": [1, -1]}],
    }
    data = {"data_0": rng.normal(size=(6, 3)), "data_1": rng.normal(size=(6, 2))}
    specs = [tf.TensorSpec(value.shape, tf.float64) for value in data.values()]
    item = ar.GraphItem.from_function(descent(loss)(variables_of(shapes)), *specs, batch_inputs=dict.fromkeys(data, 0))
    report = ar.verify(item, mesh, feeds=[data])
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


def certified() -> Certificate:
    """Rewrite a graph under the eyes of the certificate."""
    item, certificate = normalise_original(models.item()), Certificate(strict=True)
    plan = request(item, Config.of(models.on_two_axes(2, strategy={"variables": "mirrored"})))
    rewrite(Request(item, plan, certificate=certificate), verify=True)
    return certificate


def test_the_certificate_looks_at_each_axis() -> None:
    assert not certified().not_covered


@pytest.mark.parametrize("axis", ["model_0", "model_1"])
def test_devices_that_meet_along_another_axis_are_found_out(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands, lines = AlongModel._operands, Mesh.lines

    def crossed(self: AlongModel, *given: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(Mesh, "lines", lambda mesh, _: lines(mesh, [axis]))
            return operands(self, *given)

    monkeypatch.setattr(AlongModel, "_operands", crossed)
    with pytest.raises(VerifyError):
        certified()


def test_lines_are_the_devices_that_differ_along_some_axes_only() -> None:
    mesh = Mesh.of(1, model=6, divided=(Axis("model_0", 3), Axis("model_1", 2)))
    assert mesh.lines(["model_0"]) == [[0, 2, 4], [1, 3, 5]]
    assert mesh.lines(["model_1"]) == [[0, 1], [2, 3], [4, 5]]
    assert mesh.lines(["model_0", "model_1"]) == [[0, 1, 2, 3, 4, 5]]
    assert mesh.lines([]) == [[0], [1], [2], [3], [4], [5]]
    assert Mesh.of(2, model=2).lines(["model"]) == [[0, 1]]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_computes_what_one_device_does(mesh: str) -> None:
    report = ar.verify(models.item(), MESHES[mesh])
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


@pytest.mark.parametrize(("mesh", "hidden"), covering(["two replicas", "two stages", "four blocks in a row"], [5, 7]))
def test_blocks_need_not_be_of_one_size(mesh: str, hidden: int) -> None:
    report = ar.verify(models.item(hidden), MESHES[mesh])
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


@pytest.mark.parametrize("axis", [0, 1])
def test_a_sum_that_is_left_out_on_one_axis_is_found_out(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    join = Unroll._join

    def without(self: Unroll, parts: Any, *how: Any) -> Any:
        return parts[0] if self.put.keywords["axis"] == axis else join(self, parts, *how)

    monkeypatch.setattr(Unroll, "_join", without)
    try:
        report = ar.verify(models.item(), models.on_two_axes(1))
    except RewriteError:
        return
    assert not report.ok


@pytest.mark.parametrize(("mode", "data"), [("shared", 2), ("mirrored", 1)])
def test_a_function_trains_five_steps_and_its_variables_stay_the_truth(mode: str, data: int) -> None:
    models.assert_a_function_trains_alike(models.on_two_axes(data, strategy={"variables": mode}), (8, 5, 8, 8, 5))


def test_each_replica_of_a_function_has_copies_of_its_own_on_eight_devices() -> None:
    program = Path(__file__).parents[2] / "jobs/programs/two_axes.py"
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    worst = json.loads(run.stdout.splitlines()[-1])
    assert max(worst.values()) <= EXACT, worst


def in_a_graph() -> ar.GraphItem:
    """Return the item of a TensorFlow 1 graph: two matrices with a momentum each, and a saver."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 4], "x")
        rng = np.random.default_rng(0)
        up, down = (
            v1.get_variable(name, initializer=rng.normal(size=shape), use_resource=True)
            for name, shape in (("up0", (4, 8)), ("down0", (8, 4)))
        )
        loss = tf.reduce_mean((tf.nn.relu(x @ up) @ down - 1.0) ** 2, name="loss")
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        tf.group(v1.global_variables_initializer(), name="init")
        v1.train.Saver()
        return ar.GraphItem.from_graph(graph, train_op=train, outputs=[loss], init_op="init")


def test_a_session_trains_reads_writes_saves_and_restores_whole_variables(tmp_path: Path) -> None:
    original = in_a_graph()
    item = ar.rewrite(original, models.on_two_axes(1))
    assert {name for name, one in item.variables.items() if one.shards is not None and one.shards.count == 4} == {
        "up0", "down0", "up0/Momentum", "down0/Momentum",
    }  # fmt: skip
    x, path = models.batch(0, 8)[0], str(tmp_path / "checkpoint")
    with item.session() as session, original.session() as alone:
        for one in (session, alone):
            one.run("init")
            for _ in range(5):
                one.run(item.targets[0], {"x:0": x})
        trained = alone.read_variables()
        for name, value in session.read_variables().items():
            np.testing.assert_allclose(value, trained[name], rtol=0, atol=EXACT)
        session.run("save/control_dependency", {"save/Const:0": path})  # what is in the file is whole
        alone.run("init")
        alone.run("save/restore_all", {"save/Const:0": path})
        for name, value in alone.read_variables().items():
            np.testing.assert_allclose(value, trained[name], rtol=0, atol=EXACT)
        session.write_variable("up0", np.zeros((4, 8)))
        assert not session.read_variable("up0").any()
        session.run("save/restore_all", {"save/Const:0": path})
        np.testing.assert_allclose(session.read_variable("up0"), trained["up0"], rtol=0, atol=EXACT)
    item.save(tmp_path / "cut.zip")
    assert ar.GraphItem.load(tmp_path / "cut.zip").variables["up0"].shards == item.variables["up0"].shards


@pytest.mark.parametrize("mode", ["shared", "mirrored"])
def test_each_device_has_the_parameters_that_the_placements_give_it(mode: str) -> None:
    config = models.on_two_axes(2, strategy={"variables": mode})
    item = ar.rewrite(in_a_graph(), config)
    found: Counter[str] = Counter()
    for node in item.graph_def.node:
        if node.op == "VarHandleOp":
            found[node.device] += 8 * int(np.prod([dim.size for dim in node.attr["shape"].shape.dim]))
    each = 8 * 4 * 4 * 8 // 4  # two matrices and their slots, a quarter of each
    assert found == {f"/device:CPU:{i}": each for i in range(4 if mode == "shared" else 8)}


def test_a_resolved_plan_gives_the_same_graph_and_the_same_exchanges_again() -> None:
    item = ar.rewrite(models.item(), models.on_two_axes(1))
    again = ar.rewrite(models.item(), item.report.plan)
    assert again.graph_def == item.graph_def
    assert again.report.plan.model_edges == item.report.plan.model_edges


def test_explain_says_what_is_exchanged_on_each_axis_and_how_much() -> None:
    item = ar.rewrite(models.item(), models.on_two_axes(1), batch=8)
    text = ar.explain(item)
    assert "exchanged or cut on axis 0 of the model axes (2 devices each)" in text
    assert "matmul_1/part_0: partial(sum) -> replicated by add_n" in text
    hidden = [edge.bytes for edge in item.report.plan.model_edges if edge.value == "matmul/part_0_1"]
    assert hidden == [8 * 8 * 4]  # examples, bytes of a float64, half of the hidden units


@pytest.mark.parametrize("mode", ["shared", "mirrored"])
def test_comm_names_the_axis_of_each_exchange_and_the_devices_of_its_group(mode: str) -> None:
    found = meetings(ar.rewrite(models.item(), models.on_two_axes(1, strategy={"variables": mode}), batch=8))
    assert all(one.bytes for one in found if one.role == "model axis")
    places = {
        one.owner: {place for other in found if other.owner == one.owner for place in other.places} for one in found
    }
    if mode == "mirrored":
        assert set(places) == {"model axis 0", "model axis 1"}
        pairs = {(one.owner, frozenset(place[-1] for place in one.places)) for one in found}
        assert pairs == {
            ("model axis 0", frozenset("02")), ("model axis 0", frozenset("13")),
            ("model axis 1", frozenset("01")), ("model axis 1", frozenset("23")),
        }  # fmt: skip
        return
    assert places["model axis 0"] == {"/device:CPU:0", "/device:CPU:1"}
    assert places["model axis 1"] == {"/device:CPU:0", "/device:CPU:2"}


@pytest.mark.parametrize(
    ("split", "axes", "mesh", "dims"),
    [
        ((2, 2), (), (2, 2), (0, 1)),
        ((1, 4), (), (2, 2), (1, 1)),
        ((2, 2), (1, 0), (2, 2), (1, 0)),
        ((1, 2), (-1, 0), (2, 2), (1, None)),
        ((2, 4), (), (2, 1, 4), (0, None, 1)),
        ((4, 1), (), (4,), (0,)),
    ],
)
def test_each_axis_cuts_a_dimension(split: Any, axes: Any, mesh: Any, dims: Any) -> None:
    assert cut_dimensions(TensorSharding("w", split, axes=axes), mesh) == dims


@pytest.mark.parametrize(
    ("tiles", "devices", "mesh", "axes"),
    [
        ((2, 2), (0, 1, 2, 3), (2, 2), (0, 1)),
        ((2, 2), (0, 2, 1, 3), (2, 2), (1, 0)),
        ((1, 2), (0, 2, 1, 3), (2, 2), (-1, 1)),
        ((1, 2), (0, 1, 2, 3), (2, 2), (-1, 0)),
        ((3, 1, 2), (0, 2, 4, 1, 3, 5), (2, 3), None),
        ((3, 1, 2), (0, 3, 1, 4, 2, 5), (2, 3), (1, -1, 0)),
        ((1, 2), (0, 3, 1, 2), (2, 2), None),
        ((2, 1), (0, 1, 2, 3), (4,), None),
    ],
)
def test_tiles_of_xla_are_read_as_axes(tiles: Any, devices: Any, mesh: Any, axes: Any) -> None:
    assert axes_of_tiles(tiles, devices, mesh) == axes


def test_what_xla_is_told_by_mesh_split_is_read_axis_by_axis() -> None:
    v = models.variables()

    def step(x: Any, y: Any) -> Any:
        mesh = np.arange(4).reshape(2, 2)
        up, down = (
            xla_sharding.mesh_split(tf.convert_to_tensor(v[name]), mesh, axes, use_sharding_op=True)
            for name, axes in (("up0", [-1, 1]), ("down0", [1, 0]))
        )
        with tf.GradientTape() as tape:
            tape.watch((up, down))
            loss = tf.reduce_mean((tf.nn.relu(x @ up) @ down - y) ** 2)
        for name, gradient in zip(("up0", "down0"), tape.gradient(loss, (up, down)), strict=True):
            v[name].assign_sub(0.1 * gradient)
        return loss

    spec = tf.TensorSpec([None, models.WIDTH], tf.float64)
    item = ar.GraphItem.from_function(step, spec, spec)
    config = models.on_two_axes(1, sharding=[])
    shardings = ar.build_plan(item, config).model.shardings
    assert {one.name: one.axes for one in shardings} == {"up0": (-1, 1), "down0": (1, 0)}
    assert ar.verify(item, config).ok


@pytest.mark.parametrize("axes", [[0, 1], [0, -1]])
def test_a_dense_model_as_gspmd_cuts_it_divides_the_batch_too(axes: list[int]) -> None:
    spec = tf.TensorSpec([8, models.WIDTH], tf.float64)
    item = ar.GraphItem.from_function(models.step_of(models.variables()), spec, spec, batch_inputs={"x": 0, "y": 0})
    weights = models.on_two_axes(1)["sharding"]
    activations = [{"match": name, "axes": axes} for name in ("x", "y")]
    report = ar.verify(item, models.on_two_axes(1, sharding=[*weights, *activations]))
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


def test_parts_that_no_axes_make_are_refused() -> None:
    with pytest.raises(PlanError, match="'w' is cut along 2 dimensions"):
        cut_dimensions(TensorSharding("w", (2, 3)), (3, 2))
