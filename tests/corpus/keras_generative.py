"""Generative and self-supervised models, as the examples on keras.io write them: own train steps, two optimizers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.corpus.program import Built, Feed, Library, Program, images, stepped, trained

LATENT = 4
ADDRESS = "keras.io/examples/generative/"


def _generator(side: int = 8, width: int = LATENT) -> Any:
    return keras.Sequential(
        [
            keras.Input((width,)),
            layers.Dense(side // 2 * (side // 2) * 4),
            layers.Reshape((side // 2, side // 2, 4)),
            layers.Conv2DTranspose(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, kernel_size=5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


def _discriminator(side: int = 8, channels: int = 1) -> Any:
    return keras.Sequential(
        [
            keras.Input((side, side, channels)),
            layers.Conv2D(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(8, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class Gan(keras.Model):
    """A generator and a discriminator that sees generated and real images in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = _discriminator(), _generator()
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.d_metric = keras.metrics.Mean(name="d_loss")
        self.g_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self) -> list[Any]:
        return [self.d_metric, self.g_metric]

    def train_step(self, real_images: Any) -> dict[str, Any]:
        (real_images,) = real_images if isinstance(real_images, tuple) else (real_images,)
        size = ops.shape(real_images)[0]
        noise = keras.random.normal((size, LATENT), seed=self.seed_generator)
        combined = ops.concatenate([self.generator(noise), real_images], axis=0)
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply(grads, self.discriminator.trainable_weights)
        noise = keras.random.normal((size, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((size, 1)), self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(grads, self.generator.trainable_weights)
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


def dcgan() -> Built:
    model = Gan()
    model.compile(
        keras.optimizers.Adam(0.0003), keras.optimizers.Adam(0.0003), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    for optimizer, part in ((model.d_optimizer, model.discriminator), (model.g_optimizer, model.generator)):
        optimizer.build(part.trainable_variables)
    return trained(model, images(8, 1))


def dcgan_tutorial() -> Built:
    """The tutorial on tensorflow.org: two tapes, no concatenation."""
    generator, discriminator = _generator(), _discriminator()
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    g_opt, d_opt = keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4)
    g_opt.build(generator.trainable_variables)
    d_opt.build(discriminator.trainable_variables)

    def train_step(images: Any) -> dict[str, Any]:
        noise = tf.random.normal([tf.shape(images)[0], LATENT], dtype=images.dtype, seed=3)
        with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
            generated = generator(noise, training=True)
            real, fake = discriminator(images, training=True), discriminator(generated, training=True)
            g_loss = entropy(tf.ones_like(fake), fake)
            d_loss = entropy(tf.ones_like(real), real) + entropy(tf.zeros_like(fake), fake)
        g_grads = g_tape.gradient(g_loss, generator.trainable_variables)
        d_grads = d_tape.gradient(d_loss, discriminator.trainable_variables)
        g_opt.apply_gradients(zip(g_grads, generator.trainable_variables, strict=True))
        d_opt.apply_gradients(zip(d_grads, discriminator.trainable_variables, strict=True))
        return {"g_loss": g_loss, "d_loss": d_loss}

    return stepped(train_step, images=images(8, 1))


def wgan_gp() -> Built:
    """A gradient penalty: the gradient of a gradient."""
    generator, discriminator = _generator(), _discriminator()
    d_opt, g_opt = (keras.optimizers.Adam(0.0002, beta_1=0.5, beta_2=0.9) for _ in range(2))
    d_opt.build(discriminator.trainable_variables)
    g_opt.build(generator.trainable_variables)

    def penalty(real: Any, fake: Any) -> Any:
        alpha = tf.random.uniform([tf.shape(real)[0], 1, 1, 1], dtype=real.dtype, seed=4)
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            score = discriminator(interpolated, training=True)
        grads = tape.gradient(score, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]) + 1e-12)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(real: Any) -> dict[str, Any]:
        size = tf.shape(real)[0]
        for i in range(2):
            noise = tf.random.normal([size, LATENT], dtype=real.dtype, seed=5 + i)
            with tf.GradientTape() as tape:
                fake = generator(noise, training=True)
                scores = discriminator(fake, training=True), discriminator(real, training=True)
                d_loss = tf.reduce_mean(scores[0]) - tf.reduce_mean(scores[1]) + 10.0 * penalty(real, fake)
            d_grads = tape.gradient(d_loss, discriminator.trainable_variables)
            d_opt.apply_gradients(zip(d_grads, discriminator.trainable_variables, strict=True))
        noise = tf.random.normal([size, LATENT], dtype=real.dtype, seed=9)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(discriminator(generator(noise, training=True), training=True))
        g_grads = tape.gradient(g_loss, generator.trainable_variables)
        g_opt.apply_gradients(zip(g_grads, generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}

    return stepped(train_step, real=images(8, 1))


def conditional_gan() -> Built:
    generator, discriminator = _generator(width=LATENT + 3), _discriminator(channels=4)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    d_opt, g_opt = keras.optimizers.Adam(3e-4), keras.optimizers.Adam(3e-4)
    d_opt.build(discriminator.trainable_variables)
    g_opt.build(generator.trainable_variables)

    def train_step(real: Any, labels: Any) -> dict[str, Any]:
        size = tf.shape(real)[0]
        maps = tf.tile(labels[:, None, None, :], [1, 8, 8, 1])
        noise = tf.random.normal([size, LATENT], dtype=real.dtype, seed=3)
        generated = generator(tf.concat([noise, labels], axis=1))
        combined = tf.concat([tf.concat([generated, maps], -1), tf.concat([real, maps], -1)], axis=0)
        truth = tf.concat([tf.ones((size, 1), real.dtype), tf.zeros((size, 1), real.dtype)], axis=0)
        with tf.GradientTape() as tape:
            d_loss = entropy(truth, discriminator(combined))
        grads = tape.gradient(d_loss, discriminator.trainable_weights)
        d_opt.apply_gradients(zip(grads, discriminator.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            fake = tf.concat([generator(tf.concat([noise, labels], axis=1)), maps], -1)
            g_loss = entropy(tf.zeros((size, 1), real.dtype), discriminator(fake))
        grads = tape.gradient(g_loss, generator.trainable_weights)
        g_opt.apply_gradients(zip(grads, generator.trainable_weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}

    return stepped(train_step, real=images(8, 1), labels=Feed((), "one_hot", 3))


class Sampling(layers.Layer):
    """Draws from the posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_var = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


class Vae(keras.Model):
    """A variational autoencoder with its own train step."""

    def __init__(self) -> None:
        super().__init__()
        inputs = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
        x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
        mean, log_var = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
        self.encoder = keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])
        self.decoder = _generator()
        self.total = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total]

    def train_step(self, data: Any) -> dict[str, Any]:
        (data,) = data
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            entropy = keras.losses.binary_crossentropy(data, reconstruction)
            first = ops.mean(ops.sum(entropy, axis=(1, 2)))
            divergence = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            loss = first + ops.mean(ops.sum(divergence, axis=1))
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        return {"loss": self.total.result()}


def vae() -> Built:
    model = Vae()
    model.compile(optimizer=keras.optimizers.Adam())
    return trained(model, images(8, 1))


def ddim() -> Built:
    """Denoising diffusion: noise and times are drawn, weights are averaged over the steps."""
    inputs, variances = keras.Input((8, 8, 3)), keras.Input((1, 1, 1))
    x = layers.Concatenate()([inputs, layers.UpSampling2D(size=8)(variances)])
    x = layers.BatchNormalization(center=False, scale=False)(layers.Conv2D(8, 3, padding="same")(x))
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    network = keras.Model([inputs, variances], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))
    average = keras.models.clone_model(network)
    average.set_weights(network.get_weights())
    normalizer = layers.Normalization(mean=0.5, variance=0.1)
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-4)
    optimizer.build(network.trainable_variables)

    def train_step(pictures: Any) -> dict[str, Any]:
        size = tf.shape(pictures)[0]
        pictures = normalizer(pictures, training=True)
        noises = tf.random.normal(tf.shape(pictures), dtype=pictures.dtype, seed=11)
        times = tf.random.uniform((size, 1, 1, 1), dtype=pictures.dtype, seed=12)
        angles = 0.3 + times * (1.55 - 0.3)
        signal, rate = tf.cos(angles), tf.sin(angles)
        with tf.GradientTape() as tape:
            predicted = network([signal * pictures + rate * noises, rate**2], training=True)
            loss = tf.reduce_mean(keras.losses.mean_absolute_error(noises, predicted))
        grads = tape.gradient(loss, network.trainable_weights)
        optimizer.apply_gradients(zip(grads, network.trainable_weights, strict=True))
        for weight, kept in zip(network.weights, average.weights, strict=True):
            kept.assign(0.999 * kept + 0.001 * weight)
        return {"loss": loss}

    return stepped(train_step, pictures=images(8))


def cycle_gan() -> Built:
    def translator() -> Any:
        inputs = keras.Input((8, 8, 1))
        x = layers.GroupNormalization(groups=-1)(layers.Conv2D(4, 3, padding="same")(inputs))
        return keras.Model(inputs, layers.Conv2D(1, 3, padding="same", activation="tanh")(ops.relu(x)))

    gens = [translator(), translator()]
    discs = [_discriminator(), _discriminator()]
    optimizers = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(4)]
    for optimizer, model in zip(optimizers, [*gens, *discs], strict=True):
        optimizer.build(model.trainable_variables)
    squared, absolute = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()

    def train_step(a: Any, b: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape:
            fakes = [gens[0](a, training=True), gens[1](b, training=True)]  # a to b, b to a
            cycled = [gens[1](fakes[0], training=True), gens[0](fakes[1], training=True)]
            same = [gens[0](b, training=True), gens[1](a, training=True)]
            scores = [discs[0](fakes[0], training=True), discs[1](fakes[1], training=True)]
            truths = [discs[0](b, training=True), discs[1](a, training=True)]
            cycle = absolute(a, cycled[0]) + absolute(b, cycled[1])
            g = [squared(tf.ones_like(s), s) + 10.0 * cycle for s in scores]
            g = [g[0] + 5.0 * absolute(b, same[0]), g[1] + 5.0 * absolute(a, same[1])]
            d = [
                0.5 * (squared(tf.ones_like(t), t) + squared(tf.zeros_like(s), s))
                for t, s in zip(truths, scores, strict=True)
            ]
        for optimizer, loss, model in zip(optimizers, [*g, *d], [*gens, *discs], strict=True):
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return {"g": g[0], "d": d[0]}

    return stepped(train_step, a=images(8, 1), b=images(8, 1))


def vq_vae() -> Built:
    """A codebook: the nearest of its rows, with a straight-through gradient."""
    encoder = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(LATENT, 3, strides=4, padding="same")])
    decoder = keras.Sequential(
        [keras.Input((2, 2, LATENT)), layers.Conv2DTranspose(1, 4, strides=4, padding="same", activation="sigmoid")]
    )
    codes = keras.Variable(keras.random.uniform((LATENT, 6), -1.0, 1.0, seed=3), name="codes")
    variables = [*encoder.trainable_variables, *decoder.trainable_variables, codes]
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)

    def train_step(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            z = encoder(x, training=True)
            flat = tf.reshape(z, [-1, LATENT])
            table = tf.convert_to_tensor(codes)
            distances = (
                tf.reduce_sum(flat**2, axis=1, keepdims=True)
                + tf.reduce_sum(table**2, axis=0)
                - 2 * tf.matmul(flat, table)
            )
            chosen = tf.one_hot(tf.argmin(distances, axis=1), 6, dtype=x.dtype)
            quantized = tf.reshape(tf.matmul(chosen, table, transpose_b=True), tf.shape(z))
            commitment = tf.reduce_mean((tf.stop_gradient(quantized) - z) ** 2)
            codebook = tf.reduce_mean((quantized - tf.stop_gradient(z)) ** 2)
            through = z + tf.stop_gradient(quantized - z)
            loss = tf.reduce_mean((x - decoder(through, training=True)) ** 2) / 0.1 + 0.25 * commitment + codebook
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return {"loss": loss}

    return stepped(train_step, x=images(8, 1))


def pixel_cnn() -> Built:
    class Masked(layers.Conv2D):
        """A convolution that sees earlier pixels only."""

        def build(self, shape: Any) -> None:
            super().build(shape)
            mask = keras.ops.convert_to_numpy(ops.zeros(self.kernel.shape))
            mask = mask.copy()
            mask[:1], mask[1, :1] = 1.0, 1.0
            self.mask = mask

        def call(self, x: Any) -> Any:
            return ops.conv(x, self.kernel * self.mask, padding="same") + self.bias

    inputs = keras.Input((8, 8, 1))
    x = layers.Activation("relu")(Masked(8, 3, padding="same")(inputs))
    x = layers.add([x, layers.Activation("relu")(Masked(8, 3, padding="same")(x))])
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(5e-4), loss="binary_crossentropy")
    return trained(model, Feed((8, 8, 1), "binary"), Feed((8, 8, 1), "binary"))


def real_nvp() -> Built:
    """Coupling layers of a normalizing flow; the density is written out."""
    nets = [
        keras.Sequential([keras.Input((2,)), layers.Dense(8, activation="relu"), layers.Dense(4)]) for _ in range(4)
    ]
    variables = [v for net in nets for v in net.trainable_variables]
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(variables)

    def train_step(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            log_det, y = tf.zeros_like(x[:, 0]), x
            for i, net in enumerate(nets):
                mask = tf.constant([[0.0, 1.0]] if i % 2 else [[1.0, 0.0]], x.dtype)
                s, t = tf.split(net(y * mask), 2, axis=1)
                s = tf.tanh(s) * (1 - mask)
                y = mask * y + (1 - mask) * (y - t) * tf.exp(-s)
                log_det -= tf.reduce_sum(s, axis=1)
            likelihood = -0.5 * tf.reduce_sum(y**2, axis=1) + log_det
            loss = -tf.reduce_mean(likelihood)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    return stepped(train_step, x=Feed((2,)))


PROGRAMS = (
    Program(dcgan, ADDRESS + "dcgan_overriding_train_step"),
    Program(dcgan_tutorial, "tensorflow.org/tutorials/generative/dcgan"),
    Program(wgan_gp, ADDRESS + "wgan_gp"),
    Program(conditional_gan, ADDRESS + "conditional_gan"),
    Program(vae, ADDRESS + "vae"),
    Program(ddim, ADDRESS + "ddim"),
    Program(cycle_gan, ADDRESS + "cyclegan"),
    Program(vq_vae, ADDRESS + "vq_vae"),
    Program(pixel_cnn, ADDRESS + "pixelcnn"),
    Program(real_nvp, ADDRESS + "real_nvp"),
)
LIBRARY = Library("keras_generative", PROGRAMS)
