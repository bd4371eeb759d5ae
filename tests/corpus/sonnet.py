"""dm-sonnet 2 modules and optimizers, as its examples train."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.corpus.program import Built, Feed, Library, Program, ids, images, stepped

ADDRESS = "github.com/google-deepmind/sonnet/tree/v2/examples/"
F = "float32"


def _run(tape: Any, loss: Any, module: Any, optimizer: Any) -> None:
    variables = module if isinstance(module, tuple) else module.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)


def _prepared(optimizer: Any, variables: Any) -> Any:
    initialise = getattr(optimizer, "_initialize", None)
    if initialise is not None:
        initialise(variables)
    return optimizer


def sonnet_mnist() -> Built:
    import sonnet as snt

    model = snt.Sequential([snt.Flatten(), snt.Linear(16), tf.nn.relu, snt.Linear(5)])
    model(tf.zeros((1, 8, 8, 1)))
    optimizer = snt.optimizers.SGD(0.1)

    def step(images: Any, labels: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            logits = model(images)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        _run(tape, loss, model, optimizer)
        return {"loss": loss}

    return stepped(step, images=images(8, 1), labels=ids(5))


def sonnet_conv_with_batch_norm() -> Built:
    import sonnet as snt

    conv, norm, head = snt.Conv2D(6, 3), snt.BatchNorm(True, True), snt.Linear(5)

    def net(x: Any) -> Any:
        return head(snt.flatten(tf.nn.relu(norm(conv(x), is_training=True))))

    net(tf.ones((2, 8, 8, 1)))
    variables = (*conv.trainable_variables, *norm.trainable_variables, *head.trainable_variables)
    optimizer = _prepared(snt.optimizers.Adam(1e-3), variables)

    def step(images: Any, labels: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, net(images)))
        _run(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, images=images(8, 1), labels=ids(5))


def sonnet_lstm() -> Built:
    import sonnet as snt

    core, head = snt.LSTM(6), snt.Linear(3)

    def net(x: Any) -> Any:
        outputs, _ = snt.dynamic_unroll(core, x, core.initial_state(tf.shape(x)[1]))
        return head(outputs[-1])

    net(tf.zeros((2, 1, 4)))
    variables = (*core.trainable_variables, *head.trainable_variables)
    optimizer = _prepared(snt.optimizers.RMSProp(1e-2), variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            logits = net(tf.transpose(x, [1, 0, 2]))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        _run(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((5, 4)), y=ids(3))


def sonnet_vq_vae() -> Built:
    """A codebook that follows sums over the batch, as moving averages."""
    import sonnet as snt

    encoder, decoder = snt.Linear(4), snt.Linear(6)
    codes = snt.nets.VectorQuantizerEMA(embedding_dim=4, num_embeddings=5, commitment_cost=0.25, decay=0.9)
    decoder(codes(encoder(tf.zeros((2, 6))), is_training=False)["quantize"])
    variables = (*encoder.trainable_variables, *decoder.trainable_variables)
    optimizer = _prepared(snt.optimizers.Adam(1e-3), variables)

    def step(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            found = codes(encoder(x), is_training=True)
            loss = tf.reduce_mean((decoder(found["quantize"]) - x) ** 2) + found["loss"]
        _run(tape, loss, variables, optimizer)
        return {"loss": loss, "perplexity": found["perplexity"]}

    return stepped(step, x=Feed((6,)))


def sonnet_resnet() -> Built:
    import sonnet as snt

    model = snt.nets.ResNet([1, 1, 1, 1], 5, channels_per_group_list=(8, 8, 8, 8))
    model(tf.ones((2, 16, 16, 3)), is_training=True)
    optimizer = _prepared(snt.optimizers.Momentum(0.1, 0.9), model.trainable_variables)

    def step(images: Any, labels: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            logits = model(images, is_training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            loss += 1e-4 * tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_variables])
        _run(tape, loss, model, optimizer)
        return {"loss": loss}

    return stepped(step, images=images(16), labels=ids(5))


PROGRAMS = (
    Program(sonnet_mnist, ADDRESS + "simple_mnist.py", floats=F),
    Program(sonnet_conv_with_batch_norm, ADDRESS + "distributed_cifar10.ipynb", floats=F),
    Program(sonnet_lstm, ADDRESS + "functional_mlp_mnist.py", floats=F),
    Program(sonnet_vq_vae, ADDRESS + "vqvae_example.ipynb", floats=F),
    Program(sonnet_resnet, "github.com/google-deepmind/sonnet/blob/v2/sonnet/src/nets/resnet.py", floats=F),
)
LIBRARY = Library("dm_sonnet", PROGRAMS, needs=("sonnet",))
