"""keras-hub backbones and tasks, from small configurations."""

from __future__ import annotations

from typing import Any

from tests.corpus.program import Built, Feed, Library, Program, ids, images, trained

ADDRESS = "keras.io/keras_hub/api/models/"
SIZE = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 6}
TOKENS = {"token_ids": ids(20, 6), "padding_mask": Feed((6,), "binary", dtype="int32")}
TYPED = {**TOKENS, "segment_ids": ids(2, 6)}


def _classifier(backbone: Any, feeds: Any, pooled: Any) -> Built:
    import keras

    logits = keras.layers.Dense(3)(pooled(backbone.output))
    model = keras.Model(backbone.input, logits)
    model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return trained(model, feeds, ids(3))


def _causal(task: Any, feeds: Any = TOKENS) -> Built:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, jit_compile=False)
    return trained(task, feeds, ids(20, 6))


def bert() -> Built:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(vocabulary_size=20, **SIZE)
    return _classifier(backbone, TYPED, lambda out: out["pooled_output"])


def roberta() -> Built:
    import keras_hub

    backbone = keras_hub.models.RobertaBackbone(vocabulary_size=20, **SIZE)
    return _classifier(backbone, TOKENS, lambda out: out[:, 0])


def distil_bert() -> Built:
    import keras_hub

    backbone = keras_hub.models.DistilBertBackbone(vocabulary_size=20, **SIZE)
    return _classifier(backbone, TOKENS, lambda out: out[:, 0])


def albert() -> Built:
    import keras_hub

    backbone = keras_hub.models.AlbertBackbone(vocabulary_size=20, embedding_dim=8, **{**SIZE, "num_layers": 2})
    return _classifier(backbone, TYPED, lambda out: out["pooled_output"])


def deberta_v3() -> Built:
    import keras_hub

    backbone = keras_hub.models.DebertaV3Backbone(vocabulary_size=20, bucket_size=4, **SIZE)
    return _classifier(backbone, TOKENS, lambda out: out[:, 0])


def gpt2() -> Built:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(vocabulary_size=20, **SIZE)
    return _causal(keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None))


def opt() -> Built:
    import keras_hub

    backbone = keras_hub.models.OPTBackbone(vocabulary_size=20, **SIZE)
    return _causal(keras_hub.models.OPTCausalLM(backbone=backbone, preprocessor=None))


def llama() -> Built:
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=20, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=8, intermediate_dim=16
    )
    return _causal(keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None))


def gemma() -> Built:
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=20,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=16,
        head_dim=4,
    )
    return _causal(keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None))


def t5() -> Built:
    import keras
    import keras_hub

    backbone = keras_hub.models.T5Backbone(
        vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16
    )
    feeds = {f"{part}_{name}": feed for part in ("encoder", "decoder") for name, feed in TOKENS.items()}
    logits = backbone.token_embedding(backbone.output["decoder_sequence_output"], reverse=True)
    model = keras.Model(backbone.input, logits)
    model.compile(keras.optimizers.Adafactor(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return trained(model, feeds, ids(20, 6))


def bart() -> Built:
    import keras
    import keras_hub

    backbone = keras_hub.models.BartBackbone(vocabulary_size=20, **SIZE)
    feeds = {f"{part}_{name}": feed for part in ("encoder", "decoder") for name, feed in TOKENS.items()}
    logits = keras.layers.Dense(20)(backbone.output["decoder_sequence_output"])
    model = keras.Model(backbone.input, logits)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return trained(model, feeds, ids(20, 6))


def hub_vit() -> Built:
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=(8, 8),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    )
    return _classifier(backbone, images(16), lambda out: out[:, 0])


PROGRAMS = (
    Program(bert, ADDRESS + "bert"),
    Program(gpt2, ADDRESS + "gpt2"),
    Program(t5, ADDRESS + "t5", floats="float32"),
    Program(roberta, ADDRESS + "roberta"),
    Program(distil_bert, ADDRESS + "distil_bert"),
    Program(albert, ADDRESS + "albert"),
    Program(deberta_v3, ADDRESS + "deberta_v3"),
    Program(opt, ADDRESS + "opt"),
    Program(llama, ADDRESS + "llama"),
    Program(gemma, ADDRESS + "gemma", floats="float32"),
    Program(bart, ADDRESS + "bart"),
    Program(hub_vit, ADDRESS + "vit"),
)
LIBRARY = Library("keras_hub", PROGRAMS, needs=("keras_hub",))
