"""Random training graphs: from a few values each step makes another one, in a way that is drawn from a table.

    grow(seed=7, batch=None)   ->   {"loss": ..., "o0": ..., "o1": ...}, ["pairs/add", "pieces/reverse"]

What a way makes of a value need not make sense to anybody. TensorFlow refuses what does not fit: then
another way is tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.training import placeholder, v1, variable

Way = Callable[["Pool", Any], Any]
D = tf.float64
INPUTS = ("x", "z", "q", "ids")
LABELS = 5  # ids are below
ATTEMPTS = 80
DOES_NOT_FIT = (ValueError, TypeError, LookupError)
"""What TensorFlow, or the choice of a dimension that a value does not have, raises for an impossible combination."""


@dataclass
class Pool:
    """The values of a graph so far, and the dice."""

    dice: random.Random
    values: list[Any]
    sizes: list[Any]
    ids: Any
    trained: tuple[Any, ...]
    ways: list[str] = field(default_factory=list)

    def value(self) -> Any:
        """Return a value, rather a late one: chains of ops are more interesting than many short ones."""
        return self.dice.choice(self.values[-8:] if self.chance(0.6) else self.values)

    def size(self) -> Any:
        return self.dice.choice(self.sizes)

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def axis(self, value: Any) -> int:
        """Return a dimension of `value`, counted from either end."""
        rank = value.shape.rank
        return self.dice.randrange(-rank, rank) if rank else 0

    def axes(self, value: Any) -> list[int] | None:
        """Return some dimensions; None for all of them."""
        rank = value.shape.rank
        if not rank or self.chance(0.3):
            return None
        return sorted(self.dice.sample(range(rank), self.dice.randint(1, rank)))

    def order(self, value: Any) -> list[int]:
        """Return the dimensions in another order."""
        return self.dice.sample(range(value.shape.rank), value.shape.rank)


def alone(**functions: Callable[[Any], Any]) -> dict[str, Way]:
    """Ways that look at one value only."""
    return {name: partial(lambda f, _, v: f(v), function) for name, function in functions.items()}


def with_another(**functions: Callable[[Any, Any], Any]) -> dict[str, Way]:
    """Ways that join a value with any other."""
    return {name: partial(lambda f, pool, v: f(v, pool.value()), function) for name, function in functions.items()}


def along_some(**functions: Callable[..., Any]) -> dict[str, Way]:
    """Ways that reduce dimensions."""

    def way(function: Callable[..., Any], pool: Pool, value: Any) -> Any:
        return function(value, pool.axes(value), keepdims=pool.chance(0.4))

    return {name: partial(way, function) for name, function in functions.items()}


def measured(**functions: Callable[[Pool, Any], Any]) -> dict[str, Way]:
    """Ways that compute an integer, which later ways may use as a size."""

    def way(function: Callable[[Pool, Any], Any], pool: Pool, value: Any) -> Any:
        pool.sizes.append(function(pool, value))
        return tf.cast(pool.sizes[-1], D)

    return {name: partial(way, function) for name, function in functions.items()}


def loop(pool: Pool, value: Any) -> Any:
    other, is_linear = pool.value(), pool.chance(0.5)
    body = lambda i, a: (i + 1, a * 0.5 + other if is_linear else tf.tanh(a))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 3, body, [0, value])[1]


def branch(pool: Pool, value: Any) -> Any:
    return tf.cond(tf.reduce_sum(pool.value()) > 0.0, lambda: value * 2, lambda: value + 1)


def gradient(pool: Pool, value: Any) -> Any:
    found = [slope for slope in v1.gradients(tf.reduce_sum(value * value), pool.trained) if slope is not None]
    return tf.convert_to_tensor(pool.dice.choice(found))


def rows(value: Any) -> Any:
    return tf.range(tf.shape(value)[0])


POINTWISE = alone(
    tanh=tf.tanh, exp=tf.exp, square=tf.square, abs=tf.abs, relu=tf.nn.relu, sign=tf.sign, negative=tf.negative,
    zeros_like=tf.zeros_like, ones_like=tf.ones_like, softmax=tf.nn.softmax, log_softmax=tf.nn.log_softmax,
    stop_gradient=tf.stop_gradient, half=lambda v: v * 0.5, clip=lambda v: tf.clip_by_value(v, -1.0, 1.0),
    narrow=lambda v: tf.cast(tf.cast(v, tf.float32), D), positive=lambda v: tf.cast(v > 0, D),
)  # fmt: skip
PAIRS = with_another(
    add=tf.add, subtract=tf.subtract, multiply=tf.multiply, maximum=tf.maximum, minimum=tf.minimum,
    divide=tf.math.divide_no_nan, difference=tf.math.squared_difference,
    select=lambda v, u: tf.where(v > 0, v, u), select_greater=lambda v, u: tf.where(v > u, v, u),
)  # fmt: skip
REDUCTIONS = along_some(
    sum=tf.reduce_sum, mean=tf.reduce_mean, max=tf.reduce_max, min=tf.reduce_min, logsumexp=tf.reduce_logsumexp,
    std=tf.math.reduce_std, prod=lambda v, axes, keepdims: tf.reduce_prod(tf.tanh(v), axes, keepdims=keepdims),
)  # fmt: skip
PRODUCTS: dict[str, Way] = {
    "matmul": lambda p, v: tf.matmul(v, p.value(), transpose_a=p.chance(0.4), transpose_b=p.chance(0.4)),
    "outer": lambda p, v: tf.einsum("ij,kj->ik", v, p.value()),
    "contracted": lambda p, v: tf.einsum("ij,ik->jk", v, p.value()),
}
SHAPES: dict[str, Way] = {
    **alone(
        flat=lambda v: tf.reshape(v, [-1]), column=lambda v: tf.reshape(v, tf.concat([tf.shape(v), [1]], 0)),
        matrix=lambda v: tf.reshape(v, [tf.shape(v)[0], -1]), rows=lambda v: tf.reshape(v, [-1, v.shape[-1] or 4]),
        broadcast=lambda v: tf.broadcast_to(tf.reduce_sum(v, 0, keepdims=True), tf.shape(v)),
        filled=lambda v: tf.fill(tf.shape(v), tf.constant(0.5, D)), ones=lambda v: tf.ones(tf.shape(v), D) * v,
        transposed=tf.transpose, diagonal=tf.linalg.diag,
    ),
    "expanded": lambda p, v: tf.expand_dims(v, p.axis(v)),
    "tiled": lambda p, v: tf.tile(v, [p.dice.choice([1, 1, 2]) for _ in v.shape]),
    "permuted": lambda p, v: tf.transpose(v, p.order(v)),
    "permuted_flat": lambda p, v: tf.reshape(tf.transpose(v, p.order(v)), [-1]),
}  # fmt: skip
PIECES: dict[str, Way] = {
    **alone(
        without_first=lambda v: v[1:], first_column=lambda v: v[:, :1], last=lambda v: v[..., -1],
        first=lambda v: v[0], every_other=lambda v: v[::2], upper_half=lambda v: v[: tf.shape(v)[0] // 2],
        lower_half=lambda v: v[tf.shape(v)[0] // 2 :], unstacked=lambda v: tf.unstack(v, axis=-1)[0],
        parted=lambda v: tf.split(v, 2, axis=-1)[1],
        sliced=lambda v: tf.slice(v, [0] * v.shape.rank, [-1] * (v.shape.rank - 1) + [1]),
    ),
    "concat": lambda p, v: tf.concat([v, p.value()], p.axis(v)),
    "stack": lambda p, v: tf.stack([v, v * 2, p.value()], p.axis(v)),
    "reverse": lambda p, v: tf.reverse(v, [p.axis(v)]),
    "padded": lambda p, v: tf.pad(v, [[p.dice.choice([0, 0, 1]), p.dice.choice([0, 0, 1])] for _ in v.shape]),
    "cumsum": lambda p, v: tf.cumsum(v, p.axis(v)),
    "roll": lambda p, v: tf.roll(v, 1, p.axis(v)),
    "sort": lambda p, v: tf.sort(v, axis=p.axis(v)),
}  # fmt: skip
GATHERS: dict[str, Way] = {
    **alone(
        reversed=lambda v: tf.gather(v, rows(v)[::-1]), counted=lambda v: tf.cast(rows(v), D),
        masked=lambda v: tf.boolean_mask(v, tf.reshape(v, [tf.shape(v)[0], -1])[:, 0] > 0),
        top=lambda v: tf.nn.top_k(v, 2)[0], columns=lambda v: tf.gather(v, [0, 1], axis=-1),
    ),
    "by_ids": lambda p, v: tf.gather(v, p.ids % 3),
    "segments": lambda p, v: tf.math.unsorted_segment_sum(v, p.ids, LABELS),
    "one_hot": lambda p, _: tf.one_hot(p.ids, LABELS, dtype=D),
    "argmax": lambda p, v: tf.cast(tf.argmax(v, p.axis(v)), D),
    "scattered": lambda p, v: tf.scatter_nd(p.ids[:, None], v, tf.stack([LABELS, tf.shape(v)[1]])),
    "first_of_each": lambda p, v: tf.gather_nd(v, tf.stack([rows(v), p.ids * 0], 1)),
}  # fmt: skip
SIZES = measured(
    sum=lambda p, _: p.size() + p.size(), product=lambda p, _: p.size() * p.size(),
    difference=lambda p, _: p.size() - p.size(), quotient=lambda p, _: p.size() // tf.maximum(p.size(), 1),
    greater=lambda p, _: tf.maximum(p.size(), p.size()), lesser=lambda p, _: tf.minimum(p.size(), p.size()),
    elements=lambda _, v: tf.size(v), last=lambda _, v: tf.shape(v)[-1],
    product_of_shape=lambda _, v: tf.reduce_prod(tf.shape(v)),
)  # fmt: skip

FAMILIES: Mapping[str, tuple[float, Mapping[str, Way]]] = {
    "pointwise": (4, POINTWISE),
    "pairs": (4, PAIRS),
    "reductions": (4, REDUCTIONS),
    "products": (2, PRODUCTS),
    "shapes": (4, SHAPES),
    "pieces": (3, PIECES),
    "gathers": (3, GATHERS),
    "sizes": (2, SIZES),
    "flow": (1, {"branch": branch, "loop": loop}),
    "gradients": (1.5, {"gradient": gradient}),
}
"""How often a family is drawn, and its ways."""


def grow(seed: int, batch: int | None) -> tuple[dict[str, Any], list[str]]:
    """Add a random network to the default graph; return what it computes, and the ways in which it was made.

    Args:
        seed: of everything that is random.
        batch: the static batch size; None leaves it open.
    """
    pool = _roots(seed, batch)
    kept = len(pool.values)
    wanted = pool.dice.choice([8, 11, 14])
    weights = [weight for weight, _ in FAMILIES.values()]
    for _ in range(ATTEMPTS):
        (family,) = pool.dice.choices(list(FAMILIES), weights)
        name = pool.dice.choice(list(FAMILIES[family][1]))
        try:
            value = FAMILIES[family][1][name](pool, pool.value())
        except DOES_NOT_FIT:
            continue
        if value.shape.rank is None or value.shape.rank > 4:
            continue
        pool.values.append(value)
        pool.ways.append(f"{family}/{name}")
        if len(pool.ways) == wanted:
            break
    first, made = pool.values[3], pool.values[kept:]
    loss = tf.add_n([tf.reduce_sum(tf.tanh(value)) for value in (first, *made[-3:])])
    return {"loss": loss} | {f"o{i}": value for i, value in enumerate(made)}, pool.ways


def _roots(seed: int, batch: int | None) -> Pool:
    """Return inputs and variables of several ranks, and constants that broadcast."""
    draw = np.random.default_rng(seed).normal
    x, z, q = placeholder("x", batch, 4), placeholder("z", batch, None), placeholder("q", batch, 3, 4)
    ids = placeholder("ids", batch, dtype=tf.int32)
    w, b, t = (variable(n, draw(size=s) * 0.3) for n, s in (("w", (4, 4)), ("b", (4,)), ("t", (LABELS, 4))))
    constants = [tf.constant(draw(size=4)), tf.constant(draw(size=(3, 1))), tf.constant(2.0, D)]
    values = [x, z, q, x @ w + b, tf.gather(t, ids), tf.cast(ids, D), *constants]
    sizes = [ids, tf.shape(x)[0], tf.shape(z)[1], tf.size(q), tf.constant(2)]
    return Pool(random.Random(seed), values, sizes, ids, (w, b, t))


def feed(seed: int, batch: int, length: int) -> dict[str, Any]:
    """Return one batch; `length` is the size that the graph leaves open."""
    rng = np.random.default_rng(seed)
    x, z, q = (rng.normal(size=(batch, *rest)) for rest in ((4,), (length,), (3, 4)))
    return {"x": x, "z": z, "q": q, "ids": rng.integers(0, LABELS, batch)}
