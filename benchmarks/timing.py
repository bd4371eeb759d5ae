"""Times that can be compared although the machine is not quiet: interleaved rounds, medians, paired ratios, fits.

    round 1: A B C     round 2: B C A     round 3: C A B  ...      ratio(A, B) = median over rounds of A / B

Whatever disturbs a round disturbs all contestants of it, so the ratio of two contestants hardly notices. The time that
the processor worked for this process is kept as well: on a busy machine it is the better witness.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Times = dict[str, dict[str, list[float]]]
"""Seconds per call, one number per round, by contestant: {"wall": {"A": [...]}, "processor": {"A": [...]}}."""


def interleaved(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float = 0.0, warm_up: int = 1
) -> Times:
    """Time the contestants in turn, round by round; who begins changes.

    Args:
        contestants: what to call, by name.
        rounds: numbers per contestant.
        seconds: repeat the calls of one round until about this much time has passed.
        warm_up: calls that are not counted.
    """
    calls = {}
    for name, call in contestants.items():
        for _ in range(warm_up):
            call()
        calls[name] = max(1, round(seconds / max(_timed(call, 1)[0], 1e-7))) if seconds else 1
    names = list(contestants)
    times: Times = {"wall": {name: [] for name in names}, "processor": {name: [] for name in names}}
    for index in range(rounds):
        at = index % len(names)
        for name in names[at:] + names[:at]:
            wall, processor = _timed(contestants[name], calls[name])
            times["wall"][name].append(wall)
            times["processor"][name].append(processor)
    return times


def _timed(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the time per call on the wall, and on the processor."""
    gc.collect()  # what the one before has left behind is not to be paid here
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    return (time.perf_counter() - wall) / calls, (time.process_time() - processor) / calls


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median over the rounds of `of` divided by `to`."""
    return median(a / b for a, b in zip(of, to, strict=True))


def compare(times: Times, of: str, to: str) -> str:
    """Say how two contestants compare by other measures than the median on the wall."""
    wall, processor = times["wall"], times["processor"]
    work = ratio(processor[of], processor[to])
    return f"{work:.2f}x in processor time, {min(wall[of]) / min(wall[to]):.2f}x between the fastest rounds"


def spread(values: Sequence[float]) -> float:
    """Return the distance of the quartiles relative to the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


@dataclass(frozen=True)
class Fit:
    """A straight line through points, and how well it describes them."""

    slope: float
    intercept: float
    r_squared: float
    exponent: float  # of the power law y ~ x ** exponent: 1 where y is proportional to x, below 1 with a fixed part


def fit(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """Fit y = intercept + slope * x by least squares, and the exponent on logarithmic axes."""
    slope, intercept = _line(xs, ys)
    mean = sum(ys) / len(ys)
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    total = sum((y - mean) ** 2 for y in ys)
    exponent, _ = _line([math.log(x) for x in xs], [math.log(y) for y in ys])
    return Fit(slope, intercept, 1 - left / total if total else 1.0, exponent)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)
    return slope, y_mean - slope * x_mean
