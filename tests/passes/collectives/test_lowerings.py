"""Lowerings are data: what follows from their hops, and a new one in two files, as docs/writing_rules.md says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import autograph_rewrite as ar
from autograph_rewrite.compile import request
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.passes.collectives.all_gather import GATHER
from autograph_rewrite.passes.collectives.all_reduce import REDUCE
from autograph_rewrite.passes.collectives.local_ops import PEERS
from autograph_rewrite.passes.pass_pipeline import rewrite
from autograph_rewrite.plan.parts.lowerings import ACROSS, LOWERINGS, Lowering, Medium, Operation, lowering
from tests.support.paths import ROOT

CASE = """# output loss = %loss
# target %train
# input %x, batch axis 0
%x: float32[?,3] = Placeholder()
%w: resource = VarHandleOp() {dtype=float32, shape=[3,2], shared_name="w"}
%w/read: float32[3,2] = ReadVariableOp(%w)
%y = MatMul(%x, %w/read)
%axes: int32[2] = Const() {value=[0, 1]}
%loss = Sum(%y, %axes)
%ones = OnesLike(%y)
%dw = MatMul(%x, %ones) {transpose_a=true}
%rate: float32 = Const() {value=0.1}
%train = ResourceApplyGradientDescent(%w, %rate, %dw)
"""
TRY = """
import sys
from dataclasses import replace
import autograph_rewrite as ar
item = ar.GraphItem.load("case.txt")
plan = ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"]})
changed = tuple(replace(e, lowering="stack_sum") if e.lowering == "add_n" else e for e in plan.edges)
assert changed != plan.edges
new = ar.rewrite(item, replace(plan, edges=changed))
print([node.op for node in new.graph if node.name.endswith(("dw/stack", "dw/stack_sum"))])
print([node.op for node in new.graph if node.op == "AddN"])
simulated = ar.simulate(item, replace(plan, edges=changed), {})
print("stack_sum" in str(simulated.trace()), "tensorflow" in sys.modules)
"""


@pytest.mark.parametrize("row", LOWERINGS.values(), ids=lambda row: row.name)
def test_every_hop_has_what_emits_it(row: Lowering) -> None:
    emitters = {Operation.REDUCE: REDUCE, Operation.GATHER: GATHER}
    for hop in row.hops:
        if hop.medium is Medium.PEERS:
            assert hop.operation in PEERS
        else:
            assert (hop.medium, hop.algorithm) in emitters[hop.operation]


def test_what_is_asked_of_a_lowering_follows_from_its_hops() -> None:
    shots = {"one_shot_reduce", "micro_one_shot"}
    everywhere = {"collective_reduce", "collective_gather", "micro_reduce", "micro_gather", *shots}
    peers = {"all_gather", "reduce_scatter"}
    between = {"host_reduce", "host_gather", "host_one_shot"}
    assert {row.name for row in LOWERINGS.values() if row.is_collective} == everywhere | between
    assert {row.name for row in LOWERINGS.values() if row.is_stored} == {
        "accumulator",
        "server_reduce",
        "server_gather",
    }
    assert {row.name for row in LOWERINGS.values() if row.is_local} == {"add_n", "fold", "concat"}
    assert {row.name for row in LOWERINGS.values() if row.is_everywhere} == everywhere | peers
    assert {row.name for row in LOWERINGS.values() if row.is_among_peers} == peers
    assert {row.name for row in LOWERINGS.values() if not row.hops} == {"slice", "zeros", "local_size", "global_size"}
    for row in LOWERINGS.values():
        assert row.crosses == any(hop.over == ACROSS for hop in row.hops)
        done = [row.does(one) for one in (Operation.REDUCE, Operation.GATHER, Operation.SCATTER)]
        assert not row.hops or sum(done) == 1


def test_a_name_that_is_no_lowering_has_no_hops() -> None:
    assert lowering("teleport").hops == ()


def _block(page: str, kind: str) -> str:
    found = re.search(rf"```python {kind}\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_a_lowering_is_added_in_two_files_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "writing_rules.md").read_text(encoding="utf-8")
    package = tmp_path / "autograph_rewrite"
    shutil.copytree(ROOT / "autograph_rewrite", package, ignore=shutil.ignore_patterns("__pycache__"))
    for mapped in ("strategies", "tools", "configs"):
        shutil.copytree(ROOT / mapped, package / mapped, ignore=shutil.ignore_patterns("__pycache__"))
    table = package / "plan" / "parts" / "lowerings.py"
    text = table.read_text(encoding="utf-8")
    assert text.count("_ROWS = (\n") == 1
    row = textwrap.indent(f"{_block(page, 'row').rstrip()},\n", " " * 4)
    table.write_text(text.replace("_ROWS = (\n", f"_ROWS = (\n{row}"))
    emitters = package / "passes" / "collectives" / "all_reduce.py"
    imports = (
        "from autograph_rewrite.ir.mesh import ONCE\nfrom autograph_rewrite.passes.base.builder import FoldedBuilder\n"
    )
    emitters.write_text(f"{emitters.read_text(encoding='utf-8')}\n\n{imports}{_block(page, 'emitter')}")
    (tmp_path / "case.txt").write_text(CASE, encoding="utf-8")
    environ = {"PYTHONPATH": str(tmp_path), "AUTOGRAPH_CERTIFY": "all", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{TRY}"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[:2] == ["['Pack', 'Sum']", "[]"]
    assert run.stdout.splitlines()[2] == "True False"  # it is priced, and nothing of all this needs TensorFlow


def test_programs_of_one_form_and_other_shapes_meet_in_other_groups(tmp_path: Path) -> None:
    """Two models of a sweep have one plan; TensorFlow remembers the shapes of each instance of a group."""

    def group(units: int) -> int:
        file = tmp_path / f"{units}.txt"
        file.write_text(CASE.replace("[3,2]", f"[3,{units}]"), encoding="utf-8")
        config = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1"]}}
        item = normalise_original(ar.GraphItem.load(file))
        graph = rewrite(Request(item, request(item, ar.Config.of(config)))).graph
        meets = next(node for node in graph if node.op == "CollectiveReduceV2" and "dw" in node.name)
        return int(meets.inputs[2].node.attr("value"))

    assert group(2) == group(2) != group(4)
