"""Workers that train by themselves and average: the same as models that one process trains apart."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tests.jobs.programs.fixtures import Jobs, ended
from tests.runtime.test_local_sgd import Apart, assert_alike, batches, momentum, network, small_model, train_models

LIMIT = 150


@pytest.mark.parametrize("replicas", [1, 2])
def test_workers_train_apart_and_average(jobs: Jobs, replicas: int) -> None:
    environ = {"JOB_REPLICAS": str(replicas)}
    workers = jobs.job(2, "tests/jobs/programs/local_sgd.py", jobs.folder, environ=environ)
    assert ended(workers, LIMIT) == [0, 0], "\n".join(worker.output[-3000:] for worker in workers)
    found = [pickle.loads((jobs.folder / f"worker{task}.pkl").read_bytes()) for task in range(2)]
    apart = Apart(momentum, 2 * replicas, lambda n: n == 2)
    losses = [apart.step(x, y)["loss"] for x, y in batches(3, 8)]
    one = apart.variables(0), apart.variables(replicas)
    apart.average()
    for task, each in enumerate(found):
        assert_alike(each["function"]["losses"], losses)
        assert_alike(each["function"]["between"], one[task])
        assert_alike(each["function"]["w"], apart.variables())
        assert "sizes" not in each["model"]["edges"]  # nothing but outputs crosses in each step
    graphs = Apart(small_model, 2 * replicas, lambda n: n % 2 == 0)
    for x, y in batches(4, 8):
        graphs.step(x, y)
    models = [network() for _ in range(2 * replicas)]
    x, y = (np.concatenate(parts) for parts in zip(*batches(3, 8), strict=True))
    loss = np.mean(train_models(models, x, y, 3))
    for each in found:
        assert_alike(each["session"]["w"], graphs.variables()[:1])
        assert_alike(each["model"]["w"], models[0].get_weights())
        np.testing.assert_allclose(each["model"]["loss"], [loss], rtol=1e-6)
