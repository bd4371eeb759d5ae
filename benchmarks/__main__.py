"""`python -m benchmarks [name ...]`: run the benchmarks, print their figures, keep them in build/bench.json."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.child import ROOT, ChildFailed
from benchmarks.effort import Effort
from benchmarks.figure import Figure, show

BENCHMARKS = ("throughput", "session_step", "function_step", "start_up", "memory", "overhead")
OTHERS = (
    "dist",
    "dist_dense",
    "dist_link",
    "hierarchy",
    "one_shot",
    "bucket_order",
    "dist_servers",
    "dist_embedding",
    "pipeline",
    "cost",
    "remat",
    "largest_batch",
    "auto_memory",
    "auto_memory_large",
    "steps_per_run",
    "mesh",
    "mesh_memory",
    "checkpoint",
    "strategies",
    "layers",
)
RESULTS = ROOT / "build" / "bench.json"


def run(names: Sequence[str], effort: Effort, results: Path, console: Console) -> int:
    """Run benchmarks by name; return 1 if one of them failed. A missed target is no failure: it is in the table."""
    found: list[Figure] = []
    failed = []
    for name in names:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        began = time.perf_counter()
        try:
            figures, details = benchmark.run(effort)
        except ChildFailed as error:
            console.print(f"[bold red]{name} failed:[/] {error}", highlight=False)
            failed.append(name)
            continue
        seconds = time.perf_counter() - began
        show(console, f"{benchmark.TITLE}  ({seconds:.0f} s)", figures)
        found += figures
        _keep(results, name, {"seconds": seconds, "figures": [f.as_dict() for f in figures], "details": details})
    missed = [figure.name.strip() for figure in found if figure.met is False]
    met = sum(figure.met is True for figure in found)
    listed = f": {'; '.join(missed)}" if missed else ""
    console.print(f"{met} targets met, {len(missed)} missed{listed}", highlight=False)
    console.print(f"written to {results}", highlight=False)
    return int(bool(failed))


def _keep(results: Path, name: str, outcome: dict[str, Any]) -> None:
    """Write one benchmark's outcome, beside those of the others that are there already."""
    try:
        known = json.loads(results.read_text())["benchmarks"]
    except (OSError, ValueError, KeyError):
        known = {}
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps({"machine": machine(), "benchmarks": {**known, name: outcome}}, indent=1))


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    versions = {}
    for package in ("autograph-rewrite", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "packages": versions,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = ", ".join((*BENCHMARKS, *OTHERS))
    listed = f"one of {known}; by default the first {len(BENCHMARKS)}"
    parser.add_argument("names", nargs="*", metavar="name", help=listed)
    parser.add_argument("--tiny", action="store_true", help="small models, one round: does it work at all?")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results (JSON)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - {*BENCHMARKS, *OTHERS})
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {known}")
    width = None if sys.stdout.isatty() else 140
    return run(options.names or BENCHMARKS, Effort(options.tiny), options.output, Console(width=width))


if __name__ == "__main__":
    sys.exit(main())
