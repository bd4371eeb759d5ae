"""The documentation is true: links lead somewhere, names exist, code compiles, and what claims to run runs.

A fenced block marked `python run` is executed, with the names of `prepared`.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
OWN = sorted(DOCS.glob("*.md"))
PACKAGE = ROOT / "autograph_rewrite"
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PATH = re.compile(r"[\w*./-]+\.(py|md|proto|svg|json)")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Block(NamedTuple):
    """A fenced block: its page, line, language with options, and text."""

    page: Path
    line: int
    kind: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str, pages: list[Path] | None = None) -> list[Block]:
    found = []
    for page in PAGES if pages is None else pages:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            kind = tuple(match[1].split())
            if kind[:1] == (language,):
                found.append(Block(page, text.count("\n", 0, match.start()) + 1, kind, textwrap.dedent(match[2])))
    return found


def prose(page: Path) -> str:
    """Return the text without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


def test_the_index_lists_every_page() -> None:
    linked = set(LINK.findall((DOCS / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in OWN} - {"README.md"} <= linked


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_every_picture_can_be_drawn(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().get("viewBox")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_place_on_somebodys_machine(page: Path) -> None:
    assert re.findall(r"/(?:tmp|home|root|Users|work)/\S*", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    roots = (ROOT, PACKAGE, DOCS)
    named = {span for span in SPAN.findall(prose(page)) if PATH.fullmatch(span)}
    assert sorted(span for span in named if not any(any(root.glob(span)) for root in roots)) == []


@cache
def definitions() -> tuple[frozenset[str], frozenset[str]]:
    """Return the dotted names that the package defines, and the names of its parts and classes.

    `passes.reshard.insert_reshards.ReshardInserter.whole` is listed as that and as `ReshardInserter.whole`.
    """
    names: set[str] = set()
    starts: set[str] = set()
    sources = {path: path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    sources |= {path: path.relative_to(ROOT) for top in ("strategies", "tools") for path in (ROOT / top).rglob("*.py")}
    for path, relative in sources.items():
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        names |= {module, *(module.rsplit(".", i)[0] for i in range(module.count(".") + 1))}
        starts.add(module.partition(".")[0])
        for name, node in _defined(ast.parse(path.read_text(encoding="utf-8")).body):
            names.add(f"{module}.{name}")
            if not isinstance(node, ast.ClassDef):
                continue
            starts.add(name)
            for member, _ in _defined(node.body):
                names |= {f"{module}.{name}.{member}", f"{name}.{member}"}
    return frozenset(names), frozenset(starts)


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield what statements define; of methods also the attributes that they set."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Assign(targets=targets):
                yield from ((t.id, node) for target in targets for t in ast.walk(target) if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield inner.attr, node


@cache
def settings() -> frozenset[str]:
    """Return the settings of a configuration as docs write them: `cluster.ps` is one, and no name of the code."""
    schema = json.loads((DOCS / "config.schema.json").read_text(encoding="utf-8"))
    return frozenset(
        f"{name}.{field}"
        for name, section in schema["properties"].items()
        for definition in re.findall(r"#/\$defs/(\w+)", json.dumps(section))
        for field in schema["$defs"][definition].get("properties", ())
    )


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.name)
def test_every_name_of_the_code_that_is_quoted_exists(page: Path) -> None:
    names, starts = definitions()
    quoted = {span.partition("(")[0] for span in SPAN.findall(prose(page))} - settings()
    ours = {name for name in quoted if DOTTED.fullmatch(name) and name.partition(".")[0] in starts}
    assert sorted(name for name in ours if name not in names and not PATH.fullmatch(name)) == []


def test_a_name_that_does_not_exist_would_be_found() -> None:
    names, starts = definitions()
    inserter = "passes.reshard.insert_reshards.ReshardInserter"
    assert {"passes", "ReshardInserter"} <= starts
    assert {"passes.reshard", f"{inserter}.whole", "ReshardInserter.whole", "Select.ALL", "Node.span"} <= names
    assert "ReshardInserter.whoel" not in names
    assert "cluster.ps" in settings() - names


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_example_is_python(block: Block) -> None:
    compile("\n" * block.line + block.text, str(block.page), "exec")


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_every_command_exists(block: Block) -> None:
    from autograph_rewrite.tools.cli import VERBS

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = block.text.replace("\\\n", " ").splitlines()
    for words in filter(None, (line.split("#")[0].split() for line in lines)):
        if words[0] == "autograph-rewrite":
            assert words[1] in VERBS
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
        else:
            assert words[:2] == ["python", "-m"], words


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
    graph = regression()
    return {
        "ar": ar, "tf": tf, "keras": keras, "x": x, "y": y, "graph": graph, "make_model": make_model, "model": model,
        "train_step": train_step, "config": {"devices": ["CPU:0", "CPU:1"]}, "optimizer": "adam", "loss": "mse",
        "initial": tf.ones([3, 1]), "decay": lambda w: 0.01 * tf.nn.l2_loss(w),
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
        "item": ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init"),
    }  # fmt: skip


def run_blocks() -> list[Block]:
    """Return the blocks that claim to run: those marked so, and all of the project's front page."""
    return [block for block in blocks("python") if block.kind[1:] == ("run",) or block.page == ROOT / "README.md"]


@pytest.mark.parametrize("block", run_blocks(), ids=str)
def test_what_claims_to_run_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    names = prepared()
    (tmp_path / "graph.pb").write_bytes(names["graph"].as_graph_def().SerializeToString())
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * block.line + block.text, str(block.page), "exec"), names)
