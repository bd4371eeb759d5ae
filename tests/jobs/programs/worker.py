"""What `launch` runs: cases one after the other, whose results go into a file per process.

    worker.py mlp,keras_cnn OUT     with TF_CONFIG      OUT/worker0.pkl, OUT/worker1.pkl
                                    without             OUT/single.pkl, OUT/alone.pkl

One pair of processes runs many cases, because starting TensorFlow costs more than most of them.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.jobs.programs.job import Case, Job, Results


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    from tests.jobs.programs import functions, graphs, models, pipelines, served, served_models, served_reads, steps

    return {
        **graphs.CASES,
        **functions.CASES,
        **models.CASES,
        **pipelines.CASES,
        **served.CASES,
        **steps.CASES,
        **served_models.CASES,
        **served_reads.CASES,
    }


def run(names: list[str], job: Job, known: Mapping[str, Case] | None = None) -> dict[str, Results]:
    """Run cases, saying how long each takes."""
    known = cases() if known is None else known
    results = {}
    for name in names:
        began = time.monotonic()
        folder = job.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        results[name] = known[name](replace(job, folder=folder))
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return results


def split_cpu(count: int) -> None:
    """Make virtual devices, which is possible only before TensorFlow starts."""
    import tensorflow as tf

    import autograph_rewrite  # noqa: F401  joins the job

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def write(path: Path, results: dict[str, Results]) -> None:
    """Write results, whole or not at all."""
    path.with_suffix(".part").write_bytes(pickle.dumps(results))
    path.with_suffix(".part").rename(path)


def main(names: list[str], out: Path) -> None:
    """Run as what TF_CONFIG says this process is."""
    job = Job.here(out / "files")
    if job.is_rewritten:
        split_cpu(2)
        write(out / f"worker{job.task}.pkl", run(names, job))
        return
    write(out / "single.pkl", run(names, replace(job, folder=out / "single_files")))
    write(out / "alone.pkl", run(names, Job(0, 2, alone=True, folder=out / "alone_files")))


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
