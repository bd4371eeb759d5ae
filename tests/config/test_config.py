"""Configurations: the whole contract is understood, and every mistake is told at its line with its cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autograph_rewrite.cluster.membership import in_job
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.fields import read_size
from autograph_rewrite.config.json_schema import schema_text
from autograph_rewrite.errors import ConfigError, RewriteError
from tests.support.paths import ROOT

TWO = {"devices": ["CPU:0", "CPU:1"]}

# The example of the contract, key for key.
CONTRACT = """\
devices: [CPU:0, CPU:1]          # this process's replicas. Or a cluster:
cluster:
  workers: [127.0.0.1:2222, 127.0.0.1:2223]
  network: {bandwidth_gbps: 10, latency_us: 50}
strategy:
  name: AllReduce
  variables: shared
  bucket_bytes: 4MiB
  compressor: none
  hint: auto
variables:
  - {match: "emb/.*", synchronizer: ps, partition: {axis: 0, shards: 4}, sync: true, staleness: 0,
     proxy: false}
pipeline: {stages: 2, microbatches: 8, schedule: 1f1b}
microbatches: 4
remat: {policy: sqrt}
mesh: {data: 2, model: 2}
sharding: [{match: "ffn/w1", split: [1, 2]}]
steps_per_run: 1
semantics: {batch_norm: sync, random: exact, strict: false}
timeout_seconds: 60
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(config: dict[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.of(config)
    return str(caught.value)


def refused_lines(folder: Path, text: str) -> list[str]:
    """What loading `text` complains of, as "line: message"."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    lines = str(caught.value).replace(f"{path}:", "").splitlines()
    return [line.strip() for line in (lines[1:] if len(lines) > 1 else lines)]


def test_every_key_of_the_contract_is_understood(tmp_path: Path) -> None:
    config = Config.load(write(tmp_path, CONTRACT))
    assert config.devices == ("/device:CPU:0", "/device:CPU:1")
    assert config.cluster is not None
    assert config.cluster.workers == ("127.0.0.1:2222", "127.0.0.1:2223")
    assert config.strategy.bucket_bytes == 4194304
    assert config.variables[0].partition is not None
    assert config.variables[0].partition.shards == 4
    assert config.pipeline is not None
    assert config.pipeline.schedule == "1f1b"
    assert config.sharding[0].split == (1, 2)


def test_a_mesh_that_the_devices_of_all_workers_do_not_cover_is_refused_at_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, CONTRACT)
    with pytest.raises(ConfigError, match=f"{path}:17: mesh has data 2 x model 2 x 2 stages, but there are 4 devices"):
        Config.load(path).require_usable()


@pytest.mark.parametrize(
    ("setting", "feature"),
    [
        (
            {
                "remat": {"policy": "budget:1MiB"},
                "pipeline": {"stages": 2, "microbatches": 2, "circular_repeat": 2, "schedule": "interleaved"},
            },
            "remat.policy budget:1MiB with several stages per device",
        ),
    ],
)
def test_every_feature_to_come_is_refused_in_a_dict_too(setting: dict[str, Any], feature: str) -> None:
    config = Config.of({**TWO, **setting})
    with pytest.raises(ConfigError, match=f"{feature}.* is not available yet in this version"):
        config.require_usable()


def test_what_asks_for_nothing_new_is_usable() -> None:
    harmless = {
        "cluster": {"workers": ["127.0.0.1:2222"]},
        "strategy": {"name": "AllReduce", "compressor": "topk", "hint": "ring"},
        "variables": [
            {"match": "w", "synchronizer": "all_reduce", "sync": True, "hint": "ring", "compressor": "fp16_ef"}
        ],
        "microbatches": 1,
        "remat": {"policy": "none"},
        "mesh": {"data": 2, "model": 1},
        "sharding": [],
    }
    Config.of({**TWO, **harmless}).require_usable()


def test_a_mesh_covers_the_devices_of_all_workers_whoever_names_them() -> None:
    config = Config.of({**TWO, "mesh": {"data": 4}})
    workers = {"worker": ["a:1", "b:1"]}
    tf_config = json.dumps({"cluster": workers, "task": {"type": "worker", "index": 1}})
    in_job(config, {"TF_CONFIG": tf_config})[0].require_usable()
    with pytest.raises(ConfigError, match="mesh has data 4 x model 1, but there are 2 devices"):
        in_job(config, {})[0].require_usable()
    in_job(Config.of({**TWO, "mesh": {"data": 2}}), {})[0].require_usable()
    with pytest.raises(ConfigError, match="mesh has data 2 x model 1, but there are 4 devices"):
        in_job(Config.of({**TWO, "mesh": {"data": 2}}), {"TF_CONFIG": tf_config})[0].require_usable()


def test_a_mesh_beside_a_pipeline_counts_its_stages() -> None:
    four = {"devices": [f"CPU:{i}" for i in range(4)], "pipeline": {"stages": 2, "microbatches": 2}}
    Config.of({**four, "mesh": {"data": 2}}).require_usable()
    with pytest.raises(ConfigError, match="mesh has data 4 x model 1 x 2 stages, but there are 4 devices"):
        Config.of({**four, "mesh": {"data": 4}}).require_usable()


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_stages_that_the_devices_cannot_hold_are_refused_at_their_line(kind: str, tmp_path: Path) -> None:
    config = Config.load(write(tmp_path, f"devices: [{kind}:0, {kind}:1]\npipeline:\n  stages: 3\n"))
    said = r":3: pipeline.stages is 3, devices are 2 \(give 3 devices, or a multiple of 3 for replicas\)"
    with pytest.raises(ConfigError, match=said):
        config.require_usable()
    workers = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 1}}
    in_job(config, {"TF_CONFIG": json.dumps(workers)})[0].require_usable()


def test_one_cpu_stands_for_the_devices_of_all_stages_and_one_gpu_does_not() -> None:
    Config.of({"devices": ["CPU:0"], "pipeline": {"stages": 3}}).require_usable()
    with pytest.raises(ConfigError, match=r"pipeline\.stages is 3, devices are 1"):
        Config.of({"devices": ["GPU:0"], "pipeline": {"stages": 3}}).require_usable()


def test_a_dict_a_path_and_a_config_are_all_configurations(tmp_path: Path) -> None:
    path = write(tmp_path, "devices: [CPU:0, CPU:1]\n")
    loaded = Config.load(path)
    assert Config.of(str(path)) == Config.of(path) == Config.of(TWO) == Config.of(loaded) == loaded
    assert Config.of(loaded) is loaded
    with pytest.raises(ConfigError, match="a configuration is a path, a dict or a Config, not int"):
        Config.of(3)  # type: ignore[arg-type]


def test_a_json_file_is_a_configuration_too(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(TWO))
    assert Config.load(path) == Config.of(TWO)


def test_all_mistakes_of_a_file_are_told_at_once_each_at_its_line(tmp_path: Path) -> None:
    text = """\
devices: [CPU:0, CPPU:1]
strateg: {}
strategy:
  name: Allreduce
  bucket_byte: 3
  hint: rng
semantics: {batch_norm: synch, strict: maybe}
timeout_seconds: 0
microbatches: "2"
mesh: 3
microbatches: 3
bucket_bytes: 3
remat: {policy: every:0}
variables:
  - {match: "a("}
  - {synchronizer: ps}
"""
    names = (
        "AllReduce, PS, PSLoadBalancing, PartitionedPS, UnevenPartitionedPS, PartitionedAR, "
        "RandomAxisPartitionAR, Parallax, FSDP, Pipeline, Auto or path/to/file.py:Class"
    )
    assert refused_lines(tmp_path, text) == [
        "1: devices[1]: 'CPPU:1' is not a device: there is no kind 'CPPU' (did you mean 'CPU:1'?)",
        "2: unknown key 'strateg' (did you mean 'strategy'?)",
        f"4: strategy.name must be {names}, not 'Allreduce' (did you mean 'AllReduce'?)",
        "5: unknown key 'bucket_byte' in strategy (did you mean 'bucket_bytes'?)",
        "6: strategy.hint must be auto, ring or nccl, not 'rng' (did you mean 'ring'?)",
        "7: semantics.batch_norm must be sync or local, not 'synch' (did you mean 'sync'?)",
        "7: semantics.strict must be true or false, not 'maybe'",
        "8: timeout_seconds must be more than 0, not 0",
        "9: microbatches must be a whole number, not '2'",
        "10: mesh must be a mapping (key: value), not 3",
        "11: the key 'microbatches' stands here twice (first in line 9)",
        "12: unknown key 'bucket_bytes' (did you mean 'strategy.bucket_bytes'?)",
        "13: remat.policy must be none, sqrt, hierarchical, names, collection, scopes, save_matmuls, "
        "every:N or budget:SIZE, not 'every:0'",
        "15: variables[0].match must be a regular expression, and 'a(' is not: "
        "missing ), unterminated subpattern at position 1",
        "16: the key 'match' is missing in variables[1]",
    ]


def test_one_mistake_is_one_line_and_its_place_is_there_for_programs(tmp_path: Path) -> None:
    path = write(tmp_path, "devices: [CPU:0]\nstrategi: {}\n")
    with pytest.raises(RewriteError) as caught:
        Config.load(path)
    assert str(caught.value) == f"{path}:2: unknown key 'strategi' (did you mean 'strategy'?)"
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"devices": "CPU:0"}, "devices must be a list, as in [a, b], not 'CPU:0'"),
        ({"devices": {"CPU:0", "CPU:1"}}, "devices must be a list: a set has no order"),
        ({1: 2}, "a key must be a text, not 1"),
        ({"strategy": {"bucket_bytes": "9" * 30}}, "strategy.bucket_bytes must be at most 4.61169e+18"),
        ({"devices": [0]}, "devices[0] must be a text, not 0"),
        ({"devices": ["CPU0"]}, "devices[0]: 'CPU0' has no index (write CPU:0)"),
        ({"strategy": "AllReduce"}, "strategy must be a mapping (key: value), not 'AllReduce'"),
        ({"strategy": None}, "strategy must be a mapping (key: value), not nothing"),
        ({"strategy": {"bucket_bytes": "4Mi"}}, "strategy.bucket_bytes must be a size, not '4Mi'"),
        ({"strategy": {"bucket_bytes": -1}}, "strategy.bucket_bytes must be at least 0, not -1"),
        ({"strategy": {"bucket_bytes": True}}, "strategy.bucket_bytes must be a size, not True"),
        ({"strategy": {"bucket_bytes": "0.3B"}}, "strategy.bucket_bytes must be whole bytes"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds must be a finite number"),
        ({"timeout_seconds": True}, "timeout_seconds must be a number, not true"),
        ({"microbatches": 0}, "microbatches must be at least 1, not 0"),
        ({"microbatches": 2.0}, "microbatches must be a whole number, not 2.0"),
        ({"steps_per_run": 0}, "steps_per_run must be at least 1, not 0"),
        ({"mesh": {"data": 0}}, "mesh.data must be at least 1, not 0"),
        ({"pipeline": {"stages": 0}}, "pipeline.stages must be at least 1, not 0"),
        ({"semantics": {"strict": "yes"}}, "semantics.strict must be true or false, not 'yes'"),
        ({"cluster": {"workers": ["nowhere"]}}, "cluster.workers[0] must be an address like 10.0.0.1:2222"),
        ({"cluster": {"workers": ["a:99999"]}}, "cluster.workers[0] must be an address like 10.0.0.1:2222"),
        ({"cluster": {}}, "the key 'workers' is missing in cluster"),
        ({"remat": {"policy": "budget:much"}}, "remat.policy must be a size, not 'much'"),
        ({"variables": [{"match": ""}]}, "variables[0].match must not be empty, not ''"),
        ({"variables": [{"match": "w", "partition": {"shards": 1}}]}, "shards must be at least 2, not 1"),
        ({"variables": [{"match": "w", "staleness": -1}]}, "variables[0].staleness must be at least 0"),
        ({"learning_rate": 3}, "unknown key 'learning_rate' (known keys: devices, cluster, strategy"),
        ({"cluster": {"workers": ["a:1"], "network": {"x": 1}}}, "unknown key 'x' in cluster.network"),
        ({"cluster": {"workers": ["a:1"], "timeout_seconds": 9}}, "'timeout_seconds' belongs at the top, outside of"),
    ],
)
def test_a_wrong_value_is_told_with_its_key_path(setting: dict[Any, Any], said: str) -> None:
    assert said in refused({**TWO, **setting})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"devices": []}, "devices is empty: there must be a replica"),
        (
            {"devices": ["CPU:0", "/cpu:0"], "strategy": {"variables": "mirrored"}},
            "CPU:0 stands twice in devices, but mirrored variables live on distinct devices",
        ),
        (
            {"devices": ["CPU:0", "CPU:0"], "cluster": {"workers": ["a:1", "b:1"]}},
            "CPU:0 stands twice in devices, but mirrored variables live on distinct devices",
        ),
        (
            {**TWO, "cluster": {"workers": ["a:1"]}, "mesh": {"data": 4}},
            "mesh has data 4 x model 1, but there are 2 devices",
        ),
        ({**TWO, "mesh": {"data": 3}}, "mesh has data 3 x model 1, but there are 2 devices"),
        ({**TWO, "mesh": {"model": 3}}, "mesh.model is 3, which 2 devices cannot be divided by"),
        ({"cluster": {"workers": []}}, "cluster.workers is empty"),
        ({"cluster": {"workers": ["a:1", "a:1"]}}, "the address a:1 stands twice in cluster"),
        (
            {"variables": [{"match": "w", "synchronizer": "all_reduce", "staleness": 2}]},
            "variables[0].staleness belongs to parameter servers; an all-reduce has none",
        ),
        (
            {"variables": [{"match": "w", "sync": False, "staleness": 2}]},
            "variables[0].staleness bounds how far replicas drift, but sync: false sets no bound",
        ),
        (
            {"pipeline": {"stages": 2, "microbatches": 3, "schedule": "interleaved"}},
            "pipeline.microbatches (3) must be a multiple of pipeline.stages (2)",
        ),
        ({"pipeline": {"stages": 2, "devices": ["CPU:0"]}}, "pipeline.devices names 1 devices for 2 stages"),
        ({"sharding": [{"match": "w"}]}, "sharding[0] must say exactly one of split, axes, replicate and device"),
        ({"remat": {"policy": "names"}}, "the policy 'names' needs remat.names"),
        ({"remat": {"policy": "sqrt", "names": ["a"]}}, "remat.names is read by the policy 'names'"),
        ({"remat": {"policy": "scopes"}}, "the policy 'scopes' needs remat.scopes"),
    ],
)
def test_an_impossible_combination_is_refused_with_the_reason(setting: dict[str, Any], said: str) -> None:
    assert said in refused(setting)


def test_a_combination_is_checked_although_another_key_is_wrong(tmp_path: Path) -> None:
    text = "devices: [CPU:0, CPU:0]\nstrategy: {variables: mirrored}\nsemantic: {}\n"
    first, second = refused_lines(tmp_path, text)
    assert first.startswith("1: CPU:0 stands twice in devices")
    assert second == "3: unknown key 'semantic' (did you mean 'semantics'?)"


def test_a_combination_with_a_wrong_key_is_not_guessed_at(tmp_path: Path) -> None:
    (only,) = refused_lines(tmp_path, "devices: [CPU:0, CPU:0]\nstrategy: {variables: mirored}\n")
    assert only == "2: strategy.variables must be shared or mirrored, not 'mirored' (did you mean 'mirrored'?)"


def test_what_is_no_mapping_is_no_configuration(tmp_path: Path) -> None:
    assert refused_lines(tmp_path, "- CPU:0\n") == ["1: the configuration must be a mapping (key: value), not a list"]


@pytest.mark.parametrize(
    ("written", "size"),
    [(0, 0), (7, 7), ("0", 0), ("512 B", 512), ("4MiB", 4 << 20), ("4mib", 4 << 20), ("1.5KiB", 1536),
     ("2KB", 2000), ("1 GB", 10**9), ("1GiB", 1 << 30)],
)  # fmt: skip
def test_sizes_are_numbers_or_texts_with_a_unit(written: int | str, size: int) -> None:
    assert read_size(written) == size


def test_variables_are_shared_in_one_process_and_mirrored_across_processes() -> None:
    many = {**TWO, "cluster": {"workers": ["a:1", "b:1"]}}
    assert Config.of(TWO).mode == "shared"
    assert Config.of(many).mode == "mirrored"
    assert Config.of({**many, "strategy": {"variables": "shared"}}).mode == "shared"


def test_devices_left_out_are_the_accelerators() -> None:
    logical = ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]
    config = Config.of({}).with_devices(logical)
    assert config.replica_devices() == ("/device:GPU:0", "/device:GPU:1")
    assert Config.of(TWO).with_devices(logical).replica_devices() == ("/device:CPU:0", "/device:CPU:1")


def test_a_worker_without_accelerators_is_one_replica_on_its_processor() -> None:
    config = Config.of({"cluster": {"workers": ["a:1"]}}).with_devices(["CPU:0", "CPU:1"])
    assert config.replica_devices() == ("/device:CPU:0",)


def test_devices_that_cannot_be_chosen_must_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, "strategy: {}\n")
    with pytest.raises(ConfigError, match=r"devices is missing.*no accelerator.*name one device per replica"):
        Config.load(path).with_devices(["/device:CPU:0"])
    with pytest.raises(ConfigError, match=rf"^{path}:1: devices is missing \(name one device per replica"):
        Config.load(path).replica_devices()


def test_places_survive_what_fills_in_devices(tmp_path: Path) -> None:
    path = write(tmp_path, "strategy:\n  hint: ring\n")
    config = Config.load(path).with_devices(["/device:GPU:0"])
    assert config.where("strategy", "hint") == f"{path}:2"
    assert Config.of(TWO).where("devices") == "config"


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config.of(TWO).microbatches = 3


def test_a_configuration_built_past_the_loader_is_checked_when_it_is_used() -> None:
    with pytest.raises(ConfigError, match="devices is empty"):
        Config(devices=()).require_usable()


def test_the_published_schema_is_current_and_describes_every_key() -> None:
    published = (ROOT / "docs" / "config.schema.json").read_text(encoding="utf-8")
    assert json.loads(published) == json.loads(schema_text()), "python -m autograph_rewrite.config.json_schema"
    for section in (json.loads(published), *json.loads(published)["$defs"].values()):
        assert section["additionalProperties"] is False
        assert all("description" in described or "$ref" in described for described in section["properties"].values())


def test_every_setting_says_what_it_means_and_the_schema_too() -> None:
    schema = Config.json_schema()
    for section in [schema, *schema["$defs"].values()]:
        for name, found in section.get("properties", {}).items():
            assert found.get("description"), f"{section['title']}.{name}"
