"""A worker that profiles its steps, with all others, and leaves the profile; `profiled.py OUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.inspect.profile import estimated
from autograph_rewrite.runtime.engine.step_observers import PROFILE
from tests.jobs.programs.job import Job

JOB = Job.here(Path(sys.argv[1]))
SIZE = 1024
os.environ[PROFILE] = json.dumps({"folder": sys.argv[1], "skip": 1, "steps": 2})
w = tf.Variable(tf.ones([SIZE, SIZE]) / SIZE, name="w")


def step(x: Any) -> Any:
    """Train for one step that takes long enough to be looked into."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w)))
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss


distributed = ar.distribute(step, JOB.config())
x = tf.ones([SIZE, SIZE])
for _ in range(3):
    distributed(x)  # those that the environment asks for
found = ar.profile(distributed, x, steps=3)
found.save(Path(sys.argv[1]) / f"profile_{JOB.task}.json")
first, other = found.ranks
print(json.dumps(estimated(first, other)._asdict()))
