"""The manifests and scripts for clusters do what they say, as far as that can be seen without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autograph_rewrite.cluster.membership import Membership, membership_of
from autograph_rewrite.config.config import Config
from tests.support.paths import EXAMPLES

MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
RAY = """\
import types
class Ref:
    def __init__(self, value): self.value = value
class Method:
    def __init__(self, call): self.call = call
    def remote(self, *args): return Ref(self.call(*args))
class Handle:
    def __init__(self, actor): self.actor = actor
    def __getattr__(self, name): return Method(getattr(self.actor, name))
class Actor:
    def __init__(self, kind): self.kind = kind
    def options(self, **_): return self
    def remote(self): return Handle(self.kind())
class Group:
    def ready(self): return Ref(None)
class RayError(Exception): pass
exceptions = types.SimpleNamespace(RayError=RayError, GetTimeoutError=TimeoutError)
def init(**_): pass
def remote(**_): return Actor
def get(refs, timeout=None): return [ref.value for ref in refs] if isinstance(refs, list) else refs.value
def wait(refs, num_returns): return refs[:1], refs[1:]
"""
RAY_UTIL = """\
from ray import Group
def get_node_ip_address(): return "10.0.0.9"
def placement_group(bundles, strategy):
    print(strategy, len(bundles))
    return Group()
def remove_placement_group(group): print("removed")
"""
SCRIPT = """\
import os, sys
print(os.environ["TF_CONFIG"])
print(sys.argv, os.environ["AUTOGRAPH_RESTART"])
sys.exit(3 * (os.environ["AUTOGRAPH_RESTART"] == sys.argv[1]))
"""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def only(path: Path, kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents(path) if document["kind"] == kind)
    return found


def variables(listed: list[dict[str, str]]) -> dict[str, str]:
    assert all(isinstance(entry["value"], str) for entry in listed)  # Kubernetes takes nothing else
    return {entry["name"]: entry["value"] for entry in listed}


def member_of_pod(container: dict[str, Any], environ: dict[str, str], index: int, folder: Path) -> Membership | None:
    """Run a container's script with a program in place of ours that shows TF_CONFIG; return what we read from that."""
    program = folder / "autograph-rewrite"
    program.write_text('#!/bin/sh\necho "$TF_CONFIG"\n')
    program.chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={**environ, "JOB_COMPLETION_INDEX": str(index), "PATH": path},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return membership_of(Config(), {"TF_CONFIG": done.stdout})


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_manifest_is_yaml_and_says_what_it_is(path: Path) -> None:
    assert documents(path)
    for document in documents(path):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)


def test_the_parts_of_the_indexed_job_fit_each_other() -> None:
    path = EXAMPLES / "kubernetes" / "indexed-job.yaml"
    service, policy, job = (only(path, kind) for kind in ("Service", "NetworkPolicy", "Job"))
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environ = variables(container["env"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] == environ["SERVICE"]
    assert environ["PODS"] == job["metadata"]["name"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    count = int(environ["WORKERS"]) + int(environ["SERVERS"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == count
    (rule,) = job["spec"]["successPolicy"]["rules"]
    assert rule["succeededIndexes"] == f"0-{int(environ['WORKERS']) - 1}"


@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (2, 1)])
def test_the_indexed_job_tells_every_pod_who_it_is(tmp_path: Path, workers: int, servers: int) -> None:
    job = only(EXAMPLES / "kubernetes" / "indexed-job.yaml", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environ = {**variables(container["env"]), "WORKERS": str(workers), "SERVERS": str(servers)}
    hosts = tuple(f"train-{i}.train:2222" for i in range(workers + servers))
    for i in range(workers + servers):
        job_name, task = ("worker", i) if i < workers else ("ps", i - workers)
        expected = Membership(hosts[:workers], hosts[workers:], job_name, task)  # type: ignore[arg-type]
        assert member_of_pod(container, environ, i, tmp_path) == expected


def test_the_trainjob_tells_every_pod_who_it_is(tmp_path: Path) -> None:
    path = EXAMPLES / "kubernetes" / "trainjob.yaml"
    runtime, job = only(path, "TrainingRuntime"), only(path, "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    environ = variables(job["spec"]["trainer"]["env"])
    assert environ == {"TRAINJOB": job["metadata"]["name"], "WORKERS": str(job["spec"]["trainer"]["numNodes"])}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    hosts = ("train-node-0-0.train:2222", "train-node-0-1.train:2222")
    assert member_of_pod(container, environ, 1, tmp_path) == Membership(hosts, (), "worker", 1)


def test_the_slurm_script_starts_the_step_again_after_a_failure(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@" $AUTOGRAPH_RESTART\n[ "$AUTOGRAPH_RESTART" -eq 2 ]\n')
    srun.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG": "c.yaml"}
    line = ["bash", str(EXAMPLES / "slurm.sh"), "train.py", "--epochs", "3"]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=30, check=True)
    assert len(done.stdout.splitlines()) == 3
    assert done.stdout.endswith("--cpu-bind=cores autograph-rewrite run --config c.yaml train.py --epochs 3 2\n")
    srun.write_text("#!/bin/sh\nexit 1\n")
    assert subprocess.run(line, env=environ, capture_output=True, timeout=30, check=False).returncode == 1


def ray_launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    line = [sys.executable, str(EXAMPLES / "ray_launch.py"), *arguments]
    return subprocess.run(line, env=environ, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_ray_launcher_says_how_to_get_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(name='ray')")
    done = ray_launch(tmp_path, "--workers", "2", "s.py")
    assert done.returncode == 1
    assert "pip install 'autograph-rewrite[ray]'" in done.stderr


def test_the_ray_launcher_gives_each_process_its_place_and_starts_again(tmp_path: Path) -> None:
    """On a stand-in for Ray that runs everything at once, in turn."""
    package = tmp_path / "ray"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text(RAY)
    (package / "util" / "__init__.py").write_text(RAY_UTIL)
    (package / "util" / "scheduling_strategies.py").write_text("def PlacementGroupSchedulingStrategy(*_, **__): pass")
    (tmp_path / "s.py").write_text(SCRIPT)
    done = ray_launch(tmp_path, "--workers", "2", "--restart", "1", "s.py", "0")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "worker 0 failed with exit code 3\n"
    lines = done.stdout.splitlines()
    assert lines.count("STRICT_SPREAD 2") == lines.count("removed") == 2
    members = [membership_of(Config(), {"TF_CONFIG": line}) for line in lines if line.startswith("{")]
    assert [member.name for member in members if member] == ["worker 0", "worker 1"] * 2
    assert all(json.loads(line)["cluster"]["ps"] == [] for line in lines if line.startswith("{"))
    assert lines.count("['s.py', '0'] 1") == 2
    assert ray_launch(tmp_path, "--workers", "1", "s.py", "0").returncode == 3
