"""Every block of the documentation runs, or is checked as far as it can be here.

python          is executed, with the names of `prepared`; `python before` is another library's code and is compiled,
`python row` and `python emitter` are run by tests/passes/collectives/test_lowerings.py
sh              commands of this package, run one page after another in one folder; make and launch are looked up only
yaml            is a configuration
bash, json      are checked for their syntax
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autograph_rewrite.config.config import Config
from autograph_rewrite.tools.cli import SCRIPTS, VERBS, main
from tests.docs.blocks import PAGES, Block, blocks
from tests.support.paths import ROOT

ELSEWHERE = {"before", "row", "emitter"}
KINDS = {"python", "sh", "yaml", "bash", "json", "text"}
BEFORE = {
    "report.md": "model = ar.distribute(model, config); model.train_on_batch(x, y); new = ar.rewrite(item, config)",
    "steps_per_run.md": "x, y = np.ones([57, 4, 3], 'f'), np.ones([57, 4, 1], 'f')",
    "rematerialisation.md": "block, h = (lambda x: 2 * x), tf.ones([2, 3])",
    "profile.md": """
step = ar.distribute(train_step, config)
model = ar.distribute(model, config)
session, feeds = ar.rewrite(item, config).session(), {"x:0": x, "y:0": y}
session.run("init")
""",
    "elastic.md": """
data = tf.data.Dataset.from_tensor_slices((np.ones([4, 3], "f"), np.ones([4, 1], "f"))).batch(2)
step, steps, session = train_step, 2, ar.rewrite(item, config).session()
feeds = lambda number: {"x:0": x, "y:0": y}
session.run("init")
""",
    "jobs.md": """
with tf.io.TFRecordWriter("data") as writer:
    writer.write(b"1 2 3 4")
files, step, train = ["data"], train_step, lambda step: None
def parse(record):
    numbers = tf.ensure_shape(tf.strings.to_number(tf.strings.split(record)), [4])
    return numbers[:3], numbers[3:]
""",
}
"""What a page takes for granted beside `prepared`."""


@cache
def regression() -> Any:
    """Return the graph of a linear regression, as any tutorial builds it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        y = v1.placeholder(tf.float32, [None, 1], name="y")
        w = v1.get_variable("w", [3, 1], initializer=tf.ones_initializer(), use_resource=True)
        loss = tf.reduce_mean(tf.math.squared_difference(tf.matmul(x, w), y), name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        v1.global_variables_initializer()
    return graph


@cache
def item() -> Any:
    """Return the regression, with its signature."""
    import autograph_rewrite as ar

    return ar.GraphItem.from_graph(regression(), train_op="train", outputs=["loss"], init_op="init")


def prepared() -> dict[str, Any]:
    """Return the names that examples take for granted."""
    import keras
    import tensorflow as tf

    import autograph_rewrite as ar

    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 3)).astype(np.float32)
    y = x @ np.float32([[1], [-2], [3]])
    w = tf.Variable(tf.ones([3, 1]))

    def make_model() -> Any:
        return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - y))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    model = make_model()
    model.compile("adam", "mse")
    return {
        "ar": ar, "tf": tf, "keras": keras, "np": np, "x": x, "y": y, "graph": regression(), "make_model": make_model,
        "model": model, "train_step": train_step, "config": {"devices": ["CPU:0", "CPU:1"]}, "optimizer": "adam",
        "loss": "mse", "initial": tf.ones([3, 1]), "decay": lambda w: 0.01 * tf.nn.l2_loss(w),
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)).batch(4), "item": item(),
    }  # fmt: skip


def running() -> list[Block]:
    """Return the blocks of Python that are executed here."""
    return [block for block in blocks("python") if not ELSEWHERE & set(block.kind)]


def test_every_block_says_what_it_is() -> None:
    wrong = []
    for page in PAGES:
        opened = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```"):
                opened = not opened
                if opened and line[3:].split()[:1] and line[3:].split()[0] not in KINDS:
                    wrong.append(f"{page.name}:{number}: {line}")
    assert wrong == []


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_example_is_python(block: Block) -> None:
    compile("\n" * block.line + block.text, str(block.page), "exec")


@cache
def rewritten() -> Any:
    """Return the regression for two replicas."""
    import autograph_rewrite as ar

    return ar.rewrite(item(), {"devices": ["CPU:0", "CPU:1"]})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with the files that examples name."""
    import autograph_rewrite as ar

    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "config.yaml").write_text("devices: [CPU:0, CPU:1]\n", encoding="utf-8")
    (tmp_path / "remat.yaml").write_text("devices: [CPU:0, CPU:1]\nremat: {policy: sqrt}\n", encoding="utf-8")
    (tmp_path / "graph.pb").write_bytes(item().graph_bytes)
    item().save(tmp_path / "graph.ar")
    rewritten().save(tmp_path / "new.ar")
    (tmp_path / "small.txt").write_text(ar.dump(item(), "text", full=True), encoding="utf-8")
    (tmp_path / "case.txt").write_text(ar.dump(item(), "text", full=True), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_page(page: Path, folder: Path) -> None:
    """Write the files that a page itself shows: a configuration that names code, that code, a graph as text."""
    for block in blocks("yaml", [page]):
        named = re.search(r"(\w+\.py):\w", block.text)
        if named is not None:
            code = next(one for one in blocks("python", [page]) if one.kind[1:] == ("run",))
            (folder / named[1]).write_text(code.text.partition("\nar.register")[0] + "\n", encoding="utf-8")
            (folder / "config.yaml").write_text(block.text, encoding="utf-8")
    shown = re.search(r"^```\n(# output .*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if shown is not None:
        (folder / "case.txt").write_text(shown[1], encoding="utf-8")


@pytest.mark.parametrize("block", running(), ids=str)
def test_every_block_of_python_runs(block: Block, folder: Path) -> None:
    names = prepared()
    exec(BEFORE.get(block.page.name, ""), names)
    exec(compile("\n" * block.line + block.text, str(block.page), "exec"), names)


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


SHELL = [(page, list(group)) for page, group in groupby(blocks("sh"), key=lambda block: block.page)]


@pytest.mark.parametrize(("page", "group"), SHELL, ids=[str(page.relative_to(ROOT)) for page, _ in SHELL])
def test_every_command_runs(page: Path, group: list[Block], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    of_page(page, folder)
    for block in group:
        for words in commands(block):
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
            elif words[0] != "autograph-rewrite":
                assert words[:2] == ["python", "-m"], words
            elif words[1] in SCRIPTS:
                assert words[1] in VERBS
            else:
                code = main(words[1:])
                assert code == 0, f"{block}: {' '.join(words)}\n{capsys.readouterr()}"


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_every_block_of_yaml_is_a_configuration(block: Block) -> None:
    Config.of(yaml.safe_load(block.text))


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_every_block_of_bash_can_be_parsed(block: Block) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_every_block_of_json_can_be_read(block: Block) -> None:
    json.loads(block.text)
