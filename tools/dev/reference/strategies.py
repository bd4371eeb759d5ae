"""The strategy builders of the registry, with what each does in a sentence and the presets that use it."""

from __future__ import annotations

import ast

from autograph_rewrite.config.config import Config
from autograph_rewrite.strategies import STRATEGIES
from autograph_rewrite.tools.dev.reference.sources import ROOT, table

HEAD = """\
# Strategies: the list

What `strategy.name` takes, from the registry of builders. `path/to/file.py:Class` names
[one of your own](../writing_strategies.md).

"""
PAGES = {
    "AllReduce": "all_reduce",
    "PS": "parameter_server",
    "PSLoadBalancing": "parameter_server",
    "PartitionedPS": "partitioned",
    "UnevenPartitionedPS": "partitioned",
    "PartitionedAR": "partitioned",
    "RandomAxisPartitionAR": "partitioned",
    "Parallax": "parallax",
    "FSDP": "partitioned",
    "Pipeline": "pipeline",
    "Auto": "auto",
}


def strategies_page() -> str:
    """Return the page of the strategies."""
    used: dict[str, list[str]] = {}
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        used.setdefault(Config.load(file).strategy.name, []).append(f"[`{file.stem}`](presets.md#{file.stem})")
    what = sentences()
    links = {name: f"[`{name}`](../strategy/{PAGES[name]}.md)" for name in STRATEGIES}
    rows = [(links[name], what[name], " ".join(used.get(name, ()))) for name in STRATEGIES]
    return HEAD + table(("name", "what it does", "presets"), *rows)


def sentences() -> dict[str, str]:
    """Return what each builder does, as the docstring of its class says it."""
    found: dict[str, str] = {}
    for module in ("__init__.py", "pipeline.py", "auto.py"):
        tree = ast.parse((ROOT / "strategies" / module).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return found
