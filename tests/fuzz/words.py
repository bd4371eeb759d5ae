"""The names of outcomes."""

from __future__ import annotations

OUTCOMES = ("equal", "ran", "refused", "skipped", "wrong", "crash", "hang")
BAD = ("wrong", "crash", "hang")
