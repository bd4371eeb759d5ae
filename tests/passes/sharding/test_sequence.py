"""Sequence parallelism: what is kept between two layers is cut along time, so that sums end as blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.collectives.along_model import AlongModel
from autograph_rewrite.runtime.engine.session import open_session
from tests.support.training import make_item, placeholder, variable

TIMES, WIDTH = 4, 6
LAYERS = [{"match": "up.*", "split": [1, 2]}, {"match": "down.*", "split": [2, 1]}]
ALONG_TIME = [{"match": "kept|residual[01]", "split": [1, 2, 1]}]


def item(dtype: Any = tf.float64, batch: int | None = None) -> ar.GraphItem:
    """Return two layers, each behind a norm, whose results are added to what they have read."""

    def forward() -> dict[str, tf.Tensor]:
        rng = np.random.default_rng(0)

        def weight(name: str, *shape: int) -> tf.Tensor:
            return tf.cast(variable(name, rng.normal(size=shape) * 0.3), dtype)

        kept = tf.identity(tf.cast(placeholder("x", batch, TIMES, WIDTH), dtype), name="kept")
        for k in range(2):
            centred = kept - tf.reduce_mean(kept, -1, keepdims=True)
            norm = tf.multiply(centred, weight(f"scale{k}", WIDTH), name=f"norm{k}")
            inner = tf.nn.relu(tf.einsum("btd,df->btf", norm, weight(f"up{k}", WIDTH, 8)))
            kept = tf.add(kept, tf.einsum("btf,fd->btd", inner, weight(f"down{k}", 8, WIDTH)), name=f"residual{k}")
        return {"loss": tf.cast(tf.reduce_sum(tf.square(kept)) / 100, tf.float64)}

    return make_item(forward, batch_inputs={"x": 0})


def config(data: int, axes: Any = 2, sharding: Any = (*LAYERS, *ALONG_TIME)) -> dict[str, Any]:
    return {
        "devices": [f"CPU:{k}" for k in range(data * int(np.prod(axes)))],
        "mesh": {"data": data, "model": axes},
        "strategy": {"variables": "mirrored"},
        "sharding": list(sharding),
    }


def collectives(new: Any) -> Counter[str]:
    """Return how many collectives each device of a replica joins, by op."""
    devices = len({node.device for node in new.graph if node.op.startswith("Collective")})
    counted = Counter(node.op for node in new.graph if node.op.startswith("Collective"))
    return Counter({op: count // devices for op, count in counted.items()})


def test_a_sum_of_which_blocks_are_read_ends_as_blocks() -> None:
    """Each layer gathers and scatters once in each direction; what is left to add up are two scales and the loss."""
    assert collectives(ar.rewrite(item(), config(1, sharding=LAYERS))) == {"CollectiveReduceV2": 4}
    blocks = {"CollectiveGatherV2": 4, "CollectiveAllToAllV2": 4, "CollectiveReduceV2": 3}
    assert collectives(ar.rewrite(item(), config(1))) == blocks


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("batch", [None, 6])
def test_a_step_computes_what_one_device_does(data: int, batch: int | None) -> None:
    report = ar.verify(item(batch=batch), config(data))
    assert report.ok, report
    assert max(row.error for row in report.rows) <= 1e-9


def test_narrow_numbers_are_added_as_wide_ones() -> None:
    report = ar.verify(item(tf.bfloat16), config(1), rtol=0.1)
    assert report.ok, report


def test_a_block_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = AlongModel._sum_of_mine

    def wrong(self: AlongModel, node: Any, build: Any, blocks: Any, changing: bool) -> Any:
        return lowered(self, node, build, [blocks[1], *blocks[1:]], changing)

    monkeypatch.setattr(AlongModel, "_sum_of_mine", wrong)
    with pytest.raises(VerifyError, match="gets something else"):
        ar.verify(item(batch=6), config(1))


def test_who_reads_the_whole_of_what_others_read_in_blocks_gathers_these() -> None:
    """No sum is made twice: as blocks for one reader, and whole for another."""

    def forward() -> dict[str, tf.Tensor]:
        rng = np.random.default_rng(0)
        x = tf.identity(placeholder("x", None, TIMES, WIDTH), name="kept")
        up, down = (
            variable(name, rng.normal(size=shape)) for name, shape in (("up0", (WIDTH, 8)), ("down0", (8, WIDTH)))
        )
        y = tf.einsum("btf,fd->btd", tf.nn.relu(tf.einsum("btd,df->btf", x, up)), down)
        return {"loss": tf.reduce_sum(tf.square(x + y)), "last": tf.cumsum(y, 1)}

    item = make_item(forward, batch_inputs={"x": 0})
    config_ = config(1, sharding=(*LAYERS, {"match": "kept", "split": [1, 2, 1]}))
    report = ar.verify(item, config_)
    assert report.ok, report
    met = {
        "CollectiveAllToAllV2": 1,
        "CollectiveGatherV2": 2,
        "CollectiveReduceV2": 1,
    }  # and the gradient of y, the loss
    assert collectives(ar.rewrite(item, config_)) == met


BOTH = [{"match": "up.*", "split": [2, 2]}, {"match": "down.*", "split": [2, 2]}]


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("cuts", ["layers", "along time", "both axes"])
def test_blocks_and_parts_of_sums_are_whole_for_who_fetches_them(data: int, cuts: str) -> None:
    sharding = {"layers": LAYERS, "along time": (*LAYERS, *ALONG_TIME), "both axes": BOTH}[cuts]
    one, new = item(), ar.rewrite(item(), config(data, [2, 2] if cuts == "both axes" else 2, sharding))
    flat, blocked = normalise_original(one).graph, new.layout.blocked
    names = [name for name in blocked if name in flat and flat.node(name).output_dtypes[:1] == (dtypes.DOUBLE,)]
    assert {placement.kind for name in names for _, placement in blocked[name]} == {"split", "partial"}
    found = []
    for each in (one, new):
        with open_session(each) as session:
            session.run("init")
            feeds = {"x:0": np.random.default_rng(1).normal(size=(4, TIMES, WIDTH))}
            found.append(session.run([f"{name}:0" for name in names], feeds))
    for name, left, right in zip(names, *found, strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-9, atol=1e-9, err_msg=name)
