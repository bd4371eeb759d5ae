"""Reads the items and plans that others have written: `exchange.py FOLDER...`, each with graph.ar and plan.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

import autograph_rewrite as ar


def main(folders: list[str]) -> None:
    """Verify each item under its plan, from either form of the plan."""
    for folder in map(Path, folders):
        item, plan = ar.GraphItem.load(folder / "graph.ar"), ar.Plan.load(folder / "plan.yaml")
        plan.save(folder / "read.pb")
        assert ar.Plan.load(folder / "read.pb") == plan
        report = ar.verify(item, plan, steps=2)
        print(f"{folder.name}: {str(report).splitlines()[0]}")
        assert report.ok


if __name__ == "__main__":
    main(sys.argv[1:])
