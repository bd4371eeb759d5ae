"""Every text form is as it was, and the same in processes that hash differently."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import autograph_rewrite as ar
from autograph_rewrite.inspect.table import ranking_text, without_ranking
from autograph_rewrite.plan.parts.notes import ranking
from tests.support.golden_text import check_golden
from tests.support.small_items import regression

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
VERBS = (
    "inspect old.ar",
    "plan old.ar --config c.json",
    "rewrite old.ar --config c.json -o new.ar",
    "inspect new.ar",
    "dump new.ar",
    "dump new.ar --format table --around replica_0/gradient --depth 1",
    "dump new.ar --format dot --around replica_0/gradient --depth 1",
    "dump new.ar --json --around replica_0/gradient --depth 1",
    "diff old.ar new.ar",
    "why new.ar gradient",
    "why new.ar gradient --json",
    "why-not old.ar w FSDP --json",
    "comm new.ar",
    "comm new.ar --json",
    "explain old.ar --config c.json",
    "simulate old.ar --config c.json",
    "opt old.ar --config c.json --stop-after propagate",
)
SCRIPT = """
import sys
from autograph_rewrite.tools import cli
for verb in sys.argv[1:]:
    print("$", verb, flush=True)
    assert cli.main(verb.split()) == 0
assert "tensorflow" not in sys.modules
"""


def forms(folder: Path, seed: int) -> str:
    """Return what the verbs print in a process, without times."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *VERBS],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    parts = re.split(r"^(?=\$ )", ran.stdout, flags=re.MULTILINE)
    kept = [part if not part.startswith("$ rewrite") else "$ rewrite\n" for part in parts]
    return re.sub(r" in \d+\.\d+ s\b|^Most time.*\n", "", "".join(kept), flags=re.MULTILINE)


def test_every_form_is_as_it_was_in_two_processes_that_hash_differently(tmp_path: Path) -> None:
    regression().save(tmp_path / "old.ar")
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    first, second = (forms(tmp_path, seed) for seed in (1, 2))
    assert first == second
    check_golden("text_forms.txt", first)


def test_what_auto_has_compared_is_a_table_with_one_that_was_chosen() -> None:
    plan = ar.build_plan(regression(), {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "Auto"}})
    rows = ranking(plan.notes)
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["verdict"] for row in rows].count("chosen") == 1
    table = ranking_text(plan.notes)
    assert len(table.splitlines()) == len(rows) + 3
    assert "chosen" in table
    assert not any(note.startswith("rank ") for note in without_ranking(plan.notes))
    account = ar.explain(ar.rewrite(regression(), plan))
    assert table.splitlines()[0] in account
