"""Text and sequences, as the examples on keras.io write them."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.corpus.program import Built, Feed, Library, Program, ids, trained

WORDS, LENGTH, WIDTH = 20, 6, 8
ADDRESS = "keras.io/examples/nlp/"


class TokenAndPosition(layers.Layer):
    """Embeds words and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = layers.Embedding(WORDS, WIDTH), layers.Embedding(LENGTH, WIDTH)

    def call(self, x: Any) -> Any:
        return self.token(x) + self.position(ops.arange(start=0, stop=ops.shape(x)[-1], step=1))


class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=2, key_dim=WIDTH)
        self.ffn = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(WIDTH)])
        self.norm1, self.norm2 = (layers.LayerNormalization(epsilon=1e-6) for _ in range(2))
        self.drop1, self.drop2 = layers.Dropout(0.1), layers.Dropout(0.1)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.norm1(x + self.drop1(self.att(x, x), training=training))
        return self.norm2(x + self.drop2(self.ffn(x), training=training))


def text_transformer() -> Built:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(TransformerBlock()(TokenAndPosition()(inputs)))
    x = layers.Dense(8, activation="relu")(layers.Dropout(0.1)(x))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(x)))
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return trained(model, ids(WORDS, LENGTH), ids(2))


def bidirectional_lstm() -> Built:
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(inputs)
    x = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(6))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return trained(model, ids(WORDS, LENGTH), Feed((1,), "binary"))


def masked_lstm() -> Built:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(inputs)
    x = layers.LSTM(6, dropout=0.1, recurrent_dropout=0.1)(x)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    model.compile("rmsprop", "sparse_categorical_crossentropy")
    return trained(model, ids(4, LENGTH), ids(3))


def text_conv() -> Built:
    inputs = keras.Input((None,), dtype="int64")
    x = layers.Dropout(0.5)(layers.Embedding(WORDS, WIDTH)(inputs))
    x = layers.Conv1D(8, 3, padding="valid", activation="relu", strides=2)(x)
    x = layers.GlobalMaxPooling1D()(x)
    x = layers.Dropout(0.5)(layers.Dense(8, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid", name="predictions")(x))
    model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
    return trained(model, Feed((8,), "ids", WORDS, "int64"), Feed((1,), "binary"))


def seq2seq_lstm() -> Built:
    encoder_inputs = keras.Input((None, 5))
    _, h, c = layers.LSTM(6, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, 7))
    outputs, _, _ = layers.LSTM(6, return_sequences=True, return_state=True)(decoder_inputs, initial_state=[h, c])
    model = keras.Model([encoder_inputs, decoder_inputs], layers.Dense(7, activation="softmax")(outputs))
    model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
    return trained(model, [Feed((4,), "one_hot", 5), Feed((3,), "one_hot", 7)], Feed((3,), "one_hot", 7))


def addition_rnn() -> Built:
    model = keras.Sequential(
        [
            keras.Input((5, 12)),
            layers.LSTM(8),
            layers.RepeatVector(3),
            layers.LSTM(8, return_sequences=True),
            layers.Dense(12, activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    return trained(model, Feed((5,), "one_hot", 12), Feed((3,), "one_hot", 12))


def gru_with_state() -> Built:
    model = keras.Sequential(
        [keras.Input((LENGTH, 3)), layers.GRU(6, reset_after=False, return_sequences=True), layers.GRU(4)]
    )
    model.add(layers.Dense(1))
    model.compile(loss=keras.losses.Huber(), optimizer=keras.optimizers.Adam(clipvalue=0.5))
    return trained(model, Feed((LENGTH, 3)), Feed((1,)))


def translation_transformer() -> Built:
    source = keras.Input((None,), dtype="int64", name="encoder_inputs")
    target = keras.Input((None,), dtype="int64", name="decoder_inputs")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(source)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, WIDTH)(x, x))
    y = layers.Embedding(WORDS, WIDTH, mask_zero=True)(target)
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, WIDTH)(y, y, use_causal_mask=True))
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, WIDTH)(query=y, value=x, key=x))
    outputs = layers.Dense(WORDS, activation="softmax")(layers.Dropout(0.5)(y))
    model = keras.Model([source, target], outputs)
    model.compile("rmsprop", loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0), metrics=["accuracy"])
    words = Feed((5,), "ids", WORDS, "int64")
    return trained(model, {"encoder_inputs": words, "decoder_inputs": words}, words)


def fnet() -> Built:
    class Fourier(layers.Layer):
        """Mixes tokens by a Fourier transform."""

        def call(self, x: Any) -> Any:
            real, _ = ops.fft2((x, ops.zeros_like(x)))
            return real

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TokenAndPosition()(inputs)
    x = layers.LayerNormalization()(x + Fourier()(x))
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(layers.Dense(16, activation="relu")(x)))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "binary_crossentropy")
    return trained(model, ids(WORDS, LENGTH), Feed((1,), "binary"))


class MaskedLanguageModel(keras.Model):
    """Trains on sample weights that say which words were masked."""

    def train_step(self, inputs: Any) -> dict[str, Any]:
        import tensorflow as tf

        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.loss_fn(labels, predictions, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def masked_language_model() -> Built:
    import tensorflow as tf

    from tests.corpus.program import stepped

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TransformerBlock()(TokenAndPosition()(inputs))
    model = MaskedLanguageModel(inputs, layers.Dense(WORDS, activation="softmax")(x))
    model.loss_fn = keras.losses.SparseCategoricalCrossentropy()
    model.compile(optimizer=keras.optimizers.Adam(0.001))
    model.optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any, weight: Any) -> dict[str, Any]:
        return model.train_step((x, y, tf.cast(weight, keras.config.floatx())))

    return stepped(step, x=ids(WORDS, LENGTH), y=ids(WORDS, LENGTH), weight=Feed((LENGTH,), "binary"))


def named_entities() -> Built:
    class Loss(keras.losses.Loss):
        """Leaves out what is padding."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            loss = ops.sparse_categorical_crossentropy(y_true, y_pred)
            mask = ops.cast(y_true > 0, dtype=loss.dtype)
            return ops.sum(loss * mask) / ops.sum(mask)

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TransformerBlock()(TokenAndPosition()(inputs))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(layers.Dropout(0.1)(x)))
    model.compile(optimizer="adam", loss=Loss(reduction=None))
    return trained(model, ids(WORDS, LENGTH), ids(4, LENGTH))


def switch_transformer() -> Built:
    """Experts with a capacity: where a word goes depends on the words before it in the whole batch."""
    tokens = LENGTH * 8

    class Router(layers.Layer):
        """Chooses an expert for each token, and none where it is full."""

        def __init__(self) -> None:
            super().__init__()
            self.route = layers.Dense(units=2)

        def call(self, x: Any) -> Any:
            probabilities = keras.activations.softmax(self.route(x), axis=-1)
            gate, index = ops.top_k(probabilities, k=1)
            chosen = ops.one_hot(ops.squeeze(index, -1), 2)
            density = ops.mean(ops.cast(chosen, x.dtype), axis=0)
            self.add_loss(ops.mean(density * ops.mean(probabilities, axis=0)) * 4.0)
            position = ops.cumsum(chosen, axis=0) * chosen
            kept = ops.cast(position <= tokens // 2, x.dtype) * ops.cast(chosen, x.dtype)
            return kept * gate

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TokenAndPosition()(inputs)
    flat = ops.reshape(x, (-1, WIDTH))
    gates = Router()(flat)
    experts = [layers.Dense(WIDTH, activation="relu")(flat) * gates[:, i : i + 1] for i in range(2)]
    x = layers.LayerNormalization()(x + ops.reshape(experts[0] + experts[1], (-1, LENGTH, WIDTH)))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "sparse_categorical_crossentropy")
    return trained(model, ids(WORDS, LENGTH), ids(2))


def speech_transformer() -> Built:
    inputs = keras.Input((16, 8))
    x = inputs
    for _ in range(2):
        x = layers.Conv1D(8, 5, strides=2, padding="same", activation="relu")(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    model = keras.Model(inputs, layers.Dense(WORDS)(x))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, 10, warmup_target=2e-3)), loss)
    return trained(model, Feed((16, 8)), Feed((4,), "one_hot", WORDS))


def gpt_miniature() -> Built:
    """Text generation with a miniature GPT: a causal mask made from the batch's shape."""
    inputs = keras.Input((6,), dtype="int32")
    positions = layers.Embedding(6, 8)(ops.arange(0, 6))
    x = layers.Embedding(20, 8)(inputs) + positions
    attended = layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(attended))
    y = layers.Dense(8)(layers.Dense(16, activation="relu")(x))
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(y))
    model = keras.Model(inputs, layers.Dense(20)(x))
    model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return trained(model, ids(20, 6), ids(20, 6))


PROGRAMS = (
    Program(text_transformer, ADDRESS + "text_classification_with_transformer"),
    Program(bidirectional_lstm, ADDRESS + "bidirectional_lstm_imdb"),
    Program(masked_lstm, "keras.io/guides/understanding_masking_and_padding"),
    Program(text_conv, ADDRESS + "text_classification_from_scratch"),
    Program(seq2seq_lstm, ADDRESS + "lstm_seq2seq"),
    Program(addition_rnn, ADDRESS + "addition_rnn"),
    Program(gru_with_state, "keras.io/guides/working_with_rnns"),
    Program(translation_transformer, ADDRESS + "neural_machine_translation_with_transformer"),
    Program(fnet, ADDRESS + "fnet_classification_with_keras_hub"),
    Program(masked_language_model, ADDRESS + "masked_language_modeling"),
    Program(named_entities, ADDRESS + "ner_transformers"),
    Program(switch_transformer, ADDRESS + "text_classification_with_switch_transformer"),
    Program(gpt_miniature, "keras.io/examples/generative/text_generation_with_miniature_gpt"),
    Program(speech_transformer, "keras.io/examples/audio/transformer_asr"),
)
LIBRARY = Library("keras_text", PROGRAMS)
