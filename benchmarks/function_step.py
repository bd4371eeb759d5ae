"""Step time in function mode: `ar.distribute` against a bare tf.function and against MirroredStrategy.

All run the same Keras model and optimizer on the same total batch; two replicas are on two virtual CPU devices.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks import contestants
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.session_step import step_figures
from benchmarks.timing import Times, compare, interleaved, ratio

TITLE = "step time, function: 2 virtual CPU devices against one and against MirroredStrategy, same total batch"
MODELS = ("mlp", "cnn", "resnet", "transformer")


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for model in effort.some(MODELS):
        arguments = {
            "model": model,
            "rounds": effort.rounds(11),
            "seconds": effort.seconds(0.4),
            "tiny": effort.tiny,
        }
        times: Times = call("benchmarks.function_step:measure", arguments, timeout=180)
        figures += step_figures(model, times)
        figures += _against_strategy(model, times)
        details[model] = times
    return figures, details


def _against_strategy(model: str, times: Times) -> list[Figure]:
    """Compare with MirroredStrategy, whose batch normalisation is local; the better of the two has the target."""
    wall = times["wall"]
    local = "-local" if "shared-local" in wall else ""
    ratios = {name: ratio(wall[name + local], wall["strategy"]) for name in ("shared", "mirrored")}
    best = min(ratios, key=lambda name: ratios[name])
    return [
        Figure(
            f"{model}: {name} / MirroredStrategy",
            value,
            at_most=0.6 if name == best else None,
            how=f"{milliseconds(median(wall[name + local]))} / {milliseconds(median(wall['strategy']))}; "
            f"{compare(times, name + local, 'strategy')}{'; both with local batch norm' if local else ''}",
        )
        for name, value in ratios.items()
    ]


def measure(model: str, rounds: int, seconds: float, tiny: bool) -> Times:
    """Time one step in every way, and the update alone (in a child)."""
    contestants.split_cpu(2)
    ways = contestants.HOW + (contestants.LOCAL if model == "resnet" else ())
    made = {how: contestants.prepare(how, model, 2, tiny=tiny) for how in ways}
    steps = {how: contestant.start() for how, contestant in made.items()}
    steps["update"] = _update(made["single"].program)
    return interleaved(steps, rounds=rounds, seconds=seconds, warm_up=3)


def _update(program: Any) -> Any:
    """Return a step that only applies given gradients."""
    import tensorflow as tf

    gradients = program.gradients()

    return tf.function(lambda: program.optimizer.apply(gradients, program.model.trainable_variables))
