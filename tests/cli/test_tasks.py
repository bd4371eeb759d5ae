"""`rewrite --task K`: the graph of one worker, written anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from autograph_rewrite.item import GraphItem
from autograph_rewrite.tools import cli
from tests.support.small_items import regression

CONFIG = "cluster: {workers: ['127.0.0.1:1', '127.0.0.1:2']}\ndevices: [CPU:0]\nstrategy: {name: AllReduce}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    regression().save("item.ar")
    Path("config.yaml").write_text(CONFIG)


def test_each_worker_gets_its_own_graph() -> None:
    for task in range(2):
        assert cli.main(f"rewrite item.ar --config config.yaml --task {task} -o worker{task}.ar".split()) == 0
    devices = [{node.device for node in GraphItem.load(f"worker{task}.ar").graph} - {""} for task in range(2)]
    assert devices == [{f"/job:worker/replica:0/task:{task}/device:CPU:0"} for task in range(2)]


def test_a_worker_that_the_cluster_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rewrite", "item.ar", "--config", "config.yaml", "--task", "2", "-o", "worker.ar"]) == 2
    assert "there is no worker 2: the plan has 2" in capsys.readouterr().err
    assert not Path("worker.ar").exists()


def test_without_a_task_nothing_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rewrite", "item.ar", "--config", "config.yaml", "-o", "worker.ar"]) == 2
    assert "nothing says which of them this is" in capsys.readouterr().err
