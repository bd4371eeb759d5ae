"""Which configurations each item meets: every feature on several items, spread by a rule that draws nothing.

A recording holds the settings of each of its cases, so this table may change; what it has then counts from the next
recording on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle.rewrites import Case

Settings = Mapping[str, Any]
ADDRESSES = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
CONFIGS = Path(__file__).parents[2] / "configs"
CUTS = ("h0", "h1", "h2")
"""Where models of `tests.support.staged` end their stages."""
EVERY, EVERY_LARGE = 2, 8
"""One item in so many meets a configuration, and one large item."""
LARGE = 500
"""Nodes from which on an item counts as large: its rewrites take most of the time."""
APART = ("replicas",)
"""Items that only meet the configurations that name them: all others are refused."""
PRINTED = 3
"""So many cases of an item have their printed forms compared."""


@dataclass(frozen=True)
class Entry:
    """A configuration, the ranks whose graphs are compared, and the items that meet it (a pattern; all by turns)."""

    name: str
    settings: Callable[[Any], Settings]
    ranks: Sequence[int] | None = None
    items: str = ""


def cases(items: Mapping[str, Any]) -> Iterator[Case]:
    """All cases of some items, which are given by name."""
    table = list(entries())
    for place, (name, item) in enumerate(sorted(items.items())):
        size = sum(1 for _ in item.graph)
        every = EVERY if size < LARGE else EVERY_LARGE
        met = [entry for i, entry in enumerate(table) if _meets(entry, name, place + i, every)]
        printed = {met[(place + k * len(met) // PRINTED) % len(met)].name for k in range(PRINTED)}
        for entry in met:
            settings = entry.settings(item)
            for rank in entry.ranks or (0,):
                is_printed = entry.name in printed and rank == (entry.ranks or (0,))[-1]
                yield Case(name, entry.name, rank, settings, entry.ranks is not None, is_printed)


def _meets(entry: Entry, item: str, turn: int, every: int) -> bool:
    if entry.items:
        return re.fullmatch(entry.items, item) is not None
    return item not in APART and turn % every == 0


def entries() -> Iterator[Entry]:
    """The configurations."""
    for part in (_replicas, _micro_batches, _jobs, _fsdp, _compressors, _remat, _local, _policies, _steps):
        yield from part()
    for part in (_mesh, _stages, _stages_with_a_model_axis, _semantics):
        yield from part()


def _entry(name: str, settings: Settings, ranks: Sequence[int] | None = None, items: str = "") -> Entry:
    return Entry(name, lambda _: settings, ranks, items)


def _on(replicas: int, strategy: str = "AllReduce", variables: str | None = None, **more: Any) -> dict[str, Any]:
    mode = {} if variables is None else {"variables": variables}
    return {"devices": [f"CPU:{i}" for i in range(replicas)], "strategy": {"name": strategy, **mode}} | more


def _job(workers: int, replicas: int = 1, strategy: str = "AllReduce", servers: int = 0, **more: Any) -> dict[str, Any]:
    cluster: dict[str, Any] = {"workers": ADDRESSES[:workers]}
    if servers:
        cluster["ps"] = [f"127.0.0.1:{10 + i}" for i in range(servers)]
    return {**_on(replicas, strategy), "cluster": cluster, **more}


def _replicas() -> Iterator[Entry]:
    yield _entry("shared2", _on(2, variables="shared"))
    yield _entry("shared3", _on(3, variables="shared"))
    yield _entry("mirrored2", _on(2, variables="mirrored"))
    yield _entry("mirrored3", _on(3, variables="mirrored"))
    yield _entry("unbucketed", {**_on(2), "strategy": {"name": "AllReduce", "bucket_bytes": 0}})
    for name, replicas, mode in (
        ("PS", 2, "shared"),
        ("PSLoadBalancing", 3, "mirrored"),
        ("PartitionedPS", 3, "shared"),
        ("UnevenPartitionedPS", 3, None),
        ("PartitionedAR", 2, "mirrored"),
        ("RandomAxisPartitionAR", 2, None),
        ("Parallax", 3, "mirrored"),
        ("FSDP", 2, "mirrored"),
        ("Auto", 2, None),
    ):
        yield _entry(f"{name}{replicas}", _on(replicas, name, mode))
    yield _entry("auto_in_memory", _on(4, "Auto", memory_limit="64KiB"))


def _micro_batches() -> Iterator[Entry]:
    for form in ("unrolled", "loop"):
        how: dict[str, Any] = {"accumulation": {"form": form}}
        yield _entry(f"micro_{form}_one", _on(1, microbatches=3, **how))
        yield _entry(f"micro_{form}_shared", _on(2, variables="shared", microbatches=2, **how))
        yield _entry(f"micro_{form}_mirrored", _on(2, variables="mirrored", microbatches=2, **how))
        yield _entry(f"micro_{form}_servers", _on(2, "PSLoadBalancing", microbatches=2, **how))
        yield _entry(f"micro_{form}_fsdp", _on(2, "FSDP", microbatches=2, **how))
        yield _entry(f"micro_{form}_job", _job(2, microbatches=2, **how), (0, 1))
        by_turns: dict[str, Any] = {"accumulation": {"form": form, "layout": "interleaved"}}
        yield _entry(f"micro_{form}_interleaved", _on(2, variables="shared", microbatches=2, **by_turns))


def _jobs() -> Iterator[Entry]:
    yield _entry("job", _job(2), (0, 1))
    yield _entry("job_2x2", _job(2, 2), (0, 1))
    yield _entry("job_ring", _job(3) | {"strategy": {"name": "AllReduce", "hint": "ring"}}, (0, 2))
    yield _entry("job_shared", _job(2, 2) | {"strategy": {"name": "AllReduce", "variables": "shared"}}, (0, 1))
    yield _entry("job_fsdp", _job(2, strategy="FSDP"), (0, 1))
    yield _entry("job_partitioned_ar", _job(3, strategy="PartitionedAR"), (0, 2))
    yield _entry("job_ps", _job(2, strategy="PS", servers=1), (0, 1))
    yield _entry("job_balanced", _job(3, 2, strategy="PSLoadBalancing", servers=2), (0, 2))
    yield _entry("job_parallax", _job(3, strategy="Parallax", servers=2), (0, 2))
    stale = [{"match": ".*", "staleness": 2, "proxy": True}]
    yield _entry("job_stale", _job(2, strategy="PS", servers=1, variables=stale), (0, 1))
    alone = [{"match": ".*", "sync": False}]
    yield _entry("job_asynchronous", _job(2, strategy="PS", servers=2, variables=alone), (0, 1))
    yield _entry("job_padded", _job(2, padding="power_of_two"), (1,))
    yield _entry("job_own_input", _job(2, input="per_worker"), (1,))


def _fsdp() -> Iterator[Entry]:
    for stage in (1, 2, 3):
        over = [{"match": ".*", "partition": {"over": "data", "stage": stage}}]
        yield _entry(f"fsdp_stage{stage}", _on(2, variables="mirrored") | {"variables": over})
        yield _entry(f"fsdp_stage{stage}_job", _job(2, variables=over), (1,))


def _compressors() -> Iterator[Entry]:
    for name in ("fp16", "bf16", "fp16_ef", "bf16_ef", "topk", "powersgd", "int8_ef"):
        strategy = {"strategy": {"name": "AllReduce", "compressor": name}}
        yield _entry(f"{name}_job", _job(2) | strategy, (1,))
        yield _entry(f"{name}_one_process", _on(2) | strategy)
    yield _entry("powersgd_fsdp_job", _job(2) | {"strategy": {"name": "FSDP", "compressor": "bf16"}}, (1,))


def _remat() -> Iterator[Entry]:
    policies = ("sqrt", "hierarchical", "every:1", "every:2", "save_matmuls", "collection", "budget:32KiB")
    for name in policies:
        items = "with_checkpoints" if name == "collection" else ""
        yield _entry(f"remat_{name}", _on(2, remat={"policy": name}), items=items)
    given: Mapping[str, Any] = {
        "names": {"policy": "names", "names": [".*(Tanh|Relu|relu|Add|add|act|h\\d).*"]},
        "scopes": {"policy": "scopes", "scopes": [".*(layer|block|hidden|dense)[^/]*"]},
    }
    for name, remat in given.items():
        yield _entry(f"remat_{name}", _on(2, remat=remat))
    yield _entry("remat_micro", _on(2, microbatches=2, remat={"policy": "every:1"}))
    loop: dict[str, Any] = {"accumulation": {"form": "loop"}, "microbatches": 2}
    yield _entry("remat_micro_loop", _on(1, remat={"policy": "sqrt"}, **loop))
    yield _entry("remat_fsdp", _on(2, "FSDP", "mirrored", remat={"policy": "save_matmuls"}))
    yield _entry("remat_deep", _on(2, remat={"policy": "hierarchical"}), items="deep_.*")
    yield _entry("remat_deep_budget", _on(2, remat={"policy": "budget:24KiB"}), items="deep_.*")
    scopes = {"policy": "scopes", "scopes": ["layer_[4-9]|block_\\d+"]}
    yield _entry("remat_deep_scopes", _on(2, variables="mirrored", remat=scopes), items="deep_.*")
    offload: dict[str, Any] = {"policy": "sqrt", "offload": "auto"}
    yield _entry("remat_offload", {"devices": ["GPU:0", "GPU:1"], "remat": offload}, items="deep_.*|mlp|cnn")


def _local() -> Iterator[Entry]:
    yield _entry("local_sgd", _on(2, local_sgd={"period": 2}))
    yield _entry("local_sgd_warm", _on(3, local_sgd={"period": 4, "warmup_steps": 3}))
    yield _entry("local_sgd_slots", _on(2, local_sgd={"period": 2, "average_slots": False}))
    yield _entry("local_sgd_mirrored", _on(2, variables="mirrored", local_sgd={"period": 2}))
    yield _entry("local_sgd_job", _job(2, local_sgd={"period": 3}), (0, 1))


def _policies() -> Iterator[Entry]:
    pattern = ".*(moving|mean|total|count|average|good_steps).*"
    items = "cnn|cnn_fused|resnet_v1_graph|keras_cnn|mnist_convnet|vae|function_dense|custom_loop|loss_scaling"
    for synchronization in ("on_write", "on_read"):
        for aggregation in ("sum", "mean", "only_first_replica", "none"):
            one = {"match": pattern, "synchronization": synchronization, "aggregation": aggregation}
            name = f"{synchronization}_{aggregation}"
            own = {"match": "seen|means", **{key: one[key] for key in ("synchronization", "aggregation")}}
            yield _entry(name, _on(2, variable_policies=[one]), items=items)
            yield _entry(f"{name}_replicas", _on(3, variable_policies=[own]), items="replicas")
            yield _entry(f"{name}_replicas_job", _job(2, 2, variable_policies=[own]), (0, 1), "replicas")


def _steps() -> Iterator[Entry]:
    yield _entry("steps", _on(2, steps_per_run=3))
    yield _entry("steps_mirrored", _on(2, variables="mirrored", steps_per_run=5))
    yield _entry("steps_micro", _on(2, steps_per_run=3, microbatches=2))
    yield _entry("steps_job", _job(2, steps_per_run=3), (1,))
    yield _entry("steps_drawn", _on(2, steps_per_run=3), items="iterator")
    yield _entry("steps_drawn_job", _job(2, steps_per_run=3), (0, 1), "iterator")


def _mesh() -> Iterator[Entry]:
    for name, data, model in (("1x2", 1, 2), ("2x2", 2, 2), ("1x3", 1, 3), ("2x3", 2, 3)):  # 3: uneven blocks
        yield Entry(f"mesh_{name}", _sharded(data, model))
    yield Entry("mesh_1x2_micro", _sharded(1, 2, microbatches=2))
    yield Entry("mesh_2x2_loop", _sharded(2, 2, microbatches=2, accumulation={"form": "loop"}))
    yield Entry("mesh_2x2_mirrored", _sharded(2, 2, strategy={"name": "AllReduce", "variables": "mirrored"}))
    yield Entry("mesh_2x2_fsdp", _sharded(2, 2, strategy={"name": "FSDP"}))
    yield Entry("mesh_1x2_remat", _sharded(1, 2, remat={"policy": "every:2"}))
    yield Entry("mesh_2x2_job", _sharded(2, 2, workers=2), (0, 1))
    yield Entry("mesh_1x2_over_job", _sharded(1, 2, workers=2), (0, 1))
    yield Entry("mesh_[2,2]", _on_two_axes(1))
    yield Entry("mesh_2x[2,2]", _on_two_axes(2))
    yield _entry("mesh_auto", _on(4, "Auto", mesh={"data": 2, "model": 2}))
    for data in (1, 2):
        yield Entry(f"mesh_images_{data}x2", _images(data, 2), items="split_images|mnist_convnet|keras_cnn|cnn")
    yield Entry("mesh_images_1x3", _images(1, 3), items="split_images|cnn_fused|resnet_v1_graph")
    for model in (2, 3):
        yield Entry(f"mesh_split_2x{model}", _sharded(2, model, rows_first=False), items="split_mlp")
    yield _entry("megatron", _preset("megatron"), items="text_transformer|switch_transformer")
    yield _entry("gspmd_2d", _preset("gspmd_2d"), items="text_transformer")
    yield _entry("vocabulary", _preset("vocabulary_parallel"), items="text_transformer|switch_transformer")
    rows = [{"match": "words|table|embedding|embeddings", "split": ["model", 1]}]
    yield _entry("rows_of_tables", _on(4, mesh={"model": 2}, sharding=rows), items="ptb.*|word2vec.*|language_model")


def _preset(name: str) -> Settings:
    """A shipped configuration as its file says it."""
    import yaml

    found: Settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return found


def _matrices(item: Any) -> list[str]:
    """The matrices that are trained, as far as names tell; slots follow their variables."""
    names = [one.name for one in item.variables.values() if one.shape is not None and len(one.shape) == 2]
    slot = re.compile(r".*(optimizer|adam|momentum|velocity|ftrl|rmsprop|accumulator|average|_[12]$).*", re.IGNORECASE)
    return [name for name in sorted(names) if not slot.fullmatch(name)]


def _sharded(
    data: int, model: int, *, workers: int = 0, rows_first: bool = False, **more: Any
) -> Callable[[Any], Settings]:
    """Matrices are cut by columns and by rows in turn."""

    def settings(item: Any) -> Settings:
        ways = [[1, "model"], ["model", 1]][:: -1 if rows_first else 1]
        cut = [{"match": re.escape(name), "split": ways[i % 2]} for i, name in enumerate(_matrices(item))]
        given = _job(workers, data * model // workers) if workers else _on(data * model)
        return {**given, "mesh": {"data": data, "model": model}, "sharding": cut, **more}

    return settings


def _on_two_axes(data: int) -> Callable[[Any], Settings]:
    def settings(item: Any) -> Settings:
        cut = [{"match": re.escape(name), "axes": [i % 2, 1 - i % 2]} for i, name in enumerate(_matrices(item))]
        return {**_on(data * 4), "mesh": {"data": data, "model": [2, 2]}, "sharding": cut}

    return settings


def _images(data: int, model: int) -> Callable[[Any], Settings]:
    def settings(item: Any) -> Settings:
        (name,) = (name for name, one in item.inputs.items() if one.shape is not None and len(one.shape) == 4)
        cut = [{"match": re.escape(name), "split": [1, "model", 1, 1]}]
        return {**_on(data * model), "mesh": {"data": data, "model": model}, "sharding": cut}

    return settings


def _pipeline(stages: int, cuts: Sequence[str] | None = CUTS, microbatches: int = 4, **more: Any) -> Settings:
    given = {} if cuts is None else {"boundaries": list(cuts[: stages - 1])}
    return {"stages": stages, "microbatches": microbatches, **given, **more}


def _stages() -> Iterator[Entry]:
    staged = "staged_.*"
    one = {"devices": ["CPU:0"]}
    for schedule in ("gpipe", "1f1b"):
        yield _entry(f"stages_{schedule}", {**one, "pipeline": _pipeline(4, schedule=schedule)}, items=staged)
    for schedule in ("interleaved", "circular"):
        rounds = {"stages": 2, "microbatches": 4, "boundaries": list(CUTS), "circular_repeat": 2, "schedule": schedule}
        yield _entry(f"stages_{schedule}", {**one, "pipeline": rounds}, items=staged)
    yield _entry("stages_loop", {**one, "pipeline": _pipeline(2, form="loop")}, items=staged)
    yield _entry("stages_loop4", {**one, "pipeline": _pipeline(4, form="loop")}, items=staged)
    yield _entry("stages_rows", {**one, "pipeline": _pipeline(2, layout="interleaved")}, items=staged)
    yield _entry("stages_2x2", {**_on(4), "strategy": {"name": "Pipeline"}, "pipeline": _pipeline(2)}, items=staged)
    yield _entry("stages_remat", {**one, "pipeline": _pipeline(4), "remat": {"policy": "every:1"}}, items=staged)
    hosts = {"strategy": {"name": "Pipeline"}, "pipeline": _pipeline(2, microbatches=2)}
    yield _entry("stages_hosts", {**_job(2), **hosts}, (0, 1), staged)
    servers = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "PSLoadBalancing"}}
    yield _entry("stages_servers", {**servers, "pipeline": _pipeline(2)}, items=staged)
    yield _entry("stages_balanced", {**_on(2), "pipeline": _pipeline(2, None, 2)})
    yield _entry("stages_balanced_loop", {**_on(2), "pipeline": _pipeline(2, None, 2, form="loop")})
    yield _entry("stages_balanced_2x2", {**_on(4), "pipeline": _pipeline(2, None, 2)})


def _stages_with_a_model_axis() -> Iterator[Entry]:
    items = "staged_.*|split_mlp"
    for data, name in ((1, "1x2x2"), (2, "2x2x2")):
        yield Entry(f"stages_{name}", _staged_mesh(data), items=items)
    yield Entry("stages_1x2x2_loop", _staged_mesh(1, form="loop"), items=items)
    yield Entry("stages_1x2x2_gpipe", _staged_mesh(1, schedule="gpipe"), items=items)
    yield Entry("stages_1x2x3", _staged_mesh(1, model=3), items=items)


def _staged_mesh(data: int, model: int = 2, **more: Any) -> Callable[[Any], Settings]:
    sharded = _sharded(data, model)

    def settings(item: Any) -> Settings:
        given = sharded(item)
        devices = [f"CPU:{i}" for i in range(data * model * 2)]
        cuts = CUTS[1:] if item.init_op else None  # the first boundary is cut itself; the other item has no names
        mesh = {**given["mesh"], "stage": 2}
        pipeline = _pipeline(2, cuts, 2, **more)
        return {**given, "devices": devices, "mesh": mesh, "pipeline": pipeline, "strategy": {"name": "Pipeline"}}

    return settings


def _semantics() -> Iterator[Entry]:
    yield _entry("local_norm", _on(2, semantics={"batch_norm": "local"}))
    yield _entry("local_norm_all", _on(2, semantics={"batch_norm": "local"}), items="cnn|cnn_fused|keras_cnn|resnet.*")
    yield _entry("independent", _on(2, semantics={"random": "independent"}))
    yield _entry("independent_all", _on(3, semantics={"random": "independent"}), items="draws|staged_dropout|deep_.*")
    yield _entry("strict", _on(2, semantics={"strict": True}))
