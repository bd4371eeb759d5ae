"""No setting is ignored in silence: it changes what is made, is read when that runs, or a note says that it is idle."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from pydantic import BaseModel

import autograph_rewrite as ar
from autograph_rewrite.compile import Job, compile_item, request
from autograph_rewrite.config import presets
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import PlanError
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.passes.unused_settings import READERS, written
from autograph_rewrite.runtime.function.session_step import without_shards

TWO = {"devices": ["CPU:0", "CPU:1"]}
WORKERS = {"workers": ["127.0.0.1:4001", "127.0.0.1:4002"]}
SERVER = {"ps": ["127.0.0.1:4003"]}
BASES: dict[str, dict[str, Any]] = {
    "shared": {**TWO, "strategy": {"variables": "shared"}},
    "mirrored": {**TWO, "strategy": {"variables": "mirrored"}},
    "one replica": {"devices": ["CPU:0"]},
    "PS": {**TWO, "strategy": {"name": "PS"}},
    "FSDP": {**TWO, "strategy": {"name": "FSDP"}},
    "PartitionedAR": {**TWO, "strategy": {"name": "PartitionedAR", "variables": "mirrored"}},
    "micro-batches": {**TWO, "microbatches": 2},
    "stages": {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 2}},
    "job": {"devices": ["CPU:0"], "cluster": WORKERS},
    "job with a server": {"devices": ["CPU:0"], "cluster": {**WORKERS, **SERVER}, "strategy": {"name": "PS"}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "strategy.hint": {"strategy": {"hint": "ring"}},
    "strategy.bucket_bytes": {"strategy": {"bucket_bytes": 1}},
    "strategy.compressor": {"strategy": {"compressor": "fp16"}},
    "variables[0].sync": {"variables": [{"match": "w", "sync": False}]},
    "variables[0].staleness": {"variables": [{"match": "w", "staleness": 3}]},
    "variables[0].proxy": {"variables": [{"match": "w", "proxy": True}]},
    "variables[0].hint": {"variables": [{"match": "w", "hint": "ring"}]},
    "variables[0].bucket_bytes": {"variables": [{"match": "w", "bucket_bytes": 1}]},
    "variables[0].compressor": {"variables": [{"match": "w", "compressor": "bf16"}]},
    "variables[0].match": {"variables": [{"match": "w"}]},
    "variables[0].partition": {"variables": [{"match": "w", "partition": {"over": "data", "stage": 1}}]},
    "variables[1].match": {"variables": [{"match": ".*", "hint": "nccl"}, {"match": "w", "hint": "ring"}]},
    "accumulation.form": {"accumulation": {"form": "loop"}},
    "accumulation.layout": {"accumulation": {"layout": "interleaved"}},
    "accumulation.uneven": {"accumulation": {"uneven": "error"}},
    "semantics.random": {"semantics": {"random": "independent"}},
    "semantics.batch_norm": {"semantics": {"batch_norm": "local"}},
    "input": {"input": "per_worker"},
    "timeout_seconds": {"timeout_seconds": 5.0},
}
# Read by what runs the graph, so that the graph is the same.
AT_RUN_TIME = {
    ("timeout_seconds", "mirrored"), ("timeout_seconds", "PartitionedAR"), ("timeout_seconds", "job"),
    ("timeout_seconds", "job with a server"), ("input", "job"), ("input", "job with a server"),
    ("accumulation.uneven", "micro-batches"),
}  # fmt: skip


@functools.cache
def layer() -> ar.GraphItem:
    """A dense layer, trained with momentum: two gradients that can travel together."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 6], "x")
        w, b = (v1.get_variable(name, shape, use_resource=True) for name, shape in (("w", [6, 4]), ("b", [4])))
        loss = tf.reduce_mean(tf.square(x @ w + b))
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        v1.group(v1.global_variables_initializer(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=[loss], init_op="init")


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {**base, **more}
    return {
        key: merged(base[key], more[key]) if isinstance(value, dict) and key in base and key in more else value
        for key, value in both.items()
    }


def keys(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield every key of a configuration."""
    for name, field in section.model_fields.items():
        here = f"{path}.{name}" if path else name
        yield here
        parts = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [one for part in parts for one in getattr(part, "__args__", ())]
        for part in [*parts, *inner]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from keys(part, here)


def rewritten(config: dict[str, Any]) -> Any:
    return ar.rewrite(layer(), config, task=0)


def test_every_key_of_a_configuration_has_a_reader() -> None:
    assert set(keys(Config)) == set(READERS)


@pytest.mark.filterwarnings("ignore:autograph_rewrite")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_changes_the_rewrite_or_is_read_at_run_time_or_is_noted(key: str, base: str) -> None:
    try:
        new = rewritten(merged(BASES[base], SETTINGS[key]))
    except ar.RewriteError:
        return  # a refusal is no silence
    noted = [note for note in new.report.plan.notes if f": {key}" in note and "does nothing here" in note]
    if (key, base) in AT_RUN_TIME or new.graph_bytes != rewritten(BASES[base]).graph_bytes:
        return
    assert len(noted) == 1
    assert noted[0] in str(new.report)
    assert noted[0] in ar.explain(new)


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        (merged(BASES["PS"], SETTINGS["variables[0].sync"]), "variables[0].sync: false", "there is one process"),
        (merged(BASES["PS"], SETTINGS["variables[0].staleness"]), "variables[0].staleness: 3", "there is one process"),
        (merged(BASES["PS"], SETTINGS["variables[0].proxy"]), "variables[0].proxy: true", "has the variable itself"),
        (merged(BASES["mirrored"], {"strategy": {"hint": "nccl"}}), "strategy.hint: nccl", "NCCL is for GPUs"),
        (merged(BASES["job"], {"cluster": SERVER}), "cluster.ps", "puts no variable on a parameter server"),
        (merged(BASES["stages"], {"microbatches": 4}), "microbatches: 4", "the section `pipeline` says how many"),
        ({**TWO, "strategy": {"name": "Parallax"}}, "strategy.name: Parallax", "no variable to place or split"),
        ({**TWO, "variables": [{"match": "w/.*", "compressor": "fp16"}]}, "variables[0].compressor: fp16", "no grad"),
        ({"devices": ["CPU:0"], "strategy": {"variables": "mirrored"}}, "strategy.variables", "there is one replica"),
    ],
)
def test_a_note_says_why_nothing_reads_a_setting(config: dict[str, Any], key: str, reason: str) -> None:
    with pytest.warns(UserWarning, match="settings without an effect") as caught:
        plan = rewritten(config).report.plan
    assert len([one for one in caught if "without an effect" in str(one.message)]) == 1
    assert any(f": {key}" in note and reason in note for note in plan.notes), plan.notes


def own_notes(plan: ar.Plan) -> list[str]:
    """Return the notes of a plan, but for the one that tells its coverage."""
    return [note for note in plan.notes if not note.startswith("coverage ")]


def test_the_note_names_the_line_and_stays_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("devices: [CPU:0, CPU:1]\nstrategy:\n  variables: shared\n  hint: nccl\n")
    with pytest.warns(UserWarning, match=r"c.yaml:4: strategy.hint: nccl does nothing here"):
        plan = ar.build_plan(layer(), tmp_path / "c.yaml")
    plan.save(tmp_path / "plan.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = ar.rewrite(layer(), ar.Plan.load(tmp_path / "plan.yaml"))
    assert new.report.plan.notes == plan.notes
    assert "c.yaml:4" in own_notes(plan)[0]


def open_rows(*, partly: bool = False) -> ar.GraphItem:
    """A step that trains a variable whose shape is open."""
    w = tf.Variable(tf.ones([8, 8]), shape=tf.TensorShape([None, 8]), name="w")
    always = tf.Variable(tf.ones([8, 8]), name="always")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            state = tf.tanh(x @ w.read_value())
            loss = tf.reduce_mean((state @ always if partly else state) ** 2)
        gradient, other = tape.gradient(loss, (w, always))
        w.assign(w.read_value() - 0.1 * gradient)
        if partly:
            always.assign_sub(0.1 * other)
        return loss

    return ar.GraphItem.from_function(step, tf.TensorSpec([None, 8]))


def test_sharding_that_splits_nothing_says_why_and_how_many_bytes_stay_whole() -> None:
    given = {**TWO, "strategy": {"name": "FSDP", "variables": "mirrored"}}
    said = r"FSDP does nothing here: 32 bytes \('w'\) stay whole, .*: its shape is open"
    with pytest.warns(UserWarning, match=said):
        new = ar.rewrite(open_rows(), given)
    assert set(new.report.held.values()) == {32}
    assert "'w' stays whole: its shape is open" in str(new.report)
    with pytest.raises(PlanError, match=said):
        ar.rewrite(open_rows(), {**given, "semantics": {"strict": True}})


def test_sharding_that_splits_some_variables_only_names_the_others() -> None:
    given = {**TWO, "strategy": {"name": "FSDP", "variables": "mirrored"}}
    said = r"FSDP splits the other variables only: 32 bytes \('w'\) stay whole, .*: its shape is open"
    with pytest.warns(UserWarning, match=said):
        new = ar.rewrite(open_rows(partly=True), given)
    assert set(new.report.held.values()) == {32 + 128}
    with pytest.raises(PlanError, match=said):
        ar.rewrite(open_rows(partly=True), {**given, "semantics": {"strict": True}})


@pytest.mark.parametrize("name", ["PartitionedPS", "UnevenPartitionedPS"])
def test_micro_batches_in_a_job_say_that_they_reach_no_shards_of_other_processes(name: str) -> None:
    """As `ar.distribute` does in a job."""
    given = {"devices": ["CPU:0"], "microbatches": 2, "cluster": WORKERS | SERVER, "strategy": {"name": name}}
    w = tf.Variable(tf.ones([8, 8]), name="w")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    item = normalise(ar.GraphItem.from_function(step, tf.TensorSpec([None, 8])))
    said = r"does nothing here: 256 bytes \('w'\) stay whole, .*: micro-batches, and several steps of one run, reach"
    plan = without_shards(request(item, Config.of(given)))
    with pytest.warns(UserWarning, match=said):
        new = compile_item(item, plan, Job.of(Config.of(given), 0))
    assert "'w' stays whole: micro-batches" in str(new.report)
    assert list(new.report.held.values()) == [256]
    strict = Config.of({**given, "semantics": {"strict": True}})
    item = normalise(ar.GraphItem.from_function(step, tf.TensorSpec([None, 8])))
    with pytest.raises(PlanError, match=said):
        compile_item(item, without_shards(request(item, strict)), Job.of(strict, 0))


def test_what_equals_its_default_or_is_left_out_gets_no_note() -> None:
    said = {"strategy": {"hint": "auto", "compressor": "none"}, "timeout_seconds": 60.0, "microbatches": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for base in BASES.values():
            assert own_notes(rewritten(base).report.plan) == []
        assert own_notes(rewritten(merged(BASES["shared"], said)).report.plan) == []
    assert list(written(Config.of(said))) == []


OF_OTHER_MODELS = {"all_reduce_local_bn", "pipeline_hosts", "parallax", "spatial"}
"""Shipped configurations that have nothing to do where there is no batch norm, cluster, lookup or image."""
ON_NAMES = {"megatron", "vocabulary_parallel", "expert_parallel", "gspmd_2d"}
"""They place variables by their names: `tests/strategies/test_sharding_presets.py` has models with these."""


def test_shipped_configurations_that_place_variables_say_where_there_are_none() -> None:
    for name in sorted(ON_NAMES):
        with pytest.warns(UserWarning, match="nothing is placed on it"):
            ar.rewrite(layer(), Config.load(name), task=0)


@pytest.mark.parametrize("name", sorted(set(presets.names()) - OF_OTHER_MODELS - ON_NAMES))
def test_shipped_configurations_have_no_idle_setting(name: str) -> None:
    config = Config.load(name)
    if config.devices is None:
        config = config.with_devices(["/device:GPU:0", "/device:GPU:1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ar.rewrite(layer(), config, task=0)
