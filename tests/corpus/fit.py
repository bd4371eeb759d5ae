"""A program of the corpus over two processes: `fit` of its model, or a call of its function for each batch.

python -m tests.corpus.fit NAME OUT    what one process of them does; it leaves what it has trained in OUT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autograph_rewrite import errors as known_errors
from tests.support.paths import ROOT

LIMIT_SECONDS = 220
"""Of one run, on a machine that is busy."""
TRIES = 3
"""How often one process is nudged before a difference counts as wrong."""
NUDGED = "nudged"
EXAMPLES = 8
"""In the batch of both processes."""
CONFIG: Mapping[str, Any] = {"devices": ["CPU:0"], "strategy": {"name": "AllReduce"}, "timeout_seconds": 60}
ERRORS = [name for name in dir(known_errors) if name.endswith("Error")]
Array = np.ndarray[Any, Any]
Trained = dict[str, Array]


def judged(name: str, rtol: float) -> dict[str, Any]:
    """Train a program in one process and in two; return how that came out.

    Args:
        name: of the program.
        rtol: the tolerance.
    """
    job = ("-m", "autograph_rewrite", "launch", "-n", "2", "--timeout", str(LIMIT_SECONDS))
    runs: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in ("lone", "job", *(f"{NUDGED}{attempt}" for attempt in range(TRIES))):
            launch = job if one == "job" else ()
            given = [sys.executable, *launch, "-m", "tests.corpus.fit", name, f"{folder}/{one}.npz"]
            try:
                done = subprocess.run(
                    given, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS + 20
                )
            except subprocess.TimeoutExpired:
                return {"outcome": "hang", "reason": f"{one}: no end after {LIMIT_SECONDS} s"}
            if done.returncode:
                return failed(one, done)
            runs[one] = dict(np.load(f"{folder}/{one}.npz"))
            if one != "lone":
                line = compared(*runs.values(), rtol=rtol)
                if line["outcome"] == "exact":
                    break
    return line


def failed(one: str, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return how a run came out that failed."""
    said = [line for line in (done.stderr + done.stdout).splitlines() if "Error" in line]
    known = any(f"autograph_rewrite.errors.{kind}" in said[-1] for kind in ERRORS) if said else False
    outcome = "broken" if one != "job" else "hang" if done.returncode == 124 else "refused" if known else "foreign"
    return {"outcome": outcome, "reason": (said or ["it failed"])[-1][-300:], "detail": done.stderr[-3000:]}


def compared(expected: Trained, found: Trained, *nudged: Trained, rtol: float) -> dict[str, Any]:
    """Compare what one process and two have trained.

    Args:
        expected: of one.
        found: of two.
        nudged: each of one that began with variables that differ in the last bit.
        rtol: the tolerance.
    """
    from autograph_rewrite.check.report import NOISE_FACTOR, deviation

    if set(expected) != set(found):
        return {"outcome": "wrong", "reason": f"these are not there in both: {sorted(set(expected) ^ set(found))[:4]}"}
    errors = {name: deviation(found[name], value, rtol).error for name, value in expected.items()}
    noise = {
        name: max((deviation(each[name], value, rtol).error for each in nudged), default=0.0)
        for name, value in expected.items()
    }
    over = [name for name, error in errors.items() if error > rtol]
    wrong = [name for name in over if errors[name] > NOISE_FACTOR * noise[name]]
    if wrong:
        told = [f"{name}: {errors[name]:.1e} (noise {noise[name]:.1e})" for name in wrong]
        return {"outcome": "wrong", "reason": f"{len(wrong)} of {len(errors)} differ: {told[0]}", "detail": told[:20]}
    worst = max(errors.keys() - over, key=errors.__getitem__, default=next(iter(over), ""))
    figures = {"error": errors[worst], "noise": noise[worst], "tensor": worst, "over": len(over)}
    return {"outcome": "exact", "compared": len(errors), **figures}


def train(name: str, nudge: int | None = None) -> Trained:
    """Train a program, as TF_CONFIG says with another process, and return variables and outputs.

    Args:
        name: of the program.
        nudge: begin with weights that differ in the last bit, in the way that a number chooses.
    """
    import tensorflow as tf

    import autograph_rewrite as ar
    from autograph_rewrite.load.keras_library import is_model
    from tests.corpus.catalogue import programs
    from tests.corpus.judge import SEED
    from tests.corpus.program import mapped
    from tests.corpus.training import nudged
    from tests.support.chosen_keras import keras
    from tests.support.keras_floats import keras_floats
    from tests.zoo.oracle import as_arrays, model_variables

    program = programs()[name][1]
    keras.utils.set_random_seed(SEED)
    with keras_floats(program.floats):
        built = program.build()
        rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
        examples = program.steps * EXAMPLES
        values = [
            mapped(nest, lambda feed: feed.values(rng, program.floats, examples)) for nest in built.nests.values()
        ]
        given = tuple(tuple(one) if isinstance(one, list) else one for one in values)  # a list would be stacked
        target = built.target
        if nudge is not None and is_model(target):
            weights = {str(i): one for i, one in enumerate(target.get_weights())}
            target.set_weights(list(nudged(weights, nudge).values()))
        if "TF_CONFIG" in os.environ:
            target = ar.distribute(target, CONFIG)
        data = tf.data.Dataset.from_tensor_slices(given if len(given) > 1 else given[0]).batch(EXAMPLES)
        if is_model(target):
            losses = target.fit(data, shuffle=False, verbose=0).history
            return model_variables(target) | as_arrays(losses)
        call = target if "TF_CONFIG" in os.environ else tf.function(target)
        count = EXAMPLES // 2 if "TF_CONFIG" in os.environ else EXAMPLES
        mine = slice(_task() * count, (_task() + 1) * count)
        parts = (
            tf.nest.map_structure(lambda value: value[mine], part) for part in data
        )  # a function is given its part
        steps = [call(*part) if len(given) > 1 else call(part) for part in parts]
    return {f"{name} {i}": np.asarray(value) for i, outputs in enumerate(steps) for name, value in outputs.items()}


def _task() -> int:
    """Return which process of the job this is; 0 where there is none."""
    return int(json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"])


def main(name: str, out: str) -> None:
    """Train, and write what was trained: of two processes, the first one does."""
    from tests.fuzz.worker import prepare

    prepare()
    attempt = Path(out).stem.removeprefix(NUDGED)
    trained = train(name, int(attempt) if attempt.isdigit() else None)
    if _task() == 0:
        np.savez(out, **trained)


if __name__ == "__main__":
    main(*sys.argv[1:])
