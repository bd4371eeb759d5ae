"""Fifty and more slips of the hand in a plan's file: each is told at its line, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.parts.collective_keys import group_key
from autograph_rewrite.plan.parts.messages import Options, Server, VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import check
from tests.support.plan_items import TWO_DEVICES, mirrored_plan, reduce_edge, small_item

ITEM = small_item()
LATER = "not available yet in this version"
SERVER = "/job:ps/replica:0/task:0/device:CPU:0"


def good_plan() -> Plan:
    """A plan with a variable of each kind, and two collectives."""
    served = Options("ps")
    plan = mirrored_plan(reduce_edge(), reduce_edge("grad/bias", "dense/bias"))
    variables = (
        VariableRequest("dense/kernel", "split(0)", served, (SERVER, SERVER[:-1] + "1"), (2, 1), Server(staleness=3)),
        VariableRequest("dense/bias", "split(0)", Options(), TWO_DEVICES, (1, 1), stage=3),
        VariableRequest("count", "single", served, ("/device:CPU:0",), server=Server(sync=False)),
        VariableRequest("dense/kernel/momentum", "replicated", Options(hint="ring")),
    )
    return replace(plan, variables=variables, semantics=messages.Semantics())


GOOD = good_plan().to_yaml()
KEY = group_key(TWO_DEVICES)

# What stands there; what is written instead; what is said of it.
MISTAKES = [
    ("version: 2", "version: 3", "version 3"),
    ("version: 2", "version: one", "version must be a whole number"),
    ("version: 2", "verson: 2", "unknown key 'verson' (did you mean 'version'?)"),
    ("mode: mirrored", "mode: mirored", "mode must be shared or mirrored, not 'mirored'"),
    ("timeout_seconds: 60.0", "timeout_seconds: 0", "timeout_seconds is 0"),
    ("timeout_seconds: 60.0", "timeout_seconds: soon", "timeout_seconds must be a finite number"),
    ("- /device:CPU:1\nmode", "- CPU:1\nmode", "'CPU:1' is not the canonical name"),
    ("- /device:CPU:1\nmode", "- /device:CPU\nmode", "'/device:CPU' has no index"),
    ("- /device:CPU:1\nmode", "- /device:CPU:0\nmode", "mirrored replicas share CPU:0"),
    ("- {name: data, size: 2}", "- {name: data, size: 4}", "the axes of mesh multiply to 4"),
    ("- {name: data, size: 2}", "- {name: date, size: 2}", "the mesh has no axis 'date'"),
    ("- {name: data, size: 2}", "- {name: data, size: 0}", "the axis data has size 0"),
    ("batch_norm: sync", "batch_norm: sink", "must be sync or local, not 'sink'"),
    ("random: exact", "random: 3", "must be exact or independent, not 3"),
    ("strict: false", "strict: maybe", "must be true or false, not 'maybe'"),
    ("- {name: x, axis: 0}", "- {name: X, axis: 0}", "the graph has no input 'X' (did you mean 'x'?)"),
    ("- {name: x, axis: 0}", "- {name: x, axis: 2}", "'x' has 2 axes, so no axis 2"),
    ("- {name: x, axis: 0}", "- {name: x, axis: -1}", "the batch axis of 'x' is -1"),
    ("- name: dense/kernel\n", "- name: dense/kernal\n", "no variable 'dense/kernal' (did you mean 'dense/kernel'?)"),
    ("- name: dense/kernel\n", "- name: dense/bias\n", "the variable 'dense/bias' stands twice in variables"),
    ("- name: dense/kernel\n", "- name: 3\n", "variables[0].name must be a text (quote it)"),
    ("placement: split(0)", "placement: splitted(0)", "'splitted(0)' is no placement of a variable ('dense/kernel')"),
    ("placement: split(0)", "placement: split", "'split' is no placement of a variable ('dense/kernel')"),
    ("placement: split(0)", "placement: split(2)", "'dense/kernel' has 2 axes, so it cannot be split along axis 2"),
    ("placement: split(0)", "placement: split(1)", "of 'dense/kernel' add up to 3, but axis 1 has 2"),
    ("placement: split(0)", "placement: replicated", "'dense/kernel' is replicated, so it has no servers"),
    ("placement: split(0)", "placement: single", "'dense/kernel' lives on one device, but 2 are named in servers"),
    (
        "placement: single",
        "placement: singel",
        "'singel' is no placement of a variable ('count') (did you mean 'single",
    ),
    ("placement: single", "placement: split(0)", "'count' has 0 axes, so it cannot be split along axis 0"),
    ("  - 2\n  - 1\n", "  - 2\n  - 2\n", "the shards of 'dense/kernel' add up to 4, but axis 0 has 3"),
    ("  - 2\n  - 1\n", "  - 3\n  - 0\n", "a shard of 'dense/kernel' has size 0"),
    ("  - 2\n  - 1\n", "  - 3\n", "'dense/kernel' is split into 1 shards; there must be 2 or more"),
    ("  - 2\n  - 1\n", "  - 1\n  - 1\n  - 1\n", "'dense/kernel' has 3 shards, but servers names 2 devices"),
    ("  - 2\n  - 1\n", "  - 2\n  - one\n", "variables[0].sizes[1] must be a whole number"),
    (SERVER, "/job:ps/task:0/device:CPU:0", "'/job:ps/task:0/device:CPU:0' is not the canonical name"),
    (SERVER, SERVER.replace("ps", "pss"), "no process of the plan has that device"),
    (SERVER, SERVER.replace("ps", "worker"), "no process of the plan has that device"),
    (SERVER, SERVER.replace("task:0", "task:x"), "its task 'x' is not a number"),
    (SERVER, "nowhere", "'nowhere' has no index"),
    ("staleness: 3", "staleness: -1", "the staleness of 'dense/kernel' is -1"),
    ("{sync: true, staleness: 3", "{sync: false, staleness: 3", "but sync: false sets no bound"),
    ("staleness: 3", "stalenes: 3", "unknown key 'stalenes' in variables[0].server (did you mean 'staleness'?)"),
    (
        "synchronizer: ps",
        "synchronizer: all_reduce",
        "'dense/kernel' has settings of a server, but its synchronizer is",
    ),
    ("synchronizer: ps", "synchronizer: pss", "must be all_reduce or ps, not 'pss' (did you mean 'ps'?)"),
    ("stage: 3", "stage: 4", "the stage of 'dense/bias' is 4; it is 1, 2 or 3"),
    ("  - /device:CPU:1\n  sizes", "  - /device:CPU:0\n  sizes", "the shards of 'dense/bias' are not on the replicas'"),
    ("hint: ring", "hint: rng", "must be auto, ring or nccl, not 'rng' (did you mean 'ring'?)"),
    ("bucket_bytes: 4194304}\n  servers", "bucket_bytes: -1}\n  servers", "bucket_bytes of 'dense/kernel' is -1"),
    ("compressor: none, bucket", "compressor: gzip, bucket", "default.compressor must be none, fp16"),
    ("value: grad/bias", "value: grad/bais", "the graph has no value 'grad/bais' (did you mean 'grad/bias'?)"),
    ("owner: dense/bias", "owner: dense/bais", "no variable 'dense/bais' can own 'grad/bias'"),
    ("owner: dense/bias\n  lowering: collective_reduce", "owner: dense/bias\n  lowering: allreduce", "no lowering"),
    (
        "owner: dense/bias\n  lowering: collective_reduce",
        "owner: dense/bias\n  lowering: concat\n  bucket: 7",
        "a bucket",
    ),
    ("dtype: float32\n  bytes: '24'", "dtype: float16\n  bytes: '24'", "'grad/kernel' is float32, not float16"),
    ("order: 1", "order: 0", "'grad/bias' has the order 0 of 'grad/kernel'"),
    (f"group_key: {KEY}", "group_key: 7", f"group_key of 'grad/kernel' is 7, but that of these devices is {KEY}"),
]


def said_of(text: str) -> list[str]:
    """What reading and checking a plan's text complains of."""
    try:
        plan = Plan.from_yaml(text, name="p.yaml")
    except PlanError as error:
        return str(error).splitlines()
    return [str(problem) for problem in check(plan, ITEM) if LATER not in str(problem)]


def test_the_plan_itself_is_sound() -> None:
    assert said_of(GOOD) == []
    assert Plan.from_yaml(GOOD) == good_plan()
    assert len(MISTAKES) >= 50


@pytest.mark.parametrize(("there", "instead", "said"), MISTAKES, ids=[f"{i}: {m[2]}" for i, m in enumerate(MISTAKES)])
def test_a_mistake_is_told_at_its_line(there: str, instead: str, said: str) -> None:
    there = there.replace("bytes: '24'", "bytes: 24")
    instead = instead.replace("bytes: '24'", "bytes: 24")
    before, found, after = GOOD.partition(there)
    assert found, there
    first = before.count("\n") + 1
    lines = [line for line in said_of(before + instead + after) if said in line]
    assert lines, said_of(before + instead + after)
    _, number, _ = lines[0].strip().split(":", 2)
    assert abs(int(number) - first) <= 9  # at the key itself, or what it stands in, or contradicts
    assert lines[0].strip().startswith("p.yaml:")
