"""`verify` for a cluster: the graphs of all processes fit together, and their replicas compute what one device does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.check.verify import in_one_process
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.tools import cli
from tests.support.rank_jobs import item_of
from tests.support.small_items import regression

YAML = "devices: [CPU:0]\ncluster: {workers: ['127.0.0.1:1', '127.0.0.1:2']}\nstrategy: {name: AllReduce}\n"


def cluster(workers: int, devices: int = 1, **strategy: Any) -> dict[str, Any]:
    return {
        "devices": [f"CPU:{i}" for i in range(devices)],
        "cluster": {"workers": [f"127.0.0.1:{i + 1}" for i in range(workers)]},
        "strategy": {"name": "AllReduce", **strategy},
    }


@pytest.mark.parametrize(("workers", "devices", "mode"), [(2, 1, "mirrored"), (3, 1, "shared"), (2, 2, "mirrored")])
def test_the_graphs_of_a_cluster_fit_and_their_replicas_compute_the_same(workers: int, devices: int, mode: str) -> None:
    report = ar.verify(item_of("mlp"), cluster(workers, devices, variables=mode))
    assert report.ok, str(report)
    assert report.notes[0].startswith(f"the graphs of {workers} processes fit together (")
    assert f"their {workers * devices} replicas in one process" in report.notes[0]
    assert len(report.config["devices"]) == workers * devices
    assert report.config["devices"][-1].startswith(f"/job:worker/replica:0/task:{workers - 1}/")


def test_a_plan_for_a_cluster_is_verified_as_well() -> None:
    item = regression()
    report = ar.verify(item, ar.build_plan(item, cluster(2)))
    assert report.ok
    assert "2 processes fit together" in str(report)


def test_a_plan_for_this_process_stays_as_it_is() -> None:
    plan = ar.build_plan(regression(), {"devices": ["CPU:0", "CPU:1"]})
    assert in_one_process(plan) is plan


def test_the_command_line_says_whether_they_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    regression().save("item.ar")
    Path("cluster.yaml").write_text(YAML)
    assert cli.main(["verify", "item.ar", "--config", "cluster.yaml"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ok: 3 values agree")
    assert "note: the graphs of 2 processes fit together (3 collectives with 6 members)" in printed


def test_graphs_that_do_not_fit_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = pass_pipeline.rewrite

    def spoilt(request: Request, **options: Any) -> GraphItem:
        new = rewrite(request, **options)
        if request.task == 1:
            graph = new.graph.clone()
            graph.node("replica_0/gradient/all_reduce").set_attr("merge_op", b"Max")
            new = replace(new, source=graph)
        return new

    monkeypatch.setattr(pass_pipeline, "rewrite", spoilt)
    monkeypatch.chdir(tmp_path)
    item = regression()
    with pytest.raises(VerifyError, match=r"'merge_op'.* of rank 0.*of rank 1") as caught:
        ar.verify(item, cluster(2))
    assert caught.value.hint is not None
    item.save("item.ar")
    Path("cluster.yaml").write_text(YAML)
    assert cli.main(["verify", "item.ar", "--config", "cluster.yaml"]) != 0
    assert "'Max' at 'replica_0/gradient/all_reduce' of rank 1" in capsys.readouterr().err


def test_a_plan_made_by_hand_keeps_its_edges_when_the_ranks_are_checked() -> None:
    item = regression()
    plan = ar.build_plan(item, cluster(2))
    other = tuple(replace(edge, instance_key=edge.instance_key + 1) for edge in plan.edges)
    report = ar.verify(item, replace(plan, edges=other))
    assert report.ok
