"""TensorFlow 1 graphs, as its tutorials and the models of its time were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.corpus.program import Built, Feed, Library, Program, graphed, ids, images, placeholders

v1 = tf.compat.v1
D = tf.float64
EXAMPLES = "github.com/aymericdamien/TensorFlow-Examples"


def _graph(build: Callable[..., tuple[Any, Any]], **feeds: Feed) -> Built:
    """Build loss and train op from placeholders."""
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(3)
        loss, train = build(*placeholders(**feeds))
        return graphed(graph, loss, train, **feeds)


def _dense(x: Any, units: int, name: str, activation: Any = None) -> Any:
    w = v1.get_variable(f"{name}/w", (x.shape[-1], units), D, v1.glorot_uniform_initializer())
    out = x @ w + v1.get_variable(f"{name}/b", (units,), D, v1.zeros_initializer())
    return out if activation is None else activation(out)


def deep_mnist() -> Built:
    def build(x: Any, y: Any) -> tuple[Any, Any]:
        w = v1.get_variable("w", (3, 3, 1, 6), D, v1.truncated_normal_initializer(stddev=0.1))
        h = tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME") + v1.get_variable("b", (6,), D, v1.constant_initializer(0.1)))
        h = tf.reshape(tf.nn.max_pool2d(h, 2, 2, "SAME"), [-1, 4 * 4 * 6])
        h = v1.nn.dropout(_dense(h, 8, "fc", tf.nn.relu), keep_prob=0.5)
        loss = tf.reduce_mean(v1.nn.softmax_cross_entropy_with_logits_v2(labels=y, logits=_dense(h, 5, "out")))
        return loss, v1.train.AdamOptimizer(1e-4).minimize(loss)

    return _graph(build, x=images(8, 1), y=Feed((), "one_hot", 5))


def logistic_regression_v1() -> Built:
    def build(x: Any, y: Any) -> tuple[Any, Any]:
        prediction = tf.nn.softmax(_dense(x, 5, "softmax"))
        loss = tf.reduce_mean(-tf.reduce_sum(y * tf.math.log(prediction + 1e-9), axis=1))
        step = v1.train.get_or_create_global_step()
        rate = tf.cast(v1.train.exponential_decay(0.1, step, 2, 0.96, staircase=True), D)
        return loss, v1.train.GradientDescentOptimizer(rate).minimize(loss, global_step=step)

    return _graph(build, x=Feed((6,)), y=Feed((), "one_hot", 5))


def dynamic_rnn() -> Built:
    def build(x: Any, lengths: Any, y: Any) -> tuple[Any, Any]:
        kernel = v1.get_variable("kernel", (3 + 6, 4 * 6), D, v1.glorot_uniform_initializer())

        def body(t: Any, c: Any, h: Any) -> Any:
            i, j, f, o = tf.split(tf.concat([x[:, t], h], 1) @ kernel, 4, axis=1)
            c2 = tf.sigmoid(f + 1.0) * c + tf.sigmoid(i) * tf.tanh(j)
            h2 = tf.sigmoid(o) * tf.tanh(c2)
            alive = (t < lengths)[:, None]
            return t + 1, tf.where(alive, c2, c), tf.where(alive, h2, h)

        zero = tf.zeros([tf.shape(x)[0], 6], D)
        _, _, h = tf.while_loop(lambda t, *_: t < 5, body, [tf.constant(0), zero, zero])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=_dense(h, 3, "out")))
        return loss, v1.train.AdagradOptimizer(0.1).minimize(loss)

    return _graph(build, x=Feed((5, 3)), lengths=ids(6), y=ids(3))


def word2vec_sampled() -> Built:
    def build(words: Any, labels: Any) -> tuple[Any, Any]:
        table = v1.get_variable("embeddings", (30, 4), D, v1.random_uniform_initializer(-1.0, 1.0))
        weights = v1.get_variable("nce_w", (30, 4), D, v1.truncated_normal_initializer(stddev=0.5))
        biases = v1.get_variable("nce_b", (30,), D, v1.zeros_initializer())
        embedded = tf.nn.embedding_lookup(table, words)
        negatives = tf.random.stateless_uniform([6], [1, 2], 0, 30, tf.int32)
        true = tf.reduce_sum(embedded * tf.gather(weights, labels), 1) + tf.gather(biases, labels)
        noise = tf.matmul(embedded, tf.gather(weights, negatives), transpose_b=True) + tf.gather(biases, negatives)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.ones_like(true), logits=true)
        other = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.zeros_like(noise), logits=noise)
        loss = tf.reduce_mean(losses + tf.reduce_sum(other, 1))
        return loss, v1.train.GradientDescentOptimizer(0.5).minimize(loss)

    return _graph(build, words=ids(30), labels=ids(30))


def ptb_language_model() -> Built:
    def build(x: Any, y: Any) -> tuple[Any, Any]:
        table = v1.get_variable("embedding", (12, 5), D)
        inputs = tf.nn.embedding_lookup(table, x)
        kernel = v1.get_variable("kernel", (10, 20), D, v1.glorot_uniform_initializer())
        c = h = tf.zeros([tf.shape(x)[0], 5], D)
        outputs = []
        for t in range(4):
            i, j, f, o = tf.split(tf.concat([inputs[:, t], h], 1) @ kernel, 4, axis=1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(j)
            h = tf.sigmoid(o) * tf.tanh(c)
            outputs.append(h)
        logits = _dense(tf.reshape(tf.stack(outputs, 1), [-1, 5]), 12, "softmax")
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.reshape(y, [-1]), logits=logits)
        cost = tf.reduce_sum(losses) / tf.cast(tf.shape(x)[0], D)
        variables = v1.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(cost, variables), 5.0)
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        step = v1.train.get_or_create_global_step()
        return cost, optimizer.apply_gradients(zip(gradients, variables, strict=True), global_step=step)

    return _graph(build, x=ids(12, 4), y=ids(12, 4))


def resnet_v1_graph() -> Built:
    def build(x: Any, y: Any) -> tuple[Any, Any]:
        updates = []

        def norm(h: Any, name: str) -> Any:
            width = h.shape[-1]
            gamma = v1.get_variable(f"{name}/gamma", (width,), D, v1.ones_initializer())
            beta = v1.get_variable(f"{name}/beta", (width,), D, v1.zeros_initializer())
            mean, variance = tf.nn.moments(h, [0, 1, 2])
            kept = v1.get_variable(f"{name}/mean", (width,), D, v1.zeros_initializer(), trainable=False)
            updates.append(v1.assign(kept, 0.9 * kept + 0.1 * mean))
            return tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-3)

        def conv(h: Any, filters: int, name: str) -> Any:
            w = v1.get_variable(f"{name}/w", (3, 3, h.shape[-1], filters), D, v1.glorot_uniform_initializer())
            return tf.nn.conv2d(h, w, 1, "SAME")

        h = conv(x, 6, "stem")
        for i in range(2):
            inner = conv(tf.nn.relu(norm(h, f"{i}/norm")), 6, f"{i}/conv")
            h = h + inner
        logits = _dense(tf.reduce_mean(tf.nn.relu(norm(h, "last")), [1, 2]), 5, "out")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        loss += 2e-4 * tf.add_n([tf.nn.l2_loss(v) for v in v1.trainable_variables()])
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)
        with tf.control_dependencies(updates):
            return loss, optimizer.minimize(loss)

    return _graph(build, x=images(8), y=ids(5))


def autoencoder_v1() -> Built:
    def build(x: Any) -> tuple[Any, Any]:
        code = _dense(x, 4, "encoder", tf.nn.sigmoid)
        decoded = _dense(code, 8, "decoder", tf.nn.sigmoid)
        loss = tf.reduce_mean(tf.pow(x - decoded, 2))
        return loss, v1.train.RMSPropOptimizer(0.01).minimize(loss)

    return _graph(build, x=Feed((8,), "unit"))


def gan_v1() -> Built:
    def build(real: Any, noise: Any) -> tuple[Any, Any]:
        with v1.variable_scope("gen"):
            fake = _dense(_dense(noise, 8, "hidden", tf.nn.relu), 6, "out", tf.nn.sigmoid)

        def discriminator(h: Any) -> Any:
            with v1.variable_scope("disc", reuse=v1.AUTO_REUSE):
                return _dense(_dense(h, 8, "hidden", tf.nn.relu), 1, "out", tf.nn.sigmoid)

        d_real, d_fake = discriminator(real), discriminator(fake)
        g_loss = -tf.reduce_mean(tf.math.log(d_fake))
        d_loss = -tf.reduce_mean(tf.math.log(d_real) + tf.math.log(1.0 - d_fake))
        g_vars, d_vars = (v1.get_collection("trainable_variables", scope) for scope in ("gen", "disc"))
        g_train = v1.train.AdamOptimizer(2e-4).minimize(g_loss, var_list=g_vars)
        d_train = v1.train.AdamOptimizer(2e-4).minimize(d_loss, var_list=d_vars)
        return d_loss, tf.group(g_train, d_train)

    return _graph(build, real=Feed((6,), "unit"), noise=Feed((3,)))


def averaged_weights_v1() -> Built:
    """The CIFAR-10 tutorial: moving averages of losses and weights behind the update."""

    def build(x: Any, y: Any) -> tuple[Any, Any]:
        logits = _dense(_dense(x, 8, "local", tf.nn.relu), 5, "out")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        of_losses = v1.train.ExponentialMovingAverage(0.9, name="avg").apply([loss])
        step = v1.train.get_or_create_global_step()
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        with tf.control_dependencies([of_losses]):
            gradients = optimizer.compute_gradients(loss)
        applied = optimizer.apply_gradients(gradients, global_step=step)
        with tf.control_dependencies([applied]):
            average = v1.train.ExponentialMovingAverage(0.99, step)
            return loss, average.apply(v1.trainable_variables())

    return _graph(build, x=Feed((6,)), y=ids(5))


def matrix_factorisation() -> Built:
    def build(user: Any, item: Any, rating: Any) -> tuple[Any, Any]:
        u, v = (v1.get_variable(n, (9, 3), D, v1.random_normal_initializer(stddev=0.3)) for n in ("users", "items"))
        bias = v1.get_variable("bias", (), D, v1.zeros_initializer())
        a, b = tf.nn.embedding_lookup(u, user), tf.nn.embedding_lookup(v, item)
        loss = tf.nn.l2_loss(tf.reduce_sum(a * b, 1) + bias - rating) + 0.1 * (tf.nn.l2_loss(a) + tf.nn.l2_loss(b))
        return loss, v1.train.FtrlOptimizer(0.1).minimize(loss)

    return _graph(build, user=ids(9), item=ids(9), rating=Feed())


PROGRAMS = (
    Program(deep_mnist, "github.com/tensorflow/tensorflow/blob/r1.15/tensorflow/examples/tutorials/mnist"),
    Program(logistic_regression_v1, EXAMPLES),
    Program(dynamic_rnn, EXAMPLES),
    Program(word2vec_sampled, "github.com/tensorflow/tensorflow/blob/r1.15/tensorflow/examples/tutorials/word2vec"),
    Program(ptb_language_model, "github.com/tensorflow/models/tree/r1.13.0/tutorials/rnn/ptb"),
    Program(resnet_v1_graph, "github.com/tensorflow/models/tree/r1.13.0/official/resnet"),
    Program(autoencoder_v1, EXAMPLES),
    Program(gan_v1, EXAMPLES),
    Program(averaged_weights_v1, "github.com/tensorflow/models/tree/r1.13.0/tutorials/image/cifar10"),
    Program(matrix_factorisation, "github.com/songgc/TF-recomm"),
)
LIBRARY = Library("v1_graphs", PROGRAMS)
