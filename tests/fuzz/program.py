"""A random program: how it is written, its blocks, its loss and what is around them, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tests.fuzz import configurations
from tests.fuzz.configurations import Choice
from tests.fuzz.flow import FLOW
from tests.fuzz.layers import ACTIVATIONS, LAYERS, Block, linear
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
    """

    seed: int
    mode: str
    style: Style
    optimizer: str
    extras: tuple[str, ...]
    batches: tuple[int, ...]
    times: tuple[int, ...]
    choice: Choice

    @staticmethod
    def draw(seed: int) -> Program:
        """Draw what belongs to a seed."""
        dice = random.Random(f"program {seed}")
        choice = configurations.draw(dice)
        if seed >= EXTENDED_FROM:
            choice = configurations.extended(choice, random.Random(f"configuration {seed}"))
        (mode,) = dice.choices(("session", "reference", "function", "keras"), (45, 15, 36, 4))
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
        )
        if mode == "function":
            optimizer = dice.choice([*KERAS, *HANDS, *HANDS])
        else:
            optimizer = dice.choice([*GRAPH, *GRAPH, *HANDS])
        extras = tuple(sorted(dice.sample(EXTRAS, dice.choice([0, 0, 1, 1, 2, 3]))))
        return Program(seed, mode, style, optimizer, extras, batches, times, choice)

    def net(self, given: dict[str, Any] | None = None, variables: Any = None) -> Net:
        """Return the empty network of this program."""
        return Net.of(f"network {self.seed}", self.style, given, variables)

    def feeds(self, inputs: Mapping[str, Input]) -> list[dict[str, Any]]:
        """Return what is fed in each step."""
        numbers = np.random.default_rng([self.seed, 1])
        sizes = zip(self.batches, self.times, strict=True)
        return [{name: one.values(numbers, b, t) for name, one in inputs.items()} for b, t in sizes]


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
