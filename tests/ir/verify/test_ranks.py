"""The graphs of all ranks of a job are accepted as they are made, and refused however they are broken."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from autograph_rewrite.errors import GraphError, VerifyError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, Mesh
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.collective_groups import KeyRange, contracted_order, key_range
from autograph_rewrite.ir.verify.folded import Fault, folded_faults
from autograph_rewrite.ir.verify.ranks import check_ranks, verify_ranks
from autograph_rewrite.runtime.job.digests import common_name
from tests.seeded_mistakes.__main__ import table
from tests.seeded_mistakes.job_bench import JobBench, in_loop
from tests.seeded_mistakes.orders import chained, give_token
from tests.seeded_mistakes.ranks import KINDS, MODELS, judge, mutants
from tests.support.covering import covering
from tests.support.rank_jobs import EXTRA, RANKS, Job, item_of, job_of, jobs_of
from tests.support.small_items import regression
from tests.zoo import ZOO

EVERY = 4  # a job is broken in every fourth way, beginning elsewhere in each
AT_LEAST = 30  # broken jobs of a model; seven models make more than 200


def faults_of(job: Job) -> list[Fault]:
    return verify_ranks(job.graphs, job.original)


def problems(job: Job) -> list[str]:
    return [fault.problem for fault in faults_of(job)]


@pytest.mark.parametrize(("model", "ranks"), covering([name for name in (*ZOO, *EXTRA) if name not in MODELS], RANKS))
def test_real_rewrites_fit_together(model: str, ranks: int) -> None:
    for job in jobs_of(model, item_of(model), (ranks,)):
        assert problems(job) == [], job.name
        met = [{common_name(node.name) for node in graph if node.op.startswith("Collective")} for graph in job.graphs]
        assert met[1:] == met[:-1], "workers tell each other by name where they meet"


@pytest.mark.parametrize("model", MODELS)
def test_every_broken_job_is_refused_and_the_rank_and_the_collective_are_named(model: str) -> None:
    rows = []
    for at, job in enumerate(jobs_of(model, item_of(model))):
        assert problems(job) == [], job.name
        for mutant in mutants(job, KINDS[(at + MODELS.index(model)) % EVERY :: EVERY]):
            assert folded_faults(mutant.job.graphs[mutant.rank or 0], Mesh.of(1)) == [], (
                f"broken by itself: {mutant.sentence}"
            )
            rows.append(judge(mutant))
            assert rows[-1]["refused"], f"accepted, or not named: {mutant.sentence}"
    print(f"{model}\n{table(rows)}")
    assert len(rows) >= AT_LEAST


@cache
def small_job(ranks: int = 2, mode: str = "mirrored", devices: int = 1) -> Job:
    return job_of("regression", regression(), mode, devices, ranks)


def fresh(ranks: int = 2) -> Job:
    return small_job(ranks).clone()


def member(job: Job, rank: int, what: str = "gradient") -> Node:
    return job.graphs[rank].node(f"replica_0/{what}/all_reduce")


def test_mutants_are_the_same_every_time() -> None:
    jobs = (job_of("mlp", regression(), "mirrored", 2, 3) for _ in range(2))
    one, other = ([mutant.sentence for mutant in mutants(job)] for job in jobs)
    assert one == other
    assert len(one) > 20


def test_a_job_of_encoded_graphs_is_checked_too() -> None:
    job = fresh()
    check_ranks([serde.to_bytes(graph) for graph in job.graphs], job.original)
    check_ranks([serde.to_bytes(graph) for graph in job.graphs])
    assert verify_ranks([]) == []
    with pytest.raises(GraphError):
        check_ranks([b"\xff\xff"])


def test_the_error_says_what_to_do() -> None:
    job = fresh()
    member(job, 1).set_attr("merge_op", b"Max")
    with pytest.raises(VerifyError) as caught:
        check_ranks(job.graphs, job.original)
    text = str(caught.value)
    assert "'merge_op'" in text
    assert "'Max' at 'replica_0/gradient/all_reduce' of rank 1" in text
    assert "'Add' at 'replica_0/gradient/all_reduce' of rank 0" in text
    assert "hint rewrite for all ranks again" in text


def test_every_fault_of_a_broken_job_has_a_node_of_the_job_and_a_hint() -> None:
    for job in (small_job(3), small_job(2, devices=2), small_job(2, "shared", 2)):
        for mutant in mutants(job):
            for fault in verify_ranks(mutant.job.graphs, mutant.job.original):
                assert fault.hint, fault.problem
                assert fault.node is None or fault.node.graph in mutant.job.graphs


def test_all_faults_are_reported_not_the_first() -> None:
    job = fresh(3)
    member(job, 1).set_attr("merge_op", b"Max")
    member(job, 2, "loss").set_attr("communication_hint", b"ring")
    text = "\n".join(problems(job))
    assert "'merge_op'" in text
    assert "'communication_hint'" in text


def test_a_missing_rank_is_a_missing_member_of_every_collective() -> None:
    job = fresh(3)
    found = [fault.problem for fault in verify_ranks(job.graphs[:2], job.original)]
    collectives = ("gradient", "loss", "sizes, and a digest of what all workers are given alike")
    assert len([problem for problem in found if "has 2 members; it needs 3" in problem]) == len(collectives)


def test_two_ranks_with_one_graph_are_for_one_process() -> None:
    job = fresh()
    found = [fault.problem for fault in verify_ranks([job.graphs[0], job.graphs[0]], job.original)]
    assert any("rank 0 and rank 1 are both for the process '/job:worker/replica:0/task:0'" in text for text in found)


def test_what_has_gone_astray_is_found_in_another_collective() -> None:
    job = fresh()
    node = member(job, 1)
    key = node.graph.add("Const", name="odd", attrs={"value": np.int32(5), "dtype": dtypes.INT32}).output()
    node.set_input(3, key)
    text = "\n".join(problems(job))
    assert "rank 1 has none: its 'replica_0/gradient/all_reduce' is in collective (group " in text
    assert "instance 5)" in text


def test_opposite_orders_are_a_deadlock_that_names_both_ranks_and_the_chain() -> None:
    job = fresh()
    between = job.graphs[1].add("NoOp", name="between", controls=[member(job, 1)])
    member(job, 0).add_control(member(job, 0, "loss"))
    member(job, 1, "loss").add_control(between)
    (problem,) = problems(job)
    assert "wait for each other" in problem
    assert "'replica_0/gradient/all_reduce' of rank 0" in problem
    assert "'replica_0/loss/all_reduce' of rank 1 on /job:worker/replica:0/task:1/device:CPU:0" in problem
    assert "comes after 'replica_0/gradient/all_reduce' of rank 1 through 'between'" in problem


def test_what_cannot_be_ordered_by_itself_is_said_of_its_rank() -> None:
    job = fresh()
    member(job, 1).add_control(job.graphs[1].node("train"))
    (problem,) = problems(job)
    assert problem.startswith("rank 1: the graph has a cycle")
    job = fresh()
    job.graphs[1].node("train").span = EACH
    (problem,) = problems(job)
    assert problem == "'train' of rank 1 is still folded"


def test_what_only_some_ranks_can_run_is_named() -> None:
    job = fresh(3)
    graph = job.graphs[2]
    graph.erase(graph.node("train"))
    assert "rank 2 cannot run target 'train': its graph has no node 'train'" in problems(job)


def test_a_step_that_one_rank_cuts_short_would_hang() -> None:
    job = fresh()
    train = job.graphs[1].node("train")
    for control in train.controls:
        train.remove_control(control)
    (problem,) = problems(job)
    assert problem.startswith("running target 'train' alone hangs")
    assert "of rank 1" in problem


def spoil_nothing(bench: JobBench) -> None:
    pass


def chain_everywhere(bench: JobBench) -> None:
    chained(bench)


def tokens_everywhere(bench: JobBench) -> None:
    for node in [node for group in bench.groups for node in group.members]:
        give_token(bench, node)


def a_copy_on_one_rank(bench: JobBench) -> None:
    for group in bench.groups:
        for node in bench.of(group):
            copy = bench.graph.add("Identity", [node.inputs[0]], name=f"{node.name}/copy", device=node.device)
            node.set_input(0, copy.output())


def another_hint_everywhere(bench: JobBench) -> None:
    for node in [node for group in bench.groups for node in group.members]:
        node.set_attr("communication_hint", b"ring")


def another_frame_everywhere(bench: JobBench) -> None:
    for node in bench.nodes_of_all:
        if node.op == "Enter":
            node.set_attr("frame_name", node.attr("frame_name") + b"/other")


def other_order_in_the_file(bench: JobBench) -> None:
    bench.graph.nodes = dict(reversed(bench.graph.nodes.items()))


def more_on_one_rank(bench: JobBench) -> None:
    """Let the first rank do something for itself, as a chief that writes summaries does."""
    _, node = bench.member(lambda group: not in_loop(group))
    bench.graph.add("Print", [node.output(), node.output()], name="summary", attrs={"U": [node.attr("T")]})


@pytest.mark.parametrize(
    "change",
    [
        spoil_nothing,
        chain_everywhere,
        tokens_everywhere,
        a_copy_on_one_rank,
        another_hint_everywhere,
        another_frame_everywhere,
        other_order_in_the_file,
        more_on_one_rank,
    ],
)
@pytest.mark.parametrize("model", ["mlp", "norm_in_loop"])
def test_changes_that_break_nothing_are_accepted(model: str, change: Callable[[JobBench], None]) -> None:
    import random

    bench = JobBench(two_ranks(model), random.Random(0))
    change(bench)
    assert problems(bench.job) == []


@cache
def two_ranks(model: str) -> Job:
    return next(jobs_of(model, item_of(model)))


def test_a_collective_behind_a_loop_and_one_in_it_have_an_order() -> None:
    """The loop on rank 0 ends before `outer` begins; on rank 1 it begins after `outer` has ended."""
    graphs = [looped(after=True), looped(after=False)]
    (fault,) = verify_ranks(graphs)
    assert "wait for each other" in fault.problem
    assert "through 'leave'" in fault.problem or "'leave'" in fault.problem
    assert verify_ranks([looped(after=True, task=task) for task in (0, 1)]) == []


def looped(*, after: bool, task: int | None = None) -> Graph:
    """Return one rank of a loop with a collective in it, and of a collective that runs after the loop, or before it."""
    graph = Graph()
    place = f"/job:worker/replica:0/task:{(0 if after else 1) if task is None else task}/device:CPU:0"

    def const(name: str, value: object, dtype: int = dtypes.INT32, **more: object) -> Node:
        array = np.asarray(value, dtypes.numpy_dtype(dtype))
        return graph.add("Const", name=name, attrs={"value": array, "dtype": dtype}, **more)  # type: ignore[arg-type]

    def collective(name: str, value: Node, *keys: Node) -> Node:
        attrs = {"merge_op": "Add", "final_op": "Id"}
        inputs = [value.output(), *(key.output() for key in keys)]
        return graph.add("CollectiveReduceV2", inputs, name=name, attrs=attrs, device=place)

    size, group, one, two = (const(f"key_{name}", key) for name, key in zip("sgab", (2, 7, 11, 12), strict=True))
    start = const("start", 1.0, dtypes.FLOAT)
    frame = {"frame_name": "loop", "parallel_iterations": 10}
    enter = graph.add("Enter", [start.output()], name="enter", attrs=frame)
    inside = [
        graph.add("Enter", [key.output()], name=f"in_{key.name}", attrs=frame | {"is_constant": True})
        for key in (size, group, one)
    ]
    merge = graph.add("Merge", [enter.output(), enter.output()], name="merge", attrs={"N": 2})
    stop = graph.add("Enter", [start.output()], name="in_stop", attrs=frame | {"is_constant": True})
    less = graph.add("Less", [merge.output(), stop.output()], name="less")
    condition = graph.add("LoopCond", [less.output()], name="condition")
    switch = graph.add("Switch", [merge.output(), condition.output()], name="switch")
    body = graph.add("Identity", [switch.output(1)], name="body")
    inner = collective("inner", body, *inside)
    back = graph.add("NextIteration", [inner.output()], name="back")
    merge.set_input(1, back.output())
    leave = graph.add("Exit", [switch.output(0)], name="leave")
    outer = collective("outer", start, size, group, two)
    outer.add_control(leave) if after else enter.add_control(outer)
    return graph


@pytest.mark.parametrize(
    ("symbol", "numbers"),
    [
        (7, KeyRange(7, 0, 7)),
        (("AddV2", 5, 6), KeyRange(11, 0, 11)),
        (("AddV2", ("Mul", ("BitwiseAnd", ("Size", "x"), 3), 8), 64), KeyRange(64, 8, 88)),
        (("AddV2", 64, ("Mul", 8, ("BitwiseAnd", 3, ("Size", "x")))), KeyRange(64, 8, 88)),
        (("Size", "x"), KeyRange(0, 1, float("inf"))),
        (("FloorMod", ("Size", "x"), 3), KeyRange(0, 1, float("inf"))),
    ],
)
def test_the_numbers_that_a_key_can_be_follow_from_how_it_is_computed(symbol: object, numbers: KeyRange) -> None:
    assert key_range(symbol) == numbers  # type: ignore[arg-type]


def test_rows_that_are_interleaved_never_meet() -> None:
    rows = [key_range(("AddV2", ("Mul", ("BitwiseAnd", ("Size", "x"), 15), 4), 64 + row)) for row in range(4)]
    assert not any(one.meets(other) for one, other in pairwise(rows))
    assert rows[0].meets(key_range(68))
    assert not rows[0].meets(key_range(69))
    assert not rows[0].meets(key_range(63))
    assert rows[0].meets(key_range(("Size", "y")))
    assert key_range(5).meets(key_range(5))
    assert not key_range(5).meets(key_range(6))


def test_the_order_of_a_real_job_holds_every_node_once() -> None:
    bench_job = two_ranks("norm_in_loop")
    nodes = [node for graph in bench_job.graphs for node in graph]
    from autograph_rewrite.ir.verify.collective_groups import collect

    order, stuck = contracted_order(nodes, collect(nodes)[0])
    assert stuck == []
    assert len(order) == len(set(order)) == len(nodes)
