"""One seed: train its program on one device and distributed, and tell how that came out.

equal     all outputs of all steps and all variables, within rounding
wrong     a number differs by more than its own sensitivity to rounding explains
refused   a RewriteError says why not
crash     any other exception, or an invariant of the rewriter that does not hold
hang      a time limit ended it
skipped   TensorFlow itself cannot run the program, or what it computes is noise
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.fuzz import functions, graphs, keras_models
from tests.fuzz.program import Program

TOLERANCE, LOOSE = 1e-9, 3e-5
FLOOR = 1e-3  # errors are relative to the largest value of a tensor, or to this
NOISE_FACTOR = 300.0
NUDGES = 3
OPTIMISED = 8  # one seed out of so many is run with TensorFlow's own optimisations of graphs, which take long
Results = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a seed came out; `program` and `parts` are for readers."""

    seed: int
    outcome: str
    reason: str = ""
    kind: str = ""
    mode: str = ""
    config: str = ""
    program: str = ""
    seconds: float = 0.0
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """A program that can be trained both ways."""

    original: Callable[[float], Results]
    rewritten: Callable[[], Results]
    parts: tuple[str, ...]
    loose: bool


def trial_of(program: Program) -> Trial:
    """Build what a seed says."""
    choice = program.choice
    if program.mode == "keras":
        config = choice.config
        return Trial(
            lambda nudge: keras_models.run(program, None, nudge), lambda: keras_models.run(program, config), (), False
        )
    if program.mode == "function":
        step = functions.Step(program)
        feeds, net = program.feeds(step.net.inputs), step.net
        return Trial(
            lambda nudge: functions.run_original(step, _nudged(feeds, nudge)),
            lambda: functions.run_rewritten(step, feeds, choice.config),
            tuple(net.parts),
            net.loose or program.optimizer in functions.KERAS,
        )
    built = graphs.build(program)
    feeds = program.feeds(built.net.inputs)
    config = choice.with_boundaries(built.net.cuts, built.net.dice)
    return Trial(
        lambda nudge: graphs.run_original(built, _nudged(feeds, nudge), optimised=program.seed % OPTIMISED == 0),
        lambda: graphs.run_rewritten(program, built, feeds, config, optimised=program.seed % OPTIMISED == 0),
        tuple(built.net.parts),
        built.net.loose,
    )


def run(seed: int) -> Outcome:
    """Return how a seed came out."""
    start = time.monotonic()
    program = Program.draw(seed)

    def outcome(kind: str, reason: str = "", detail: str = "", parts: tuple[str, ...] = ()) -> Outcome:
        said = f"{', '.join(parts)}; {program.optimizer}; {' '.join(program.extras)}; {program.batches} {program.times}"
        said += f" {'static' if program.style.batch else 'open'} v{program.style.version}"
        seconds = round(time.monotonic() - start, 3)
        return Outcome(
            seed, kind, reason, program.choice.kind, program.mode, str(program.choice), said, seconds, detail
        )

    try:
        trial = trial_of(program)
        expected = trial.original(0.0)
    except Exception as error:
        return outcome("skipped", f"original: {masked(error)}", traceback.format_exc()[-1500:])
    if not all(map(is_finite, expected.values())):
        return outcome("skipped", "original: not finite", parts=trial.parts)
    try:
        got = trial.rewritten()
    except Exception as error:
        kind = outcome_of(error)
        detail = str(error)[:600] if kind == "refused" else traceback.format_exc()[-2500:]
        return outcome(kind, masked(error), detail, trial.parts)
    kind, reason, detail = compare(trial, expected, got)
    return outcome(kind, reason, detail, trial.parts)


def outcome_of(error: Exception) -> str:
    """Return how an exception counts."""
    if isinstance(error, tf.errors.DeadlineExceededError) or "imed out" in str(error):
        return "hang"
    if isinstance(error, ar.RewriteError) and not isinstance(error, ar.VerifyError):
        return "refused"
    return "crash"


def compare(trial: Trial, expected: Results, got: Results) -> tuple[str, str, str]:
    """Return outcome, reason and detail of two results; rounding is judged by nudging the inputs."""
    missing = sorted(set(expected) - set(got))
    if missing:
        return "wrong", "missing: " + masked_text(missing[0]), str(missing[:5])
    limit = LOOSE if trial.loose else TOLERANCE
    errors = {name: error_of(expected[name], got[name]) for name in expected}
    far = {name: error for name, error in errors.items() if not error <= limit}
    if not far:
        return "equal", "", ""
    noise = dict.fromkeys(far, 0.0)
    for i in range(NUDGES):
        other = trial.original((i + 1) * (2.0**-23 if trial.loose else 2.0**-51))
        noise = {name: max(noise[name], error_of(expected[name], other[name])) for name in noise}
    wrong = {name: error for name, error in far.items() if not error <= NOISE_FACTOR * noise[name]}
    text = ", ".join(
        f"{name}: {far[name]:.1e} (noise {noise[name]:.1e})" for name in sorted(far, key=far.get)[::-1][:6]
    )
    if not wrong:
        return "skipped", "ill-conditioned", text
    worst = max(wrong, key=lambda name: wrong[name])
    return "wrong", "differs: " + masked_text(worst.replace("step 0", "step").replace("step 1", "step")), text


def error_of(expected: Any, got: Any) -> float:
    """Return the largest relative error; infinite where shapes or kinds differ."""
    a, b = np.asarray(expected), np.asarray(got)
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    if a.dtype.kind in "OSU":
        return 0.0 if np.array_equal(a, b) else float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(a - b).max() / max(np.abs(a).max(), FLOOR)
    return float(error) if np.isfinite(error) else float("inf")


def is_finite(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype.kind != "f" or bool(np.all(np.isfinite(array)))


def _nudged(feeds: list[dict[str, Any]], nudge: float) -> list[dict[str, Any]]:
    """Return feeds whose floating-point values differ by about one unit in the last place."""
    if not nudge:
        return feeds
    return [
        {name: value * (1 + nudge) if value.dtype == np.float64 else value for name, value in feed.items()}
        for feed in feeds
    ]


def masked(error: Exception) -> str:
    """Return the first line of an error without names and numbers."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, tf.errors.OpError):
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Graph execution")]
        first = next((line for line in lines if "Node:" not in line and "Detected at" not in line), first)
    return f"{type(error).__name__}: {masked_text(first)}"


def masked_text(text: str) -> str:
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\{\{[^}]*\}\}", "_", text)
    text = re.sub(r"\b[\w/]*/[\w/:]+", "_", text)
    return re.sub(r"\d+", "#", text)[:160]
