"""Auto over the mesh: what it proposes to cut by itself, within the memory that there is, and how plans are ranked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.cost.search import Evaluator
from autograph_rewrite.cost.simulate import Hardware
from autograph_rewrite.errors import PlanError
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.plan.parts.notes import ranking
from autograph_rewrite.strategies import STRATEGIES
from autograph_rewrite.strategies.auto import MeshSearch, on_mesh, pattern_of
from benchmarks.auto_memory import measured_peak
from benchmarks.memory_limits import LIMITED
from benchmarks.mesh_models import MODELS
from tests.support import split_models
from tests.zoo import ZOO, Options, transformer

NARROW = LIMITED["narrow"]
"""Variables and moments take 36 MiB, and activations next to nothing."""


def splits(plan: ar.Plan) -> dict[str, tuple[int, ...]]:
    """Return the parts of each dimension by variable, with numbers as one pattern."""
    assert plan.model is not None
    return {pattern_of(one.name).replace("\\", ""): one.split for one in plan.model.shardings}


def test_of_a_transformer_it_finds_columns_and_then_rows_with_two_sums_per_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(transformer._SHAPES, "small", replace(transformer._SHAPES["small"], layers=1))
    built = ZOO["transformer"].builder(Options(size="small", optimizer="adam", dtype="float32"))
    item = ar.GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs),
    )
    auto = {"devices": ["CPU:0", "CPU:1"], "mesh": {"data": 1, "model": 2}, "strategy": {"name": "Auto"}}
    plan = ar.build_plan(item, auto)
    found = splits(plan)
    assert {found[f"layer_d+/{name}/w"] for name in ("query", "key", "value", "inner")} == {(1, 2)}
    assert {found[f"layer_d+/{name}/w"] for name in ("output", "outer")} == {(2, 1)}
    forward = [
        edge.value
        for edge in plan.model_edges
        if edge.from_ == "partial(sum)" and edge.value.startswith("layer_") and edge.lowering == "add_n"
    ]
    assert Counter(value.partition("/")[0] for value in forward) == {"layer_0": 2}
    assert not [edge for edge in plan.model_edges if edge.lowering == "concat"]


def test_variables_that_do_not_fit_one_device_are_cut_and_train_within_the_limit() -> None:
    item = NARROW.item()
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "Auto"}, "memory_limit": NARROW.limit}
    plan = ar.build_plan(item, config)
    assert sorted((one.name, one.split) for one in plan.model.shardings) == [  # type: ignore[union-attr]
        ("w0", (1, 2)), ("w1", (2, 1)), ("w2", (1, 2)), ("w3", (2, 1)),
    ]  # fmt: skip
    assert ar.simulate(item, plan).peak_bytes <= NARROW.limit
    assert measured_peak(item, plan, NARROW.feeds()) <= NARROW.limit
    plain = {"devices": ["CPU:0"], "strategy": {"name": "AllReduce"}}
    assert measured_peak(item, plain, NARROW.feeds()) > NARROW.limit
    assert ar.verify(item, plan).ok


def test_parameters_and_activations_that_do_not_fit_train_on_a_stated_mesh_within_the_limit() -> None:
    chosen, limit = MODELS["transformer"], 18 * 2**20
    item, feeds = chosen.item(32), chosen.feeds(32)
    mesh = {"devices": ["CPU:0", "CPU:1"], "mesh": {"data": 1, "model": 2}}
    plan = ar.build_plan(item, {**mesh, "strategy": {"name": "Auto"}, "memory_limit": limit, "microbatches": 1})
    assert plan.model is not None
    assert plan.model.shardings
    assert measured_peak(item, plan, feeds) <= limit < measured_peak(item, {"devices": ["CPU:0"]}, feeds)
    assert ar.verify(item, plan).ok


def test_plans_are_ranked_in_words_and_as_data() -> None:
    item = MODELS["layers"].item(32)
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "Auto"}, "memory_limit": "1GiB"}
    rows = ranking(ar.build_plan(item, config).notes)
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows == sorted(rows, key=lambda row: (not row["fits"], row["milliseconds"]))
    assert any("mesh 1 x 2" in row["plan"] for row in rows)
    assert [row["verdict"] for row in rows].count("chosen") == 1
    text = "rank 2 | 4.5 ms | 24.25 MiB | 1.5 MiB moved | does not fit | too large | AllReduce (shared), 2 stages"
    assert ranking([text, "something else"]) == [
        {
            **{"rank": 2, "milliseconds": 4.5, "mebibytes": 24.25, "moved": 1.5, "fits": False},
            **{"verdict": "too large", "plan": "AllReduce (shared), 2 stages"},
        }
    ]


def test_what_fits_nowhere_says_the_least_of_all_meshes() -> None:
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "Auto"}, "memory_limit": "1MiB"}
    with pytest.raises(PlanError, match="mesh 1 x 2"):
        ar.build_plan(NARROW.item(), config)


def test_annotations_of_the_user_are_kept() -> None:
    config = split_models.config(1, 2, strategy={"name": "Auto"})
    plan = ar.build_plan(split_models.item(), config)
    assert plan.model == ar.build_plan(split_models.item(), split_models.config(1, 2)).model


@pytest.mark.parametrize("name", MODELS)
def test_each_model_is_cut_so_that_a_device_holds_less_and_one_is_cut_the_same_again(name: str) -> None:
    item = normalise(MODELS[name].item(32))

    def search() -> MeshSearch:
        config = on_mesh(Config.of({"devices": ["CPU:0", "CPU:1"]}), 1, 2)

        def build(chosen: Config) -> Any:
            return STRATEGIES["AllReduce"].build(item, chosen)

        hardware = Hardware(Machine(onednn=True))  # where what a convolution holds depends on its images
        return MeshSearch(item, config, Evaluator(item, hardware), build, limit=1)

    one = search().run()
    if name == "layers":
        assert [priced.cuts for priced in one] == [priced.cuts for priced in search().run()]
    assert one[-1].found.peak_bytes < 0.8 * one[0].found.peak_bytes
