"""Auto: at least as good in simulation as the best single builder, the same each time, and with its reasons."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.search import Evaluator
from autograph_rewrite.cost.simulate import Hardware
from autograph_rewrite.errors import PassError, PlanError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import check
from autograph_rewrite.strategies import STRATEGIES, builder_for, named_builder
from autograph_rewrite.strategies.assemble import trained_variables
from autograph_rewrite.strategies.auto import NODES, Auto, _alike
from tests.support.covering import covering
from tests.support.plan_tables import tables
from tests.support.small_items import regression

SINGLE = {name: builder for name, builder in STRATEGIES.items() if name not in ("Auto", "Pipeline")}
WORKERS = [f"h{i}:1" for i in range(8)]
SLOW = {"workers": WORKERS, "ps": ["p:1", "q:1"], "network": {"bandwidth_gbps": 1, "latency_us": 200}}
FAST = {"workers": WORKERS, "network": {"bandwidth_gbps": 100, "latency_us": 5}}
CASES = [
    {"devices": ["GPU:0"], "cluster": SLOW},
    {"devices": ["GPU:0"], "cluster": FAST},
    {"devices": ["CPU:0", "CPU:1"]},
]
IDS = ["slow", "fast", "process"]


def config(**changes: Any) -> Config:
    strategy = {"name": "Auto", **changes.pop("strategy", {})}
    return Config.of({"devices": ["CPU:0", "CPU:1"], **changes, "strategy": strategy})


def chosen(item: GraphItem, read: Config) -> Plan:
    return Auto(SINGLE, every=True).build(item, read)


def seconds(item: GraphItem, plan: Plan, read: Config) -> float:
    network = read.cluster.network if read.cluster is not None else None
    return Evaluator(item, Hardware(network=network)).simulate(plan).step_seconds


def best_single(item: GraphItem, read: Config) -> float:
    found = []
    for name in SINGLE:
        section = read.strategy.model_copy(update={"name": name})
        own = read.model_copy(update={"strategy": section})
        found.append(seconds(item, named_builder(own).build(item, own), read))
    return min(found)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_no_single_builder_is_better(case: dict[str, Any]) -> None:
    item, read = tables(), config(**case)
    plan = chosen(item, read)
    assert plan.strategy == "Auto"
    assert seconds(item, plan, read) <= best_single(item, read)
    assert [str(p) for p in check(plan, item) if "not available yet" not in str(p)] == []
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_the_plan_says_what_was_compared_and_why_it_was_chosen() -> None:
    notes = chosen(tables(), config(**CASES[0])).notes
    assert notes[-3].startswith("Auto simulated ")
    assert all(name in notes[-2] for name in SINGLE)
    assert notes[-1].startswith("it began with ")


def test_plans_are_compared_for_the_batch_that_is_given() -> None:
    item, read = normalise(regression()), config()

    def told(*notes: str) -> str:
        return re.findall(r"plans for steps of ([\d,]+) examples", "\n".join(notes))[0]

    assert told(*builder_for(read).build(item, read).notes) == "64"
    assert told(*ar.build_plan(item, read, batch=1024).notes) == "1,024"
    assert told(*ar.rewrite(item, read, batch=1024).report.plan.notes) == "1,024"
    limited = config(memory_limit="1GiB")
    assert told(*ar.build_plan(item, limited, batch=1024).notes) == "1,024"


def test_a_larger_batch_needs_more_of_the_memory_limit() -> None:
    item, read = normalise(regression()), config(memory_limit="1MiB")
    ar.build_plan(item, read)
    with pytest.raises(PlanError, match=r"takes [\d,]+ B on a device for 1,000,000 examples"):
        ar.build_plan(item, read, batch=1_000_000)


def test_what_is_sent_over_a_slow_network_counts_more() -> None:
    slow, fast = (chosen(tables(), config(**case)) for case in CASES[:2])
    assert slow.variables != fast.variables


def test_the_user_has_the_last_word() -> None:
    override = {"match": "kernel", "synchronizer": "ps"}
    plan = chosen(tables(), config(**CASES[0], variables=[override], strategy={"bucket_bytes": 1024}))
    found = {request.name: request for request in plan.variables}
    assert found["kernel"].placement == "single"
    assert {request.options.bucket_bytes for request in plan.variables} == {1024}
    mirrored = chosen(tables(), config(strategy={"variables": "mirrored"}))
    assert mirrored.mode == "mirrored"


def test_lossy_compressors_are_used_only_where_the_configuration_allows_one() -> None:
    slow = {
        "devices": ["GPU:0"],
        "cluster": {"workers": WORKERS, "network": {"bandwidth_gbps": 0.001, "latency_us": 1}},
    }
    assert compressors(config(**slow)) == {"w": "none"}
    assert compressors(config(**slow, strategy={"compressor": "fp16"})) == {"w": "fp16"}
    never = [{"match": "w", "compressor": "none"}]
    assert compressors(config(**slow, variables=never, strategy={"compressor": "fp16"})) == {"w": "none"}


def compressors(read: Config) -> dict[str, str]:
    return {request.name: request.options.compressor for request in chosen(regression(), read).variables}


def test_only_what_can_be_carried_out_is_chosen_for_a_user() -> None:
    read = config()
    item = tables()
    plan = builder_for(read).build(item, read)
    assert [str(p) for p in check(plan, item)] == []


def test_every_process_finds_the_same_plan(fresh_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = fresh_python(
        "import sys\n"
        "from tests.strategies.test_auto import CASES, chosen, config, tables\n"
        "print(chosen(tables(), config(**CASES[0])).to_yaml(), end='')\n"
        "print('tensorflow' in sys.modules)\n"
    )
    assert done.stdout == chosen(tables(), config(**CASES[0])).to_yaml() + "False\n"


@pytest.mark.parametrize(("model", "case"), covering(["transformer", "language_model"], CASES[:2]))
def test_a_real_model_is_searched_with_few_simulations(model: str, case: dict[str, Any]) -> None:
    from tests.zoo import ZOO

    built = ZOO[model].build(optimizer="adam", size="small" if model == "transformer" else "large", dtype="float32")
    item = normalise(
        GraphItem.from_graph(
            built.graph, train_op=built.train_op, outputs=list(built.outputs), batch_inputs=dict(built.batch_inputs)
        )
    )
    read = config(**case)
    plan = chosen(item, read)
    told = re.search(r"Auto simulated (\d+) plans", "\n".join(plan.notes))
    assert told is not None
    assert int(told[1]) * len(item.graph) < NODES, "the time of a search is that of the nodes that it simulates"
    assert seconds(item, plan, read) <= best_single(item, read)


def test_what_cannot_be_built_gives_way_to_the_next_best_and_the_plan_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    item, tried = normalise(regression()), []
    real = pass_pipeline.try_out

    def try_out(request: Request) -> None:
        tried.append(request.plan)
        if len(tried) < 3:
            raise PassError(f"no way {len(tried)}")
        real(request)

    monkeypatch.setattr(pass_pipeline, "try_out", try_out)
    plan = Auto(SINGLE).build(item, config())
    assert [note.partition("cannot be built: ")[2] for note in plan.notes[:2]] == ["no way 1", "no way 2"]
    assert (plan.variables, plan.mode) == (tried[-1].variables, tried[-1].mode)


def test_where_nothing_can_be_built_the_reason_of_the_best_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_out(request: Request) -> None:
        raise PassError("no way at all")

    monkeypatch.setattr(pass_pipeline, "try_out", try_out)
    with pytest.raises(PassError, match="no way at all"):
        Auto(SINGLE).build(normalise(regression()), config())


def test_variables_of_one_shape_and_role_are_tried_as_one() -> None:
    again = {f"{name}/again": one for name, one in trained_variables(tables()).items()}
    groups = _alike(trained_variables(tables()) | again)
    assert {len(group) for group in groups} == {2}
    assert len({(one.shape, one.role.sparse) for group in groups for one in group}) == len(groups)
