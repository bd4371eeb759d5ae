"""Every block of the documentation runs, or is checked as far as it can be here.

python          is executed, with the names of `prepared`; `python NAME.py` is a file that the page's commands read,
                `python before` another library's code, which is compiled,
                `python row` and `python emitter` are run by tests/passes/collectives/test_lowerings.py
sh              all blocks of a page are one script of a shell, run in a process in a folder with the files of `USERS`;
                pages with `make` or `.venv` find a checkout there, and the tutorial nothing else
yaml            is a configuration; `yaml NAME.yaml` is a file, too
bash, json      are checked for their syntax
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autograph_rewrite.config.config import Config
from tests.docs.blocks import PAGES, Block, blocks
from tests.support.paths import ROOT

ELSEWHERE = {"before", "row", "emitter"}
KINDS = {"python", "sh", "yaml", "bash", "json", "text"}
BEFORE = {
    "report.md": "model = ar.distribute(model, config); model.train_on_batch(x, y); new = ar.rewrite(item, config)",
    "steps_per_run.md": "x, y = np.ones([57, 4, 3], 'f'), np.ones([57, 4, 1], 'f')",
    "auto.md": 'ar.build_plan(item, {**config, "strategy": {"name": "Auto"}}).save("plan.yaml")',
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
"""What a page takes for granted in addition to `prepared`."""


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
    return [block for block in blocks("python") if not ELSEWHERE & set(block.kind) and not is_file(block)]


def is_file(block: Block) -> bool:
    """Return whether a block is a file that the commands of its page read."""
    return block.kind[-1].endswith((".py", ".yaml"))


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


USERS = {
    "train.py": """
import argparse, os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras, numpy as np
import autograph_rewrite as ar

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
layers = [keras.Input([3]), keras.layers.Dense(4), keras.layers.Dense(4), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile("adam", "mse")
chosen = os.environ.get("AUTOGRAPH_REWRITE_CONFIG")
model = ar.distribute(model, *([] if chosen else [ar.Config.load("config.yaml")]))
x = np.random.default_rng(0).normal(size=(128, 3)).astype("float32")
model.fit(x, x[:, :1], batch_size=8, epochs=parser.parse_args().epochs, verbose=0)
""",
    "package/train.py": "import train\n",
    "c.yaml": "devices: [CPU:0]\nstrategy: {name: PSLoadBalancing}\n",
}
"""What a page takes for a user's own: a script that trains under config.yaml, or as --config says."""
SHELL = [(page, list(group)) for page, group in groupby(blocks("sh"), key=lambda block: block.page)]
CHECKOUT = [page for page, group in SHELL if any(block.text.startswith(("make ", ".venv/")) for block in group)]
SECONDS = 400


@pytest.mark.slow
def test_the_command_that_checks_a_rule_selects_its_samples() -> None:
    (page,) = (page for page, _ in SHELL if page.stem == "writing_rules")
    commands = [line for block in blocks("sh", [page]) for line in block.text.splitlines() if "pytest" in line]
    assert len(commands) == 1
    words = shlex.split(commands[0], comments=True)
    quick = [sys.executable, *words[1:], "--collect-only", "-q", "-n0"]
    done = subprocess.run(quick, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(found) == 12, done.stdout[-2000:] + done.stderr[-2000:]
    assert any("test_an_op_on_blocks_gives_what_it_gives_on_the_whole[InTopK" in line for line in found)
    assert "it runs 12\ntests" in page.read_text(encoding="utf-8")


def checkout(folder: Path) -> Path:
    """Make a folder a checkout in which nothing has been run yet; return it."""
    folder.mkdir(exist_ok=True)
    for path in ROOT.iterdir():
        if path.name not in {"build", "docs", "out", ".venv", ".git"} and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / ".venv").mkdir(exist_ok=True)
    for path in Path(sys.prefix).iterdir():
        if path.name != ".ok" and not (folder / ".venv" / path.name).exists():
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / ".ok").touch()  # no `make` of a page makes anew the environment in which the tests run
    return folder


def users_files(page: Path, folder: Path) -> None:
    """Write what a page takes for a user's own files, and those that it shows."""
    for name, text in USERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    first = min(block.line for block in blocks("sh", [page]))
    shown = [block.text for block in blocks("yaml", [page]) if block.line < first and "pipeline" in block.text]
    (folder / "config.yaml").write_text(shown[-1] if shown else "devices: [CPU:0]\n", encoding="utf-8")
    ports = [free_port() for _ in range(2)]
    addresses = ", ".join(f"127.0.0.1:{port}" for port in ports)
    (folder / "cluster.yaml").write_text(f"devices: [CPU:0]\ncluster: {{workers: [{addresses}]}}\n", encoding="utf-8")
    of_page(page, folder)
    for block in filter(is_file, [*blocks("python", [page]), *blocks("yaml", [page])]):
        (folder / block.kind[-1]).write_text(block.text, encoding="utf-8")


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("page", "group"), SHELL, ids=[page.stem for page, _ in SHELL])
def test_every_command_runs_in_a_process(page: Path, group: list[Block], folder: Path) -> None:
    if page.stem != "digits":
        users_files(page, folder)
        model().save(folder / "model.ar")
    if page in CHECKOUT:
        folder = checkout(folder if page.stem != "digits" else folder / "empty")
    path = os.environ["PATH"]
    if page.stem != "digits":  # which activates the environment itself
        path = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    own = ("PYTEST_", "AUTOGRAPH", "TF_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    environment |= {"PATH": path, "HOME": str(folder), "PYTHONWARNINGS": "ignore"}
    script = "set -e\n" + "\n".join(block.text for block in group)
    line, options = ["bash", "-c", script], {"cwd": folder, "env": environment, "timeout": SECONDS}
    done = subprocess.run(line, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{page}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


@cache
def model() -> Any:
    """Return a Keras model's step, as the page on Keras saves it."""
    import keras
    import tensorflow as tf

    import autograph_rewrite as ar

    one = keras.Sequential([keras.Input([8]), keras.layers.Dense(1, name="head")], name="model")
    one.compile("adam", "mse")
    return ar.GraphItem.from_keras(one, tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1]))


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
