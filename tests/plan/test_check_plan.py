"""plan.check: every problem at once, each with its reason, before anything is edited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.parts.collective_keys import group_key
from autograph_rewrite.plan.parts.graph_digest import graph_digest
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import check, require
from tests.support.plan_items import mirrored_plan, reduce_edge, small_item

ITEM = small_item()
BIAS = reduce_edge("grad/bias", "dense/bias")
COUNT = reduce_edge("grad/count", "count", dtype="int32")


def problems(plan: Plan) -> list[str]:
    return [str(problem).removeprefix("plan: ") for problem in check(plan, ITEM)]


def with_edge(**changes: object) -> Plan:
    """A sound plan of two edges, of which the second is changed."""
    plan = mirrored_plan(reduce_edge(), BIAS)
    edges = (plan.edges[0], replace(plan.edges[1], **changes))  # type: ignore[arg-type]
    return replace(plan, edges=edges)


@pytest.mark.parametrize(
    "plan",
    [
        mirrored_plan(),
        mirrored_plan(reduce_edge(), BIAS, COUNT),
        mirrored_plan(reduce_edge(bucket=1), replace(BIAS, bucket=1), COUNT),
        replace(mirrored_plan(reduce_edge()), graph_digest=graph_digest(ITEM.graph)),
        Plan(("/device:CPU:0", "/device:CPU:0"), "shared"),
        Plan(("/device:CPU:0",), edges=(EdgePlan("x:0", "replicated", "split(0)", lowering="slice"),)),
    ],
)
def test_a_sound_plan_has_no_problems(plan: Plan) -> None:
    assert problems(plan) == []
    require(plan, ITEM)


CASES: list[tuple[Callable[[Plan], Plan], str]] = [
    (lambda p: replace(p, version=3), "version is 3; only 1 to 2 are known"),
    (lambda p: replace(p, mode="unset"), "mode must be shared or mirrored, not 'unset'"),
    (
        lambda p: replace(p, timeout_seconds=0),
        "timeout_seconds is 0: a collective whose peer is gone would hang",
    ),
    (lambda p: replace(p, timeout_seconds=float("nan")), "timeout_seconds is nan"),
    (lambda p: replace(p, devices=(), mesh=()), "devices is empty"),
    (
        lambda p: replace(p, devices=("CPU:0", p.devices[1])),
        "'CPU:0' is not the canonical name (write /device:CPU:0)",
    ),
    (
        lambda p: replace(p, devices=("CPUU:0", p.devices[1])),
        "there is no kind 'CPUU' (did you mean 'CPU:0'?)",
    ),
    (
        lambda p: replace(p, mesh=(messages.Axis("data", 3),)),
        "the axes of mesh multiply to 3, but there are 2 devices",
    ),
    (
        lambda p: replace(p, mesh=(messages.Axis("date", 2),)),
        "the mesh has no axis 'date' (did you mean 'data'?)",
    ),
    (lambda p: replace(p, mesh=(messages.Axis("data", 0),)), "the axis data has size 0; it must be at least 1"),
    (
        lambda p: replace(p, mesh=(messages.Axis("data", 1), messages.Axis("model", 2))),
        "mesh has a model axis, and the plan names no devices for it (fill in model)",
    ),
    (
        lambda p: replace(p, mesh=(messages.Axis("data", 2), messages.Axis("data", 1))),
        "the axis 'data' stands twice",
    ),
    (
        lambda p: replace(p, batch_inputs=(messages.BatchInput("X"),)),
        "the graph has no input 'X' (did you mean 'x'?)",
    ),
    (lambda p: replace(p, batch_inputs=(messages.BatchInput("x", 2),)), "'x' has 2 axes, so no axis 2"),
    (lambda p: replace(p, batch_inputs=(messages.BatchInput("x", -1),)), "the batch axis of 'x' is -1"),
    (lambda p: replace(p, batch_inputs=p.batch_inputs * 2), "the input 'x' stands twice in batch_inputs"),
    (
        lambda p: replace(p, variables=(messages.VariableRequest("dense/kernal"),)),
        "the graph has no variable 'dense/kernal' (did you mean 'dense/kernel'?)",
    ),
    (
        lambda p: replace(p, variables=p.variables * 2),
        "the variable 'dense/kernel' stands twice in variables",
    ),
    (
        lambda p: replace(p, variables=(messages.VariableRequest("count", "partial(sum)"),)),
        "'partial(sum)' is no placement of a variable ('count')",
    ),
    (
        lambda p: replace(p, variables=(messages.VariableRequest("count", options=messages.Options(bucket_bytes=-1)),)),
        "bucket_bytes of 'count' is -1",
    ),
]


@pytest.mark.parametrize(("spoil", "said"), CASES, ids=[said for _, said in CASES])
def test_a_wrong_request_is_told(spoil: Callable[[Plan], Plan], said: str) -> None:
    assert any(said in problem for problem in problems(spoil(mirrored_plan())))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"value": "grad/bias2"}, "the graph has no value 'grad/bias2' (did you mean 'grad/bias'?)"),
        ({"value": "grad/bias:1"}, "%grad/bias (Neg) has 1 outputs, so no 'grad/bias:1'"),
        ({"value": "grad/bias:x"}, "%grad/bias (Neg) has 1 outputs, so no 'grad/bias:x'"),
        ({"owner": "dense/bia"}, "no variable 'dense/bia' can own 'grad/bias' (did you mean 'dense/bias'?)"),
        ({"from_": "Partial of sum"}, "'Partial of sum' is no placement (from of 'grad/bias')"),
        ({"to": ""}, "'' is no placement (to of 'grad/bias')"),
        ({"lowering": "colective_reduce"}, "(did you mean 'collective_reduce'?)"),
        ({"dtype": "float23"}, "there is no type 'float23' (did you mean 'float32'?)"),
        ({"dtype": "int32"}, "'grad/bias' is float32, not int32"),
        ({"bytes": -1}, "bytes of 'grad/bias' is -1"),
        ({"bucket": 2**31}, "bucket of 'grad/bias' is 2147483648"),
        ({"lowering": "slice", "bucket": 3}, "'grad/bias' cannot be in a bucket: slice has none"),
        ({"value": "grad/kernel"}, "edges[1] converts 'grad/kernel' to replicated again, as edges[0] does"),
        ({"group_key": 7}, "group_key of 'grad/bias' is 7, but that of these devices is "),
        ({"instance_key": 0}, "the collective 'grad/bias' has no instance_key"),
        ({"order": None}, "the collective 'grad/bias' has no order"),
        ({"order": 0}, "'grad/bias' has the order 0 of 'grad/kernel'"),
    ],
)
def test_a_wrong_edge_is_told(changes: dict[str, object], said: str) -> None:
    assert any(said in problem for problem in problems(with_edge(**changes)))


def test_two_collectives_of_a_group_with_one_instance_key_are_told() -> None:
    plan = mirrored_plan(reduce_edge(), BIAS)
    (only,) = problems(with_edge(instance_key=plan.edges[0].instance_key))
    assert "'grad/bias' has the instance_key" in only
    assert "of 'grad/kernel' (TensorFlow would pair whichever tensors arrive together" in only


def test_a_bucket_of_two_types_is_told() -> None:
    plan = mirrored_plan(reduce_edge(bucket=1), replace(COUNT, bucket=1))
    assert problems(plan) == [
        "bucket 1 mixes dtype float32 ('grad/kernel') and int32 ('grad/count') (put them in two buckets)"
    ]


def test_a_bucket_of_two_hints_is_told() -> None:
    plan = mirrored_plan(reduce_edge(bucket=1), replace(BIAS, bucket=1))
    ring = messages.VariableRequest("dense/bias", options=messages.Options(hint="ring"))
    plan = replace(plan, variables=(plan.variables[0], ring))
    assert problems(plan) == [
        "bucket 1 mixes hint auto ('grad/kernel') and ring ('grad/bias') (put them in two buckets)"
    ]


def test_mirrored_replicas_on_one_device_are_told_before_they_hang() -> None:
    (only,) = problems(Plan(("/device:CPU:0", "/device:CPU:0"), "mirrored"))
    assert "mirrored replicas share CPU:0: a collective with two members on one device never ends" in only


def test_collectives_of_shared_variables_are_told() -> None:
    plan = replace(mirrored_plan(reduce_edge()), mode="shared")
    assert any("which has no members where variables are shared" in problem for problem in problems(plan))


def test_edges_of_another_graph_are_told_but_a_request_fits_any_graph() -> None:
    other = "0" * 64
    assert problems(replace(mirrored_plan(), graph_digest=other)) == []
    (only,) = problems(replace(mirrored_plan(reduce_edge()), graph_digest=other))
    assert "the edges of this plan were resolved on another graph" in only


def test_changed_devices_are_noticed_in_the_keys() -> None:
    plan = mirrored_plan(reduce_edge())
    moved = replace(plan, devices=plan.devices[::-1])
    (only,) = problems(moved)
    assert f"but that of these devices is {group_key(moved.devices)}" in only


def test_all_problems_are_raised_at_once_at_the_lines_of_the_file() -> None:
    plan = replace(
        with_edge(value="nothing", lowering="magic"),
        variables=(messages.VariableRequest("w"),),
        timeout_seconds=0,
    )
    read = Plan.from_yaml(plan.to_yaml(), name="p.yaml")
    with pytest.raises(PlanError) as caught:
        require(read, ITEM)
    said = str(caught.value)
    lines = read.to_yaml().splitlines()
    assert "p.yaml has 4 problems:" in said
    for text, message in [
        ("timeout_seconds: 0.0", "timeout_seconds is 0"),
        ("- name: w", "the graph has no variable 'w'"),
        ("- value: nothing", "the graph has no value 'nothing'"),
        ("  lowering: magic", "there is no lowering 'magic'"),
    ]:
        assert f"p.yaml:{lines.index(text) + 1}: {message}" in said


def test_the_digest_of_a_graph_ignores_the_order_of_its_nodes_and_sees_its_wiring() -> None:
    digest = graph_digest(ITEM.graph)
    assert digest == graph_digest(small_item().graph)
    changed = small_item().graph
    changed.nodes = dict(reversed(changed.nodes.items()))
    assert graph_digest(changed) == digest
    changed.node("grad/bias").set_inputs([changed.node("grad/kernel").output()])
    assert graph_digest(changed) != digest


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (messages.Policy("kount", "on_write", "sum"), "the graph has no variable 'kount'"),
        (messages.Policy("dense/bias", "on_read", "sum"), "'dense/bias' is trained"),
        (messages.Policy("count", "on_write", "mean"), "'count' is of type int32, which has no mean"),
    ],
    ids=["unknown", "trained", "no mean"],
)
def test_a_policy_is_for_a_variable_that_can_have_it(policy: messages.Policy, text: str) -> None:
    (found,) = problems(replace(mirrored_plan(), policies=(policy,)))
    assert text in found


def test_replicas_that_train_by_themselves_have_all_variables() -> None:
    alone = messages.LocalSgd(4)
    assert problems(replace(mirrored_plan(), local_sgd=alone)) == []
    assert "period 0" in problems(replace(mirrored_plan(), local_sgd=messages.LocalSgd(0)))[0]
    assert "not with micro-batches" in problems(replace(mirrored_plan(), local_sgd=alone, micro=messages.Micro(2)))[0]


def test_a_variable_has_one_policy() -> None:
    policy = messages.Policy("count", "on_write", "sum")
    assert problems(replace(mirrored_plan(), policies=(policy,))) == []
    assert "stands twice in policies" in problems(replace(mirrored_plan(), policies=(policy, policy)))[0]
