"""Training loops with a GradientTape, as guides and papers' code write them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.corpus.program import Built, Feed, Library, Program, ids, images, stepped, update

GUIDE = "tensorflow.org/guide/"


def _mlp(inputs: int, outputs: int, width: int = 8, activation: str = "relu") -> Any:
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(width, activation=activation), layers.Dense(outputs)])


def _cnn(outputs: int = 5) -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(outputs),
        ]
    )


def _adam(variables: Any, rate: Any = 1e-3, **options: Any) -> Any:
    optimizer = keras.optimizers.Adam(rate, **options)
    optimizer.build(variables)
    return optimizer


def quickstart_loop() -> Built:
    model = _cnn()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = _adam(model.trainable_variables)
    train_loss, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()

    def train_step(images: Any, labels: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = loss_object(labels, predictions)
        update(tape, loss, model.trainable_variables, optimizer)
        train_loss.update_state(loss)
        accuracy.update_state(labels, predictions)
        return {"loss": train_loss.result(), "accuracy": accuracy.result()}

    return stepped(train_step, images=images(8, 1), labels=ids(5))


def linear_regression_basics() -> Built:
    w, b = tf.Variable(5.0, dtype=tf.float64), tf.Variable(0.0, dtype=tf.float64)

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as t:
            loss = tf.reduce_mean(tf.square(y - (w * x + b)))
        dw, db = t.gradient(loss, [w, b])
        w.assign_sub(0.1 * dw)
        b.assign_sub(0.1 * db)
        return loss

    return stepped(train, x=Feed(), y=Feed())


def clipped_by_global_norm() -> Built:
    model = _mlp(6, 3)
    variables, optimizer = model.trainable_variables, keras.optimizers.RMSprop(1e-2, momentum=0.9, centered=True)
    optimizer.build(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
            loss += 1e-4 * tf.add_n([tf.nn.l2_loss(v) for v in variables])
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.5)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss, "norm": norm}

    return stepped(step, x=Feed((6,)), y=ids(3))


def accumulated_gradients() -> Built:
    model = _mlp(6, 1)
    variables = model.trainable_variables
    optimizer = _adam(variables)
    sums = [tf.Variable(tf.zeros(v.shape, tf.float64), trainable=False) for v in variables]
    count = tf.Variable(0, dtype=tf.int32, trainable=False)

    def apply() -> Any:
        optimizer.apply_gradients([(s / 2.0, v) for s, v in zip(sums, variables, strict=True)])
        for s in sums:
            s.assign(tf.zeros_like(s))
        return tf.constant(True)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        for s, g in zip(sums, tape.gradient(loss, variables), strict=True):
            s.assign_add(g)
        count.assign_add(1)
        done = tf.cond(tf.equal(count % 2, 0), apply, lambda: tf.constant(False))
        return {"loss": loss, "applied": done}

    return stepped(step, x=Feed((6,)), y=Feed((1,)))


def scaled_loss() -> Built:
    model = _mlp(6, 1)
    variables = model.trainable_variables
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            scaled = optimizer.scale_loss(loss)
        update(tape, scaled, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((6,)), y=Feed((1,)))


def averaged_weights() -> Built:
    model = _mlp(6, 3)
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((6,)), y=ids(3))


def distillation() -> Built:
    teacher, student = _cnn(), _cnn()
    optimizer = _adam(student.trainable_variables)
    divergence = keras.losses.KLDivergence()

    def step(x: Any, y: Any) -> dict[str, Any]:
        soft = tf.nn.softmax(teacher(x, training=False) / 10.0)
        with tf.GradientTape() as tape:
            logits = student(x, training=True)
            hard = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
            loss = 0.1 * hard + 0.9 * divergence(soft, tf.nn.softmax(logits / 10.0)) * 100.0
        update(tape, loss, student.trainable_variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=images(8, 1), y=ids(5))


def _contrastive(encoder: Any, optimizer: Any, a: Any, b: Any) -> dict[str, Any]:
    """Encode two views in one batch, and tell each row's other view from all other rows."""
    size = tf.shape(a)[0]
    with tf.GradientTape() as tape:
        z = tf.math.l2_normalize(encoder(tf.concat([a, b], 0), training=True), axis=1)
        similarities = tf.matmul(z, z, transpose_b=True) / 0.1 - 1e9 * tf.eye(2 * size, dtype=z.dtype)
        labels = tf.concat([tf.range(size, 2 * size), tf.range(size)], 0)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similarities))
    update(tape, loss, encoder.trainable_variables, optimizer)
    return {"loss": loss}


def simclr() -> Built:
    """The two views of an image are channels of one input, as in google-research/simclr."""
    encoder = _cnn(6)
    optimizer = _adam(encoder.trainable_variables)

    def step(features: Any) -> dict[str, Any]:
        return _contrastive(encoder, optimizer, *tf.split(features, 2, axis=-1))

    return stepped(step, features=images(8, 2))


def simclr_two_inputs() -> Built:
    """The two views are two inputs."""
    encoder = _cnn(6)
    optimizer = _adam(encoder.trainable_variables)
    return stepped(lambda a, b: _contrastive(encoder, optimizer, a, b), a=images(8, 1), b=images(8, 1))


def simsiam() -> Built:
    encoder, predictor = _cnn(6), _mlp(6, 6)
    variables = [*encoder.trainable_variables, *predictor.trainable_variables]
    optimizer = _adam(variables)

    def distance(p: Any, z: Any) -> Any:
        z = tf.stop_gradient(z)
        p, z = tf.math.l2_normalize(p, axis=1), tf.math.l2_normalize(z, axis=1)
        return -tf.reduce_mean(tf.reduce_sum(p * z, axis=1))

    def step(a: Any, b: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            z1, z2 = encoder(a, training=True), encoder(b, training=True)
            loss = distance(predictor(z1), z2) / 2 + distance(predictor(z2), z1) / 2
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, a=images(8, 1), b=images(8, 1))


def clip_dual_encoder() -> Built:
    vision, text = _cnn(6), keras.Sequential([keras.Input((4,)), layers.Dense(6)])
    variables = [*vision.trainable_variables, *text.trainable_variables]
    optimizer = _adam(variables)

    def step(image: Any, caption: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            a, b = text(caption, training=True), vision(image, training=True)
            logits = tf.matmul(a, b, transpose_b=True) / 0.05
            targets = tf.nn.softmax(
                (tf.matmul(a, a, transpose_b=True) + tf.matmul(b, b, transpose_b=True)) / (2 * 0.05)
            )
            first = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
            second = keras.losses.categorical_crossentropy(
                tf.transpose(targets), tf.transpose(logits), from_logits=True
            )
            loss = tf.reduce_mean((first + second) / 2)
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, image=images(8, 1), caption=Feed((4,)))


def triplets() -> Built:
    model = _cnn(6)
    optimizer = _adam(model.trainable_variables)

    def step(anchor: Any, positive: Any, negative: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            a, p, n = (model(x, training=True) for x in (anchor, positive, negative))
            near, far = tf.reduce_sum((a - p) ** 2, -1), tf.reduce_sum((a - n) ** 2, -1)
            loss = tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    return stepped(step, anchor=images(8, 1), positive=images(8, 1), negative=images(8, 1))


def physics_informed() -> Built:
    """Burgers' equation: second derivatives by nested tapes."""
    model = _mlp(2, 1, 8, "tanh")
    optimizer = _adam(model.trainable_variables)

    def step(points: Any, at: Any, value: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            t, x = points[:, :1], points[:, 1:]
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape(persistent=True) as inner:
                    inner.watch([t, x])
                    u = model(tf.concat([t, x], 1))
                u_x, u_t = inner.gradient(u, x), inner.gradient(u, t)
            u_xx = outer.gradient(u_x, x)
            residual = tf.reduce_mean((u_t + u * u_x - 0.01 * u_xx) ** 2)
            loss = residual + tf.reduce_mean((model(at) - value) ** 2)
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    return stepped(step, points=Feed((2,), "unit"), at=Feed((2,), "unit"), value=Feed((1,)))


def neural_ode() -> Built:
    model = _mlp(3, 3, 8, "tanh")
    optimizer = _adam(model.trainable_variables)

    def step(y0: Any, y1: Any) -> dict[str, Any]:
        def body(i: Any, y: Any) -> Any:
            k1 = model(y)
            k2 = model(y + 0.05 * k1)
            k3 = model(y + 0.05 * k2)
            k4 = model(y + 0.1 * k3)
            return i + 1, y + (k1 + 2 * k2 + 2 * k3 + k4) / 60.0

        with tf.GradientTape() as tape:
            _, y = tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0), y0])
            loss = tf.reduce_mean(tf.reduce_sum((y - y1) ** 2, -1))
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    return stepped(step, y0=Feed((3,)), y1=Feed((3,)))


def maml() -> Built:
    """A gradient step inside the loss, on fed support examples."""
    w, b = tf.Variable(tf.ones((4, 1), tf.float64) * 0.1), tf.Variable(tf.zeros((1,), tf.float64))
    optimizer = _adam([w, b], 1e-2)

    def step(x: Any, y: Any, x2: Any, y2: Any) -> dict[str, Any]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                first = tf.reduce_mean((x @ w + b - y) ** 2)
            dw, db = inner.gradient(first, [w, b])
            loss = tf.reduce_mean((x2 @ (w - 0.1 * dw) + (b - 0.1 * db) - y2) ** 2)
        update(outer, loss, [w, b], optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((4,)), y=Feed((1,)), x2=Feed((4,)), y2=Feed((1,)))


def mixup_loop() -> Built:
    model = _cnn()
    optimizer = _adam(model.trainable_variables)

    def step(x: Any, y: Any, x2: Any, y2: Any) -> dict[str, Any]:
        size = tf.shape(x)[0]
        one = tf.random.gamma([size], 0.2, dtype=x.dtype, seed=1)
        two = tf.random.gamma([size], 0.2, dtype=x.dtype, seed=2)
        share = (one + 1e-3) / (one + two + 2e-3)
        mixed = x * share[:, None, None, None] + x2 * (1 - share)[:, None, None, None]
        labels = y * share[:, None] + y2 * (1 - share)[:, None]
        with tf.GradientTape() as tape:
            logits = model(mixed, training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    labels = Feed((), "one_hot", 5)
    return stepped(step, x=images(8, 1), y=labels, x2=images(8, 1), y2=labels)


def adversarial_training() -> Built:
    model = _cnn()
    optimizer = _adam(model.trainable_variables)

    def loss_of(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=False)))

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as inner:
            inner.watch(x)
            clean = loss_of(x, y)
        attacked = tf.stop_gradient(tf.clip_by_value(x + 0.01 * tf.sign(inner.gradient(clean, x)), 0.0, 1.0))
        with tf.GradientTape() as tape:
            loss = 0.5 * loss_of(x, y) + 0.5 * loss_of(attacked, y)
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=images(8, 1), y=ids(5))


def word2vec() -> Built:
    target = tf.Variable(tf.reshape(tf.cast(tf.range(60), tf.float64), (15, 4)) * 0.01)
    context = tf.Variable(tf.reshape(tf.cast(tf.range(60), tf.float64), (15, 4)) * -0.01)
    optimizer = _adam([target, context])

    def step(word: Any, around: Any, labels: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            dots = tf.einsum("be,bce->bc", tf.gather(target, word), tf.gather(context, around))
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, dots))
        update(tape, loss, [target, context], optimizer)
        return {"loss": loss}

    return stepped(step, word=ids(15), around=ids(15, 5), labels=Feed((), "one_hot", 5))


PROGRAMS = (
    Program(quickstart_loop, "tensorflow.org/tutorials/quickstart/advanced"),
    Program(linear_regression_basics, GUIDE + "basic_training_loops"),
    Program(clipped_by_global_norm, "tensorflow.org/api_docs/python/tf/clip_by_global_norm"),
    Program(accumulated_gradients, "stackoverflow.com/questions/55268762"),
    Program(scaled_loss, GUIDE + "mixed_precision"),
    Program(averaged_weights, "keras.io/api/optimizers"),
    Program(distillation, "keras.io/examples/vision/knowledge_distillation"),
    Program(simclr, "github.com/google-research/simclr"),
    Program(
        simclr_two_inputs,
        "keras.io/examples/vision/semisupervised_simclr",
        why="nothing says that two inputs are of one size, so that rows of both are joined whole",
    ),
    Program(simsiam, "keras.io/examples/vision/simsiam"),
    Program(clip_dual_encoder, "keras.io/examples/vision/nl_image_search"),
    Program(triplets, "keras.io/examples/vision/siamese_network"),
    Program(physics_informed, "github.com/maziarraissi/PINNs"),
    Program(neural_ode, "arxiv.org/abs/1806.07366"),
    Program(maml, "arxiv.org/abs/1703.03400"),
    Program(mixup_loop, "keras.io/examples/vision/mixup"),
    Program(adversarial_training, "tensorflow.org/tutorials/generative/adversarial_fgsm"),
    Program(word2vec, "tensorflow.org/text/tutorials/word2vec"),
)
LIBRARY = Library("custom_loops", PROGRAMS)
