"""Random programs as jobs: ten in one job of two or three workers, each compared with one process, which is this one.

The programs of seeds 20 to 29 are job 2; its number decides on the workers and servers. What does not come out equal,
or refused by all workers alike, ends the job, and another one goes on behind it. A bad program is tried once more in a
job of its own, so that it is known whether it takes the programs before it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.fuzz import many, one
from tests.fuzz.configurations import Layout
from tests.fuzz.one import AnswerError, Outcome, Results, Trial
from tests.fuzz.program import Program
from tests.fuzz.words import BAD
from tests.jobs.programs.fixtures import Jobs
from tests.jobs.programs.nursery import ROOT, Nursery, Worker

SEEDS_PER_JOB = 10
LIMIT_SECONDS, LEAST_WORK, MOST_SPANS = 90.0, 0.1, 5
"""A program has another span of so many seconds if its processes have worked a tenth of the last one: on a busy machine
some take long, and those that wait for each other do not work."""
SCRIPT = ROOT / "tests/fuzz/job_worker.py"


def run_jobs(seeds: Sequence[int], out: Path, say: Any = print) -> list[dict[str, Any]]:
    """Run seeds that `out` does not have yet; return all outcomes in it."""
    known = {line["seed"] for line in many.read(out)} if out.exists() else set()
    left = [seed for seed in seeds if seed not in known]
    with Nursery() as nursery:
        nursery.wait(many.START_SECONDS)
        for outcome in outcomes(left, nursery):
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome.as_dict()) + "\n")
            if outcome.outcome in BAD:
                say(f"{outcome.seed}: {outcome.outcome}: {outcome.reason}", flush=True)
    return many.read(out)


def outcomes(seeds: Sequence[int], nursery: Nursery) -> Iterator[Outcome]:
    """Yield how seeds come out, ten in one job."""
    for _, group in groupby(sorted(seeds), lambda seed: seed // SEEDS_PER_JOB):
        left, done = list(group), []
        while left:
            for outcome in one_job(tuple(left), nursery):
                done.append(left.pop(0))
                if outcome.outcome in BAD and len(done) > 1:
                    (alone,) = one_job([outcome.seed], nursery)
                    if alone.outcome != outcome.outcome:
                        seeds_before = ",".join(map(str, done))
                        reason = f"{outcome.reason} (alone it is {alone.outcome}: run --seeds {seeds_before})"
                        outcome = replace(outcome, reason=reason)
                yield outcome


def one_job(seeds: Sequence[int], nursery: Nursery) -> Iterator[Outcome]:
    """Yield how seeds come out in one job, up to the first that leaves its workers apart."""
    layout = Layout.draw(seeds[0] // SEEDS_PER_JOB)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = Jobs(nursery, folder)
        given = (SCRIPT, ",".join(map(str, seeds)), folder)
        environ = {"FUZZ_LAYOUT": f"{layout.workers},{layout.servers}", "PYTHONPATH": str(ROOT)}
        try:
            if layout.servers:
                workers, servers = jobs.job_with_servers(layout.workers, layout.servers, *given, environ=environ)
            else:
                workers, servers = jobs.job(layout.workers, *given, environ=environ), []
            for seed in seeds:
                answers = Answers(seed, folder, workers, servers)
                yield one.judged(Program.draw(seed, layout), answers.results)
                if not answers.is_clean:
                    return
                (folder / f"{seed}.go").touch()
        finally:
            jobs.end()


class Answers:
    """What the workers of a job say about one program.

    Attributes:
        is_clean: all have trained it, or refused it alike, so that the same job can go on with another.
    """

    def __init__(self, seed: int, folder: Path, workers: Sequence[Worker], servers: Sequence[Worker]) -> None:
        self._paths = [folder / f"{seed}.{task}.pkl" for task in range(len(workers))]
        self._saved, self._processes = folder / f"{seed}", [*workers, *servers]
        self.is_clean = False

    def results(self, trial: Trial) -> Iterator[Results]:
        """Yield the results of each worker, and those of whoever goes on from the checkpoint that they have left.

        Raises:
            AnswerError: a worker has none.
        """
        self._wait()
        found = [pickle.loads(path.read_bytes()) for path in self._paths]
        bad = [(task, answer) for task, answer in enumerate(found) if answer["outcome"] != "equal"]
        if not bad:
            self.is_clean = True
            yield from (answer["results"] for answer in found)
            if trial.resumed is not None:
                yield found[0]["results"] | trial.resumed(self._saved)
            return
        task, worst = max(bad, key=lambda one: ("refused", "hang", "crash").index(one[1]["outcome"]))
        kind, reason = worst["outcome"], worst["reason"]
        self.is_clean = kind == "refused" and len({answer.get("reason") for answer in found}) == 1
        if kind == "refused" and not self.is_clean:
            kind, reason = "crash", f"refused by worker {task}, but not by all alike: {reason}"
        raise AnswerError(kind, reason, f"worker {task}: {worst['detail']}")

    def _wait(self) -> None:
        """Wait for all answers, also after one is bad: it may be the one that the others were waiting for."""
        end, spans, worked = time.monotonic() + LIMIT_SECONDS, 1, self._work()
        while missing := [path for path in self._paths if not path.exists()]:
            gone = [process for process in self._processes if process.code is not None]
            if gone:
                said = gone[0].output[-2500:]
                raise AnswerError("crash", f"a process died: exit code {gone[0].code}", said)
            if time.monotonic() > end:
                if self._work() - worked > LEAST_WORK * LIMIT_SECONDS and spans < MOST_SPANS:
                    end, spans, worked = time.monotonic() + LIMIT_SECONDS, spans + 1, self._work()
                    continue
                for process in self._processes:
                    process.kill(signal.SIGUSR1)
                time.sleep(1)
                said = [f"{len(missing)} do not answer", *(process.output[-2500:] for process in self._processes)]
                raise AnswerError("hang", f"no end after {spans * LIMIT_SECONDS:.0f} s", "\n".join(said))
            time.sleep(0.01)

    def _work(self) -> float:
        """Return for how many seconds processors have worked for the processes that still run."""
        total = 0
        for process in self._processes:
            with suppress(OSError):  # it has ended
                total += sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        return total / os.sysconf("SC_CLK_TCK")
