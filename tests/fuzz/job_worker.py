"""A worker, or a parameter server, of a job that trains random programs one after the other: `job_worker.py SEEDS OUT`.

    SEED.TASK.pkl   what this worker has come to: results, or how an exception counts
    SEED.go         whoever started the job is content with SEED: all begin the next one

So nothing begins while another worker is still at, or has failed in, the program before.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.fuzz.configurations import Layout
from tests.jobs.programs.job import Job
from tests.jobs.programs.worker import split_cpu

DEVICES = 4


def main(seeds: list[int], layout: Layout, out: Path) -> None:
    """Train the programs of these seeds, each of which begins when all are done with the one before."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # where it is, for whoever has waited in vain
    job = Job.here(out)
    split_cpu(DEVICES)
    import tensorflow as tf

    import autograph_rewrite as ar

    tf.compat.v1.logging.set_verbosity("ERROR")
    ar.join()  # a parameter server stays here
    for seed in seeds:
        name = out / f"{seed}.{job.task}.pkl"
        name.with_suffix(".part").write_bytes(pickle.dumps(answer(seed, layout, job.task, out / f"{seed}")))
        name.with_suffix(".part").rename(name)
        gc.collect()
        while not (out / f"{seed}.go").exists():
            time.sleep(0.01)


def answer(seed: int, layout: Layout, task: int, folder: Path) -> dict[str, Any]:
    """Return results, or how this worker has failed."""
    from tests.fuzz import one
    from tests.fuzz.program import Program

    folder.mkdir(exist_ok=True)
    try:
        return {"outcome": "equal", "results": one.trial_of(Program.draw(seed, layout), task).rewritten(folder)}
    except Exception as error:
        traceback.print_exc()
        kind = one.outcome_of(error, in_job=True)
        detail = str(error)[:800] if kind == "refused" else traceback.format_exc()[-2500:]
        return {"outcome": kind, "reason": one.masked(error), "detail": detail}


if __name__ == "__main__":
    count, servers = os.environ["FUZZ_LAYOUT"].split(",")
    main([int(seed) for seed in sys.argv[1].split(",")], Layout(int(count), int(servers)), Path(sys.argv[2]))
