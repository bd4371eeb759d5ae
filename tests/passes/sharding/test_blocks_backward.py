"""What is read in blocks only is made in blocks: masks of experts, lookups in a cut table, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.passes.sharding import placements
from autograph_rewrite.passes.sharding.placements import BlockReads
from tests.support.model_axis import conversions, descent, on_mesh, worst_difference

TOKENS, WIDTH, EXPERTS, SLOTS, INNER = 8, 6, 4, 5, 10
MOE = {
    "router": (WIDTH, EXPERTS),
    "up": (EXPERTS, WIDTH, INNER),
    "down": (EXPERTS, INNER, WIDTH),
    "head": (WIDTH, 2),
}
EXPERT_PARALLEL = {"up": (0, 1, 1), "down": (0, 1, 1)}
WORDS = 14
EMBEDDED = {"table": (WORDS, 6), "head": (6, 2)}


def examples() -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(TOKENS, WIDTH)), rng.normal(size=(TOKENS, 2))]


def routed(gates: Any, choices: int) -> Any:
    """Return how much each slot of each expert counts for each token, [t, E, C] (GShard)."""
    import tensorflow as tf

    best, index = tf.math.top_k(gates, choices)
    combine, before = 0.0, tf.zeros([EXPERTS], tf.float64)
    for k in range(choices):
        chosen = tf.one_hot(index[:, k], EXPERTS, dtype=tf.float64)
        place = tf.cumsum(chosen, exclusive=True) + before
        before += tf.reduce_sum(chosen, 0)
        kept = tf.cast(place < SLOTS, tf.float64) * chosen
        slot = tf.one_hot(tf.cast(tf.reduce_sum(place * chosen, -1), tf.int32), SLOTS, dtype=tf.float64)
        combine += (best[:, k][:, None] * kept)[:, :, None] * slot[:, None, :]
    return combine


def moe_loss(choices: int) -> Callable[..., Any]:
    import tensorflow as tf

    def loss(v: dict[str, Any], x: Any, y: Any) -> Any:
        combine = routed(tf.nn.softmax(x @ v["router"]), choices)
        dispatch = tf.cast(combine > 0, tf.float64)
        hidden = tf.einsum("tec,td->ecd", dispatch, x)
        hidden = tf.nn.relu(tf.einsum("ecd,edf->ecf", hidden, v["up"]))
        hidden = tf.einsum("ecf,efd->ecd", hidden, v["down"])
        return tf.reduce_mean(((x + tf.einsum("tec,ecd->td", combine, hidden)) @ v["head"] - y) ** 2)

    return loss


def gathered_moe_loss(v: dict[str, Any], x: Any, y: Any) -> Any:
    """Each token looks the weights of its expert up."""
    import tensorflow as tf

    gates = tf.nn.softmax(x @ v["router"])
    best = tf.argmax(gates, -1)
    hidden = tf.nn.relu(tf.einsum("td,tdf->tf", x, tf.gather(v["up"], best)))
    out = tf.einsum("tf,tfd->td", hidden, tf.gather(v["down"], best))
    return tf.reduce_mean(((x + tf.reduce_max(gates, -1, keepdims=True) * out) @ v["head"] - y) ** 2)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize(("replicas", "model"), [(1, 4), (2, 2)])
def test_experts_on_devices_of_their_own_train_as_on_one_device(choices: int, replicas: int, model: int) -> None:
    config = on_mesh(replicas, model, EXPERT_PARALLEL)
    assert worst_difference(MOE, descent(moe_loss(choices)), examples(), config) < 1e-9


def test_experts_that_are_looked_up_train_as_on_one_device() -> None:
    config = on_mesh(1, 2, EXPERT_PARALLEL)
    assert worst_difference(MOE, descent(gathered_moe_loss), examples(), config) < 1e-9


@pytest.mark.parametrize("choices", [1, 2])
def test_a_layer_of_experts_has_one_sum_of_tokens_and_gathers_none(choices: int) -> None:
    found = conversions(MOE, descent(moe_loss(choices)), examples(), on_mesh(1, 2, EXPERT_PARALLEL))
    assert found.count(("sum", (-1, WIDTH))) == 1  # its output; what x gets is not needed: it is the input
    assert [shape for how, shape in found if how == "gather" or shape == (EXPERTS, SLOTS, WIDTH)] == []


def test_tokens_are_dispatched_in_one_place_without_backward_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "block_reads", lambda state, units: BlockReads(state))
    found = conversions(MOE, descent(moe_loss(2)), examples(), on_mesh(1, 2, EXPERT_PARALLEL))
    assert ("cut", (EXPERTS, SLOTS, WIDTH)) in found


def ids() -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, WORDS, (8, 3)), rng.normal(size=(8, 2))]


def embedding_loss(v: dict[str, Any], words: Any, y: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean((tf.reduce_sum(tf.nn.embedding_lookup(v["table"], words), 1) @ v["head"] - y) ** 2)


def tied_loss(v: dict[str, Any], words: Any, y: Any) -> Any:
    import tensorflow as tf

    hidden = tf.tanh(tf.gather(v["table"], words)) @ v["head"]
    logits = tf.einsum("btd,vd->btv", hidden, v["table"])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(words, logits))


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)], ids=["rows", "columns"])
@pytest.mark.parametrize(("replicas", "model"), [(1, 2), (2, 2)])
def test_a_cut_table_of_embeddings_trains_as_on_one_device(dims: tuple[int, int], replicas: int, model: int) -> None:
    config = on_mesh(replicas, model, {"table": dims})
    assert worst_difference(EMBEDDED, descent(embedding_loss), ids(), config) < 1e-12
    found = conversions(EMBEDDED, descent(embedding_loss), ids(), config)
    assert [shape for _, shape in found if WORDS in shape] == []


def test_uneven_rows_of_a_table_train_as_on_one_device() -> None:
    config = on_mesh(1, 4, {"table": (0, 1)})
    assert worst_difference(EMBEDDED, descent(embedding_loss), ids(), config) < 1e-12


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_table_that_is_also_the_head_trains_as_on_one_device(replicas: int) -> None:
    shapes, config = {"table": (WORDS, 6), "head": (6, 6)}, on_mesh(replicas, 2, {"table": (0, 1)})
    assert worst_difference(shapes, descent(tied_loss), ids(), config) < 1e-12
