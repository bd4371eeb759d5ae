"""Workers with sequences of other lengths compute what one device computes on all of them in their true lengths."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import pytest

from tests.jobs.programs.fixtures import Jobs, ended

LENGTHS = "tests/jobs/programs/lengths.py"
LIMIT = 180
EXACT = ("mean_of_tokens", "mean_of_sums", "attention", "recurrent", "positions", "convolution")
REFUSED = {
    "stores_the_length": "AssignAddVariableOp .*keeps something that depends on the length",
    "divides_by_the_length": "is an output that depends on the length",
    "draws_noise": "RandomUniform",
    "squares_gradients_of_positions": "is exchanged, and its shape may depend on the length",
}
full = pytest.mark.full
KINDS: dict[str, dict[str, str]] = {
    "mirrored": {},
    "two": {"JOB_REPLICAS": "2"},
    "shared": {"JOB_CONFIG": '{"strategy": {"name": "AllReduce", "variables": "shared"}}'},
    "microbatches": {"JOB_CONFIG": '{"microbatches": 2}'},
    "shards": {"JOB_CONFIG": '{"strategy": {"name": "PartitionedAR"}}', "JOB_REPLICAS": "2"},
    "served": {"JOB_STRATEGY": "PSLoadBalancing"},
    "power": {"JOB_CONFIG": '{"padding": "power_of_two"}'},
}


def run(jobs: Jobs, kind: str, *cases: str) -> list[Mapping[str, object]]:
    """Run a job of two workers; return what each has found."""
    arguments = (LENGTHS, jobs.folder, *cases)
    if kind == "served":
        workers, _ = jobs.job_with_servers(2, 1, *arguments, environ=KINDS[kind])
    else:
        workers = jobs.job(2, *arguments, environ=KINDS[kind])
    assert ended(workers, LIMIT) == [0, 0], "\n".join(worker.output[-3000:] for worker in workers)
    return [json.loads((jobs.folder / f"worker{task}.json").read_text()) for task in range(2)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("two", "microbatches") else full) for kind in KINDS]
)
def test_losses_and_variables_are_those_of_one_device(jobs: Jobs, kind: str) -> None:
    for found in run(jobs, kind, *EXACT):
        assert set(found) == set(EXACT)
        assert max(map(float, found.values())) < 1e-12, found  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["power", pytest.param("mirrored", marks=full), pytest.param("served", marks=full)])
def test_outputs_are_padded_with_zeros_to_the_longest_and_session_and_keras_take_other_lengths(
    jobs: Jobs, kind: str
) -> None:
    for found in run(jobs, kind, "outputs", "session", "keras_model"):
        assert found["outputs"] == {"shape": [8, 8 if kind == "power" else 5, 4], "equal": True}
        assert found["session"] < 1e-12
        assert found["keras_model"] < 1e-12


def test_a_program_that_needs_one_length_says_where_and_gets_an_error_with_the_lengths(jobs: Jobs) -> None:
    for found in run(jobs, "mirrored", *REFUSED):
        for name, why in REFUSED.items():
            note, error = found[name]  # type: ignore[misc]
            assert re.search(why, note), note
            assert re.search(r"the length of dimension 1 of '\S+': 3 on worker 0, 5 on worker 1", error), error
