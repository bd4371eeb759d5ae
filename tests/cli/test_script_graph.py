"""A script, or a saved Keras model, in place of a graph: its step is found with its data, and nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import pytest

import autograph_rewrite as ar
from autograph_rewrite.tools.cli import main

MODELS = """
import keras, numpy as np, tensorflow as tf
import autograph_rewrite as ar

def built(units):
    model = keras.Sequential([keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    return model

def main():
    first, second = built(1), ar.distribute(built(2), {"devices": ["CPU:0", "CPU:1"]})
    data = tf.data.Dataset.from_tensor_slices((np.ones([7, 3], "f"), np.ones([7, 1], "f")))
    data = data.batch(2, drop_remainder=True)
    first.fit(data, callbacks=[keras.callbacks.ModelCheckpoint("trained.keras")])
    second.fit(np.ones([7, 4], "f"), np.ones([7, 2], "f"), sample_weight=np.ones([7], "f"))
    open("ended.txt", "w").close()

if __name__ == "__main__":
    main()
"""
FUNCTION = """
import tensorflow as tf
import autograph_rewrite as ar

w = tf.Variable(tf.ones([3, 1]))

def train_step(x, rate):
    w.assign_sub(rate * tf.reduce_sum(x, axis=0)[:, None])

step = ar.distribute(train_step, {"devices": ["CPU:0"]})
step(tf.ones([4, 3]), 0.5)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def inputs(graph: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", graph, "--json"]) == 0
    return {one["name"]: one["shape"] for one in json.loads(capsys.readouterr().out)["inputs"]}


def test_a_script_runs_up_to_its_first_step_and_gives_it_for_batches_of_any_size(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(MODELS)
    assert inputs("train.py", capsys) == {"x": [None, 3], "y": [None, 1]}
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]


def test_a_name_picks_a_model_and_no_other_is_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(MODELS)
    assert inputs("train.py:second", capsys) == {"x": [None, 4], "y": [None, 2], "sample_weight": [None]}
    assert main(["inspect", "train.py:third"]) == 2
    assert "never trained 'third'" in capsys.readouterr().err
    assert not Path("trained.keras").exists()


@pytest.mark.parametrize(("graph", "more", "examples"), [("train.py", [], 2), ("train.py:second", ["--batch", "9"], 9)])
@pytest.mark.parametrize("verb", ["explain", "plan", "simulate"])
def test_plans_of_a_script_are_for_the_batch_of_its_fit(
    verb: str, graph: str, more: list[str], examples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(MODELS)
    Path("c.yaml").write_text("{devices: [CPU:0], strategy: {name: Auto}}")
    assert main([verb, graph, "--config", "c.yaml", "--json", *more]) == 0
    data = json.loads(capsys.readouterr().out)
    found = data["plan_notes"] if verb == "explain" else data["notes"]
    if verb == "simulate":
        assert data["batch"] == examples
    else:
        assert any(f"for steps of {examples} examples" in note for note in found)


@pytest.mark.parametrize("verb", ["plan", "rewrite"])
def test_a_script_does_not_run_for_a_file_that_cannot_be_written(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("raise SystemExit(5)\n")
    for out, said in (("auto.unknown", "does not say which form"), ("nowhere/auto.pb", "cannot write")):
        assert main([verb, "train.py", "--config", "all_reduce", "-o", out]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("graph", ["loop.py", "loop.py:step", "loop.py:train_step"])
def test_the_first_call_of_a_distributed_function_is_its_step(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop.py").write_text(FUNCTION)
    assert inputs(graph, capsys)["x"] == [None, 3]


def test_a_script_that_fails_is_told_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("import keras\n\nkeras.layers.Dens(3)\n")
    assert main(["inspect", "train.py"]) == 2
    assert "train.py:3" in capsys.readouterr().err
    Path("train.py").write_text("pass\n")
    assert main(["inspect", "train.py"]) == 2
    assert "'train.py' trained nothing" in capsys.readouterr().err


def test_the_labels_of_a_saved_model_follow_from_its_losses() -> None:
    x = keras.Input([8])
    heads = {"digit": keras.layers.Dense(3, name="digit")(x), "size": keras.layers.Dense(1, name="size")(x)}
    model = keras.Model(x, heads)
    model.compile("adam", {"digit": "sparse_categorical_crossentropy", "size": "mse"})
    model.save("model.keras")
    item = ar.GraphItem.load("model.keras")
    assert item.inputs["y/digit"].dtype == "int64"
    assert [one.shape for one in item.inputs.values()] == [(None, 8), (None,), (None, 1)]


def test_a_model_that_was_saved_without_compile_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    keras.Sequential([keras.Input([8]), keras.layers.Dense(1)]).save("model.keras")
    assert main(["inspect", "model.keras"]) == 2
    assert "compile()" in capsys.readouterr().err
