"""The names of outcomes."""

from __future__ import annotations

OUTCOMES = ("equal", "refused", "skipped", "wrong", "crash", "hang")
BAD = ("wrong", "crash", "hang")
