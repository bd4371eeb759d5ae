"""Losses: means, sums, masked ones, statistics of the batch, ranking and contrast, and terms that are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.fuzz.layers import linear
from tests.fuzz.net import D, Net

v1 = tf.compat.v1
Loss = Callable[[Net, Any], Any]


def squared_mean(net: Net, h: Any) -> Any:
    return tf.reduce_mean(tf.square(linear(net, h, 2) - net.input("y", 2)))


def squared_sum(net: Net, h: Any) -> Any:
    return tf.reduce_sum(tf.square(linear(net, h, 2) - net.input("y", 2))) * 0.1


def per_example(net: Net, h: Any) -> Any:
    """A loss per example that is an output too."""
    each = tf.reduce_sum(tf.abs(linear(net, h, 2) - net.input("y", 2)), 1)
    net.outputs["each"] = each
    return tf.reduce_mean(each) if net.chance(0.6) else tf.reduce_sum(each) / tf.cast(tf.shape(each)[0], D)


def cross_entropy(net: Net, h: Any) -> Any:
    logits = linear(net, h, 3)
    labels = net.ids("label", 3)
    if net.chance(0.5):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    else:
        each = tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(labels, 3, dtype=D), logits)
    if net.chance(0.4):
        net.outputs["accuracy"] = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1, labels.dtype), labels), D))
    return tf.reduce_mean(each) if net.chance(0.7) else tf.reduce_sum(each)


def weighted(net: Net, h: Any) -> Any:
    logits = linear(net, h, 1)[:, 0]
    each = tf.nn.sigmoid_cross_entropy_with_logits(net.input("target", kind="mask"), logits)
    weights = net.input("weight", kind="positive")
    return tf.reduce_sum(each * weights) / tf.reduce_sum(weights)


def masked_mean(net: Net, h: Any) -> Any:
    each = tf.reduce_sum(linear(net, h, 2) ** 2, 1)
    mask = net.input("mask", kind="mask")
    way = net.dice.choice(["sums", "boolean_mask", "nonzero", "maximum"])
    if way == "boolean_mask":
        return tf.reduce_mean(tf.boolean_mask(each, mask > 0.5))
    count = tf.reduce_sum(mask)
    if way == "nonzero":
        count = tf.cast(tf.math.count_nonzero(mask), D)
    if way == "maximum":
        count = tf.maximum(count, 1.0)
    return tf.reduce_sum(each * mask) / count


def named_losses(net: Net, h: Any) -> Any:
    """The loss functions of v1, with weights and reductions; they compute in float32."""
    net.loose = True
    out, y = linear(net, h, 2), net.input("y", 2)
    function = net.dice.choice([v1.losses.mean_squared_error, v1.losses.absolute_difference, v1.losses.huber_loss])
    kinds = v1.losses.Reduction
    reduction = net.dice.choice([kinds.SUM_BY_NONZERO_WEIGHTS, kinds.SUM, kinds.MEAN, kinds.SUM_OVER_BATCH_SIZE])
    weights = net.input("weight", 1, kind="mask") if net.chance(0.5) else 1.0
    return tf.cast(function(y, out, weights=weights, reduction=reduction, loss_collection=None), D)


def spread(net: Net, h: Any) -> Any:
    """How far the predictions are from each other."""
    z = linear(net, h, 3)
    way = net.dice.choice(["std", "std_rows", "variance", "moments", "hinge", "covariance"])
    if way == "std":
        return tf.math.reduce_std(z)
    if way == "std_rows":
        return tf.reduce_sum(tf.math.reduce_std(z + 0.01 * net.input("y", 3), 0))
    if way == "variance":
        return tf.reduce_mean(z**2) - 0.1 * tf.math.reduce_variance(z)
    if way == "moments":
        mean, variance = tf.nn.moments(z, [0])
        return tf.reduce_sum(mean**2) + tf.reduce_sum((variance - 1.0) ** 2)
    if way == "hinge":
        return tf.reduce_sum(tf.nn.relu(2.0 - tf.nn.moments(z, [0])[1])) + tf.reduce_mean(z**2)
    c = z - tf.reduce_mean(z, 0)
    covariance = tf.matmul(c, c, transpose_a=True) / tf.cast(tf.shape(z)[0], D)
    return tf.reduce_sum(covariance**2) + tf.reduce_mean(z)


def advantage(net: Net, h: Any) -> Any:
    """Policy gradient with advantages that are normalised over the batch."""
    logits = linear(net, h, 3)
    fed = net.input("reward")
    mean, variance = tf.nn.moments(fed, [0])
    normalised = (fed - mean) / (tf.sqrt(variance) + 1e-3)
    if net.chance(0.4):
        normalised = (fed - tf.reduce_mean(fed)) / (tf.math.reduce_std(fed) + 1e-3)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(net.ids("action", 3), logits)
    entropy = -tf.reduce_mean(tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), 1))
    return tf.reduce_mean(each * normalised) - 0.01 * entropy


def log_sum(net: Net, h: Any) -> Any:
    """A logsumexp over the batch: a bound on mutual information, a partition function."""
    z = linear(net, h, 1)[:, 0]
    rows = tf.cast(tf.shape(z)[0], D)
    axis = net.dice.choice([None, 0])
    return tf.reduce_logsumexp(z, axis) - tf.math.log(rows) - tf.reduce_mean(z * net.input("y"))


def contrastive(net: Net, h: Any) -> Any:
    """Each row against all others."""
    z = tf.tanh(linear(net, h, 3))
    other = net.input("view", 3)
    way = net.dice.choice(["infonce", "symmetric", "gram", "distances", "crosscorrelation", "two_views"])
    if way == "gram":
        return tf.reduce_mean(tf.matmul(z, z, transpose_b=True) ** 2)
    if way == "distances":
        gaps = tf.reduce_sum((z[:, None, :] - other[None, :, :]) ** 2, -1)
        return tf.reduce_mean(tf.reduce_min(gaps, 1)) + tf.reduce_mean(z**2)
    if way == "crosscorrelation":
        c = tf.matmul(z, other, transpose_a=True) / tf.cast(tf.shape(z)[0], D)
        return tf.reduce_sum((c - tf.eye(3, dtype=D)) ** 2)
    if way == "two_views":
        rows = tf.concat([z, other], 0)
        logits = tf.matmul(rows, rows, transpose_b=True) - 1e2 * tf.eye(tf.shape(rows)[0], dtype=D)
        count = tf.shape(z)[0]
        positives = tf.concat([tf.range(count) + count, tf.range(count)], 0)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(positives, logits))
    logits = tf.matmul(z, other, transpose_b=True)
    labels = tf.range(tf.shape(z)[0])
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    if way == "symmetric":
        loss += tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.transpose(logits)))
    return loss


def hardest(net: Net, h: Any) -> Any:
    """The worst examples, or the order of all."""
    each = tf.reduce_sum((linear(net, h, 2) - net.input("y", 2)) ** 2, 1)
    way = net.dice.choice(["max", "top", "half", "pairs", "product"])
    if way == "max":
        return tf.reduce_max(each)
    if way == "top":
        return tf.reduce_mean(tf.nn.top_k(each, 2)[0])
    if way == "half":
        return tf.reduce_mean(tf.sort(each)[: tf.shape(each)[0] // 2 + 1])
    if way == "pairs":
        return tf.reduce_mean(tf.nn.relu(1.0 - each[:, None] + each[None, :]))
    return tf.reduce_prod(tf.sigmoid(each)) + tf.reduce_mean(each)


def sampled(net: Net, h: Any) -> Any:
    """Sampled softmax over a large table of classes."""
    weights, biases = net.variable("classes", (9, int(h.shape[-1]))), net.variable("biases", (9,))
    net.draws = True
    labels = tf.cast(net.input("label", 1, dtype=tf.int64, kind="ids", below=9), tf.int64)
    drawn = tf.random.log_uniform_candidate_sampler(labels, 1, 4, True, 9, seed=net.dice.randint(1, 99))
    if net.chance(0.5):
        return tf.reduce_mean(tf.nn.sampled_softmax_loss(weights, biases, labels, h, 4, 9, sampled_values=drawn))
    rows = tf.gather(weights, tf.concat([tf.reshape(labels, [-1]), drawn[0]], 0))
    return tf.reduce_mean(tf.matmul(h, rows, transpose_b=True) ** 2)


def over_time(net: Net, h: Any) -> Any:
    """A masked sequence loss."""
    steps = net.sequence("frames", 2)
    out = linear(net, tf.tanh(linear(net, steps, int(h.shape[-1]))) + h[:, None, :], 3)
    labels = net.input("tags", "T", dtype=tf.int32, kind="ids", below=3)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, out)
    if net.chance(0.4):
        return tf.reduce_mean(each)
    mask = tf.sequence_mask(net.input("lengths", dtype=tf.int32, kind="lengths"), tf.shape(each)[1], dtype=D)
    if net.chance(0.3):
        return tf.reduce_mean(tf.reduce_sum(each * mask, 1))
    return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)


def transcription(net: Net, h: Any) -> Any:
    """CTC over the steps that are fed."""
    steps = net.sequence("audio", 2)
    logits = linear(net, tf.concat([steps, steps, steps], 1), 4) + h[:, None, :1]
    labels = tf.cast(net.input("letters", 2, dtype=tf.int32, kind="ids", below=3), tf.int32) + 1
    rows, length = tf.shape(logits)[0], tf.shape(logits)[1]
    loss = tf.nn.ctc_loss(
        labels,
        tf.cast(logits, tf.float32),
        tf.fill([rows], 2),
        tf.fill([rows], length),
        logits_time_major=False,
        blank_index=0,
    )
    net.loose = True
    return tf.cast(tf.reduce_mean(loss), D)


def critic(net: Net, h: Any) -> Any:
    """The difference of two means, and a penalty."""
    score, real = linear(net, h, 1), linear(net, net.input("real", int(h.shape[-1])), 1)
    gap = tf.reduce_mean(score) - tf.reduce_mean(real)
    return gap + 0.1 * tf.reduce_mean(score**2) + 0.1 * tf.reduce_mean(tf.square(real))


def lookup_alone(net: Net, h: Any) -> Any:
    """A loss directly on a lookup."""
    table = net.variable("factors", (6, 3))
    users, items = net.ids("user", 6), net.ids("item", 6)
    product = tf.reduce_sum(tf.gather(table, users) * tf.gather(table, items), 1)
    return tf.reduce_mean((product - net.input("rating")) ** 2) + 0.1 * tf.reduce_mean(h**2)


LOSSES: dict[str, tuple[float, Loss]] = {
    "squared_mean": (3, squared_mean),
    "squared_sum": (1.5, squared_sum),
    "per_example": (2, per_example),
    "cross_entropy": (3, cross_entropy),
    "weighted": (1, weighted),
    "masked_mean": (2, masked_mean),
    "named_losses": (1, named_losses),
    "spread": (2, spread),
    "advantage": (1, advantage),
    "log_sum": (1, log_sum),
    "contrastive": (1.5, contrastive),
    "hardest": (1, hardest),
    "sampled": (0.5, sampled),
    "over_time": (1.5, over_time),
    "transcription": (0.4, transcription),
    "critic": (0.8, critic),
    "lookup_alone": (0.7, lookup_alone),
}
"""How often a loss is drawn, and the loss."""


def terms(net: Net, h: Any) -> Any:
    """Return what is added to a loss; None for nothing."""
    found = [tf.cast(term, D) for term in net.losses]
    way = net.dice.choice(["none", "none", "decay", "activity", "l2_of_layer", "schedule"])
    if way == "decay" and net.trained:
        found += [0.01 * tf.nn.l2_loss(w) for w in net.trained[:3]]
    if way == "activity":
        found.append(0.1 * tf.reduce_mean(tf.abs(h)))
    if way == "l2_of_layer":
        found.append(0.05 * tf.nn.l2_loss(h))
    if way == "schedule":
        found.append(net.input("weight_of_term", axis=None) * tf.reduce_mean(h))
    return tf.add_n(found) if found else None
