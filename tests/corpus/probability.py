"""TensorFlow Probability, as its tutorials train: distributions, bijectors, variational inference."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.corpus.program import Built, Feed, Library, Program, stepped, update

ADDRESS = "tensorflow.org/probability/examples/"
D = tf.float64


def _adam(variables: Any, rate: float = 0.01) -> Any:
    import keras

    optimizer = keras.optimizers.Adam(rate)
    optimizer.build(variables)
    return optimizer


def _variables(*shapes: tuple[int, ...]) -> list[Any]:
    return [tf.Variable(tf.random.stateless_normal(s, [3, i], dtype=D) * 0.3) for i, s in enumerate(shapes)]


def probabilistic_regression() -> Built:
    """A normal whose mean and scale depend on x."""
    import tensorflow_probability as tfp

    w, b = variables = _variables((3, 2), (2,))
    optimizer = _adam(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            out = x @ w + b
            normal = tfp.distributions.Normal(out[:, :1], 1e-3 + tf.math.softplus(0.05 * out[:, 1:]))
            loss = -tf.reduce_mean(normal.log_prob(y))
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((3,)), y=Feed((1,)))


def tfp_vae() -> Built:
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    w, v = variables = _variables((6, 4), (2, 6))
    optimizer = _adam(variables)
    prior = tfd.Independent(tfd.Normal(tf.zeros(2, D), tf.ones(2, D)), 1)

    def step(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, scale = tf.split(x @ w, 2, 1)
            posterior = tfd.Independent(tfd.Normal(mean, tf.math.softplus(scale) + 1e-3), 1)
            z = posterior.sample(seed=3)
            likelihood = tfd.Independent(tfd.Bernoulli(logits=z @ v), 1).log_prob(x)
            loss = tf.reduce_mean(tfd.kl_divergence(posterior, prior) - likelihood)
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((6,), "binary"))


def gaussian_mixture() -> Built:
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    logits, means, scales = variables = _variables((3,), (3, 2), (3, 2))
    optimizer = _adam(variables)

    def step(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mixture = tfd.MixtureSameFamily(
                tfd.Categorical(logits=logits), tfd.MultivariateNormalDiag(means, tf.math.softplus(scales))
            )
            loss = -tf.reduce_mean(mixture.log_prob(x))
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((2,)))


def masked_autoregressive_flow() -> Built:
    import tensorflow_probability as tfp

    tfd, tfb = tfp.distributions, tfp.bijectors
    w, u = variables = _variables((2, 8), (8, 4))
    optimizer = _adam(variables)
    mask = tf.constant([[1.0] * 8, [0.0] * 8], D)

    def shift_and_scale(x: Any) -> Any:
        out = tf.tanh(x @ (w * mask)) @ u
        keep = tf.constant([0.0, 1.0], D)
        return out[..., :2] * keep, tf.tanh(out[..., 2:]) * keep

    def step(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            flow = tfb.Chain([tfb.MaskedAutoregressiveFlow(shift_and_scale), tfb.Permute([1, 0])])
            base = tfd.MultivariateNormalDiag(tf.zeros(2, D))
            loss = -tf.reduce_mean(tfd.TransformedDistribution(base, flow).log_prob(x))
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((2,)))


def bayesian_weights() -> Built:
    """Weights are drawn in each step; the divergence counts once."""
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    loc, rho = variables = _variables((4, 1), (4, 1))
    optimizer = _adam(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            posterior = tfd.Independent(tfd.Normal(loc, tf.math.softplus(rho)), 2)
            prior = tfd.Independent(tfd.Normal(tf.zeros((4, 1), D), tf.ones((4, 1), D)), 2)
            fit = tfd.Normal(x @ posterior.sample(seed=5), 0.5).log_prob(y)
            loss = -tf.reduce_mean(fit) + 0.01 * tfd.kl_divergence(posterior, prior)
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((4,)), y=Feed((1,)))


def multilevel_model() -> Built:
    """Radon levels by county: a joint distribution and its surrogate."""
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    county, scale, floor = variables = _variables((5,), (5,), ())
    optimizer = _adam(variables)

    def step(where: Any, below: Any, radon: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            surrogate = tfd.Normal(county, tf.math.softplus(scale))
            drawn = surrogate.sample(2, seed=9)
            fit = tfd.Normal(tf.gather(drawn, where, axis=1) + floor * below, 1.0).log_prob(radon)
            prior = tfd.Normal(tf.zeros((), D), 1.0).log_prob(drawn)
            elbo = tf.reduce_sum(fit, -1) + tf.reduce_sum(prior - surrogate.log_prob(drawn), -1)
            loss = -tf.reduce_mean(elbo)
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, where=Feed((), "ids", 5), below=Feed((), "binary"), radon=Feed())


def mixture_density_network() -> Built:
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    w, u = variables = _variables((2, 8), (8, 9))
    optimizer = _adam(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            logits, means, scales = tf.split(tf.tanh(x @ w) @ u, 3, axis=1)
            mixture = tfd.MixtureSameFamily(
                tfd.Categorical(logits=logits), tfd.StudentT(4.0, means, tf.math.softplus(scales) + 1e-2)
            )
            loss = -tf.reduce_mean(mixture.log_prob(y))
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((2,)), y=Feed())


def full_covariance() -> Built:
    """One Cholesky factor for each example."""
    import tensorflow_probability as tfp

    w, b = variables = _variables((3, 5), (5,))
    optimizer = _adam(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            out = x @ w + b
            tril = tfp.bijectors.FillScaleTriL(diag_shift=tf.constant(1e-3, D))(out[:, 2:])
            loss = -tf.reduce_mean(tfp.distributions.MultivariateNormalTriL(out[:, :2], tril).log_prob(y))
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((3,)), y=Feed((2,)))


PROGRAMS = (
    Program(probabilistic_regression, ADDRESS + "Probabilistic_Layers_Regression"),
    Program(tfp_vae, ADDRESS + "Probabilistic_Layers_VAE"),
    Program(gaussian_mixture, ADDRESS + "Bayesian_Gaussian_Mixture_Model"),
    Program(masked_autoregressive_flow, "tensorflow.org/probability/api_docs/python/tfp/bijectors"),
    Program(bayesian_weights, "github.com/tensorflow/probability/tree/main/tensorflow_probability/examples"),
    Program(
        multilevel_model,
        ADDRESS + "Multilevel_Modeling_Primer",
        why="the sample of the surrogate posterior has no batch dimension",
    ),
    Program(mixture_density_network, "arxiv.org/abs/1308.0850"),
    Program(full_covariance, ADDRESS + "TensorFlow_Distributions_Tutorial"),
)
LIBRARY = Library("tensorflow_probability", PROGRAMS, needs=("tensorflow_probability",))
