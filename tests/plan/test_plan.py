"""Plans: one value, two equivalent files, and errors at the line where a plan was edited wrongly."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autograph_rewrite as ar
from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan import file_forms
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import default_options
from tests.support.plan_items import TWO_DEVICES, mirrored_plan, reduce_edge

names = st.text(min_size=1, max_size=12)
int32 = st.integers(0, 2**31 - 1)
options = st.builds(
    messages.Options, hint=st.sampled_from(["auto", "ring", "nccl"]), bucket_bytes=st.integers(0, 2**62)
)
edges = st.builds(
    messages.EdgePlan,
    value=names,
    from_=st.sampled_from(["partial(sum)", "split(0)"]),
    to=st.just("replicated"),
    owner=st.one_of(st.just(messages.STEP), names),
    role=st.sampled_from(["", "indices"]),
    lowering=st.sampled_from(["add_n", "collective_reduce"]),
    dtype=st.sampled_from(["", "float32"]),
    bytes=st.integers(0, 2**62),
    group_key=int32,
    instance_key=int32,
    order=st.one_of(st.none(), int32),
    bucket=int32,
    reason=st.text(max_size=20),
)
plans = st.builds(
    Plan,
    devices=st.sampled_from([(), TWO_DEVICES]),
    mode=st.sampled_from(["shared", "mirrored"]),
    id=st.text(max_size=5),
    strategy=st.text(max_size=5),
    graph_digest=st.text(max_size=5),
    mesh=st.lists(st.builds(messages.Axis, name=names, size=int32), max_size=2).map(tuple),
    semantics=st.builds(
        messages.Semantics,
        batch_norm=st.sampled_from(["sync", "local"]),
        random=st.sampled_from(["exact", "independent"]),
        strict=st.booleans(),
    ),
    timeout_seconds=st.floats(0, 1e300),
    batch_inputs=st.lists(st.builds(messages.BatchInput, name=names, axis=st.integers(0, 3)), max_size=2).map(tuple),
    default=options,
    variables=st.lists(st.builds(messages.VariableRequest, name=names, options=options), max_size=3).map(tuple),
    edges=st.lists(edges, max_size=3).map(tuple),
    notes=st.lists(st.text(max_size=20), max_size=2).map(tuple),
)


def refused(text: str) -> list[str]:
    """What reading this YAML complains of, a line each."""
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text, name="p.yaml")
    lines = str(caught.value).splitlines()
    return [line.strip() for line in lines[1:]] if lines[0].endswith("problems:") else lines


@given(plans)
def test_yaml_and_binary_forms_of_any_plan_are_equivalent_and_exact(plan: Plan) -> None:
    text = plan.to_yaml()
    assert Plan.from_yaml(text) == plan
    assert Plan.from_proto(file_forms.new("Plan").FromString(plan.to_proto().SerializeToString())) == plan
    assert Plan.from_yaml(text).to_yaml() == text
    assert Plan.from_yaml(text).digest() == plan.digest()


@pytest.mark.parametrize("name", ["p.yaml", "p.yml", "p.json", "p.pb", "p.binpb"])
def test_a_saved_plan_is_loaded_equal(name: str, tmp_path: Path) -> None:
    plan = mirrored_plan(reduce_edge(), reduce_edge("grad/bias", "dense/bias"))
    plan.save(tmp_path / name)
    assert Plan.load(str(tmp_path / name)) == plan
    assert [path.name for path in tmp_path.iterdir()] == [name]  # nothing half-written is left behind


def test_the_yaml_form_reads_like_the_configuration_file() -> None:
    plan = replace(mirrored_plan(reduce_edge()), variables=(messages.VariableRequest("w"),), notes=("a note",))
    assert (
        plan.to_yaml()
        == f"""\
version: 2
mesh:
- {{name: data, size: 2}}
devices:
- /device:CPU:0
- /device:CPU:1
mode: mirrored
semantics: {{batch_norm: sync, random: exact, strict: false}}
timeout_seconds: 60.0
batch_inputs:
- {{name: x, axis: 0}}
default: {{synchronizer: all_reduce, hint: auto, compressor: none, bucket_bytes: 4194304}}
variables:
- name: w
  placement: replicated
  options: {{synchronizer: all_reduce, hint: auto, compressor: none, bucket_bytes: 4194304}}
edges:
- value: grad/kernel
  from: partial(sum)
  to: replicated
  owner: dense/kernel
  lowering: collective_reduce
  dtype: float32
  bytes: 24
  group_key: {plan.edges[0].group_key}
  instance_key: {plan.edges[0].instance_key}
  order: 0
  reason: the update reads the whole gradient
notes:
- a note
"""
    )


def test_what_a_written_plan_leaves_out_takes_its_default() -> None:
    plan = Plan.from_yaml(
        "version: 2\ndevices: [/device:CPU:0]\nmode: shared\ndefault: {hint: ring, bucket_bytes: 7}\n"
        "variables: [{name: w}, {name: v, options: {hint: nccl}}]\n"
        "edges: [{value: g, from: partial(sum), to: replicated, lowering: add_n}]\n"
    )
    assert plan.timeout_seconds == 60
    assert plan.semantics == messages.Semantics()
    assert plan.edges[0].owner == messages.STEP
    assert plan.edges[0].order is None
    assert plan.variables[0].placement == "replicated"
    assert plan.options_of("w") == plan.options_of("not listed") == messages.Options(hint="ring", bucket_bytes=7)
    assert plan.options_of("v") == messages.Options(hint="nccl", bucket_bytes=7)


def test_every_mistake_in_a_written_plan_is_told_at_its_line() -> None:
    text = """\
version: 2
devices: [/device:CPU:0, 1]
mode: mirored
mesh: {name: data}
semantics: {batch_norm: sinc, strict: 1}
timeout_seconds: .nan
default: {bucket_bytes: "7", hnt: ring}
edges:
- {value: g, form: partial(sum), bucket: 4294967296}
- 3
mode: shared
"""
    assert refused(text) == [
        "p.yaml:2: devices[1] must be a text (quote it), not 1",
        "p.yaml:3: mode must be shared or mirrored, not 'mirored' (did you mean 'mirrored'?)",
        "p.yaml:4: mesh must be a list",
        "p.yaml:5: semantics.batch_norm must be sync or local, not 'sinc' (did you mean 'sync'?)",
        "p.yaml:5: semantics.strict must be true or false, not 1",
        "p.yaml:6: timeout_seconds must be a finite number, not nan",
        "p.yaml:7: default.bucket_bytes must be a whole number below 9223372036854775808, not '7'",
        "p.yaml:7: unknown key 'hnt' in default (did you mean 'hint'?)",
        "p.yaml:9: unknown key 'form' in edges[0] (did you mean 'from'?)",
        "p.yaml:9: edges[0].bucket must be a whole number below 2147483648, not 4294967296",
        "p.yaml:10: edges[1] must be a mapping (key: value)",
        "p.yaml:11: the key 'mode' stands here twice (first in line 3)",
    ]


@pytest.mark.parametrize("wrong", ["true", "null", "[1]", "{a: 1}", "x", "1.5"])
@pytest.mark.parametrize("key", [field.name for field in file_forms.new("Plan").DESCRIPTOR.fields])
def test_no_value_of_a_wrong_kind_escapes_as_another_error(key: str, wrong: str) -> None:
    text = f"version: 2\n{key}: {wrong}\n" if key != "version" else f"version: {wrong}\n"
    with contextlib.suppress(PlanError):
        Plan.from_yaml(text)


def test_a_plan_of_another_version_is_refused() -> None:
    assert refused("version: 3\n") == [
        "p.yaml:1: this plan has version 3; only 1 to 2 can be read (build it anew with build_plan)"
    ]
    assert refused("mode: shared\n") == [
        "p.yaml:1: this plan has no version; only 1 to 2 can be read (build it anew with build_plan)"
    ]


def test_files_that_are_no_plan_are_typed_errors(tmp_path: Path) -> None:
    good = mirrored_plan(reduce_edge()).to_proto().SerializeToString()
    for name, data, said in [
        ("cut.pb", good[:-3], "is no plan, or is cut short"),
        ("noise.pb", b"\xff\xff\xff\xff", "is no plan, or is cut short"),
        ("empty.pb", b"", "this plan has no version"),
        ("later.pb", good + b"\xa0\x06\x01", "this plan has fields that are not known here"),
        ("later_enum.pb", good + b"\x38\x63", "mode has the unknown value 99"),
        ("list.yaml", b"[1]", "a plan must be a mapping"),
        ("plan.txt", good, r"name it \.yaml, \.yml, \.json, \.pb or \.binpb"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PlanError, match=said):
            Plan.load(tmp_path / name)
    for missing in ("none.pb", "none.yaml"):
        with pytest.raises(PlanError, match=missing):
            Plan.load(tmp_path / missing)


def test_a_plan_that_cannot_be_saved_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    plan = mirrored_plan()
    with pytest.raises(PlanError, match=r"plan\.txt' does not say which form"):
        plan.save(tmp_path / "plan.txt")
    with pytest.raises(PlanError, match="cannot write"):
        plan.save(tmp_path / "no folder" / "p.yaml")
    wrong = replace(plan, mode="mirored")
    with pytest.raises(PlanError, match=r"'mirored' is no mode\n.*did you mean 'mirrored'"):
        wrong.save(tmp_path / "p.yaml")
    with pytest.raises(PlanError, match="group_key of a Edge cannot be -4294967296"):
        replace(plan, edges=(replace(reduce_edge(), group_key=-(2**32)),)).to_proto()
    assert list(tmp_path.iterdir()) == []


def test_the_digest_is_of_what_workers_must_agree_on() -> None:
    plan = mirrored_plan(reduce_edge())
    assert plan.digest() == replace(plan, id="another", notes=("a note",)).digest()
    assert plan.digest() != replace(plan, timeout_seconds=61.0).digest()
    assert plan.digest() != replace(plan, devices=plan.devices[::-1]).digest()
    assert plan.digest() != plan.with_edges(()).digest()


def test_resolving_a_request_changes_a_copy() -> None:
    request = mirrored_plan()
    resolved = request.with_edges([reduce_edge()], graph_digest="abc", notes=["reduced once"])
    assert request.edges == ()
    assert (resolved.edges, resolved.graph_digest) == ((reduce_edge(),), "abc")
    assert resolved.notes == ("reduced once",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.mode = "shared"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("network", "stated", "size"),
    [
        (None, {}, 4 * 1024**2),
        ({"bandwidth_gbps": 1}, {}, 125_000),
        ({"bandwidth_gbps": 0.1}, {}, 64 * 1024),
        ({"bandwidth_gbps": 100}, {}, 4 * 1024**2),
        ({"bandwidth_gbps": 1}, {"bucket_bytes": "1MiB"}, 1024**2),
    ],
)
def test_buckets_are_as_large_as_the_network_carries_in_a_millisecond(
    network: dict[str, float] | None, stated: dict[str, str], size: int
) -> None:
    cluster = {"workers": ["a:1", "b:1"], **({"network": network} if network else {})}
    config = ar.Config.of({"devices": ["CPU:0"], "cluster": cluster, "strategy": stated})
    assert default_options(config).bucket_bytes == size
