"""One seed: train its program on one device and distributed, and tell how that came out.

equal     all outputs of all steps and all variables, within rounding
ran       to the end, and what it computes is another result than one device's on purpose, of which there is no model
wrong     a number differs by more than its own sensitivity to rounding explains
refused   a RewriteError says why not
crash     any other exception, or an invariant of the rewriter that does not hold
hang      a time limit ended it
skipped   TensorFlow itself cannot run the program, or what it computes is noise
"""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.fuzz import functions, graphs, keras_models
from tests.fuzz.net import Net
from tests.fuzz.program import Program, Stretch

TOLERANCE, LOOSE = 1e-9, 3e-5
FLOOR = 1e-3  # errors are relative to the largest value of a tensor, or to this
NOISE_FACTOR = 300.0
NUDGES = 3
DRAWN = {"dropout", "noise"}  # of rows: replicas that train alone draw their own
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


Run = Callable[[dict[str, Any] | None, Stretch], Results]


@dataclass(frozen=True)
class Built:
    """A program that is built.

    Attributes:
        original: trains on one device, on inputs that are off by a nudge.
        run: trains with a configuration, or without one on one device, some steps.
        config: its configuration, as far as it is known without the names of variables.
        shapes: of its variables, by name.
        trained: the names of those that an optimizer updates.
        draws: whether something draws from a state that a checkpoint does not have.
        apart: trains as replicas do that are averaged now and then, and gives what a worker has of that; None: nobody
            knows what that gives.
        parts: for readers.
        loose: whether something computes in less than float64.
    """

    original: Callable[[float], Results]
    run: Run
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    trained: set[str]
    draws: bool
    apart: Callable[[float, int], Results] | None = None
    parts: tuple[str, ...] = ()
    loose: bool = False


@dataclass(frozen=True)
class Trial:
    """A program that can be trained both ways.

    Attributes:
        original: trains on one device, on inputs that are off by a nudge.
        rewritten: trains on many; what is saved on the way goes into a folder.
        parts: of the program, for readers.
        loose: whether something computes in less than float64.
        is_promised: whether the configuration promises what the original gives under a name.
        resumed: goes on, in one process, from the checkpoint that a job has left in a folder; None: there is none.
        apart: what a worker has where replicas train by themselves.
    """

    original: Callable[[float], Results]
    rewritten: Callable[[Path], Results]
    parts: tuple[str, ...]
    loose: bool
    is_promised: Callable[[str], bool] = lambda _: True
    resumed: Callable[[Path], Results] | None = None
    apart: Callable[[float, int], Results] | None = None

    def seen_by(self, worker: int) -> Trial:
        """Return the trial whose original gives what a worker has to have."""
        apart = self.apart
        return self if apart is None else replace(self, original=lambda nudge: apart(nudge, worker))


def _keras(program: Program) -> Built:
    shapes, trained, draws = keras_models.surveyed(program)
    chunks = keras_models.chunks(program)

    def original(nudge: float) -> Results:
        return keras_models.run(program, None, Stretch(chunks), nudge)

    def run(config: dict[str, Any] | None, stretch: Stretch) -> Results:
        return keras_models.run(program, config, stretch)

    return Built(original, run, program.choice.config, shapes, trained, draws)


def _function(program: Program, task: int | None) -> Built:
    step = functions.Step(program)
    net, inputs = step.net, step.net.inputs
    feeds = program.feeds(inputs)
    given = feeds if task is None else program.parts(inputs, feeds, task)

    def original(nudge: float) -> Results:
        return functions.run_original(step, _nudged(feeds, nudge))

    def run(config: dict[str, Any] | None, stretch: Stretch) -> Results:
        return functions.run(step, given, config, stretch)

    def apart(nudge: float, worker: int = 0) -> Results:
        return trained_apart(program, *functions.trainer(step), program.blocks(inputs, _nudged(feeds, nudge)), worker)

    loose, draws_rows = net.loose or program.optimizer in functions.KERAS, bool(DRAWN & {*net.parts})
    config = program.choice.config
    # Ragged rows of several steps cannot be stacked, and runs of another number of steps draw from the beginning.
    if "steps_per_run" in config and (net.draws or any(one.kind == "ragged" for one in inputs.values())):
        config = {**config, "steps_per_run": 1}
    return Built(original, run, config, *_known(net), None if draws_rows else apart, tuple(net.parts), loose)


def _graph(program: Program, task: int | None) -> Built:
    built, optimised = graphs.build(program), program.seed % OPTIMISED == 0
    net, inputs = built.net, built.net.inputs
    feeds = program.feeds(inputs)
    given = feeds if task is None else program.parts(inputs, feeds, task)

    def original(nudge: float) -> Results:
        return graphs.run_original(built, _nudged(feeds, nudge), optimised=optimised)

    def run(config: dict[str, Any] | None, stretch: Stretch) -> Results:
        return graphs.run_rewritten(program, built, given, config, stretch, optimised=optimised)

    def apart(nudge: float, worker: int = 0) -> Results:
        return trained_apart(program, *graphs.trainer(built), program.blocks(inputs, _nudged(feeds, nudge)), worker)

    config, draws_rows = program.choice.with_boundaries(net.cuts, net.dice), bool(DRAWN & {*net.parts})
    return Built(original, run, config, *_known(net), None if draws_rows else apart, tuple(net.parts), net.loose)


def _known(net: Net) -> tuple[dict[str, tuple[int, ...]], set[str], bool]:
    """Return shapes, names of what is trained, and whether something draws."""
    shapes = {name: tuple(variable.shape) for name, variable in net.variables.items()}
    return shapes, {variable.name.removesuffix(":0") for variable in net.trained}, net.draws


def trial_of(program: Program, task: int | None = None) -> Trial:
    """Build what a seed says.

    Args:
        program: what to build.
        task: the worker of a job that this process is; None: a process that is given all of the data.
    """
    if program.mode == "keras":
        built = _keras(program)
    else:
        built = (_function if program.mode == "function" else _graph)(program, task)
    choice, run = program.choice, built.run
    config = choice.completed(built.shapes, built.trained, program.seed, built.config)
    chunks = program.chunks(config.get("steps_per_run", 1))
    if program.mode == "keras":
        chunks = keras_models.chunks(program)
    before = [chunk for chunk in chunks if chunk[0] < choice.save_after]
    behind = [chunk for chunk in chunks if chunk[0] >= choice.save_after]
    elsewhere, behind_elsewhere = None, behind
    if choice.elsewhere is not None:
        elsewhere = choice.elsewhere.completed(built.shapes, built.trained, program.seed)
    elif program.mode != "keras":  # the original has one step in each run
        behind_elsewhere = [[i] for chunk in behind for i in chunk]

    def rewritten(folder: Path) -> Results:
        if not choice.save_after or built.draws:
            return run(config, Stretch(chunks))
        results = run(config, Stretch(before, target=folder))
        if program.layout is not None:
            return results | run(config, Stretch(behind, source=folder))
        return results | run(elsewhere, Stretch(behind_elsewhere, source=folder))

    def resumed(folder: Path) -> Results:
        return run(elsewhere, Stretch(behind_elsewhere, source=folder))

    is_alone = "local_sgd" in config and built.apart is not None and not built.draws
    return Trial(
        built.original,
        rewritten,
        built.parts,
        built.loose,
        _promises(program, built, [config, elsewhere or {}], chunks),
        resumed if program.layout is not None and choice.save_after and not built.draws else None,
        built.apart if is_alone else None,
    ).seen_by(0)


def _promises(
    program: Program, built: Built, configs: list[dict[str, Any]], chunks: list[list[int]]
) -> Callable[[str], bool]:
    """Return what says of a name whether its value has to be that of the original."""
    local = "local_sgd" in configs[0]
    policies = [policy for config in configs for policy in config.get("variable_policies", [])]
    last = {f"step {chunk[-1]}" for chunk in chunks}
    # A metric gives what a variable keeps, under the variable's name without its number.
    metrics = {v.rstrip("0123456789") for v in built.shapes if any(re.fullmatch(one["match"], v) for one in policies)}

    def is_promised(name: str) -> bool:
        if (local and (built.draws or built.apart is None)) or (policies and program.mode == "keras"):
            return False  # which number a variable of a model has is no name that a policy matches
        if not name.startswith("variable "):
            step, output = " ".join(name.split()[:2]), " ".join(name.split()[2:])
            return not local and step in last and output not in metrics
        variable = name.removeprefix("variable ")
        stem, _, kept = variable.partition("/")
        is_changed = any(re.fullmatch(policy["match"], variable) for policy in policies)
        is_slot = kept != "ExponentialMovingAverage"  # a slot is updated as what it belongs to, an average is not
        return not is_changed or (is_slot and stem in built.trained)

    return is_promised


def trained_apart(
    program: Program,
    values: Results,
    train: Callable[[Results, dict[str, Any]], Results],
    blocks: list[list[dict[str, Any]]],
    worker: int = 0,
) -> Results:
    """Return what a worker's first replica has, of several that train by themselves and are averaged now and then."""
    local = program.choice.config["local_sgd"]
    replicas = [values for _ in blocks]
    for i in range(len(program.batches)):
        replicas = [train(one, block[i]) for one, block in zip(replicas, blocks, strict=True)]
        if (i + 1) % local["period"] == 0 or i + 1 <= local["warmup_steps"]:
            mean = {
                name: np.mean([one[name] for one in replicas], 0)
                for name, value in replicas[0].items()
                if np.asarray(value).dtype.kind == "f"
            }
            replicas = [{**one, **mean} for one in replicas]
    return replicas[worker * program.choice.replicas]


def run(seed: int) -> Outcome:
    """Return how a seed came out in one process."""
    with tempfile.TemporaryDirectory() as folder:
        return judged(Program.draw(seed), lambda trial: iter([trial.rewritten(Path(folder))]))


def judged(program: Program, answers: Callable[[Trial], Iterator[Results]]) -> Outcome:
    """Return how a program came out.

    Args:
        program: what is trained.
        answers: yields what it came to, of each process that has trained it, or raises what kept it from that.
    """
    start = time.monotonic()

    def outcome(kind: str, reason: str = "", detail: str = "", parts: tuple[str, ...] = ()) -> Outcome:
        said = f"{', '.join(parts)}; {program.optimizer}; {' '.join(program.extras)}; {program.batches} {program.times}"
        said += f" {'static' if program.style.batch else 'open'} v{program.style.version}"
        seconds = round(time.monotonic() - start, 3)
        config = f"{program.layout or ''} {program.choice}".strip()
        return Outcome(program.seed, kind, reason, program.choice.kind, program.mode, config, said, seconds, detail)

    try:
        trial = trial_of(program)
        expected = trial.original(0.0)
    except Exception as error:
        return outcome("skipped", f"original: {masked(error)}", traceback.format_exc()[-1500:])
    if not all(map(is_finite, expected.values())):
        return outcome("skipped", "original: not finite", parts=trial.parts)
    expected = {name: value for name, value in expected.items() if trial.is_promised(name)}
    try:
        for who, got in enumerate(answers(trial)):
            if trial.apart is not None and program.layout is not None:
                trial = trial.seen_by(who % program.layout.workers)  # who comes last goes on from a checkpoint
                expected = {name: value for name, value in trial.original(0.0).items() if trial.is_promised(name)}
            kind, reason, detail = compare(trial, expected, got)
            if kind != "equal":
                return outcome(kind, reason, f"answer {who}: {detail}" if who else detail, trial.parts)
    except AnswerError as error:
        return outcome(error.outcome, error.reason, error.detail, trial.parts)
    except Exception as error:
        kind = outcome_of(error)
        detail = str(error)[:600] if kind == "refused" else traceback.format_exc()[-2500:]
        return outcome(kind, masked(error), detail, trial.parts)
    if not expected:
        return outcome("ran", "inexact by choice", parts=trial.parts)
    return outcome("equal", parts=trial.parts)


class AnswerError(Exception):
    """A process of a job has no answer, and says how that counts, why, and more of it."""

    def __init__(self, outcome: str, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason, self.detail = outcome, reason, detail


INTERNAL = ("' has no output ", "cannot erase '", "cannot take the place of '", "nothing has found the ")
"""What errors say that speak of a mistake in the rewriter, not of the program or the configuration."""


def outcome_of(error: Exception, *, in_job: bool = False) -> str:
    """Return how an exception counts: in a job all workers do the same, but for the lengths of sequences."""
    signs = ("timeout_seconds", "has not answered", "stood still")
    waits = isinstance(error, ar.ClusterError) and any(sign in str(error) for sign in signs)
    if isinstance(error, tf.errors.DeadlineExceededError) or "imed out" in str(error) or waits:
        return "hang"
    if in_job and isinstance(error, ar.ClusterError) and "the length of dimension" not in str(error):
        return "crash"
    is_ours = any(sign in str(error) for sign in INTERNAL)
    if isinstance(error, ar.RewriteError) and not isinstance(error, ar.VerifyError) and not is_ours:
        return "refused"
    return "crash"


def compare(trial: Trial, expected: Results, got: Results) -> tuple[str, str, str]:
    """Return outcome, reason and detail of two results; rounding is judged by nudging the inputs."""
    missing = sorted(set(expected) - set(got))
    if missing:
        return "wrong", "missing: " + masked_text(missing[0]), str(missing[:5])
    limit = LOOSE if trial.loose else TOLERANCE
    errors = {name: error_of(expected[name], got[name]) for name in expected}
    far = {name: error for name, error in errors.items() if not error <= max(limit, _rounding(expected[name]))}
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


def _rounding(value: Any) -> float:
    """Return by how much rounding may change a value: Keras' and v1's metrics are float32 in any program."""
    array = np.asarray(value)
    return 4 * float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0


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
    if isinstance(error, ar.ConfigError) and first.endswith("problems:"):
        first = str(error).strip().splitlines()[1].strip()
    return f"{type(error).__name__}: {masked_text(first)}"


def masked_text(text: str) -> str:
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\{\{[^}]*\}\}", "_", text)
    text = re.sub(r"\b[\w/]*/[\w/:]+", "_", text)
    return re.sub(r"\d+", "#", text)[:160]
