"""Three hosts of an elastic job that are network namespaces, one of which is cut off: `partition.py OUT`, as root.

    bridge ── 10.77.0.1 (host 1) ── 10.77.0.2 (host 2) ── 10.77.0.3 (host 3)        the link of one is set down, and up

CUT says which host (1), HEAL after how many seconds its link is up again (never); MODE how the job trains (session),
STRATEGY by which strategy, MIN how many workers there are at least (1; with 2 the third host stands by until another is
lost), and OPTIONS what else agents are told (--ps 1). What training comes to is compared with the undisturbed program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
PROGRAM = "tests/jobs/programs/elastic.py"
CUT, HEAL = int(os.environ.get("CUT", "1")), float(os.environ.get("HEAL", "0"))
MODE, OPTIONS = os.environ.get("MODE", "session"), os.environ.get("OPTIONS", "").split()
MIN = int(os.environ.get("MIN", "1"))
COUNT, LIMIT, TICK, EXACT = 3, 150, 0.05, 1e-9


def ip(*words: str) -> None:
    """Configure the network."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def made() -> None:
    """Make the hosts."""
    ip("link", "add", "agbr", "type", "bridge")
    ip("link", "set", "agbr", "up")
    for host in range(1, COUNT + 1):
        ip("netns", "add", f"ag{host}")
        ip("link", "add", f"agv{host}", "type", "veth", "peer", "name", "eth0", "netns", f"ag{host}")
        ip("link", "set", f"agv{host}", "master", "agbr", "up")
        for line in (f"addr add 10.77.0.{host}/24 dev eth0", "link set eth0 up", "link set lo up"):
            ip("-n", f"ag{host}", *line.split())


def removed() -> None:
    """Remove the hosts, and whoever still runs there."""
    for host in range(1, COUNT + 1):
        found = subprocess.run(["ip", "netns", "pids", f"ag{host}"], check=False, capture_output=True, text=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", f"ag{host}"], check=False, capture_output=True)
    for link in ("agbr", *(f"agv{host}" for host in range(1, COUNT + 1))):
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def agent(host: int, out: Path) -> subprocess.Popen[bytes]:
    """Start the agent of a host."""
    meet = "10.77.0.1:29400,10.77.0.2:29400"
    most = COUNT if MIN == 1 else MIN
    line = [
        "--elastic",
        f"{MIN}:{most}",
        "--heartbeat",
        "1",
        "--json",
        "--timeout",
        str(LIMIT),
        "--rdzv-endpoint",
        meet,
    ]
    line += [
        "--address",
        f"10.77.0.{host}",
        "--nproc-per-node",
        "1",
        "--rdzv-timeout",
        "15",
        *OPTIONS,
        PROGRAM,
        MODE,
        str(out),
    ]
    environ = {**os.environ, "AUTOGRAPH_TOKEN": "of-this-job-only", "PYTHONPATH": str(ROOT), "PAUSE": "0.4"}
    with open(out / f"host{host}.log", "wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", f"ag{host}", sys.executable, "tests/jobs/programs/launch.py", *line],
            env=environ,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )


def said(out: Path, host: int) -> str:
    """Return what a host has written."""
    return (out / f"host{host}.log").read_text(errors="replace")


def until(out: Path, host: int, words: str) -> float:
    """Wait until a host has said something; return when."""
    end = time.monotonic() + LIMIT
    while words not in said(out, host):
        assert time.monotonic() < end, said(out, host)[-3000:]
        time.sleep(TICK)
    return time.monotonic()


def difference(out: Path) -> float:
    """Return by how much what the workers came to differs from what one process does."""
    alone = out / "alone"
    alone.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOGRAPH_", "STRATEGY"))}
    command = [sys.executable, PROGRAM, MODE, str(alone)]
    subprocess.run(
        command, check=True, capture_output=True, timeout=LIMIT, cwd=ROOT, env=environ | {"PYTHONPATH": str(ROOT)}
    )
    (path,) = alone.glob("*.npz")
    with np.load(path) as expected:
        worst = 0.0
        for each in out.glob("worker*.npz"):
            with np.load(each) as found:
                assert set(found) == set(expected)
                worst = max(worst, *(float(np.abs(found[name] - expected[name]).max()) for name in expected))
    assert worst < EXACT, worst
    return worst


def main(out: Path) -> None:
    """Cut one host off; print what became of each."""
    removed()
    made()
    try:
        first = range(1, COUNT + 1 if MIN == 1 else MIN + 1)
        agents = [agent(host, out) for host in first]
        if MIN > 1:
            until(out, 1, "[worker 0] memory")
            agents.append(agent(COUNT, out))  # it stands by
        other = 2 if CUT == 1 else 1
        until(out, other, "] did 8\n")
        cut = time.monotonic()
        ip("link", "set", f"agv{CUT}", "down")
        print(f"named after {until(out, other, 'generation 2 goes on') - cut:.1f} s")
        if HEAL:
            time.sleep(max(0.0, cut + HEAL - time.monotonic()))
            ip("link", "set", f"agv{CUT}", "up")
        for host, process in enumerate(agents, 1):
            code = process.wait(LIMIT)
            text = said(out, host)
            summary = json.loads(text[text.rindex('{"script"') :].splitlines()[0])
            found = [(g["number"], g["workers"], g["to_first_step"], g["why"]) for g in summary["generations"]]
            print(f"host {host}: exit code {code}", found)
        print(f"largest difference from the undisturbed program: {difference(out):.1e}")
    finally:
        removed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
