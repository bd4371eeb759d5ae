"""Meshes over several processes train as one process does, wherever the model axis lies."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.jobs.programs.fixtures import Jobs, Once, ended
from tests.jobs.programs.nursery import Nursery
from tests.jobs.test_training import error

MODELS = ("mlp", "decoder", "images", "experts")
"""The last one gives tokens places in the whole batch, for which no stage can wait."""
ON_A_SERVER = "slots"
"""A variable stays whole on worker 0, and what an optimizer keeps for it is cut on the model axis."""
SHARDED = "sharded"
"""Blocks of the devices of a replica are in shards over the replicas."""
BETWEEN_STEPS = ("failing", "reading", "dropped", "callbacks")
"""Steps that fail, what each worker reads and writes between two steps, and programs of which one ends early."""
SCRIPT, LIMIT, EXACT = "tests/jobs/programs/mesh.py", 180, 1e-9
MESHES = {
    "the model axis across two processes": (2, "1,1,2,1"),
    "replicas across two processes, the model axis inside": (2, "2,2,2,1"),
    "replicas of two processes each": (4, "1,2,2,1"),
    "replicas, stages and the model axis over two processes": (2, "4,2,2,2"),
    "replicas, stages and the model axis over four processes": (4, "2,2,2,2"),
}
FULL = ("replicas of two processes each", "replicas, stages and the model axis over four processes")


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in MESHES]
)
def test_processes_on_a_mesh_train_as_one_does(once: Once, nursery: Nursery, mesh: str) -> None:
    count, shape = MESHES[mesh]
    models = MODELS if shape.endswith("1") else MODELS[:-1]
    if shape == "2,2,2,1":
        models = (*models, ON_A_SERVER, SHARDED)
    elif shape == "1,2,2,1":
        models = (*models, SHARDED)
    elif shape == "1,1,2,1":
        models = (*models, *BETWEEN_STEPS)

    def start(folder: Path) -> None:
        jobs = Jobs(nursery, folder)
        try:
            single = jobs.start(SCRIPT, ",".join(models), folder)
            workers = jobs.job(count, SCRIPT, ",".join(models), folder, environ={"JOB_MESH": shape})
            codes = ended([single, *workers], LIMIT)
            assert set(codes) == {0}, "\n".join(worker.output[-4000:] for worker in (single, *workers))
        finally:
            jobs.end()

    folder = once(f"mesh_{count}_{shape}", start)
    found = {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pkl")}
    expected = found.pop("single")
    assert len(found) == count
    for task, got in found.items():
        for model in models:
            wanted = expected[model].items()
            worst = {name: e for name, value in wanted if not (e := error(got[model][name], value)) <= EXACT}
            assert not worst, (task, model)
            if shape.endswith("1") and model in ("mlp", "decoder", "images"):
                assert got[model]["collectives"] > 0, "whole values are on the first device only"
