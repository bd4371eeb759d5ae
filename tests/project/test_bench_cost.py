"""The comparison of predicted and measured: its arithmetic, and a tiny run in which the bytes agree exactly."""

from __future__ import annotations

import pytest

from benchmarks import cost
from benchmarks.effort import Effort


def times(**pairs: tuple[float, float]) -> dict[str, dict[str, float]]:
    return {name: {"seconds": one, "predicted_seconds": other} for name, (one, other) in pairs.items()}


def test_tau_counts_pairs_that_differ_clearly() -> None:
    assert cost.tau(times(a=(1.0, 1.0), b=(2.0, 3.0), c=(3.0, 2.0))) == pytest.approx(1 / 3)
    assert cost.tau(times(a=(1.0, 2.0), b=(1.05, 1.0), c=(2.0, 3.0))) == 1.0
    assert cost.tau(times(a=(1.0, 1.0), b=(1.01, 2.0))) is None
    assert cost.tau(times(a=(1.0, 1.0), b=(2.0, 1.0))) == 0.0


def test_a_tiny_run_finds_the_bytes_that_were_predicted() -> None:
    figures, details = cost.run(Effort(tiny=True))
    (found,) = details.values()
    assert set(found) == {"shared", "mirrored"}
    assert all(one["bytes"] == one["predicted_bytes"] > 0 for one in found.values())
    assert all(one["peak"] > 0 and one["predicted_seconds"] > 0 for one in found.values())
    assert any("exchanged bytes" in figure.name and figure.met for figure in figures)
