"""Agents of an elastic job on several hosts, which are addresses of loopback here; each is ended with its workers."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.jobs.programs.fixtures import Jobs, free_ports, until
from tests.jobs.programs.nursery import ROOT, Nursery, Worker

PROGRAM = "tests/jobs/programs/elastic.py"
LIMIT = 200
HEARTBEAT = 0.5


class Hosts:
    """The hosts of one job.

    Args:
        nursery: forks the agents.
        folder: where their output goes, and that of the workers.
        mode: of the program.
        bounds: MIN:MAX workers.
        environ: what the workers find.
    """

    def __init__(self, nursery: Nursery, folder: Path, mode: str, bounds: str, **environ: str) -> None:
        self._jobs, self._folder, self._mode, self._bounds = Jobs(nursery, folder), folder, mode, bounds
        self._port = free_ports(1)[0]
        self._environ = {"AUTOGRAPH_TOKEN": secrets.token_hex(), "PYTHONPATH": str(ROOT), **environ}
        self.agents: list[Worker] = []

    def start(self, number: int, workers: int = 1, *options: str) -> Worker:
        """Start the agent of a host: 127.0.0.NUMBER; hosts 1 and 2 are where they meet."""
        meet = f"127.0.0.1:{self._port},127.0.0.2:{self._port}"
        where = ["--rdzv-endpoint", meet, "--address", f"127.0.0.{number}", "--nproc-per-node", workers]
        line = ["--elastic", self._bounds, "--heartbeat", HEARTBEAT, "--json", "--timeout", LIMIT - 20, *where]
        line += ["--rdzv-timeout", 30, *options, PROGRAM, self._mode, self._folder]
        agent = self._jobs.start("tests/jobs/programs/launch.py", *line, environ=self._environ)
        self.agents.append(agent)
        return agent

    def until_said(self, agent: Worker, words: str) -> None:
        """Wait until something stands in the output of an agent, or of one of its workers."""
        until(lambda: words in agent.output or agent.code is not None, LIMIT)
        assert words in agent.output, agent.output[-4000:]

    def summaries(self, agents: Sequence[Worker]) -> list[dict[str, Any]]:
        """Wait until agents have ended well; return what they say at the end."""
        codes = [agent.wait(LIMIT) for agent in agents]
        assert codes == [0] * len(agents), "\n".join(agent.output[-3000:] for agent in agents)
        assert not [agent for agent in agents if "was destroyed but it is pending" in agent.output], (
            "asyncio's complaint"
        )
        return [summary_of(agent) for agent in agents]

    def end(self) -> None:
        """End whoever is left."""
        for agent in self.agents:
            signal_host(agent, signal.SIGKILL)
        self._jobs.end()


def summary_of(agent: Worker) -> dict[str, Any]:
    """Return what an agent says at the end."""
    found: dict[str, Any] = json.loads(agent.output[agent.output.rindex('{"script"') :].splitlines()[0])
    return found


def signal_host(agent: Worker, number: int) -> None:
    """Send a signal to an agent and its workers: first to the agent, which takes notice of what they get."""
    if agent.code is not None:
        return
    children: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it may just have ended
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, children)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def steps_of_worker_0(agents: Sequence[Worker]) -> set[int]:
    """Return the steps that worker 0 did, on whatever host."""
    return {int(step) for agent in agents for step in re.findall(r"\[worker 0\] did (\d+)", agent.output)}
