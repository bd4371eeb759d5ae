"""Gaussian processes with gpflow, as its notebooks train them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.program import Built, Feed, Library, Program, stepped, update

ADDRESS = "gpflow.github.io/GPflow/develop/notebooks/"


def _optimizer(variables: Any) -> Any:
    import keras

    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(variables)
    return optimizer


def _minimised(model: Any, target: Feed) -> Built:
    """Minimise the loss of a model on minibatches."""
    variables = model.trainable_variables
    optimizer = _optimizer(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = model.training_loss((x, y))
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((1,)), y=target)


def _variational(likelihood: Any, latents: int = 1, target: Feed | None = None) -> Built:
    """Train a sparse variational model."""
    import gpflow

    inducing = np.linspace(-1.0, 1.0, 5)[:, None]
    model = gpflow.models.SVGP(
        gpflow.kernels.SquaredExponential(), likelihood, inducing, num_data=100, num_latent_gps=latents
    )
    return _minimised(model, target or Feed((1,)))


def svgp_regression() -> Built:
    import gpflow

    return _variational(gpflow.likelihoods.Gaussian())


def svgp_classification() -> Built:
    import gpflow

    return _variational(gpflow.likelihoods.Bernoulli(), target=Feed((1,), "binary"))


def svgp_robust() -> Built:
    import gpflow

    return _variational(gpflow.likelihoods.StudentT())


def svgp_heteroskedastic() -> Built:
    import gpflow
    import tensorflow_probability as tfp

    likelihood = gpflow.likelihoods.HeteroskedasticTFPConditional(
        distribution_class=tfp.distributions.Normal, scale_transform=tfp.bijectors.Exp()
    )
    inducing = np.linspace(-1.0, 1.0, 4)[:, None]
    kernel = gpflow.kernels.SeparateIndependent([gpflow.kernels.RBF(), gpflow.kernels.RBF()])
    points = gpflow.inducing_variables.SharedIndependentInducingVariables(
        gpflow.inducing_variables.InducingPoints(inducing)
    )
    model = gpflow.models.SVGP(kernel, likelihood, points, num_latent_gps=2)
    return _minimised(model, Feed((1,)))


def exact_gp() -> Built:
    """The marginal likelihood of all examples: a Cholesky factor of a matrix that is as large as the batch."""
    import gpflow

    kernel = gpflow.kernels.Matern52()
    noise = gpflow.Parameter(0.1, transform=gpflow.utilities.positive())
    variables = [*kernel.trainable_variables, noise.unconstrained_variable]
    optimizer = _optimizer(variables)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            covariance = kernel(x) + noise * tf.eye(tf.shape(x)[0], dtype=x.dtype)
            factor = tf.linalg.cholesky(covariance)
            alpha = tf.linalg.triangular_solve(factor, y)
            loss = 0.5 * tf.reduce_sum(alpha**2) + tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)))
        update(tape, loss, variables, optimizer)
        return {"loss": loss}

    return stepped(step, x=Feed((1,)), y=Feed((1,)))


PROGRAMS = (
    Program(svgp_regression, ADDRESS + "advanced/gps_for_big_data.html"),
    Program(svgp_classification, ADDRESS + "getting_started/classification_and_other_data_distributions.html"),
    Program(svgp_robust, ADDRESS + "getting_started/classification_and_other_data_distributions.html"),
    Program(
        svgp_heteroskedastic,
        ADDRESS + "advanced/heteroskedastic.html",
        why="a loop over the latent processes keeps values with all examples in a list that is not cut",
    ),
    Program(
        exact_gp,
        ADDRESS + "getting_started/basic_usage.html",
        why="an exact Gaussian process compares all examples with each other, and factors one matrix of them",
    ),
)
LIBRARY = Library("gpflow", PROGRAMS, needs=("gpflow",))
