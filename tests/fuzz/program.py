"""A random program: how it is written, its blocks, its loss and what is around them, all drawn from one seed.

What a seed gives never changes. Newer draws begin at a seed of their own (EXTENDED_FROM, COMBINED_FROM, MESHED_FROM,
ANY_STRATEGY_FROM, SEVERAL_AXES_FROM, LOOPS_FROM, COPIES_FROM).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.fuzz import configurations
from tests.fuzz.configurations import Choice, Layout
from tests.fuzz.flow import FLOW
from tests.fuzz.layers import ACTIVATIONS, LAYERS, Block, linear
from tests.fuzz.lengths import LENGTHS
from tests.fuzz.losses import LOSSES, terms
from tests.fuzz.net import D, Input, Net, Style
from tests.fuzz.optimizers import GRAPH, HANDS, KERAS
from tests.fuzz.outputs import add_outputs
from tests.fuzz.rows import MIXING

BLOCKS: Mapping[str, tuple[float, Block]] = {**LAYERS, **MIXING, **FLOW}
MEETING = ("batch_norm", "fused_batch_norm", *MIXING, *FLOW)
APART = {name: each for name, each in BLOCKS.items() if name not in MEETING} | {
    name: BLOCKS[name]
    for name in ("embedding", "masked_rows", "attention", "wide_columns", "nested", "standardised_input")
}
LOSSES_APART = {
    name: LOSSES[name]
    for name in ("squared_mean", "squared_sum", "per_example", "cross_entropy", "weighted", "masked_mean", "over_time")
}
STEPS = 2
EXTENDED_FROM = 3000
"""The first seed whose configurations are `extended`; those before it stay comparable with older runs."""
COMBINED_FROM = 10_000
"""The first seed that takes three steps, and draws blocks of ragged lengths, and configurations that are `combined`."""
MESHED_FROM = 100_000
"""The first seed that draws model axes more often, and such whose devices run one program."""
ANY_STRATEGY_FROM = 110_000
"""The first seed that draws strategies for these."""
SEVERAL_AXES_FROM = 120_000
"""The first seed that draws several model axes for these."""
LOOPS_FROM = 130_000
"""The first seed whose micro-batches and stages have loops over time, also where nothing meets."""
COPIES_FROM = 140_000
"""The first seed whose replicas of stages may have variables of their own."""
EXTRAS = (
    "weight_decay",
    "average",
    "schedule",
    "counter",
    "clip_norm",
    "clip_value",
    "loss_scale",
    "value_after",
    "gradient_norm",
    "metric",
    "skip_step",
)
"""What stands around an optimizer; `graphs` and `functions` write it."""


@dataclass(frozen=True)
class Stretch:
    """Steps that are done in one go.

    Attributes:
        chunks: the steps of each run.
        source: where the checkpoint is that they begin with; None: they begin at the beginning.
        target: where they are saved in the end.
    """

    chunks: Sequence[Sequence[int]]
    source: Path | None = None
    target: Path | None = None


@dataclass(frozen=True)
class Program:
    """What is fixed before anything is built.

    Attributes:
        seed: of everything.
        mode: session, reference, function or keras.
        style: of the program.
        optimizer: its name.
        extras: what stands around it.
        batches: the size of the batch in each step.
        times: the length of sequences in each step.
        choice: the configuration.
        layout: the processes of the job that trains it; None: one process.
    """

    seed: int
    mode: str
    style: Style
    optimizer: str
    extras: tuple[str, ...]
    batches: tuple[int, ...]
    times: tuple[int, ...]
    choice: Choice
    layout: Layout | None = None

    @staticmethod
    def draw(seed: int, layout: Layout | None = None) -> Program:
        """Draw what belongs to a seed: in one process, or in a job."""
        dice = random.Random(f"program {seed}")
        choice = configurations.draw(dice)
        is_new = seed >= COMBINED_FROM
        if layout is not None:
            choice = configurations.in_job(layout, random.Random(f"configuration of a job {seed}"))
        elif seed >= EXTENDED_FROM:
            choice = configurations.extended(choice, random.Random(f"configuration {seed}"))
        if is_new and layout is None:
            choice = configurations.combined(choice, random.Random(f"combination {seed}"))
        if seed >= MESHED_FROM and layout is None:
            strategies = configurations.STRATEGIES if seed >= ANY_STRATEGY_FROM else ("AllReduce",)
            meshes = configurations.SEVERAL_AXES if seed >= SEVERAL_AXES_FROM else configurations.ONE_AXIS
            choice = configurations.meshed(choice, random.Random(f"mesh {seed}"), strategies, meshes)
        if seed >= COPIES_FROM and choice.kind == "pipeline":
            choice = configurations.copied(choice, random.Random(f"copies {seed}"))
        weights = (35, 10, 35, 20) if is_new else (45, 15, 36, 4)
        (mode,) = dice.choices(("session", "reference", "function", "keras"), weights)
        batches = _batches(dice)
        is_static = len(set(batches)) == 1 and dice.random() < 0.4
        times = dice.choice([(4, 4), (3, 3), (3, 5), (1, 4)])
        has_time = len(set(times)) == 1 and dice.random() < 0.5
        style = Style(
            function=mode == "function",
            reference=mode == "reference",
            version=dice.choice([1, 2]) if mode != "reference" else 1,
            batch=batches[0] if is_static else None,
            time=times[0] if has_time else None,
            alike=choice.kind == "pipeline_loop" and dice.random() < 0.8,
            apart=choice.kind not in ("replicas", "micro") and dice.random() < 0.65,
            newest=is_new,
            model=choice.model if choice.placed in ("code", "both") else (),
            loops=seed >= LOOPS_FROM,
        )
        if is_new:
            batches, times = (batches[0], *batches), (times[0], *times)
            choice = _resumed(choice, len(batches), random.Random(f"checkpoint {seed}"))
        if mode == "function":
            optimizer = dice.choice([*KERAS, *HANDS, *HANDS])
        else:
            optimizer = dice.choice([*GRAPH, *GRAPH, *HANDS])
        extras = tuple(sorted(dice.sample(EXTRAS, dice.choice([0, 0, 1, 1, 2, 3]))))
        return Program(seed, mode, style, optimizer, extras, batches, times, choice, layout)

    def chunks(self, each: int, *, is_fit: bool = False) -> list[list[int]]:
        """Return the steps of each run: of one shape (in a fit of any), and on one side of a checkpoint."""
        found: list[list[int]] = []
        sizes = list(zip(self.batches, self.times, strict=True))
        for i, size in enumerate(sizes):
            fits = found and (is_fit or (len(found[-1]) < each and sizes[found[-1][-1]] == size))
            if fits and i != self.choice.save_after:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def part(self, step: int, size: int, task: int) -> slice:
        """Return which examples of a step a worker has: most often as many as the others, else what the dice say.

        It has as many of each step where a run has several.
        """
        workers = self.layout.workers if self.layout is not None else 1
        dice = random.Random(f"parts {self.seed} {step if self.choice.steps_per_run == 1 else 0}")
        each, more = divmod(size, workers)
        bounds = [i * each + min(i, more) for i in range(workers + 1)]
        if self.style.batch is None and "local_sgd" not in self.choice.config and dice.random() < 0.3:
            bounds = [0, *sorted(dice.randint(0, size) for _ in range(workers - 1)), size]
        return slice(bounds[task], bounds[task + 1])

    def net(self, given: dict[str, Any] | None = None, variables: Any = None) -> Net:
        """Return the empty network of this program."""
        return Net.of(f"network {self.seed}", self.style, given, variables)

    def feeds(self, inputs: Mapping[str, Input]) -> list[dict[str, Any]]:
        """Return what is fed in each step."""
        numbers = np.random.default_rng([self.seed, 1])
        sizes = zip(self.batches, self.times, strict=True)
        feeds = [{name: one.values(numbers, b, t) for name, one in inputs.items()} for b, t in sizes]
        if self.choice.steps_per_run > 1:  # what is no batch is the same in all steps of a run
            feeds = [
                {n: feed[n] if one.axis is not None else feeds[0][n] for n, one in inputs.items()} for feed in feeds
            ]
        return feeds

    def parts(self, inputs: Mapping[str, Input], feeds: list[dict[str, Any]], task: int) -> list[dict[str, Any]]:
        """Return what one worker of a job is fed: where it holds a stage, or a part of a replica, all of it.

        All workers are given all of what is ragged, since it is not divided.
        """
        choice = self.choice
        if self.layout is None or choice.stages or (choice.model and choice.replicas < self.layout.workers):
            return feeds
        ragged = [name for name, one in inputs.items() if one.kind == "ragged"]
        is_trimmed = self.style.time is None and choice.steps_per_run == 1
        return [
            _cut(inputs, feed, self.part(i, self.batches[i], task), is_trimmed=is_trimmed)
            | {name: feed[name] for name in ragged}
            for i, feed in enumerate(feeds)
        ]

    def blocks(self, inputs: Mapping[str, Input], feeds: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return what each replica is fed, where replicas train alone."""
        found = []
        for task in range(self.layout.workers if self.layout is not None else 1):
            for device in range(self.choice.replicas):
                rows = []
                for i, feed in enumerate(feeds):
                    span = self.part(i, self.batches[i], task)
                    each, more = divmod(span.stop - span.start, self.choice.replicas)
                    begin = span.start + device * each + min(device, more)
                    rows.append(_cut(inputs, feed, slice(begin, begin + each + (device < more)), is_trimmed=False))
                found.append(rows)
        return found


def _cut(inputs: Mapping[str, Input], feed: dict[str, Any], rows: slice, *, is_trimmed: bool) -> dict[str, Any]:
    """Return some rows of a batch, padded to the longest of them where a program does not mind."""
    cut = {n: feed[n][rows] if one.axis == 0 else feed[n] for n, one in inputs.items()}
    cut |= {n: feed[n][:, rows] for n, one in inputs.items() if one.axis == 1}
    if is_trimmed:
        for name, one in inputs.items():
            if one.trimmed_by and cut[one.trimmed_by].size:
                cut[name] = cut[name][:, : int(cut[one.trimmed_by].max())]
    return cut


def _resumed(choice: Choice, steps: int, dice: random.Random) -> Choice:
    """Let some choices be saved and restored: into the same, other replicas or another strategy, or one device."""
    if "local_sgd" in choice.config or dice.random() < 0.75:
        return choice
    if dice.random() < 0.3:
        return replace(choice, save_after=dice.randint(1, steps - 1))
    other = configurations.draw(dice)
    while other.kind not in ("replicas", choice.kind):
        other = configurations.draw(dice)
    other = configurations.combined(other, dice)
    while "local_sgd" in other.config or other.placed or other.steps_per_run != choice.steps_per_run:
        other = configurations.combined(configurations.draw(dice), dice)
    return replace(choice, save_after=dice.randint(1, steps - 1), elsewhere=other)


def _batches(dice: random.Random) -> tuple[int, ...]:
    """Return the number of examples of each step: the same twice, or another one; divisible, or not."""
    first = dice.choice([12, 12, 6, 7, 5, 8])
    return (first, first) if dice.random() < 0.7 else (first, dice.choice([6, 7, 5, 4, 3]))


def grow(net: Net) -> Any:
    """Build inputs, blocks and the loss; return the loss."""
    h = net.input("x", 4)
    if net.style.alike:
        h = _alike(net, h)
    else:
        blocks = APART if net.style.apart else BLOCKS
        blocks = {**blocks, "recurrent": (8, FLOW["recurrent"][1])} if net.style.loops else blocks
        # Replicas that train alone have no rows of a ragged argument, of which each has all.
        lengths = {name: one for name, one in LENGTHS.items() if name != "ragged" or not net.style.apart}
        blocks = {**blocks, **lengths} if net.style.newest else blocks
        weights = [weight for weight, _ in blocks.values()]
        h = net.cut(tf.tanh(linear(net, h, 4))) if net.chance(0.7) else h
        for _ in range(net.dice.choice([1, 2, 2, 3])):
            (name,) = net.dice.choices(list(blocks), weights)
            net.note(name)
            h = net.cut(blocks[name][1](net, h))
    add_outputs(net, h)
    losses = LOSSES_APART if net.style.apart else LOSSES
    (name,) = net.dice.choices(list(losses), [weight for weight, _ in losses.values()])
    net.note(f"loss {name}")
    loss = losses[name][1](net, h)
    more = terms(net, h)
    return loss if more is None else loss + more


def _alike(net: Net, h: Any) -> Any:
    """Return the output of layers that differ in their weights only."""
    act = ACTIVATIONS[net.dice.choice(list(ACTIVATIONS))]
    count = net.dice.choice([2, 4, 4, 6])
    net.note(f"alike {count}")
    for _ in range(count):
        h = net.cut(act(tf.matmul(h, net.variable("w", (4, 4))) + net.variable("b", (4,), scale=0.1)))
    return h


def zero(dtype: Any = D) -> Any:
    """Return a zero to begin a counter with."""
    return np.zeros((), dtype.as_numpy_dtype)
