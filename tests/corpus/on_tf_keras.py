"""Programs of libraries that stand on tf_keras: Keras 2, which `tf.keras` is with TF_USE_LEGACY_KERAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.corpus import keras_applications
from tests.corpus.program import Built, Feed, Library, Program, ids, images, stepped, trained
from tests.support.chosen_keras import keras

F = "float32"
STEPS = 5
WORDS, LENGTH = 50, 8
EXAMPLES = "keras.io/examples/"
GARDEN = "github.com/tensorflow/models/tree/master/official/"
TRANSFORMERS = "huggingface.co/docs/transformers/v4.57.6/model_doc/"


def _compiled(model: Any, loss: Any, optimizer: Any = None, **more: Any) -> Any:
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss, **more)
    return model


def _logits() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _tokens() -> dict[str, Feed]:
    return {"input_ids": ids(WORDS, LENGTH), "attention_mask": Feed((LENGTH,), "binary", dtype="int32")}


def hf_bert() -> Built:
    from transformers import BertConfig, TFBertForSequenceClassification

    config = BertConfig(WORDS, 16, 2, 2, 32, num_labels=3, max_position_embeddings=LENGTH)
    model = TFBertForSequenceClassification(config)
    model.build_in_name_scope()
    return trained(_compiled(model, _logits(), keras.optimizers.Adam(1e-3), metrics=["accuracy"]), _tokens(), ids(3))


def hf_distilbert() -> Built:
    from transformers import DistilBertConfig, TFDistilBertForSequenceClassification

    config = DistilBertConfig(WORDS, LENGTH, n_layers=2, n_heads=2, dim=16, hidden_dim=32, num_labels=3)
    model = TFDistilBertForSequenceClassification(config)
    model.build_in_name_scope()
    return trained(_compiled(model, _logits()), _tokens(), ids(3))


def hf_gpt2() -> Built:
    """The loss is the one that the model computes from its labels."""
    from transformers import GPT2Config, TFGPT2LMHeadModel

    model = TFGPT2LMHeadModel(GPT2Config(WORDS, LENGTH, 16, 2, 2))
    model.build_in_name_scope()
    model.compile(keras.optimizers.SGD(0.05))
    return trained(model, {**_tokens(), "labels": ids(WORDS, LENGTH)})


def garden_resnet() -> Built:
    from official.vision.modeling.backbones.resnet import ResNet
    from official.vision.modeling.classification_model import ClassificationModel

    spec = keras.layers.InputSpec(shape=(None, 32, 32, 3))
    backbone = ResNet(10, spec, depth_multiplier=0.125)
    model = ClassificationModel(backbone, 5, spec)
    return trained(_compiled(model, _logits(), metrics=["accuracy"]), images(32), ids(5))


def garden_bert() -> Built:
    from official.nlp.modeling.models import BertClassifier
    from official.nlp.modeling.networks import BertEncoder

    encoder = BertEncoder(WORDS, 16, 2, 2, LENGTH, 2, 32, dict_outputs=True)
    model = BertClassifier(encoder, 3)
    tokens = {
        "input_word_ids": ids(WORDS, LENGTH),
        "input_mask": Feed((LENGTH,), "binary", dtype="int32"),
        "input_type_ids": ids(2, LENGTH),
    }
    return trained(_compiled(model, _logits(), keras.optimizers.Adam(1e-3)), tokens, ids(3))


def garden_retinanet() -> Built:
    """The task's training step: focal and box losses over the levels of a feature pyramid."""
    from official.vision.configs import backbones, decoders, retinanet
    from official.vision.tasks.retinanet import RetinaNetTask

    config = retinanet.RetinaNetTask(
        model=retinanet.RetinaNet(
            num_classes=3,
            input_size=[64, 64, 3],
            min_level=3,
            max_level=4,
            backbone=backbones.Backbone(type="resnet", resnet=backbones.ResNet(model_id=10, depth_multiplier=0.125)),
            decoder=decoders.Decoder(type="fpn", fpn=decoders.FPN(num_filters=8)),
            head=retinanet.RetinaNetHead(num_convs=1, num_filters=8),
        )
    )
    task = RetinaNetTask(config)
    model = task.build_model()
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    sizes = {"3": 8, "4": 4}

    def step(image: Any, labels: Any) -> dict[str, Any]:
        return {"loss": task.train_step((image, labels), model, optimizer)["loss"]}

    anchors = 9
    places = sum(side * side * anchors for side in sizes.values())
    labels = {
        "cls_targets": {level: ids(3, side, side, anchors) for level, side in sizes.items()},
        "box_targets": {level: Feed((side, side, anchors * 4)) for level, side in sizes.items()},
        "cls_weights": Feed((places,), "unit"),
        "box_weights": Feed((places,), "unit"),
    }
    return stepped(step, image=images(64), labels=labels)


def spektral_gcn() -> Built:
    """Graphs of a batch, of five nodes each, with an adjacency matrix of their own."""
    from spektral.layers import GCNConv, GlobalSumPool

    nodes, edges = keras.Input((5, 4)), keras.Input((5, 5))
    x = GCNConv(8, "relu")([nodes, edges])
    x = GlobalSumPool()(GCNConv(8, "relu")([x, edges]))
    model = keras.Model([nodes, edges], keras.layers.Dense(3, "softmax")(x))
    adjacency = Feed((5, 5), "unit")
    return trained(_compiled(model, "sparse_categorical_crossentropy"), [Feed((5, 4)), adjacency], ids(3))


def spektral_attention() -> Built:
    from spektral.layers import GATConv, GlobalAttentionPool

    nodes, edges = keras.Input((5, 4)), keras.Input((5, 5))
    x = GlobalAttentionPool(6)(GATConv(4, 2, activation="elu")([nodes, edges]))
    model = keras.Model([nodes, edges], keras.layers.Dense(3)(x))
    return trained(_compiled(model, _logits(), keras.optimizers.Adam()), [Feed((5, 4)), Feed((5, 5), "binary")], ids(3))


def recommenders_two_tower() -> Built:
    """Retrieval with the other examples of the batch as negatives."""
    import tensorflow_recommenders as tfrs

    class TwoTower(tfrs.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            tower = [keras.layers.Embedding(9, 8), keras.layers.Dense(4)]
            other = [keras.layers.Embedding(11, 8), keras.layers.Dense(4)]
            self.user, self.movie = keras.Sequential(tower), keras.Sequential(other)
            self.task = tfrs.tasks.Retrieval()

        def compute_loss(self, inputs: Any, training: bool = False) -> Any:
            return self.task(self.user(inputs["user"]), self.movie(inputs["movie"]), compute_metrics=not training)

    model = TwoTower()
    model.compile(keras.optimizers.Adagrad(0.1))
    return trained(model, {"user": ids(9), "movie": ids(11)})


def recommenders_cross() -> Built:
    import tensorflow_recommenders as tfrs

    inputs = keras.Input((6,))
    x = tfrs.layers.dcn.Cross(projection_dim=3)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    return trained(_compiled(model, "mse", keras.optimizers.Adam(0.01)), Feed((6,)), Feed((1,)))


def agents_dqn() -> Built:
    """`DqnAgent.train`: a target network that follows every second step."""
    from tf_agents.agents.dqn.dqn_agent import DqnAgent
    from tf_agents.networks.q_network import QNetwork
    from tf_agents.specs import BoundedTensorSpec, TensorSpec
    from tf_agents.trajectories import time_step, trajectory
    from tf_agents.utils import common

    seen, action = TensorSpec((4,), tf.float32), BoundedTensorSpec((), tf.int32, 0, 2)
    agent = DqnAgent(
        time_step.time_step_spec(seen),
        action,
        q_network=QNetwork(seen, action, fc_layer_params=(16,)),
        optimizer=keras.optimizers.Adam(1e-3),
        target_update_period=2,
        td_errors_loss_fn=common.element_wise_squared_loss,
    )
    agent.initialize()
    agent._optimizer.build(agent._q_network.trainable_weights)

    def step(observation: Any, action: Any, reward: Any) -> dict[str, Any]:
        ones = tf.ones_like(action)
        experience = trajectory.Trajectory(ones, observation, action, (), ones, reward, tf.ones_like(reward))
        return {"loss": agent._train(experience, None).loss}

    return stepped(step, observation=Feed((2, 4)), action=ids(3, 2), reward=Feed((2,)))


def lattice() -> Built:
    """Calibrated features in a lattice that is monotonic: constraints project the weights after each step."""
    import tensorflow_lattice as tfl

    inputs = [keras.Input((1,)) for _ in range(2)]
    calibrated = [
        tfl.layers.PWLCalibration([0.0, 0.3, 0.6, 1.0], output_min=0.0, output_max=1.0, monotonicity="increasing")(one)
        for one in inputs
    ]
    out = tfl.layers.Lattice([2, 2], monotonicities=["increasing"] * 2, output_min=0.0, output_max=1.0)(calibrated)
    model = keras.Model(inputs, out)
    unit = Feed((1,), "unit")
    return trained(_compiled(model, "mse", keras.optimizers.Adagrad(0.1)), [unit, unit], unit)


def probability_regression() -> Built:
    import tensorflow_probability as tfp

    def normal(t: Any) -> Any:
        return tfp.distributions.Normal(t[..., :1], 1e-3 + tf.math.softplus(0.05 * t[..., 1:]))

    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2), tfp.layers.DistributionLambda(normal)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), lambda y, found: -found.log_prob(y))
    return trained(model, Feed((4,)), Feed((1,)))


def tf_keras_vae() -> Built:
    """A training step of its own, with metrics; a legacy optimizer."""

    class Vae(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = keras.layers
            self.hidden, self.mean, self.log_var = layers.Dense(16, "relu"), layers.Dense(2), layers.Dense(2)
            self.decoder = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(12, "sigmoid")])
            self.loss_tracker = keras.metrics.Mean("loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.loss_tracker]

        def call(self, x: Any) -> Any:
            return self.decoder(self.mean(self.hidden(x)))

        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                hidden = self.hidden(data)
                mean, log_var = self.mean(hidden), self.log_var(hidden)
                z = mean + tf.exp(0.5 * log_var) * tf.random.normal(tf.shape(mean), dtype=mean.dtype)
                error = tf.reduce_mean(tf.reduce_sum(keras.losses.binary_crossentropy(data, self.decoder(z))))
                loss = error - 0.5 * tf.reduce_sum(1 + log_var - mean**2 - tf.exp(log_var))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

    model = Vae()
    model.build((None, 12))
    for layer in (model.mean, model.log_var):
        layer.build((None, 16)) if not layer.built else None
    model.compile(keras.optimizers.legacy.Adam(1e-3))
    return trained(model, Feed((12,), "unit"))


def tf_keras_transformer() -> Built:
    layers = keras.layers
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 16)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, "relu")(x)))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(2, "softmax")(x))
    return trained(_compiled(model, "sparse_categorical_crossentropy"), ids(WORDS, LENGTH), ids(2))


def tf_keras_bidirectional_lstm() -> Built:
    layers = keras.layers
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(layers.Embedding(WORDS, 8)(inputs))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Bidirectional(layers.LSTM(8))(x)))
    return trained(_compiled(model, "binary_crossentropy", metrics=["accuracy"]), ids(WORDS, LENGTH), ids(2, 1))


def tf_keras_convnet() -> Built:
    layers = keras.layers
    convolutions = [layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((16, 16, 3)), *convolutions, layers.Flatten(), layers.Dense(5)])
    return trained(_compiled(model, _logits(), metrics=["accuracy"]), images(), ids(5))


def tf_keras_mobilenet_v2() -> Built:
    return keras_applications.mobilenet_v2()


def tf_keras_efficientnet_b0() -> Built:
    return keras_applications.efficientnet_b0()


def tf_keras_transfer_learning() -> Built:
    return keras_applications.transfer_learning()


def _program(build: Callable[[], Built], source: str, floats: str = "float64", why: str = "") -> Program:
    return Program(build, source, floats, steps=STEPS, why=why)


PROGRAMS = (
    _program(hf_bert, TRANSFORMERS + "bert", F),
    _program(hf_distilbert, TRANSFORMERS + "distilbert", F),
    _program(hf_gpt2, TRANSFORMERS + "gpt2", F),
    _program(garden_resnet, GARDEN + "vision"),
    _program(garden_bert, GARDEN + "nlp"),
    _program(garden_retinanet, GARDEN + "vision", F),
    _program(spektral_gcn, "graphneural.network/layers/convolution"),
    _program(spektral_attention, "graphneural.network/layers/convolution"),
    _program(recommenders_two_tower, "tensorflow.org/recommenders/examples/basic_retrieval", F),
    _program(recommenders_cross, "tensorflow.org/recommenders/examples/dcn"),
    _program(agents_dqn, "tensorflow.org/agents/tutorials/1_dqn_tutorial", F),
    _program(lattice, "tensorflow.org/lattice/tutorials/keras_layers", F),
    _program(probability_regression, "tensorflow.org/probability/examples/Probabilistic_Layers_Regression"),
    _program(tf_keras_vae, EXAMPLES + "generative/vae"),
    _program(tf_keras_transformer, EXAMPLES + "nlp/text_classification_with_transformer"),
    _program(tf_keras_bidirectional_lstm, EXAMPLES + "nlp/bidirectional_lstm_imdb"),
    _program(tf_keras_convnet, EXAMPLES + "vision/mnist_convnet"),
    _program(tf_keras_mobilenet_v2, keras_applications.ADDRESS + "mobilenet"),
    _program(tf_keras_efficientnet_b0, keras_applications.ADDRESS + "efficientnet"),
    _program(tf_keras_transfer_learning, "keras.io/guides/transfer_learning"),
)
LIBRARY = Library(
    "tf_keras",
    PROGRAMS,
    needs=("tf_keras", "transformers", "spektral", "tf_agents", "official", "tensorflow_lattice"),
    environment={"TF_USE_LEGACY_KERAS": "1"},
    has_jobs=True,
)
