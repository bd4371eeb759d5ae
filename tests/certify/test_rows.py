"""The certificate and rows of interleaved micro-batches: sparse gradients come in the order of their examples."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import PassError, VerifyError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.facts.placement import Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import Sym
from autograph_rewrite.passes.collectives import all_gather
from autograph_rewrite.passes.collectives.all_gather import Blocked
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.strategies import builder_for
from tests.support.rewriting import run_pipeline
from tests.support.training import placeholder, train, variable

v1 = tf.compat.v1
RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(6, 3))
SIZES = ((7, 3), (5, 2), (2, 4))
FEEDS = [{"ids": RNG.integers(0, 6, (n, t)).astype(np.int32), "x": RNG.normal(size=(n, 3))} for n, t in SIZES]
Observer = Callable[[str, Graph], None]


def words(table: Any, ids: Any, x: Any) -> Any:
    """Look up texts of unknown length: only the run knows how many rows of the gradient an example has."""
    return tf.reduce_sum(tf.sin(tf.gather(table, ids)) * x[:, None])


def masked_words(table: Any, ids: Any, x: Any) -> Any:
    """Look up rows of which a mask keeps some: what it keeps them of comes in order, too."""
    kept = ids > 1
    of_each = tf.broadcast_to(x[:, None], tf.concat([tf.shape(ids), [3]], 0))
    return tf.reduce_sum(tf.sin(tf.gather(table, tf.boolean_mask(ids, kept))) * tf.boolean_mask(of_each, kept))


def counted_twice(table: Any, ids: Any, x: Any) -> Any:
    """Give a gradient of whose values the whole is read by example, and of whose indices by row."""
    rows = tf.sin(tf.gather(table, ids)) * x[:, None]
    count = tf.cast(tf.cast(tf.size(ids), tf.float32), tf.int32)
    values = tf.reshape(tf.cos(rows), tf.stack([count, 3]))
    return tf.IndexedSlices(values, tf.reshape(ids, [-1]), tf.constant(TABLE.shape)), tf.reduce_sum(rows)


def scattered(table: Any, ids: Any, x: Any) -> Any:
    """Add examples where numbers say that are made of the whole batch: they are as many, which only the run knows."""
    order = tf.argsort(x[:, 0] + 0 * tf.cast(ids[:, 0], x.dtype))
    places = tf.boolean_mask(order, order >= 0)
    return tf.reduce_sum(tf.sin(tf.scatter_nd((places % 4)[:, None], tf.reduce_sum(x @ tf.transpose(table), 1), [4])))


LOOP = {"form": "loop"}
RIGHT: tuple[tuple[Callable[[Any, Any, Any], Any], dict[str, Any]], ...] = (
    *((loss_of, how) for loss_of in (words, masked_words, counted_twice, scattered) for how in ({}, {"replicas": 2})),
    (words, LOOP),
    (masked_words, LOOP),
)


def item_of(loss_of: Callable[[Any, Any, Any], Any]) -> GraphItem:
    graph = tf.Graph()
    with graph.as_default():
        ids, x = placeholder("ids", None, None, dtype=tf.int32), placeholder("x", None, 3)
        table, optimizer = variable("table", TABLE), v1.train.RMSPropOptimizer(0.1)
        made = loss_of(table, ids, x)
        slope, loss = made if isinstance(made, tuple) else (v1.gradients(made, table)[0], made)
        optimizer.apply_gradients([(slope, table)], name="train")
        tf.identity(loss, name="out_loss")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["out_loss"], init_op="init")


def settings(replicas: int = 1, form: str = "unrolled") -> dict[str, Any]:
    devices = [f"CPU:{i}" for i in range(replicas)]
    return {"devices": devices, "microbatches": 2, "accumulation": {"layout": "interleaved", "form": form}}


def certified(loss_of: Callable[[Any, Any, Any], Any], *observers: Observer, **how: Any) -> Certificate:
    """Rewrite under the eyes of a certificate; observers may spoil what a pass has made."""
    flat, config = normalise_original(item_of(loss_of)), Config.model_validate(settings(**how))
    certificate = Certificate(strict=True)
    plan = builder_for(config).build(flat, config)
    run_pipeline(flat, plan, observers=list(observers), certificate=certificate)
    return certificate


@pytest.mark.parametrize(("loss_of", "how"), RIGHT)
def test_rows_in_the_order_of_their_examples_raise_no_alarm(
    loss_of: Callable[[Any, Any, Any], Any], how: dict[str, Any]
) -> None:
    assert not certified(loss_of, **how).not_covered
    item = item_of(loss_of)
    got, expected = train(ar.rewrite(item, settings(**how)), FEEDS), train(item, FEEDS)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[name], value, 1e-12, 1e-12, err_msg=name)


def left_joined(part: str) -> Observer:
    """Let one of the operands of a sparse gradient come as micro-batches were joined."""

    def spoil(name: str, graph: Graph) -> None:
        if name == "lower-reshards":
            (node,) = [one for one in graph if one.name.endswith(f"{part}/concat/restored")]
            node.output().replace_all_uses_with(node.inputs[0])

    return spoil


@pytest.mark.parametrize("part", ["Reshape", "Reshape_1"], ids=["values", "indices"])
def test_values_and_indices_of_a_sparse_gradient_in_two_orders_are_refused(part: str) -> None:
    with pytest.raises(VerifyError, match=r"should read the whole of 'gradients/Gather_grad/Reshape"):
        certified(words, left_joined(part))


def test_values_and_indices_in_two_orders_would_train_otherwise() -> None:
    """What the certificate refuses is no matter of taste."""
    flat, config = normalise_original(item_of(words)), Config.model_validate(settings())
    plan = builder_for(config).build(flat, config)
    expected = train(item_of(words), FEEDS[:1]).variables["table"]

    def trained(*observers: Observer) -> Any:
        return train(run_pipeline(flat, plan, observers=observers), FEEDS[:1]).variables["table"]

    np.testing.assert_allclose(trained(), expected, 1e-12)
    assert np.abs(trained(left_joined("Reshape_1")) - expected).max() > 1e-3


@pytest.mark.parametrize(("size", "works"), [(Sym(1, ("b#other:0",)), True), (Sym(1, ("T:ids/1", "b")), False)])
def test_rows_without_an_order_are_joined_only_with_others_of_their_kind(size: Sym, works: bool) -> None:
    """Values come as they were joined if their indices do, too."""
    graph = Graph()
    kind = {"dtype": dtypes.FLOAT, "shape": (None,)}
    values, indices = (graph.add("Placeholder", name=name, attrs=kind).output() for name in ("values", "indices"))
    facts = {values: Fact(split(0), dtypes.FLOAT, (Sym(1, ("b#values:0",)),)), indices: Fact(split(0), 1, (size,))}
    edges = {(v.name, "replicated"): EdgePlan(v.name, "split(0)", "replicated", "t") for v in facts}
    context: Any = SimpleNamespace(graph=graph, edges=edges, fact=facts.__getitem__)
    exchange = Exchange(context, cast(Any, None), edges[values.name, "replicated"])
    blocked = Blocked(facts[values], cast(Any, None), None)
    if works:
        assert all_gather._restored(exchange, values, blocked) is values
        return
    with pytest.raises(PassError, match="no order to restore"):
        all_gather._restored(exchange, values, blocked)
