"""`ar.register_op`: how a custom op divides is said in one place, recorded in plans, and checked."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite import ConfigError, GraphError, GraphItem, Plan, PlanError, VerifyError
from autograph_rewrite.analysis.op_work import work_of
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.rules.registered import OpEntry, entry_of, unregister
from tests.rules.facts import B, fact, node, split
from tests.rules.harness import check, combinations, make_case
from tests.rules.runner import run
from tests.rules.samples import SAMPLES
from tests.support.paths import ROOT
from tests.support.rewriting import run_pipeline

TWO = {"devices": ["CPU:0", "CPU:1"]}
SCALE: dict[str, Any] = {"factors": "n d, d -> n d", "linear": [0, 1]}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the custom ops against TensorFlow's headers, as its guide tells users to."""
    import tensorflow as tf

    made = tmp_path_factory.mktemp("ops") / "custom_ops.so"
    flags = (*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags())
    source = ROOT / "tests" / "ops" / "custom_ops.cc"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(made), *flags], check=True, timeout=60)
    return made


@pytest.fixture
def custom(library: Path) -> Any:
    """The loaded library, without any description of its ops."""
    import tensorflow as tf

    return tf.load_op_library(str(library))


def item(custom: Any, op: str = "ScaleColumns") -> GraphItem:
    """A step whose forward and whose gradient run a custom op."""
    import tensorflow as tf

    w = tf.Variable(np.arange(6.0).reshape(3, 2), name="w")
    scale = tf.Variable([1.5, -0.5], dtype=tf.float64, name="scale")

    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        return custom.scale_columns(x, scale), lambda dy, variables=(): (
            custom.scale_columns(dy, scale),
            [tf.reduce_sum(dy * x, 0)],
        )

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x @ w
            made = scaled(h) if op == "ScaleColumns" else h * scale + tf.stop_gradient(custom.centre_rows(h))
            loss = tf.reduce_mean((made - y) ** 2)
        for variable, gradient in zip((w, scale), tape.gradient(loss, [w, scale]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return GraphItem.from_function(step, tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([None, 2], tf.float64))


def count(new: GraphItem, op: str) -> int:
    return sum(node.op == op for node in new.graph)


@pytest.mark.filterwarnings("ignore:autograph_rewrite. only")
def test_an_op_that_nobody_describes_runs_whole_with_a_note(custom: Any) -> None:
    new = ar.rewrite(item(custom), TWO)
    assert count(new, "ScaleColumns") == 2  # forward and backward, each once
    assert [note.text for note in new.report.notes] == ["ScaleColumns has no rule"]
    assert ar.verify(item(custom), TWO).ok


def test_a_described_op_is_divided_and_equals_one_device(custom: Any) -> None:
    ar.register_op("ScaleColumns", **SCALE)
    new = ar.rewrite(item(custom), TWO)
    assert count(new, "ScaleColumns") == 4
    assert new.report.notes == ()
    assert new.report.coverage > 0.99
    report = ar.verify(item(custom), TWO, rtol=1e-12)
    assert report.ok, report


def test_a_description_that_is_wrong_is_found_by_verify(custom: Any) -> None:
    ar.register_op("CentreRows", factors="n d -> n d", linear=[0])
    report = ar.verify(item(custom, "CentreRows"), TWO)
    assert not report.ok
    unregister("CentreRows")
    ar.register_op("CentreRows", factors=". d -> . d", linear=[0])
    report = ar.verify(item(custom, "CentreRows"), TWO, rtol=1e-12)
    assert report.ok, report


def test_the_certificate_reads_the_description_for_itself(custom: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ar.register_op("ScaleColumns", **SCALE)
    step = item(custom)
    flat, plan, certificate = normalise_original(step), ar.build_plan(step, TWO), Certificate(strict=True)
    run_pipeline(flat, plan, certificate=certificate)
    assert not certificate.not_covered
    other = {"ScaleColumns": OpEntry("ScaleColumns", ". d, d -> . d")}
    monkeypatch.setattr("autograph_rewrite.passes.base.claims.registered", lambda: other)
    with pytest.raises(VerifyError, match=r"input 0 is split\(0\), along which it can't be cut"):
        run_pipeline(flat, plan, certificate=Certificate(strict=True))


DESCRIBED = {
    "MatMul": OpEntry("MatMul", "m k, k n -> m n | k", (0, 1)),
    "Conv2D": OpEntry("Conv2D", "n . . ., . . . . -> n . . .", (0, 1)),
    "Conv2DBackpropInput": OpEntry("Conv2DBackpropInput", "# n . . ., . . . ., n . . . -> n . . .", (1, 2)),
    "Softmax": OpEntry("Softmax", "... . -> ... ."),
    "BiasAddGrad": OpEntry("BiasAddGrad", "n ... d -> d | n ...", (0,)),
    "Neg": OpEntry("Neg", "... -> ...", additive=True),
    "InTopK": OpEntry("InTopK", "n -c, n -> n"),
}


@pytest.mark.parametrize("op", DESCRIBED)
def test_ops_of_tensorflow_described_in_these_words_give_on_blocks_what_they_give_on_the_whole(op: str) -> None:
    sample = next(sample for sample in SAMPLES if sample.op == op and not sample.attrs.get("transpose_a"))
    divided = False
    for letter, blocks in itertools.product(sample.letters, ((2, 2, 1), (3, 1))):
        case = make_case(sample, letter, blocks)
        expected = run(op, [operand.value for operand in case.operands], case.attrs)
        for placements in combinations(case):
            divided |= check(case, DESCRIBED[op].rule, placements, dynamic=True, expected=expected)
    assert divided


@pytest.mark.parametrize(
    ("factors", "options", "problem"),
    [
        ("n d, d", {}, "has no arrow"),
        ("n d, d -> n e", {}, "no operand has the dimension 'e'"),
        ("n n, n -> n", {}, "has a name twice"),
        ("n..d, d -> n..d", {}, "'n..d' is no name of a dimension"),
        ("n d, * d -> n d", {}, r"\* stands alone"),
        ("n d, d -> # n d", {}, "# stands before the names of an operand"),
        ("n d -> n d", {}, "it has 1 operands there, and TensorFlow's ScaleColumns has 2"),
        ("n d, d -> n d, n", {}, "it has 2 results there, and TensorFlow's ScaleColumns has 1"),
        ("n d, d -> n d", {"linear": [2]}, "cannot be linear in operand 2"),
        ("n d, d -> n d", {"work": "2 n k"}, "no operand has the dimension 'k'"),
        ("n d, d -> n d | k", {}, "no operand has the dimension 'k'"),
    ],
)
def test_a_description_that_contradicts_itself_or_tensorflow_is_refused(
    custom: Any, factors: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ar.register_op("ScaleColumns", factors=factors, **options)


def test_an_op_with_a_rule_of_this_package_keeps_it() -> None:
    with pytest.raises(ConfigError, match="the op 'MatMul' has a rule already"):
        ar.register_op("MatMul", factors="m k, k n -> m n | k")


def test_a_node_with_other_operands_than_were_described_is_an_error() -> None:
    with pytest.raises(GraphError, match="Joined is registered with 2 operands, and a node has 1"):
        OpEntry("Joined", "n d, n d -> n d").rule.place(node("Joined", fact(split(0), B, 2)))


def test_the_work_of_an_op_is_the_product_that_was_stated(custom: Any) -> None:
    ar.register_op("ScaleColumns", **SCALE, work="3 n d")
    node = next(one for one in item(custom).graph if one.op == "ScaleColumns")
    assert work_of(node, [(8, 2), (2,)], [(8, 2)], 0.0).flops == 48


def test_a_plan_records_the_description_and_wants_the_same_one(custom: Any, tmp_path: Path) -> None:
    ar.register_op("ScaleColumns", **SCALE)
    ar.register_op("NotInTheGraph", factors="n -> n")
    ar.build_plan(item(custom), TWO).save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert [(one.name, len(one.code)) for one in loaded.ops] == [("ScaleColumns", 12)]
    assert count(ar.rewrite(item(custom), loaded), "ScaleColumns") == 4
    ar.register_op("ScaleColumns", factors="n d, d -> n d")
    with pytest.raises(PlanError, match="'ScaleColumns' is described in other words"):
        ar.rewrite(item(custom), loaded)
    unregister("ScaleColumns")
    with pytest.raises(PlanError, match="'ScaleColumns', which is not registered"):
        ar.rewrite(item(custom), loaded)


@pytest.mark.filterwarnings("ignore:autograph_rewrite. only")
def test_a_plan_without_the_description_is_refused_where_there_is_one(custom: Any) -> None:
    plan = ar.build_plan(item(custom), TWO)
    ar.register_op("ScaleColumns", **SCALE)
    with pytest.raises(PlanError, match="'ScaleColumns' is registered, and was not when the plan was made"):
        ar.rewrite(item(custom), plan)


def test_a_configuration_names_the_file_of_ops(
    custom: Any, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOGRAPH_REWRITE_ALLOW_CODE", "[]")
    file = tmp_path / "my_ops.py"
    file.write_text(
        f"import tensorflow as tf\nimport autograph_rewrite as ar\n\ntf.load_op_library({str(library)!r})\n"
        "ar.register_op('ScaleColumns', factors='n d, d -> n d', linear=[0, 1])\n"
    )
    config = {**TWO, "ops": [{"file": str(file)}]}
    with pytest.raises(ConfigError, match="runs only if you allow it"):
        ar.rewrite(item(custom), config)
    ar.allow_code(file)
    assert count(ar.rewrite(item(custom), config), "ScaleColumns") == 4
    plan = ar.build_plan(item(custom), config)
    unregister("ScaleColumns")
    ar.register_op("ScaleColumns", **SCALE)
    assert plan.ops == ar.build_plan(item(custom), TWO).ops
    assert entry_of("ScaleColumns") == OpEntry("ScaleColumns", "n d, d -> n d", (0, 1))


@pytest.mark.slow
def test_the_command_line_loads_the_library_before_it_reads_the_graph(
    custom: Any, library: Path, tmp_path: Path
) -> None:
    item(custom).save(tmp_path / "step.ar")
    (tmp_path / "my_ops.py").write_text(
        f"import tensorflow as tf\nimport autograph_rewrite as ar\n\ntf.load_op_library({str(library)!r})\n"
        "ar.register_op('ScaleColumns', factors='n d, d -> n d', linear=[0, 1])\n"
    )
    (tmp_path / "config.yaml").write_text("devices: [CPU:0, CPU:1]\nops: [{file: my_ops.py}]\n")
    command = [sys.executable, "-m", "autograph_rewrite", "verify", "step.ar", "--config", "config.yaml"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert refused.returncode == 2
    assert "runs only if you allow it" in refused.stderr
    command.append("--allow-code")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "are divided over 2 devices" in done.stdout


def test_a_file_of_ops_that_fails_is_named(tmp_path: Path, custom: Any) -> None:
    file = tmp_path / "my_ops.py"
    file.write_text("import autograph_rewrite as ar\nar.register_op('MyOp', factors='n d')\n")
    ar.allow_code(file)
    with pytest.raises(ConfigError, match="the op 'MyOp' is wrong: 'n d' has no arrow"):
        ar.rewrite(item(custom), {**TWO, "ops": [{"file": str(file)}]})
