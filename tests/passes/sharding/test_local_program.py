"""Where variables are mirrored, devices of a model axis run one program of their blocks, and meet in collectives."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.compile import request
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError, VerifyError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.passes.collectives.along_model import AlongModel
from autograph_rewrite.passes.localize.rows_of_shards import RowsOfShards
from autograph_rewrite.passes.pass_pipeline import rewrite
from autograph_rewrite.passes.reshard import insert_reshards
from autograph_rewrite.passes.sharding.local_program import LocalProgram
from autograph_rewrite.resolve import server_region
from tests.passes.sharding import test_partition as zoo
from tests.support import split_models as models
from tests.support.model_axis import descent, on_mesh, worst_difference
from tests.support.training import make_item, placeholder, train, v1, variable
from tests.zoo.training import control_flow

MIRRORED = {"variables": "mirrored"}
EXACT = 1e-9


def mesh(data: int, model: int, **more: Any) -> dict[str, Any]:
    return models.config(data, model, strategy=MIRRORED, **more)


REVERSED = {"devices": ["CPU:1", "CPU:0", "CPU:3", "CPU:2"]}
CROSSED = {"devices": ["CPU:0", "CPU:2", "CPU:1", "CPU:3"]}
CONFIGURATIONS = {
    "two devices": mesh(1, 2),
    "four devices": mesh(1, 4),
    "two replicas": mesh(2, 2),
    "micro-batches on one replica": mesh(1, 2, microbatches=3),
    "micro-batches": mesh(2, 2, microbatches=2),
    "interleaved micro-batches": mesh(2, 2, microbatches=2, accumulation={"layout": "interleaved"}),
    "recomputation": mesh(2, 2, remat={"policy": "every:1"}),
    "devices that collectives put in another order": mesh(2, 2) | REVERSED,
    "devices of two replicas in turn": mesh(2, 2) | CROSSED,
    "no buckets": mesh(2, 2) | {"strategy": {**MIRRORED, "bucket_bytes": 0}},
    "steps in one run": mesh(2, 2, steps_per_run=2),
    "a loop of micro-batches": mesh(2, 2, microbatches=2, accumulation={"form": "loop"}),
    **{
        name: mesh(2, 2) | {"strategy": {**MIRRORED, "name": name}}
        for name in ("FSDP", "PS", "PSLoadBalancing", "Parallax", "PartitionedPS", "PartitionedAR")
    },
    "FSDP in micro-batches": mesh(2, 2, microbatches=2) | {"strategy": {**MIRRORED, "name": "FSDP"}},
    "FSDP in steps of one run": mesh(2, 2, steps_per_run=2) | {"strategy": {**MIRRORED, "name": "FSDP"}},
    "FSDP on one replica": mesh(1, 4) | {"strategy": {**MIRRORED, "name": "FSDP"}},
    "the first stage of ZeRO": mesh(2, 2, variables=[{"match": ".*", "partition": {"over": "data", "stage": 1}}]),
    "the second stage of ZeRO": mesh(2, 2, variables=[{"match": ".*", "partition": {"over": "data", "stage": 2}}]),
    "a policy": mesh(2, 2, variable_policies=[{"match": "slot", "synchronization": "on_write", "aggregation": "sum"}]),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_step_computes_what_one_device_does(name: str) -> None:
    report = ar.verify(models.item(), CONFIGURATIONS[name])
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


def test_a_time_limit_has_an_effect_where_the_devices_of_one_replica_meet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ar.rewrite(models.item(), mesh(1, 2, timeout_seconds=5.0))
    with pytest.warns(UserWarning, match="timeout_seconds: 5.0 does nothing"):
        ar.rewrite(models.item(), models.config(1, 2, timeout_seconds=5.0))


def test_shards_of_blocks_need_not_be_of_one_size() -> None:
    config = mesh(2, 2) | {"strategy": {**MIRRORED, "name": "FSDP"}}
    new = ar.rewrite(models.item(hidden=6), config)
    blocks = new.variables["down0"].shards
    assert (blocks.axis, blocks.sizes) == (0, (3, 3))
    assert [(one.axis, one.sizes) for one in blocks.within] == [(0, (2, 1))] * 2
    report = ar.verify(models.item(hidden=6), config)
    assert report.ok, report


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Return the variables after some steps with a configuration."""
    found = models.variables()
    step = ar.distribute(tf.function(models.step_of(found)), config)
    for number in range(4):
        step(*map(tf.constant, models.batch(number, 6)))
    return {name: one.numpy() for name, one in found.items()}


@pytest.mark.parametrize("compressor", ["fp16", "bf16_ef"])
def test_what_replicas_send_of_blocks_is_compressed_as_what_they_send_of_wholes(compressor: str) -> None:
    strategy = {"strategy": {**MIRRORED, "compressor": compressor}}
    whole, blocks = trained({"devices": ["CPU:0", "CPU:1"], **strategy}), trained(mesh(2, 2) | strategy)
    for name, value in whole.items():
        np.testing.assert_array_equal(blocks[name], value)
    exact = trained(mesh(2, 2))
    assert any((exact[name] != value).any() for name, value in whole.items())


def wide() -> dict[str, tf.Tensor]:
    """Return the outputs of a model whose columns are read whole, summed, and handed out example by example."""
    rng = np.random.default_rng(0)
    x, y = placeholder("x", None, 4), placeholder("y", None, 6)
    wide = x @ variable("columns", rng.normal(size=(4, 6)))
    each = tf.reduce_sum((tf.sort(wide) - y) ** 2, 1) + tf.reduce_max(wide, 1)
    return {"loss": tf.reduce_mean(each), "each": tf.identity(each, name="each"), "wide": tf.identity(wide)}


@pytest.mark.parametrize(("data", "examples"), [(1, 5), (2, 5), (2, 1)])
def test_a_session_gives_whole_outputs_also_where_a_replica_has_no_example(data: int, examples: int) -> None:
    item = make_item(wide)
    new = ar.rewrite(item, on_mesh(data, 2, {"columns": (1, 0)}) | {"strategy": MIRRORED})
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.normal(size=(examples, 4)), "y": rng.normal(size=(examples, 6))} for _ in range(2)]
    alone, together = train(item, feeds), train(new, feeds)
    for name, value in alone.variables.items():
        np.testing.assert_allclose(together.variables[name], value, rtol=1e-9)
    for one, other in zip(alone.fetched, together.fetched, strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-9, atol=1e-12)


TABLES: dict[str, Callable[..., Any]] = {
    "looked up": lambda v, ids: tf.reduce_mean(tf.tanh(tf.gather(v["table"], ids) @ v["up"]) ** 2),
    "tied": lambda v, ids: tf.reduce_mean(tf.nn.softmax(tf.gather(v["table"], ids) @ tf.transpose(v["table"])) ** 2),
}


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)], ids=["rows", "columns"])
@pytest.mark.parametrize("loss", TABLES)
@pytest.mark.parametrize(("data", "strategy"), [(1, "AllReduce"), (2, "AllReduce"), (2, "FSDP")])
def test_each_device_finds_the_rows_that_it_has_of_a_table(
    data: int, strategy: str, loss: str, dims: tuple[int, int]
) -> None:
    shapes = {"table": (50, 4), "up": (4, 4)} if loss == "looked up" else {"table": (50, 4)}
    config = on_mesh(data, 2, {"table": dims}) | {"strategy": {**MIRRORED, "name": strategy}}
    ids = np.array([[0, 49, 24], [24, 24, 25], [2, 0, 0], [49, 12, 13]], np.int32)
    assert worst_difference(shapes, descent(TABLES[loss]), [ids], config) <= EXACT


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("AllReduce", "SGD"),
        ("AllReduce", "Adam"),
        ("AllReduce", "Ftrl"),
        ("FSDP", "Adagrad"),
        ("PartitionedAR", "Adam"),
    ],
)
def test_a_model_of_keras_with_a_table_of_rows_fits_as_on_one_device(strategy: str, optimizer: str) -> None:
    def model() -> Any:
        found = zoo.transformer()
        found.compile(getattr(tf.keras.optimizers, optimizer)(0.01), found.loss)
        return found

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (10, 6)), rng.integers(0, 16, (10, 6))
    alone, cut = model(), model()
    sharding = [*zoo.megatron(2), {"match": "embedding/embeddings", "split": [2, 1]}]
    cut = ar.distribute(cut, mesh(2, 2) | {"sharding": sharding, "strategy": {**MIRRORED, "name": strategy}})
    losses = [one.fit(x, y, batch_size=4, verbose=0, shuffle=False).history["loss"] for one in (alone, cut)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    for mine, other in zip(alone.get_weights(), cut.get_weights(), strict=True):
        np.testing.assert_allclose(other, mine, rtol=1e-8, atol=1e-10)


def zoo_item() -> ar.GraphItem:
    """Return the training step of a small transformer."""
    return ar.GraphItem.from_keras(zoo.transformer(), *[tf.TensorSpec([None, 6], tf.int32)] * 2)


@pytest.mark.parametrize("count", [2, 4])
def test_a_transformer_has_two_collectives_per_block_and_direction_on_each_device(count: int) -> None:
    new = ar.rewrite(zoo_item(), mesh(1, count) | {"sharding": zoo.megatron(count)})
    found = Counter((node.op, node.device) for node in new.graph if node.op.startswith("Collective"))
    assert found == {("CollectiveReduceV2", f"/device:CPU:{i}"): 2 * (2 + 2) for i in range(count)}
    whole = Counter(node.device for node in new.graph if node.op == "Rsqrt")  # of the norms
    assert set(whole.values()) == {next(iter(whole.values()))}
    assert len(whole) == count


def test_each_device_holds_what_the_placements_give_it() -> None:
    new = ar.rewrite(models.item(), mesh(2, 2))
    sizes = {name: one.nbytes for name, one in new.variables.items()}
    cut = sum(size for name, size in sizes.items() if new.variables[name].shards is not None)
    assert set(new.report.held.values()) == {sum(sizes.values()) - cut // 2}
    new = ar.rewrite(models.item(), mesh(2, 2) | {"strategy": {**MIRRORED, "name": "FSDP"}})
    assert set(new.report.held.values()) == {sum(sizes.values()) // 4}


def test_pieces_of_every_copy_are_where_its_devices_are() -> None:
    new = ar.rewrite(zoo_item(), mesh(2, 2) | {"sharding": zoo.megatron(2), "strategy": {**MIRRORED, "name": "FSDP"}})
    cut = [one.shards for one in new.variables.values() if one.shards is not None]
    for shards in cut:
        for number, handles in enumerate(shards.copies):
            devices = [new.graph.nodes[handle].device for handle in handles if handle in new.graph]
            assert devices == list(shards.places(number, "")) or not devices
    assert any(len(shards.copies) > 1 for shards in cut)  # of norms, each device of a replica has a copy in shards


def test_a_slot_is_where_its_variable_is_unless_devices_have_blocks_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find, homes = server_region.find_server_region, []

    def asked(plan: Any, state: Any, variables: Any, blocked: Any) -> Any:
        homes.append(find(plan, state, variables, {variables["slot"].handle}).homes)
        found = find(plan, state, variables, blocked)
        homes.append(found.homes)
        return found

    monkeypatch.setattr(insert_reshards, "find_server_region", asked)
    ar.rewrite(models.item(), {"devices": ["CPU:0", "CPU:1"], "strategy": {**MIRRORED, "name": "PS"}})
    in_blocks, whole = homes
    assert "slot" in whole
    assert "slot" not in in_blocks


def test_a_saved_item_says_the_same_of_its_pieces(tmp_path: Path) -> None:
    new = ar.rewrite(models.item(), mesh(2, 2) | {"strategy": {**MIRRORED, "name": "FSDP"}})
    new.save(tmp_path / "new.ar")
    back = ar.GraphItem.load(tmp_path / "new.ar")
    assert {name: one.shards for name, one in back.variables.items()} == {
        name: one.shards for name, one in new.variables.items()
    }


def test_a_slot_in_blocks_stays_there_whatever_holds_its_variable() -> None:
    config = mesh(2, 2) | {"strategy": {**MIRRORED, "name": "PS"}}
    config["sharding"] = [{"match": "up0", "replicate": True}, {"match": "slot", "split": [1, 2]}]
    new = ar.rewrite(models.item(), config)
    assert new.report.homes.keys() >= {"up0"}
    assert "slot" not in new.report.homes
    report = ar.verify(models.item(), config)
    assert report.ok, report


def test_a_sum_stays_a_contribution_until_the_replicas_meet() -> None:
    """What is added up on both axes is added up among the devices of a replica, and then among the replicas."""
    new = ar.rewrite(models.item(), mesh(2, 2))
    groups = Counter(len(set(_members(new.graph, node))) for node in new.graph if node.op == "CollectiveReduceV2")
    assert groups == {2: 4 * 5}  # three sums along the model axis, the loss, and one bucket of all gradients


def _members(graph: Graph, node: Node) -> list[str]:
    key = node.inputs[1].node.attr("value"), node.inputs[2].node.attr("value")
    name = node.name.split("/", 1)[1]
    return [
        one.device
        for one in graph
        if one.op == node.op
        and one.name.endswith(name)
        and (one.inputs[1].node.attr("value"), one.inputs[2].node.attr("value")) == key
    ]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (mesh(2, 2) | {"sharding": [{"match": r"up\d", "split": [1, 2]}]}, ""),
        (models.config(1, 3, strategy=MIRRORED), "blocks are of several sizes"),
        (mesh(1, 2, microbatches=2, accumulation={"form": "loop"}), "micro-batches are a loop"),
        (mesh(2, 2) | REVERSED, "TensorFlow puts the devices in another order"),
        (models.config(2, 2, strategy={**MIRRORED, "name": "FSDP"}), ""),
    ],
)
def test_what_is_whole_runs_on_the_first_device_only_where_that_is_said(config: Any, why: str) -> None:
    new = ar.rewrite(models.item(), config)
    said = [note for note in new.report.plan.notes if "runs on the first device" in note]
    assert bool(said) == bool(why)
    assert all(why in note for note in said)
    report = ar.verify(models.item(), config)
    assert report.ok, report


def test_servers_of_a_job_add_up_one_value_of_each_process() -> None:
    job: dict[str, Any] = {"cluster": {"workers": ["a:1", "b:1"], "ps": ["c:1"]}, "devices": ["CPU:0", "CPU:1"]}
    new = ar.rewrite(models.item(), mesh(2, 2) | job | {"strategy": {**MIRRORED, "name": "PS"}}, task=0)
    assert any("servers of a job hold variables" in note for note in new.report.plan.notes)
    job["cluster"].pop("ps")
    new = ar.rewrite(models.item(), mesh(2, 2) | job | {"strategy": {**MIRRORED, "name": "FSDP"}}, task=0)
    assert not any("runs on the first device" in note for note in new.report.plan.notes)
    assert new.variables["up0"].shards.elsewhere == (1, 3)


def test_mirrored_variables_are_no_setting_without_an_effect_on_a_model_axis(recwarn: pytest.WarningsRecorder) -> None:
    ar.rewrite(models.item(), mesh(1, 2))
    assert not any("mirrored does nothing" in str(one.message) for one in recwarn)


# What is done wrong is found out: by the certificate, or by the numbers.


def certified(data: int = 2) -> None:
    """Rewrite a session's graph, whose initial values are cut, under the eyes of the certificate."""
    item = normalise_original(make_item(wide))
    plan = request(item, Config.of(on_mesh(data, 2, {"columns": (1, 0)}) | {"strategy": MIRRORED}))
    rewrite(Request(item, plan, certificate=Certificate(strict=True)), verify=True)


def test_the_certificate_looks_at_both_axes() -> None:
    certified()


def _skip(program: LocalProgram, value: Any, want: Any) -> Any:
    return value


def _alone(self: AlongModel, node: Node, value: Any, *rest: Any) -> Any:
    return FoldedBuilder.of(self.rewrite, value, node.name).op("Identity", value, what="alone")


def _of_the_other(self: AlongModel, node: Node, value: Any, dim: int, sizes: Any, axis: str) -> Any:
    return OWN_BLOCK(self, node, value, dim, (sizes[0] - 1, sizes[1]), axis)


OWN_BLOCK = AlongModel._block
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a conversion is left out": (LocalProgram, "_convert", _skip),
    "a sum is left out": (AlongModel, "_sum", _alone),
    "a block is another one": (AlongModel, "_block", _of_the_other),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_program_of_a_device_is_refused(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(VerifyError):
        certified()


def _all_elements(self: LocalProgram, value: Any, *_: Any) -> Any:
    return value


def _other_entries(self: LocalProgram, value: Any, chosen: list[bool], *rest: Any) -> Any:
    return SCALED(self, value, [not one for one in chosen], *rest)


SCALED = LocalProgram._scaled
SIZES = {
    "known": (models.item, mesh(2, 2), "_with_entry", _all_elements),
    "measured": (zoo_item, mesh(2, 2) | {"sharding": zoo.megatron(2)}, "_with_entry", _all_elements),
    "of other dimensions": (zoo_item, mesh(2, 2) | {"sharding": zoo.megatron(2)}, "_scaled", _other_entries),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_of_other_elements_are_refused(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item, config, name, mistake = SIZES[sizes]
    monkeypatch.setattr(LocalProgram, name, mistake)
    with pytest.raises(VerifyError, match="counts other elements"):
        ar.verify(item(), config)


def test_the_certificate_covers_all_of_a_transformer_on_a_mesh() -> None:
    report = ar.verify(zoo_item(), mesh(2, 2) | {"sharding": zoo.megatron(2)})
    assert not [line for line in str(report).splitlines() if "not covered" in line]


def test_rows_that_begin_elsewhere_train_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    own = RowsOfShards._find

    def shifted(self: Any, node: Any, ids: Any, table: Any) -> Any:
        ((axis, (first, second)),) = table.levels
        return own(self, node, ids, table._replace(levels=((axis, (first - 1, second + 1)),)))

    monkeypatch.setattr(RowsOfShards, "_find", shifted)
    config = on_mesh(1, 2, {"table": (0, 1)}) | {"strategy": MIRRORED}
    ids = np.array([[0, 5, 3], [3, 3, 1]], np.int32)
    shapes = {"table": (6, 4), "up": (4, 4)}
    try:
        assert worst_difference(shapes, descent(TABLES["looked up"]), [ids], config) > 1e-6
    except (tf.errors.OpError, RewriteError):
        return


def copied() -> dict[str, tf.Tensor]:
    """Return the loss of a model of which one variable begins as another that may have been given a value before."""
    x = placeholder("x", None, 4)
    first = variable("columns", np.arange(24.0).reshape(4, 6) / 9)
    with control_flow(v2=False):
        begin = tf.cond(v1.is_variable_initialized(first), first.read_value, lambda: first.initial_value)
    second = v1.get_variable("again", initializer=begin, use_resource=True)
    return {"loss": tf.reduce_mean(((x @ first) * (x @ second)) ** 2)}


def test_a_run_of_the_initialiser_has_all_members_of_what_it_meets_in() -> None:
    item = make_item(copied)
    new = ar.rewrite(item, on_mesh(2, 2, {"columns": (1, 0)}) | {"strategy": MIRRORED, "microbatches": 2})
    needed = ancestors([new.graph.nodes[new.init_op or ""]])
    groups: dict[str, list[bool]] = {}
    for node in new.graph:
        if node.op.startswith("Collective"):
            groups.setdefault(node.name.split("/", 1)[1], []).append(node in needed)
    assert any(map(any, groups.values()))
    assert all(all(one) or not any(one) for one in groups.values()), groups
    feeds = [{"x": np.ones((3, 4))}]
    alone, together = train(item, feeds), train(new, feeds)
    for name, value in alone.variables.items():
        np.testing.assert_allclose(together.variables[name], value, rtol=1e-9)
