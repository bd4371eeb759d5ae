"""One driver for all verbs: what a configuration means does not depend on the verb that is given it."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.cluster import membership
from autograph_rewrite.compile import Job, compile_item, compile_task, request, with_processes
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.normalize.normalize import normalise
from tests.support.small_items import regression

TWO = {"devices": ["CPU:0", "CPU:1"]}
TF_CONFIG = json.dumps({"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}})


def machine(logical: list[str], physical: list[str]) -> Any:
    """Return as much of TensorFlow as tells its devices."""
    lists = {"list_logical_devices": logical, "list_physical_devices": physical}
    devices = {name: lambda known=known: [SimpleNamespace(name=one) for one in known] for name, known in lists.items()}
    return SimpleNamespace(config=SimpleNamespace(**devices))


def test_devices_that_are_left_out_are_the_accelerators_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    known = machine(["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"], ["/physical_device:GPU:0"])
    monkeypatch.setattr(membership, "tensorflow", lambda: known)
    assert ar.build_plan(regression(), {}).devices == ("/device:GPU:0", "/device:GPU:1")
    assert request(normalise(regression()), ar.Config.of({})).devices == ("/device:GPU:0", "/device:GPU:1")


def test_in_a_job_the_logical_devices_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known = machine([], ["/physical_device:CPU:0", "/physical_device:GPU:0"])
    known.config.list_logical_devices = None  # calling it would start TensorFlow before the process has joined
    monkeypatch.setattr(membership, "tensorflow", lambda: known)
    plan = ar.build_plan(regression(), {"cluster": {"workers": ["127.0.0.1:1", "127.0.0.1:2"]}})
    assert [device.rpartition("/")[2] for device in plan.devices] == ["device:GPU:0", "device:GPU:0"]


def test_verify_plans_for_the_processes_of_the_environment_as_all_verbs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    config = {"devices": ["CPU:0"]}
    assert ar.build_plan(regression(), config).workers == 2
    report = ar.verify(regression(), config)
    assert report.ok
    assert "the graphs of 2 processes fit together" in str(report)


def test_a_plan_for_a_cluster_can_be_made_where_nothing_says_which_process_this_is() -> None:
    config = ar.Config.of({**TWO, "cluster": {"workers": ["127.0.0.1:1", "127.0.0.1:2"]}})
    assert with_processes(config) is config
    with pytest.raises(ConfigError, match="nothing says which of them this is"):
        Job.of(config)
    assert Job.of(config, task=1) == Job(config, None, 1)


def test_a_task_without_a_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no worker 2: the plan has 1 of them"):
        ar.rewrite(regression(), TWO, task=2)


def test_a_task_is_compiled_as_the_item_is_and_leaves_it_as_it_was() -> None:
    item = normalise(regression())
    plan = request(item, ar.Config.of(TWO))
    before = item.graph.edits
    compiled = compile_task(item, plan)
    assert item.graph.edits == before
    assert compiled.graph_bytes == compile_item(item, plan, Job(plan)).graph_bytes


@pytest.mark.parametrize("verb", [ar.build_plan, ar.rewrite])
def test_a_warning_names_the_line_of_the_program(verb: Any) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        verb(regression(), {**TWO, "strategy": {"name": "AllReduce", "variables": "shared", "hint": "nccl"}})
    assert [warning.filename for warning in found if "hint" in str(warning.message)] == [__file__]
