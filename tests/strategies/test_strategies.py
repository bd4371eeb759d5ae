"""Strategy builders: pure functions from item and configuration to a plan that fits both."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.strategy_names import KNOWN
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan.parts.graph_digest import graph_digest
from autograph_rewrite.plan.parts.messages import BatchInput, Options
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import check
from autograph_rewrite.strategies import STRATEGIES, builder_for, named_builder
from tests.support.paths import CONFIGS
from tests.support.plan_items import TWO_DEVICES, small_item

TWO = {"devices": ["CPU:0", "CPU:1"]}
LOGICAL = ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]


def build(config: dict[str, object]) -> Plan:
    read = Config.of({**TWO, **config})
    return builder_for(read).build(small_item(), read)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_shipped_configuration_gives_a_plan_that_fits(path: Path, tmp_path: Path) -> None:
    item, config = small_item(), Config.load(path).with_devices(LOGICAL)
    plan = named_builder(config).build(item, config)
    problems = [str(problem) for problem in check(plan, item)]
    assert [problem for problem in problems if "not available yet" not in problem] == []
    assert plan.replicas >= 2 or plan.part_devices
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_knob_of_a_shipped_configuration_has_a_comment(path: Path) -> None:
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    assert first == "# yaml-language-server: $schema=../docs/config.schema.json"
    sections = ("strategy:", "semantics:")
    assert [line for line in lines if "#" not in line and line not in sections] == []


def test_configurations_for_the_common_cases_are_shipped() -> None:
    common = {"all_reduce", "all_reduce_mirrored", "all_reduce_local_bn", "all_reduce_4"}
    assert common <= {path.stem for path in CONFIGS}


def test_all_reduce_replicates_every_variable_that_is_not_known_to_be_untrained() -> None:
    item = small_item()
    plan = build({})
    assert plan.devices == TWO_DEVICES
    assert plan.mode == "shared"
    assert plan.strategy == "AllReduce"
    assert plan.batch_inputs == (BatchInput("x", 0),)
    assert [request.name for request in plan.variables] == ["dense/kernel", "dense/bias", "count"]
    assert {request.placement for request in plan.variables} == {"replicated"}
    assert plan.graph_digest == graph_digest(item.graph)
    assert plan.edges == ()


def test_the_configuration_reaches_the_plan_knob_by_knob() -> None:
    plan = build(
        {
            "strategy": {"variables": "mirrored", "hint": "ring", "bucket_bytes": "1KiB"},
            "semantics": {"batch_norm": "local", "random": "independent", "strict": True},
            "timeout_seconds": 5,
        }
    )
    assert plan.mode == "mirrored"
    assert plan.default == Options(hint="ring", bucket_bytes=1024)
    assert plan.options_of("dense/kernel") == plan.default
    assert (plan.semantics.batch_norm, plan.semantics.random, plan.semantics.strict) == (
        "local",
        "independent",
        True,
    )
    assert plan.timeout_seconds == 5


def test_of_the_overrides_that_match_the_whole_name_the_first_counts() -> None:
    overrides = [
        {"match": "dense/kernel", "bucket_bytes": 0},
        {"match": "dense/.*", "hint": "ring"},
        {"match": ".*momentum", "hint": "nccl"},
    ]
    plan = build({"variables": overrides})
    assert plan.options_of("dense/kernel") == Options(bucket_bytes=0)
    assert plan.options_of("dense/bias") == Options(hint="ring")
    assert plan.options_of("count") == Options()
    assert plan.options_of("dense/kernel/momentum") == Options(hint="ring")  # named, though it is not trained


def test_an_override_that_matches_nothing_is_an_error_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "devices: [CPU:0, CPU:1]\nvariables:\n- {match: dense/kernal}\n- {match: dense}\n- {match: count}\n"
    )
    config = Config.load(path)
    with pytest.raises(ConfigError) as caught:
        builder_for(config).build(small_item(), config)
    said = str(caught.value)
    assert f"{path}:3: variables[0].match: no variable's whole name matches 'dense/kernal'" in said
    assert "did you mean 'dense/kernel'?" in said
    assert f"{path}:4: variables[1].match: no variable's whole name matches 'dense'" in said
    assert "variables[2]" not in said


def test_the_same_item_and_configuration_give_the_same_plan_in_every_process(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = fresh_python(
        "import sys\n"
        "from autograph_rewrite.config.config import Config\n"
        "from autograph_rewrite.strategies import STRATEGIES\n"
        "from tests.support.plan_items import small_item\n"
        "plan = STRATEGIES['AllReduce'].build(small_item(), Config.of({'devices': ['CPU:0', 'CPU:1']}))\n"
        "print(plan.to_yaml(), end='')\n"
        "print('tensorflow' in sys.modules)\n"
    )
    assert done.stdout == build({}).to_yaml() + "False\n"


def test_building_changes_neither_the_graph_nor_the_configuration() -> None:
    item, config = small_item(), Config.of(TWO)
    edits, before = item.graph.edits, config.model_dump_json()
    assert STRATEGIES["AllReduce"].build(item, config) == STRATEGIES["AllReduce"].build(item, config)
    assert (item.graph.edits, config.model_dump_json()) == (edits, before)


def test_every_name_of_the_configuration_has_a_builder_and_every_builder_its_name() -> None:
    assert tuple(STRATEGIES) == KNOWN


def test_devices_must_be_known_when_the_plan_is_built() -> None:
    with pytest.raises(ConfigError, match="devices is missing"):
        STRATEGIES["AllReduce"].build(small_item(), Config.of({}))
