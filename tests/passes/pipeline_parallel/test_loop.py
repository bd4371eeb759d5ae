"""A pipeline as loops in whose iterations all stages work: the same values, in a graph of one size."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan.parts.pipeline_schedule import iterations
from tests.passes.micro_batches.test_local_batch_norm import FEEDS as PICTURES
from tests.passes.micro_batches.test_local_batch_norm import LOCAL, network
from tests.passes.micro_batches.test_local_batch_norm import expected as normalised_in_sequence
from tests.support.covering import covering
from tests.support.staged import MODELS, assert_alike, convolutions, feed, inputs, staged_item, train, values, variable

v1 = tf.compat.v1
GOLDEN = 0.268087
STAGES, MICRO, LAYOUTS = (1, 2, 4), (1, 2, 4, 8), ("contiguous", "interleaved")


@lru_cache(maxsize=16)
def model(name: str) -> tuple[GraphItem, list[str], Any]:
    """Return a model, its boundaries, and what three steps on one device give."""
    item, cuts = staged_item(MODELS[name])
    return item, cuts, train(item, feeds_of(item))


def feeds_of(item: GraphItem, batch: int = 8) -> list[dict[str, Any]]:
    return [feed(item, step, batch) for step in range(3)]


def looped(item: GraphItem, **pipeline: Any) -> GraphItem:
    return ar.rewrite(item, {"devices": ["CPU:0"], "pipeline": {"form": "loop", **pipeline}})


def boundaries(cuts: list[str], stages: int) -> list[str]:
    return {1: [], 2: cuts[1:2], 4: cuts}[stages]


EVERY = [
    case
    for case in itertools.product(MODELS, STAGES, MICRO, LAYOUTS)
    if case[:2] != ("tied", 4)  # whose last stage has no layer: see below
]
COVER = {
    (name, stages, micro, LAYOUTS[i % 2])
    for i, (name, (stages, micro)) in enumerate(itertools.product(MODELS, [(2, 8), (4, 2), (4, 4)]))
} | {("mlp", 1, 4, "contiguous"), ("mlp", 4, 1, "interleaved")}
CASES = [case if case in COVER else pytest.param(*case, marks=pytest.mark.full) for case in EVERY]


@pytest.mark.parametrize(("name", "stages", "micro", "layout"), CASES)
def test_a_loop_of_stages_computes_what_one_device_computes(name: str, stages: int, micro: int, layout: str) -> None:
    item, cuts, expected = model(name)
    new = looped(item, stages=stages, microbatches=micro, layout=layout, boundaries=boundaries(cuts, stages))
    assert_alike(train(new, feeds_of(item)), expected)


@pytest.mark.parametrize("micro", [3, 4])
def test_a_loop_computes_what_copies_do(micro: int) -> None:
    item, cuts, _ = model("dropout")
    feeds = feeds_of(item, 11)
    copies = ar.rewrite(
        item, {"devices": ["CPU:0"], "pipeline": {"stages": 4, "microbatches": micro, "boundaries": cuts}}
    )
    new = looped(item, stages=4, microbatches=micro, boundaries=cuts)
    assert_alike(train(new, feeds), train(copies, feeds), 1e-12)


def test_a_lost_micro_batch_would_be_noticed() -> None:
    item, _, expected = model("mlp")
    short = train(item, [{"x": given["x"][:6]} for given in feeds_of(item)])
    assert np.abs(short[1]["w0"] - expected[1]["w0"]).max() > 1e-3


@pytest.mark.parametrize("batch", [11, 3])
def test_micro_batches_of_uneven_size_and_empty_ones_go_through_the_loop(batch: int) -> None:
    item, cuts, _ = model("masked")
    feeds = feeds_of(item, batch)
    new = looped(item, stages=4, microbatches=4, boundaries=cuts)
    assert_alike(train(new, feeds), train(item, feeds))


def half_precise() -> tuple[Any, list[str]]:
    """Layers that hand on bfloat16, beside texts that the last one counts."""
    h, cuts = tf.cast(tf.sin(inputs(6) @ variable("w", values(6, 6))), tf.bfloat16), []
    texts = tf.strings.as_string(tf.cast(h[:, 0], tf.float32), precision=3)
    for i in range(4):
        texts = tf.strings.join([texts, tf.strings.as_string(tf.cast(h[:, 1], tf.float32))])
        h = tf.tanh(tf.cast(h, tf.float64) @ variable(f"w{i}", values(6, 6, seed=i)))
        h = tf.cast(h, tf.bfloat16, name=f"h{i}")
        cuts.append(h.op.name)
    lengths = tf.cast(tf.strings.length(texts), tf.float64)[:, None]
    return tf.reduce_sum((tf.cast(h, tf.float64) - 1) ** 2 * lengths), cuts[:3]


def test_values_of_any_type_are_handed_on() -> None:
    item, cuts = staged_item(half_precise)
    how = {"stages": 4, "microbatches": 4, "boundaries": cuts}
    copies = ar.rewrite(item, {"devices": ["CPU:0"], "pipeline": how})
    new = looped(item, **how)
    handed = {node.output_dtypes[0] for node in new.graph if node.op == "NextIteration"}
    assert {tf.bfloat16.as_datatype_enum, tf.string.as_datatype_enum} <= handed
    feeds = feeds_of(item)
    assert_alike(train(new, feeds), train(copies, feeds))


@lru_cache(maxsize=1)
def convolved() -> tuple[GraphItem, list[str]]:
    return staged_item(convolutions)


@pytest.mark.parametrize(("stages", "micro"), covering(STAGES, MICRO[::-1]))
def test_the_gradient_norm_of_sixteen_convolutions_is_the_published_one(stages: int, micro: int) -> None:
    item, cuts = convolved()
    new = looped(item, stages=stages, microbatches=micro, boundaries=boundaries(cuts, stages))
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(1245)
        examples = session.run(v1.random_uniform([16, 8, 8, 1], seed=12345))
    outputs, _ = train(new, [{"x": examples}])
    slopes = [value for name, value in outputs[0].items() if name.startswith("slope")]
    assert np.sqrt(sum(np.sum(np.square(slope)) for slope in slopes)) == pytest.approx(GOLDEN, abs=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_moving_averages_take_the_statistics_of_all_micro_batches_in_their_order(fused: bool) -> None:
    item, cuts = staged_item(lambda: network(fused))
    pipeline = {"form": "loop", "stages": 3, "microbatches": 4, "boundaries": cuts[:2]}
    new = ar.rewrite(item, {**LOCAL, "pipeline": pipeline})
    assert_alike(train(new, PICTURES), normalised_in_sequence(4, fused), 2e-5)


CIRCULAR = [(4, 4, 2, 11), (8, 4, 3, 27), (5, 4, 2, 19), (3, 1, 2, 6)]


@lru_cache(maxsize=4)
def deep(layers: int) -> tuple[GraphItem, list[str], Any]:
    """Return equal layers, the boundaries between them, and what three steps on one device give."""

    def forward() -> tuple[Any, list[str]]:
        h, cuts = inputs(3), []
        for i in range(layers):
            h = tf.tanh(h @ variable(f"w{i}", values(3, 3, seed=i)), name=f"h{i}")
            cuts.append(h.op.name)
        return tf.reduce_mean((h - 1) ** 2), cuts[:-1]

    item, cuts = staged_item(forward)
    return item, cuts, train(item, feeds_of(item, 10))


@pytest.mark.parametrize(("micro", "devices", "repeat", "count"), CIRCULAR)
def test_stages_that_go_round_turn_as_often_as_the_formula_says(
    micro: int, devices: int, repeat: int, count: int
) -> None:
    item, cuts, expected = deep(devices * repeat)
    new = looped(item, stages=devices, circular_repeat=repeat, microbatches=micro, boundaries=cuts)
    feeds = feeds_of(item, 10)
    assert_alike(train(new, feeds), expected)
    assert counted(runs_of(new, feeds[0])) == [count, count] == [iterations(micro, devices, repeat)] * 2
    used = {node.device for node in new.graph if node.op == "MatMul"}
    assert used == {f"/device:CPU:{i}" for i in range(devices)}


def counted(runs: Counter[str]) -> list[int]:
    """Return how many iterations the loops of a step had."""
    return [runs[f"replica_0/autograph_pipeline/{kind}/next_number"] for kind in ("forward", "backward")]


def runs_of(new: GraphItem, given: dict[str, Any]) -> Counter[str]:
    """Return how often each node ran in one step, by TensorFlow's own account of it."""
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(v1.GraphDef.FromString(new.graph_bytes), name="")
    with v1.Session(graph=graph, config=v1.ConfigProto(device_count={"CPU": 4})) as session:
        session.run(new.init_op)
        told = v1.RunMetadata()
        options = v1.RunOptions(timeout_in_ms=60000, trace_level=v1.RunOptions.FULL_TRACE)
        session.run("train", {f"{name}:0": value for name, value in given.items()}, options, told)
    return Counter(stats.node_name for device in told.step_stats.dev_stats for stats in device.node_stats)


@pytest.mark.parametrize(("micro", "stages"), [(8, 4), (2, 4), (1, 4)])
def test_nothing_of_a_stage_runs_without_a_micro_batch(micro: int, stages: int) -> None:
    """Of M+S-1 iterations each matrix product runs in M, by TensorFlow's own account of the step."""
    item, cuts, _ = model("mlp")
    new = looped(item, stages=stages, microbatches=micro, boundaries=cuts)
    runs = runs_of(new, feed(item, 0))
    names = [node.name for node in new.graph if node.op == "MatMul"]
    assert len(names) == 4 + 4 + 3
    assert {name: runs[name] for name in names} == dict.fromkeys(names, micro)
    assert counted(runs) == [micro + stages - 1] * 2


def logarithms() -> tuple[Any, list[str]]:
    """Layers that have no finite value at zero, which they say at once."""
    h, cuts = inputs(6), []
    h = tf.exp(h)
    for i in range(4):
        logs = tf.debugging.check_numerics(tf.math.log(h), "a logarithm")
        h = tf.identity(tf.exp(tf.tanh(logs * variable(f"w{i}", values(6, seed=i)))), name=f"h{i}")
        h = tf.identity(h / tf.norm(h, axis=1, keepdims=True), name=f"o{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean((h - 1) ** 2), cuts[:3]


@pytest.mark.parametrize("form", ["loop", "unrolled"])
def test_stages_that_have_no_finite_value_at_zero_stay_finite(form: str) -> None:
    item, cuts = staged_item(logarithms)
    feeds = feeds_of(item)
    new = looped(item, stages=4, microbatches=4, boundaries=cuts, form=form)
    expected = train(item, feeds)
    assert all(np.isfinite(value).all() for value in expected[1].values())
    assert_alike(train(new, feeds), expected)


def auxiliary() -> tuple[Any, list[str]]:
    """Layers each of which adds something of its own to the loss."""
    h, cuts, extra = inputs(6), [], []
    for i in range(4):
        h = tf.tanh(h @ variable(f"w{i}", values(6, 6, seed=i)), name=f"h{i}")
        extra.append(0.1 * tf.reduce_mean(tf.reduce_max(h, 1) ** 2))
        cuts.append(h.op.name)
    return tf.reduce_mean((h - 1) ** 2) + tf.add_n(extra), cuts[:3]


@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 8), (4, 2)])
def test_losses_of_single_stages_are_added_once_per_micro_batch(stages: int, micro: int) -> None:
    item, cuts = staged_item(auxiliary)
    new = looped(item, stages=stages, microbatches=micro, boundaries=boundaries(cuts, stages))
    assert_alike(train(new, feeds_of(item)), train(item, feeds_of(item)))


@pytest.mark.parametrize(("name", "repeat"), [("mlp", 1), ("dropout", 1), ("mlp", 2)])
def test_the_graph_is_as_large_for_64_micro_batches_as_for_4(name: str, repeat: int) -> None:
    item, cuts, _ = model(name)
    how = {"stages": 4 // repeat, "circular_repeat": repeat, "boundaries": cuts}
    few, many = (len(looped(item, microbatches=micro, **how).graph) for micro in (4, 64))
    assert few == many


def test_replicas_of_a_looped_pipeline_are_summed_once_per_step() -> None:
    item, cuts, expected = model("mlp")
    pipeline = {"stages": 2, "microbatches": 2, "boundaries": cuts[1:2], "form": "loop"}
    new = ar.rewrite(item, {"devices": [f"CPU:{i}" for i in range(4)], "pipeline": pipeline})
    assert_alike(train(new, feeds_of(item)), expected)
    assert {node.device for node in new.graph if node.op == "MatMul"} == {f"/device:CPU:{i}" for i in range(4)}


def test_stages_of_a_loop_are_where_their_variables_are() -> None:
    item, cuts, _ = model("mlp")
    graph = looped(item, stages=4, microbatches=4, boundaries=cuts).graph
    for stage in range(4):
        name = "matmul" if stage == 0 else f"matmul_{stage}"
        for there in (f"w{stage}", f"w{stage}/Adam", f"train/update_w{stage}/ResourceApplyAdam", f"replica_0/{name}"):
            assert graph.nodes[there].device == f"/device:CPU:{stage}", there


def test_verify_compares_a_loop_with_one_device() -> None:
    item, cuts, _ = model("mlp")
    config = {"devices": ["CPU:0"], "pipeline": {"stages": 4, "microbatches": 4, "boundaries": cuts, "form": "loop"}}
    report = ar.verify(item, config, steps=2)
    assert report.ok, str(report)


def test_a_plan_with_a_loop_of_stages_is_read_as_it_was_written(tmp_path: Any) -> None:
    item, cuts, expected = model("mlp")
    config = {"devices": ["CPU:0"], "pipeline": {"stages": 4, "microbatches": 4, "boundaries": cuts, "form": "loop"}}
    plan = ar.build_plan(item, config)
    plan.save(tmp_path / "plan.yaml")
    plan.save(tmp_path / "plan.pb")
    read = ar.Plan.load(tmp_path / "plan.yaml")
    assert read == plan == ar.Plan.load(tmp_path / "plan.pb")
    assert read.looped
    assert_alike(train(ar.rewrite(item, read), feeds_of(item)), expected)


def test_a_loop_of_stages_is_rewritten_to_the_same_bytes_every_time() -> None:
    item, cuts, _ = model("dropout")
    first, second = (looped(item, stages=4, microbatches=4, boundaries=cuts).graph_bytes for _ in range(2))
    assert first == second


def different(change: str) -> tuple[Any, list[str]]:
    """Four layers, the third of which is not like the others."""
    h, cuts = inputs(6), []
    for i in range(4):
        odd = change if i == 2 else ""
        w = variable(f"w{i}", values(3 if odd == "shape" else 6, 6, seed=i))
        h = h[:, :3] @ w if odd == "slice" else tf.matmul(h, w, transpose_b=odd == "attribute", name=f"m{i}")
        h = tf.add(h, 0.25 if odd == "constant" else 0.5, name=f"a{i}")
        h = (tf.sin if odd == "op" else tf.tanh)(h, name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean((h - 1) ** 2), cuts[:3]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("op", "stages 1 and 2 differ, .* 'h1' is Tanh, 'h2' in its place is Sin"),
        ("attribute", "'transpose_b' of 'm1' is False, of 'm2' in its place True"),
        ("constant", "the constants 'a1/y' and 'a2/y' in its place differ"),
    ],
)
def test_stages_that_differ_are_refused_with_the_difference(change: str, why: str) -> None:
    item, cuts = staged_item(lambda: different(change))
    with pytest.raises(PlanError, match=why) as caught:
        looped(item, stages=4, microbatches=2, boundaries=cuts)
    assert "form to unrolled" in str(caught.value)
    feeds = feeds_of(item)[:1]
    assert_alike(
        train(looped(item, stages=4, microbatches=2, boundaries=cuts, form="unrolled"), feeds), train(item, feeds)
    )


def test_a_last_stage_without_a_layer_is_refused_by_name() -> None:
    item, cuts, _ = model("tied")
    with pytest.raises(PlanError, match=r"there is no Tanh in stage 3 like 'h1' of stage 1"):
        looped(item, stages=4, microbatches=2, boundaries=cuts)


def test_an_error_in_one_stage_ends_the_step() -> None:
    """The other devices do not wait for it."""
    item, cuts = staged_item(logarithms)
    new = looped(item, stages=4, microbatches=4, boundaries=cuts)
    given = feed(item, 0)
    given["x"][5] = np.inf
    with new.session() as session:
        session.run(new.init_op)
        with pytest.raises(Exception, match="a logarithm"):
            session.run("train", given, timeout_ms=60000)
