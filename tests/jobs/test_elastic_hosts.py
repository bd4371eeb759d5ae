"""Elastic jobs on several hosts: whichever host is lost, the others go on, and training comes to the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.programs.fixtures import Once
from tests.jobs.programs.hosts import HEARTBEAT, LIMIT, Hosts, signal_host, steps_of_worker_0
from tests.jobs.programs.nursery import Nursery
from tests.jobs.test_elastic import EVERY, STEPS, assert_same, undisturbed


@pytest.fixture
def hosts(nursery: Nursery, tmp_path: Path) -> Iterator[Hosts]:
    """Return three hosts that train in a session."""
    made = Hosts(nursery, tmp_path, "session", "1:3", PAUSE="0.2")
    yield made
    made.end()


def test_the_first_host_is_lost_and_the_second_goes_on_from_its_copy(
    hosts: Hosts, tmp_path: Path, once: Once, nursery: Nursery
) -> None:
    first, second, third = (hosts.start(number) for number in (1, 2, 3))
    hosts.until_said(first, "[worker 0] did 10\n")
    signal_host(first, signal.SIGKILL)
    summaries = hosts.summaries([second, third])
    expected = undisturbed(once, nursery, "session")
    for summary in summaries:
        assert [generation["workers"] for generation in summary["generations"]] == [3, 2]
        assert "host 127.0.0.1" in summary["generations"][0]["why"]
    for rank in range(2):
        assert_same(tmp_path / f"worker{rank}.npz", expected)
    assert steps_of_worker_0([first, second, third]) == set(STEPS["session"])
    again = min(steps_of_worker_0([second, third]))
    assert 10 + 2 - again <= EVERY + 1, "at most so many steps are repeated"


def test_a_host_that_was_stopped_is_expelled_and_comes_back_as_a_new_one(
    hosts: Hosts, tmp_path: Path, once: Once, nursery: Nursery
) -> None:
    first, second, third = (hosts.start(number) for number in (1, 2, 3))
    hosts.until_said(second, "] did 5\n")
    signal_host(second, signal.SIGSTOP)
    hosts.until_said(first, "generation 2 goes on")
    signal_host(second, signal.SIGCONT)
    summaries = hosts.summaries([first, second, third])
    expected = undisturbed(once, nursery, "session")
    why = summaries[0]["generations"][0]["why"]
    assert "127.0.0.2" in why
    assert "no sign of life" in why
    assert float(why.split(" for ")[1].split()[0]) < 3 * HEARTBEAT + 1.5
    assert_same(tmp_path / "worker0.npz", expected)
    assert [generation["number"] for generation in summaries[1]["generations"]][:1] == [1]
    assert "the others went on without this host" in second.output


@pytest.mark.full
@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize(
    ("mode", "strategy", "options"),
    [
        ("fit", "AllReduce", ()),
        ("fit", "FSDP", ()),
        ("function", "FSDP", ()),
        ("function", "Pipeline", ()),
        ("session", "PSLoadBalancing", ("--ps", "1")),
        ("fit", "PartitionedPS", ("--ps", "1")),
    ],
)
def test_every_kind_of_job_outlives_the_loss_of_a_host(
    mode: str, strategy: str, options: tuple[str, ...], lost: int, tmp_path: Path, once: Once, nursery: Nursery
) -> None:
    hosts = Hosts(nursery, tmp_path, mode, "2:2", PAUSE="0.3", STRATEGY=strategy)
    try:
        agents = [hosts.start(number, 1, *options) for number in (1, 2)]
        hosts.until_said(agents[0], "[worker 0] memory")
        agents.append(hosts.start(3, 1, *options))  # it stands by
        victim = agents[lost - 1]
        hosts.until_said(agents[0], "[worker 0] did 10\n")
        signal_host(victim, signal.SIGKILL)
        left = [agent for agent in agents if agent is not victim]
        summaries = hosts.summaries(left)
    finally:
        hosts.end()
    for summary in summaries:
        assert [generation["workers"] for generation in summary["generations"]][-1] == 2
    for rank in range(2):
        assert_same(tmp_path / f"worker{rank}.npz", undisturbed(once, nursery, mode))
    assert steps_of_worker_0(agents) == set(STEPS[mode])


@pytest.mark.full
def test_of_two_hosts_the_second_says_why_it_gives_up_when_the_first_is_silent(
    nursery: Nursery, tmp_path: Path
) -> None:
    hosts = Hosts(nursery, tmp_path, "session", "1:2", PAUSE="0.2")
    try:
        first, second = hosts.start(1), hosts.start(2, 1, "--rdzv-timeout", "4")
        hosts.until_said(second, "] did 5\n")
        signal_host(first, signal.SIGSTOP)
        assert second.wait(LIMIT) == 1, second.output[-3000:]
    finally:
        hosts.end()
    said = second.output
    assert "[launch] host 127.0.0.1:" in said
    assert "has given no sign of life for" in said
    assert "only 1 of 2 hosts reach each other, and the others may have gone on without this one" in said
    assert "gives up after 4 s (--rdzv-timeout)" in said
