"""Variables that are split over the replicas stay one node, train as on one device, and mistakes with them are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.certify.check_claims import check_claims
from autograph_rewrite.compile import request
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError, VerifyError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import EACH, PER_REPLICA
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types.opdefs import RESHARD
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.facts.symbolic_dims import rows_of_unit, shard_symbol, shards_of, to_global
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.passes.collectives import local_ops
from autograph_rewrite.passes.reshard import lower_reshards
from autograph_rewrite.plan.parts.lowerings import Operation
from tests.support.covering import covering
from tests.support.training import make_item, placeholder, train, variable

SHAPES = {"a": (5, 4), "b": (4,), "c": (3, 4)}
"""Over two, three and four replicas: even and uneven shards, and some that are empty."""


def item() -> ar.GraphItem:
    """Return three variables, one of which has a norm in its update, and a loss of a batch of any size."""

    def forward() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        w = {name: variable(name, rng.normal(size=shape)) for name, shape in SHAPES.items()}
        h = tf.tanh(placeholder("x", None, 5) @ w["a"] + w["b"])
        y = tf.matmul(h, w["c"], transpose_b=True)
        return {"loss": tf.reduce_mean(y**2) + 0.1 * tf.nn.l2_loss(w["a"]) * tf.norm(w["c"]), "y": y}

    return make_item(forward)


def config(replicas: int = 2, stage: int = 3, mode: str = "mirrored", **more: Any) -> dict[str, Any]:
    return {
        "devices": [f"CPU:{i}" for i in range(replicas)],
        "strategy": {"name": "AllReduce", "variables": mode},
        "variables": [{"match": ".*", "partition": {"over": "data", "stage": stage}}],
        **more,
    }


FEEDS = [{"x:0": np.random.default_rng(i).normal(size=(size, 5))} for i, size in enumerate((7, 4, 9))]


@pytest.mark.parametrize(
    ("how", "replicas"), covering([{}, {"stage": 1}, {"stage": 2, "mode": "shared"}, {"microbatches": 2}], [2, 3, 4])
)
def test_variables_over_the_replicas_train_as_on_one_device(how: dict[str, Any], replicas: int) -> None:
    one, expected = item(), train(item(), FEEDS)
    new = ar.rewrite(one, config(replicas, **how))
    assert all(variable.shards is not None for variable in new.variables.values())
    found = train(new, FEEDS)
    for got, wanted in zip(found.fetched, expected.fetched, strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, 1e-12, 1e-12)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(found.variables[name], value, 1e-12, 1e-12)


def test_a_variable_is_one_node_on_any_number_of_replicas() -> None:
    counted: dict[int, int] = {}
    for replicas in (2, 4):
        sizes: dict[str, int] = {}
        ar.rewrite(
            item(), config(replicas), observers=[lambda name, graph, seen=sizes: seen.update({name: len(graph)})]
        )
        counted[replicas] = sizes["assign-devices"]
    assert counted[2] == counted[4]


def test_the_plan_lists_what_is_gathered_and_what_is_scattered() -> None:
    edges = ar.rewrite(item(), config(2)).report.plan.edges
    gathers = [edge for edge in edges if edge.lowering == "all_gather"]
    scatters = [edge for edge in edges if edge.lowering == "reduce_scatter"]
    assert {edge.owner for edge in gathers} == {edge.owner for edge in scatters} == set(SHAPES)
    by_owner = {edge.owner: edge.bytes for edge in gathers}
    assert by_owner == {"a": 5 * 2 * 8, "b": 2 * 8, "c": 3 * 2 * 8}  # along the dimension that divides evenly
    assert {(edge.from_, edge.to.partition("(")[0]) for edge in scatters} == {("partial(sum)", "split")}
    first = [edge for edge in ar.rewrite(item(), config(2, 1)).report.plan.edges if edge.from_ == "partial(sum)"]
    assert not any(edge.to.startswith("split") for edge in first)  # the first stage adds gradients up whole


def test_sizes_of_shards_are_sizes_like_others() -> None:
    size = shard_symbol((3, 2, 0))
    assert repr(size) == "b/3,2,0"
    assert shards_of(size) == shards_of(size._replace(coef=4)) == (3, 2, 0)
    assert to_global(size._replace(coef=4), None) == 20
    assert rows_of_unit(size._replace(coef=4)) == 4
    assert shards_of(7) == shards_of(None) == ()


# Mistakes: whoever cuts, joins or adds up shards wrongly is refused by the certificate, and by nobody before it.


def refused(given: dict[str, Any]) -> str:
    """Return what the certificate says of a rewrite, "" where it agrees."""
    flat = normalise_original(item())
    asked = Request(flat, request(flat, Config.of(given)), certificate=Certificate(strict=True))
    try:
        pass_pipeline.rewrite(asked)
    except RewriteError as error:
        return str(error)
    return ""


def shifted(block: Any) -> Any:
    first, *others = block.shards
    return block._replace(shards=(first - 1, others[0] + 1, *others[1:]))


def _cut_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lower_reshards.cut_shard
    monkeypatch.setattr(lower_reshards, "cut_shard", lambda r, w, block, node: made(r, w, shifted(block), node))


def _scatter_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    made = local_ops.scatter_among_peers
    monkeypatch.setitem(local_ops.PEERS, Operation.SCATTER, lambda r, v, block, node: made(r, v, shifted(block), node))


def _take_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made = local_ops.FoldedBuilder.from_all

    def first(build: Any, *given: Any, select: Any, **how: Any) -> Any:
        return made(build, *given, select=local_ops.Select.EVERY, **how)

    monkeypatch.setattr(local_ops.FoldedBuilder, "from_all", first)


def _add_up_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(rewrite: Any, value: Any, block: Any, node: Any) -> Any:
        return local_ops.cut_shard(rewrite, value, block, node)

    monkeypatch.setitem(local_ops.PEERS, Operation.SCATTER, alone)


def _join_along_another_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    made = local_ops.gather_among_peers
    monkeypatch.setitem(
        local_ops.PEERS, Operation.GATHER, lambda r, value, block, node: made(r, value, block._replace(dim=0), node)
    )


def _join_twice_the_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(rewrite: Any, value: Any, block: Any, node: Any) -> Any:
        build = local_ops.FoldedBuilder.of(rewrite, value, node.name, span=node.span)
        return build.op("ConcatV2", value, value, build.numbers(block.dim, "axis"), what="all_gather", N=2)

    monkeypatch.setitem(local_ops.PEERS, Operation.GATHER, twice)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    _cut_elsewhere, _scatter_elsewhere, _take_the_first_block, _add_up_without_the_others,
    _join_along_another_dimension, _join_twice_the_own,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.__name__.strip("_"))
@pytest.mark.parametrize("micro", [1, 2])
def test_a_mistake_with_shards_is_refused(
    mistake: Callable[[pytest.MonkeyPatch], None], micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(2, microbatches=micro)
    assert refused(given) == ""
    mistake(monkeypatch)
    assert refused(given)


def claimed() -> tuple[Graph, Any]:
    """Return the graph and the claims of a rewrite when its placements are known."""
    taken: list[Any] = []

    class Taking(Certificate):
        def claimed(self, graph: Graph, claims: Any) -> None:
            taken.append((graph.clone(), claims))
            super().claimed(graph, claims)

    flat = normalise_original(item())
    pass_pipeline.rewrite(Request(flat, request(flat, Config.of(config(2))), certificate=Taking()))
    return taken[0]


WRONG: dict[str, Callable[[Any], Any]] = {
    "other sizes": lambda claim: claim._replace(shape=tuple(_other(dim) for dim in claim.shape)),
    "another dimension": lambda claim: claim._replace(dim=1 - claim.dim),
    "whole": lambda claim: claim._replace(kind="replicated"),
    "a contribution": lambda claim: claim._replace(kind="partial", op="sum"),
    "sizes of nothing": lambda claim: claim._replace(shape=tuple(_of_examples(dim) for dim in claim.shape)),
}


def _other(dim: Any) -> Any:
    return (dim[0], ("b/1,3",)) if isinstance(dim, tuple) else dim


def _of_examples(dim: Any) -> Any:
    return (dim[0], ("b",)) if isinstance(dim, tuple) else dim


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("of", ["a", "a/read", "train"])
def test_a_wrong_claim_about_a_shard_is_refused(of: str, wrong: str) -> None:
    graph, claims = claimed()
    check_claims(topological_order(graph), claims)
    handles = {node.name for node in graph if node.op == "VarHandleOp" and node.name in ("a", "b", "c")}
    reads = {node.name for node in graph if node.op == "ReadVariableOp" and node.inputs[0].node.name == "a"}
    blocks = {node.name for node in graph if node.op == RESHARD and claims.values[node.name].kind == "split"}
    name = min({"a": handles, "a/read": reads, "train": blocks}[of])
    values = dict(claims.values) | {name: WRONG[wrong](claims.values[name])}
    with pytest.raises(VerifyError):
        check_claims(topological_order(graph), claims.__class__(**{**vars(claims), "values": values}))


def test_what_has_a_shard_runs_once_for_all_micro_batches_of_a_replica() -> None:
    spans: dict[str, Any] = {}

    def look(name: str, graph: Graph) -> None:
        if name == "insert-reshards":
            spans.update({node.op: node.span for node in graph if node.op in ("VarHandleOp", "AssignSubVariableOp")})

    ar.rewrite(item(), config(2, microbatches=2), observers=[look])
    assert spans == {"VarHandleOp": PER_REPLICA, "AssignSubVariableOp": PER_REPLICA}
    ar.rewrite(item(), config(2), observers=[look])
    assert spans == {"VarHandleOp": EACH, "AssignSubVariableOp": EACH}
