"""Compressors between processes: every process applies the same sum, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.jobs.programs.fixtures import Jobs, ended

SCRIPT = """
import json, os, sys
import numpy as np
import tensorflow as tf
import autograph_rewrite as ar
from tests.support.compressing import COMPRESSORS, MODES, LIMIT, sums_item

tf_config = json.loads(os.environ["TF_CONFIG"])
workers, task = tf_config["cluster"]["worker"], tf_config["task"]["index"]
rows = np.random.default_rng(0).normal(size=(5, 7, 6, 20)).astype(np.float32)
mine = [np.array_split(step, len(workers))[task] for step in rows]


def config(mode, compressor):
    strategy = {"variables": mode, "compressor": compressor}
    return {"devices": ["CPU:0"], "cluster": {"workers": workers}, "strategy": strategy, "timeout_seconds": 60}


def with_session(mode, compressor):
    new = ar.rewrite(sums_item(shape=(6, 20)), config(mode, compressor))
    with new.session() as session:
        session.run("init")
        applied = [session.run(["applied", "train"], {"x": x}, timeout_ms=LIMIT)[0] for x in mine]
        kept = session.read_variable("w/autograph_residual") if new.state else np.zeros((1, 6, 20))
        return applied, kept, sorted(session.state)


def with_function(mode, compressor):
    w = tf.Variable(np.zeros((6, 20), np.float32), name="w")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w)
        gradient = tape.gradient(loss, w)
        w.assign_sub(gradient)
        return gradient

    step = ar.distribute(step, config(mode, compressor))
    applied = [step(tf.constant(x)).numpy() for x in mine]
    state = {name: value for name, value in vars(step.state).items() if name.startswith("w/")}
    kept = [value.numpy() for name, value in state.items() if "residual" in name] or np.zeros((1, 6, 20))
    return applied, kept, sorted(state)


for run in (with_session, with_function):
    for mode in MODES:
        for compressor in COMPRESSORS:
            applied, kept, names = run(mode, compressor)
            total = np.sum(np.asarray(applied, np.float64), axis=0)
            path = f"{run.__name__} {mode} {compressor} {task}.npz"
            np.savez(path, applied=total, kept=np.sum(kept, axis=0), names=names)
np.save("exact.npy", rows.astype(np.float64).sum(axis=(0, 1)))
"""


def test_two_processes_apply_the_same_and_lose_nothing(jobs: Jobs, tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    workers = jobs.job(2, script, cwd=tmp_path)
    assert ended(workers, 170) == [0, 0], "\n".join(worker.output[-3000:] for worker in workers)

    exact = np.load(tmp_path / "exact.npy")
    runs = sorted(tmp_path.glob("* 0.npz"))
    assert len(runs) == 2 * 2 * 7
    for path in runs:
        first, second = np.load(path), np.load(path.with_name(path.name.replace(" 0.npz", " 1.npz")))
        assert np.array_equal(first["applied"], second["applied"]), path.name
        lost = np.abs(first["applied"] + first["kept"] + second["kept"] - exact).max() / np.abs(exact).max()
        assert lost < (1e-6 if first["names"].size else 1e-2), f"{path.name}: {lost}"
        assert [name.replace("replica_0", "replica_1") for name in first["names"]] == second["names"].tolist()
