"""Where the checkout is, and what of it tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "golden"
CASES = ROOT / "tests" / "cases"
