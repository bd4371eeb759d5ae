"""Strategy builders: exact counts of shards, balanced servers, overrides that win, and plans that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autograph_rewrite.analysis.variable_uses import roles
from autograph_rewrite.config import user_code
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan.parts.messages import Server, VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import check
from autograph_rewrite.strategies import STRATEGIES, named_builder
from autograph_rewrite.strategies.builder import Load, shard_sizes, smallest_divisor, smallest_non_divisor
from tests.support.plan_tables import SHAPES, tables

TWO = {"devices": ["CPU:0", "CPU:1"]}
HOSTS = ("/device:CPU:0", "/device:CPU:1")
PS = tuple(f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in range(3))
JOB = {
    "devices": ["GPU:0", "GPU:1"],
    "cluster": {"workers": ["a:1", "b:1"], "ps": ["c:1", "d:1", "e:1"]},
}


def build(name: str, **config: Any) -> Plan:
    """The plan of a builder for the tables; it fits, but for what passes cannot do yet."""
    read = Config.of({**TWO, "strategy": {"name": name}, **config})
    plan = named_builder(read).build(tables(), read)
    problems = [str(problem) for problem in check(plan, tables())]
    assert [problem for problem in problems if "not available yet" not in problem] == []
    assert Plan.from_yaml(plan.to_yaml()) == plan
    return plan


def plan_of(path: Path) -> Plan:
    config = Config.load(path)
    return named_builder(config).build(tables(), config)


def asked(plan: Plan) -> dict[str, VariableRequest]:
    return {request.name: request for request in plan.variables}


def counts(plan: Plan) -> dict[str, int]:
    return {request.name: len(request.sizes) for request in plan.variables}


@pytest.mark.parametrize(("size", "count"), [(12, 2), (9, 3), (7, 7), (2, 2), (1, 1), (0, 1), (35, 5)])
def test_equal_shards_are_as_many_as_the_smallest_divisor_says(size: int, count: int) -> None:
    assert smallest_divisor(size) == count


@pytest.mark.parametrize(("size", "count"), [(12, 5), (6, 4), (2, 2), (3, 2), (1, 1), (7, 2), (60, 7)])
def test_uneven_shards_are_as_many_as_the_smallest_number_that_does_not_divide_says(size: int, count: int) -> None:
    assert smallest_non_divisor(size) == count


def test_the_first_shards_are_one_longer() -> None:
    assert shard_sizes(10, 4) == (3, 3, 2, 2)
    assert shard_sizes(12, 5) == (3, 3, 2, 2, 2)
    assert shard_sizes(7, 7) == (1,) * 7


def test_roles_tell_rows_from_whole_gradients() -> None:
    found = roles(tables())
    assert {name for name, role in found.items() if role.sparse} == {"table"}
    assert {name for name, role in found.items() if role.trained} == set(SHAPES)


def test_where_nothing_says_what_is_trained_it_is_what_the_outputs_depend_on() -> None:
    found = roles(tables(trainable=None))
    assert {name for name, role in found.items() if role.trained} == set(SHAPES)


def test_ps_puts_everything_on_the_first_server() -> None:
    plan = asked(build("PS"))
    assert {request.servers for request in plan.values()} == {HOSTS[:1]}
    assert {request.placement for request in plan.values()} == {"single"}
    assert {request.options.synchronizer for request in plan.values()} == {"ps"}
    assert {request.server for request in plan.values()} == {Server()}
    assert set(plan) == set(SHAPES)  # the slot follows its variable
    assert {request.servers for request in build("PS", **JOB).variables} == {PS[:1]}


def test_without_parameter_servers_a_job_is_served_by_its_workers() -> None:
    job = {"devices": ["GPU:0"], "cluster": {"workers": ["a:1", "b:1"]}}
    worker = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in (0, 1)]
    assert {request.servers for request in build("PS", **job).variables} == {(worker[0],)}
    balanced = {request.servers for request in build("PSLoadBalancing", **job).variables}
    assert balanced == {(worker[0],), (worker[1],)}
    assert {r.servers for r in build("PSLoadBalancing", devices=["GPU:0", "GPU:1"]).variables} == {HOSTS[:1]}


def test_load_goes_to_the_server_that_holds_least_and_of_equals_to_the_first() -> None:
    plan = asked(build("PSLoadBalancing", **JOB))
    sizes = {"table": 192, "tied": 144, "kernel": 96, "prime": 112, "row": 16, "bias": 24, "scale": 4, "branched": 192}
    load = dict.fromkeys(PS, 0)
    for name, request in plan.items():
        least = min(load, key=load.__getitem__)
        assert request.servers == (least,), name
        load[least] += sizes[name]
    assert [plan[name].servers[0] for name in ("table", "tied", "kernel", "prime")] == [PS[0], PS[1], PS[2], PS[2]]


def test_partitioned_ps_takes_the_smallest_divisor_and_turns_on_the_servers() -> None:
    plan = build("PartitionedPS", **JOB)
    expected = {"table": 2, "tied": 3, "kernel": 2, "prime": 7, "row": 0, "bias": 2, "scale": 0, "branched": 2}
    assert counts(plan) == expected
    found = asked(plan)
    assert found["table"].placement == "split(0)"
    assert found["table"].servers == PS[:2]
    assert found["tied"].servers == (PS[2], PS[0], PS[1])  # the least loaded first
    assert found["branched"].placement == "split(0)"  # read in a branch
    assert found["scale"].placement == "single"


def test_uneven_partitioned_ps_takes_the_smallest_number_that_does_not_divide() -> None:
    found = asked(build("UnevenPartitionedPS", **JOB))
    assert found["table"].sizes == (3, 3, 2, 2, 2)
    assert found["bias"].sizes == (2, 2, 1, 1)
    assert found["tied"].sizes == (5, 4)
    assert found["kernel"].sizes == (2, 1, 1)


def test_partitioned_ar_splits_as_partitioned_ps_does_and_needs_no_server() -> None:
    plan = build("PartitionedAR")
    assert counts(plan) == counts(build("PartitionedPS"))
    assert {request.servers for request in plan.variables} == {()}
    assert {request.options.synchronizer for request in plan.variables} == {"all_reduce"}
    assert asked(plan)["scale"].placement == "replicated"


def test_a_random_axis_is_one_that_can_be_split_and_the_same_each_time() -> None:
    plan = build("RandomAxisPartitionAR")
    assert plan == build("RandomAxisPartitionAR")
    found = asked(plan)
    assert found["table"].placement == "split(0)"  # its gradient consists of rows
    assert found["row"].placement == "split(1)"  # the only axis above 1
    assert {found[name].placement for name in ("tied", "kernel", "prime")} == {"split(0)", "split(1)"}
    for name in ("tied", "kernel", "prime"):
        axis = int(found[name].placement[6])
        assert sum(found[name].sizes) == SHAPES[name][axis]


def test_parallax_serves_rows_and_reduces_the_rest() -> None:
    found = asked(build("Parallax", **JOB))
    assert {name for name, request in found.items() if request.placement == "single"} == {"table"}
    assert found["table"].server == Server(proxy=False)
    assert found["kernel"].options.synchronizer == "all_reduce"


def test_fsdp_gives_each_replica_a_shard_where_there_are_enough_rows() -> None:
    plan = build("FSDP", devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    found = asked(plan)
    assert found["table"].sizes == (3, 3, 3, 3)
    assert found["table"].servers == plan.devices
    assert found["table"].stage == 3
    assert found["tied"].placement == "split(1)"  # 9 rows cannot be shared out evenly, 4 columns can
    assert found["bias"].sizes == (2, 2, 1, 1)
    assert found["scale"].placement == "replicated"
    assert found["branched"].sizes == (3, 3, 3, 3)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "Pipeline"])  # which has a section
def test_overrides_win_over_every_builder(name: str) -> None:
    overrides = [
        {"match": "kernel", "synchronizer": "ps", "sync": False, "proxy": True},
        {"match": "tied", "synchronizer": "all_reduce", "partition": {"axis": 1, "shards": 4}},
        {"match": "table", "synchronizer": "ps", "partition": {"shards": 3}, "staleness": 2},
        {"match": "prime", "partition": {"over": "data", "stage": 2}},
    ]
    found = asked(build(name, variables=overrides))
    assert found["kernel"].server == Server(sync=False, proxy=True)
    assert found["kernel"].options.synchronizer == "ps"
    assert (found["tied"].placement, found["tied"].sizes, found["tied"].servers) == ("split(1)", (1,) * 4, ())
    assert found["table"].sizes == (4, 4, 4)
    assert set(found["table"].servers) == set(HOSTS)
    assert found["table"].server == Server(staleness=2)
    assert (found["prime"].stage, found["prime"].placement, found["prime"].servers) == (2, "split(1)", HOSTS)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"match": "kernel", "staleness": 1}, "variables[0].staleness belongs to parameter servers; 'kernel'"),
        ({"match": "scale", "partition": {"shards": 2}}, "'scale' is a scalar, which has no axis to split"),
        ({"match": "bias", "partition": {"axis": 1, "shards": 2}}, "'bias' has 1 axes, so no axis 1"),
        ({"match": "prime", "partition": {"shards": 8}}, "'prime' has 7 along axis 0, too few for 8 shards"),
        ({"match": "kernel/Momentum", "synchronizer": "ps"}, "is the first match of no variable that is trained"),
        ({"match": "kernel", "partition": {"over": "data", "shards": 2}}, "over data there is one for each replica"),
        ({"match": "kernel", "partition": {"axis": 0}}, "does not say into how many parts"),
        ({"match": "kernel", "partition": {"shards": 2, "stage": 1}}, "says what is split over data"),
        ({"match": "kernel", "synchronizer": "ps", "partition": {"over": "data"}}, "its synchronizer is ps"),
        ({"match": "kernel", "partition": {"over": "data", "stage": 4}}, "must be at most 3"),
    ],
)
def test_an_override_that_nothing_can_follow_is_refused_at_its_line(
    tmp_path: Path, override: dict[str, Any], said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"devices: [CPU:0, CPU:1]\nvariables:\n- {json.dumps(override)}\n")
    with pytest.raises(ConfigError) as caught:
        plan_of(path)
    assert said in str(caught.value)
    assert f"{path}:3: variables[0]" in str(caught.value)


def test_turns_begin_with_the_least_loaded() -> None:
    load = Load(("a", "b", "c"))
    assert load.take(10) == "a"
    assert load.take_turns(4, 8) == ("b", "c", "a", "b")
    assert load.bytes == {"a": 12, "b": 4, "c": 2}


OWN = """
from dataclasses import dataclass
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice, Parts

class Mine:
    def build(self, item, config):
        large = lambda one: Choice("ps" if len(one.shape) > 1 else "all_reduce")
        return assemble(item, config, large, strategy="Mine", notes=["by rank"])
"""


@pytest.fixture
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_code.VARIABLE, "[]")  # and it is as before when the test has ended


def test_a_builder_of_the_users_own_is_one_file(tmp_path: Path, nothing_allowed: None) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    user_code.allow_code(tmp_path / "mine.py")
    plan = build(f"{tmp_path / 'mine.py'}:Mine")
    assert plan.strategy == "Mine"
    assert plan.notes == ("by rank",)
    assert asked(plan)["kernel"].placement == "single"
    assert asked(plan)["bias"].placement == "replicated"
    Config.of({**TWO, "strategy": {"name": "mine.py:Mine"}}).require_usable()  # its plan is what counts
    (tmp_path / "c.yaml").write_text("devices: [CPU:0]\nstrategy: {name: mine.py:Mine}\n")  # beside the configuration
    assert named_builder(Config.load(tmp_path / "c.yaml")).build(tables(), Config.of(TWO)).strategy == "Mine"


@pytest.mark.parametrize(
    ("write", "name", "said"),
    [
        (lambda path: None, "Mine", "there is no file"),
        (lambda path: path.write_text("1/0"), "Mine", "cannot be run: ZeroDivisionError"),
        (lambda path: path.write_text(OWN), "Other", "has no class 'Other' that builds plans"),
        (lambda path: path.write_text("Mine = 3"), "Mine", "has no class 'Mine' that builds plans"),
    ],
)
def test_a_builder_that_cannot_be_had_says_why(
    tmp_path: Path, nothing_allowed: None, write: Callable[[Path], object], name: str, said: str
) -> None:
    write(tmp_path / "mine.py")
    if (tmp_path / "mine.py").exists():
        user_code.allow_code(tmp_path / "mine.py")
    with pytest.raises(ConfigError, match=said):
        build(f"{tmp_path / 'mine.py'}:{name}")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def build(self, item, config):\n        return 1 / 0\n",
            r"failed: ZeroDivisionError: .*\n  at   .*mine.py:3",
        ),
        (
            "def build(self, item, config):\n        return sorted(item, key=[].pop)\n",
            r"failed: TypeError: .*\n  at   .*mine.py:3",
        ),
        ("def build(self, item, config): pass\n", "failed: its build returned NoneType"),
        (
            "def __init__(self): self.x\n    def build(self, item, config): pass\n",
            r"failed: AttributeError: .*\n  at   .*mine.py:2",
        ),
    ],
)
def test_a_builder_that_fails_is_told_as_the_users_with_its_line(
    tmp_path: Path, nothing_allowed: None, body: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(f"class Mine:\n    {body}")
    user_code.allow_code(tmp_path / "mine.py")
    with pytest.raises(ConfigError, match=f"the strategy 'Mine' of your own has {said}"):
        build(f"{tmp_path / 'mine.py'}:Mine")


def test_code_that_a_configuration_names_runs_only_where_it_is_allowed(tmp_path: Path, nothing_allowed: None) -> None:
    (tmp_path / "mine.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n" + OWN)
    (tmp_path / "other.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text("devices: [CPU:0, CPU:1]\nstrategy: {name: mine.py:Mine}\n")
    user_code.allow_code(tmp_path / "other.py")
    config = Config.load(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=r"c.yaml:2: .* runs only if you allow it\n.*--allow-code.*ar.allow_code"):
        named_builder(config)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "link.py").symlink_to(tmp_path / "mine.py")
    user_code.allow_code(tmp_path / "link.py")  # it is the file that counts, not its name
    assert named_builder(config).build(tables(), config).strategy == "Mine"
    assert (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match=r"there is no file '.*ghost.py' to allow"):
        user_code.allow_code(tmp_path / "ghost.py")
