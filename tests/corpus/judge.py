"""One program on one configuration: rewrite it, train it beside the original, and say how that came out."""

from __future__ import annotations

import time
import traceback
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.check.report import ComparedTensor, rows_of
from autograph_rewrite.check.verify import pin
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.runtime.function.session_step import unbind
from tests.corpus import fit, training
from tests.corpus.configurations import Configuration
from tests.corpus.program import Built, Program
from tests.support.chosen_keras import keras
from tests.support.keras_floats import keras_floats

TOLERANCE = {"float64": 1e-9, "float32": 3e-5}
SEED = 7
TRIES = 3
"""How often the original is nudged before a difference counts as wrong."""
OPTIMISED = 6
"""One run out of so many has TensorFlow's own optimisations of graphs, which take long."""
Line = dict[str, Any]


class Original:
    """A program, built and normalised once; trained once for each choice of batch sizes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.built: Built = build(program)
        single, self.given = unbind(self.built.item)
        self.item = normalise_original(single)
        pin(self.item.graph, SEED)
        self.noise: dict[str, float] = {}
        self._runs: dict[tuple[int, ...], training.Run] = {}
        self._tries = 0

    @property
    def rtol(self) -> float:
        """The tolerance."""
        return TOLERANCE[self.program.floats]

    def feeds(self, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
        """Return what is fed in each step."""
        rng = np.random.default_rng([SEED, zlib.crc32(self.program.name.encode())])
        return [
            {name: feed.values(rng, self.program.floats, size) for name, feed in self.built.feeds.items()}
            for size in self.program.sizes(sizes)
        ]

    def run(self, sizes: tuple[int, ...]) -> training.Run:
        """Return what it gives on one device; the first time, its noise is measured, too."""
        if sizes not in self._runs:
            self._runs[sizes] = training.train(self.item, self.feeds(sizes), self.given)
            if not self.noise:
                self.measure_noise(sizes)
        return self._runs[sizes]

    def measure_noise(self, sizes: tuple[int, ...]) -> None:
        """Train with variables that differ in the last bit, and keep the largest deviations."""
        expected = self._runs[sizes]
        initial = training.nudged(expected.initial, self._tries)
        other = training.train(self.item, self.feeds(sizes), self.given, initial)
        for name, found in training.deviations(expected, other, self.rtol, made=False).items():
            self.noise[name] = max(self.noise.get(name, 0.0), found.error)
        self._tries += 1


class Judge:
    """Judges one program on one configuration after another."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._original: Original | None = None

    def run(self, configuration: Configuration) -> Line:
        """Return outcome, figures and reason."""
        start = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            line = self._job() if configuration.is_job else self._run(configuration)
        return line | {"seconds": round(time.monotonic() - start, 2)}

    def _job(self) -> Line:
        return fit.judged(self.program.name, TOLERANCE[self.program.floats])

    def _run(self, configuration: Configuration) -> Line:
        try:
            if self._original is None:
                self._original = Original(self.program)
            expected = self._original.run(configuration.sizes)
        except ar.RewriteError as error:
            # Loading is a part of the toolkit, too: what it refuses is a refusal, unless TensorFlow can't trace it.
            outcome = "broken" if is_of_program(error) else "refused"
            return {"outcome": outcome, "reason": text_of(error), "detail": traceback.format_exc()[-2000:]}
        except Exception as error:
            return {"outcome": "broken", "reason": text_of(error), "detail": traceback.format_exc()[-2000:]}
        if training.is_meaningless(expected):
            return {"outcome": "broken", "reason": "no output of the original stays finite"}
        try:
            return judged(self._original, configuration)
        except ar.ClusterError as error:
            return {"outcome": "hang", "reason": text_of(error)}
        except ar.VerifyError as error:
            return {"outcome": "foreign", "reason": text_of(error), "detail": str(error)[:2000]}
        except ar.RewriteError as error:
            return {"outcome": "refused", "reason": text_of(error), "detail": str(error)[:2000]}
        except Exception as error:
            return {"outcome": "foreign", "reason": text_of(error), "detail": traceback.format_exc()[-3000:]}


def judged(original: Original, configuration: Configuration) -> Line:
    """Rewrite, train, compare."""
    start = time.perf_counter()
    new = ar.rewrite(original.item, dict(configuration.config), batch=original.program.batch)
    seconds = time.perf_counter() - start
    report, plan = new.report, new.report.plan
    check_expanded(new.graph_bytes, original.item, plan.all_devices, micro=plan.microbatches)
    covered = report.covered
    line: Line = {
        "coverage": round(covered.share, 4) if covered.parts > 1 else None,
        "whole": covered.lines(3),
        "gathers": sum(edge.lowered.does(Operation.GATHER) for edge in report.edges),
        "nodes": [report.nodes_before, report.nodes_after],
        "rewrite_seconds": round(seconds, 3),
    }
    sizes, expected = configuration.sizes, original.run(configuration.sizes)
    try:
        got = training.train(
            new,
            original.feeds(sizes),
            original.given,
            expected.initial,
            optimised=is_optimised(original, configuration),
        )
    except training.StepError as error:
        return line | {"outcome": "foreign", "reason": str(error), "detail": str(error.__cause__)[:3000]}
    worst = training.deviations(expected, got, original.rtol)
    for _ in range(TRIES):
        rows = rows_of(original.item.variables, worst, original.rtol, original.noise)
        if all(row.ok for row in rows):
            return line | {"outcome": "exact"} | figures(rows, original)
        original.measure_noise(sizes)
    wrong = [row for row in rows if not row.ok]
    told = [f"{row.name}: {row.error:.1e} (noise {row.noise:.1e}), {row.where}" for row in wrong]
    found = {
        "outcome": "wrong",
        "reason": f"{len(wrong)} of {len(rows)} differ: {told[0]}",
        "detail": "\n".join(told[:20]),
    }
    return line | found | figures(rows, original)


def build(program: Program) -> Built:
    """Build a program, seeded, in its type."""
    keras.utils.set_random_seed(SEED)
    with keras_floats(program.floats):
        built = program.build()
        _ = built.item  # is traced in the program's type
        return built


def is_of_program(error: ar.RewriteError) -> bool:
    """Tell whether an error is about another one, which the program raised while it was traced."""
    return error.__cause__ is not None and not isinstance(error.__cause__, ar.RewriteError)


def is_optimised(original: Original, configuration: Configuration) -> bool:
    """Tell whether a run is one of the few that TensorFlow optimises."""
    return zlib.crc32(f"{original.program.name} {configuration.name}".encode()) % OPTIMISED == 0


def figures(rows: Sequence[ComparedTensor], original: Original) -> Line:
    """Return the largest error within the tolerance with the noise of its tensor, and what is over it by rounding."""
    within = [row for row in rows if row.error <= original.rtol]
    row = max(within, key=lambda row: row.error, default=rows[0])
    kind = "output" if row.kind == "output" else "variable"
    over = [one for one in rows if one.ok and one.error > original.rtol]
    return {
        "error": row.error,
        "noise": original.noise.get(f"{kind} {row.name}", 0.0),
        "tensor": row.name,
        "rounding": [[one.name, one.error, one.noise] for one in over[:5]],
        "over": len(over),
        "compared": len(rows),
    }


def text_of(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith(("Graph execution", "Detected at"))), "")
    kind = type(error).__name__ if not isinstance(error, tf.errors.OpError) else f"tf.{type(error).__name__}"
    return f"{kind}: {first}"[:400]
