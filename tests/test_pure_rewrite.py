"""`ar.rewrite` is a compiler: it serves nobody and arms nothing; what makes a process part of its job does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.runtime.job import own_loop, parameter_server
from tests.support.small_items import regression

Run = Callable[..., subprocess.CompletedProcess[str]]
CLUSTER = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
SERVED = {"devices": ["CPU:0"], "strategy": {"name": "PS"}, "timeout_seconds": 7}


class ServedError(Exception):
    """Raised in the place of serving."""


@pytest.fixture
def is_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a parameter server, which raises where it would serve."""

    def served(member: Membership, seconds: float) -> None:
        raise ServedError(member.name, seconds)

    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}))
    monkeypatch.setattr(parameter_server, "serve", served)


@pytest.mark.usefixtures("is_server")
def test_a_server_is_given_the_graph_of_worker_0_and_serves_where_it_opens_a_session() -> None:
    new = ar.rewrite(regression(), SERVED)
    cluster = {"cluster": {"workers": CLUSTER["worker"], "ps": CLUSTER["ps"]}}
    assert new.graph_bytes == ar.rewrite(regression(), SERVED | cluster, task=0).graph_bytes
    with pytest.raises(ServedError) as found:
        new.session()
    assert found.value.args == ("ps 0", 7)


@pytest.mark.usefixtures("is_server")
@pytest.mark.parametrize(
    "joins",
    [
        lambda: ar.join(SERVED),
        lambda: ar.distribute(lambda x: x, SERVED),
        lambda: ar.shard_dataset(None, config=SERVED),
        lambda: ar.distribute_datasets_from_function(lambda _: None, config=SERVED),
        lambda: ar.CheckpointManager(None, "nowhere", config=SERVED),
    ],
    ids=["join", "distribute", "shard_dataset", "distribute_datasets_from_function", "CheckpointManager"],
)
def test_whatever_makes_a_process_part_of_its_job_lets_a_server_serve(joins: Callable[[], Any]) -> None:
    with pytest.raises(ServedError):
        joins()


def test_snapshots_are_armed_where_a_session_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[int] = []
    loop = SimpleNamespace(set_every=armed.append, unique=lambda name: name)
    monkeypatch.setattr(own_loop.OwnLoop, "here", classmethod(lambda _: loop))
    monkeypatch.setattr(own_loop, "is_wanted", lambda: False)
    new = ar.rewrite(regression(), {"devices": ["CPU:0", "CPU:1"], "snapshot_steps": 4})
    assert armed == []
    new.session().close()
    assert armed == [4]


def test_a_rewrite_loads_nothing_that_runs_graphs(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = fresh_python(
        "import sys\n"
        "import autograph_rewrite as ar\n"
        "from tests.support.small_items import regression\n"
        "ar.rewrite(regression(), {'devices': ['CPU:0', 'CPU:1']})\n"
        "print([name for name in sys.modules if name.startswith(('autograph_rewrite.runtime', 'tensorflow'))])\n"
    )
    assert done.stdout == "[]\n", done.stderr
