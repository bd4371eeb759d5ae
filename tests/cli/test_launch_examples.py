"""The manifests and scripts for clusters do what they say, as far as that can be seen without a cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autograph_rewrite.cluster.membership import Membership, membership_of
from autograph_rewrite.config.config import Config
from tests.support import recorded_launchers
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
print("joins", any(type(finder).__module__.endswith("join_on_import") for finder in sys.meta_path))
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
    plain = subprocess.run(line, env={**environ, "CONFIG": ""}, capture_output=True, text=True, timeout=30, check=True)
    assert plain.stdout.endswith("autograph-rewrite run train.py --epochs 3 2\n")  # the program's is not asked for
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
    assert lines.count("joins True") == 4
    assert ray_launch(tmp_path, "--workers", "1", "s.py", "0").returncode == 3


def test_the_elastic_job_meets_at_the_names_of_its_first_pods() -> None:
    path = EXAMPLES / "kubernetes" / "elastic-job.yaml"
    service, policy, job = (only(path, kind) for kind in ("Service", "NetworkPolicy", "Job"))
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environ = variables([entry for entry in container["env"] if "value" in entry])
    names = [f"{job['metadata']['name']}-{i}.{service['metadata']['name']}:29400" for i in (0, 1)]
    assert environ["ENDPOINTS"] == ",".join(names)
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environ["WORKERS"].split(":")[1])


def player(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)


def test_an_elastic_slurm_job_meets_on_its_first_two_nodes(tmp_path: Path) -> None:
    player(tmp_path, "scontrol", 'printf "node7\\nnode8\\nnode9\\n"')
    player(tmp_path, "srun", 'echo "$@"; echo "${#AUTOGRAPH_TOKEN}"')
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[7-9]"}
    line = ["bash", str(EXAMPLES / "slurm_elastic.sh"), "train.py", "--epochs", "3"]
    environ |= {"SLURM_JOB_ID": "12345", "WORKERS": "1:3", "CONFIG": "c.yaml"}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=30, check=True)
    said, length = done.stdout.splitlines()
    assert "autograph-rewrite launch --elastic 1:3 --rdzv-endpoint node7:22345,node8:22345 --nproc-per-node 1" in said
    assert said.endswith("--config c.yaml train.py --epochs 3")
    assert length == "32"


PLAIN = """\
import os, sys
import autograph_rewrite as ar
ar.on_resize(lambda done: None)
print("generation", os.environ["AUTOGRAPH_GENERATION"], os.environ["TF_CONFIG"])
"""


@pytest.mark.full
@pytest.mark.parametrize("platform", ["kubernetes", "slurm", "ray"])
def test_agents_that_a_platform_starts_run_one_job(platform: str, tmp_path: Path) -> None:
    """Two processes play the pods, tasks or actors of a platform, with what it would give them."""
    (tmp_path / "s.py").write_text(PLAIN)
    command = f'exec {sys.executable} -m autograph_rewrite.tools.cli "$@"'
    player(tmp_path, "autograph-rewrite", command)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "WORKERS": "2:2", "CONFIG": "all_reduce"}
    if platform == "kubernetes":
        job = only(EXAMPLES / "kubernetes" / "elastic-job.yaml", "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        script = container["args"][0].replace("/app/train.py", "s.py").replace("/app/config.yaml", "all_reduce")
        script = script.replace("exec autograph-rewrite", f"exec {tmp_path / 'autograph-rewrite'}")
        environ |= {"ENDPOINTS": f"127.0.0.1:{port},127.0.0.2:{port}", "AUTOGRAPH_TOKEN": "of a secret, as a file"}
        lines = [[*container["command"], script]] * 2
        environs = [{**environ, "POD_IP": f"127.0.0.{index}"} for index in (1, 2)]
    elif platform == "slurm":
        player(tmp_path, "scontrol", 'printf "127.0.0.1\\n127.0.0.2\\n"')
        tasks = [
            " ".join(f"{name}='{value}'" for name, value in task.items()) + ' "$@" &'
            for task in recorded_launchers.JOBS["sbatch -N2, in it srun"]
        ]
        player(tmp_path, "srun", f"shift 3; {' '.join(tasks)} wait")
        environs = [{**environ, "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "1", "AUTOGRAPH_PORT": str(port)}]
        lines = [["bash", str(EXAMPLES / "slurm_elastic.sh"), "s.py"]]
    else:
        package = tmp_path / "ray"
        (package / "util").mkdir(parents=True)
        threads = RAY.replace("Ref(self.call(*args))", "Pool.submit(self.call, *args)").replace(
            "ref.value", "value(ref)"
        )
        threads = threads.replace("refs.value", "value(refs)")
        pool = "from concurrent.futures import ThreadPoolExecutor\nPool = ThreadPoolExecutor(9)\n"
        pool += "def value(ref): return ref.value if hasattr(ref, 'value') else ref.result()\n"
        (package / "__init__.py").write_text(pool + threads)
        (package / "util" / "__init__.py").write_text(RAY_UTIL.replace("10.0.0.9", "127.0.0.1"))
        (package / "util" / "scheduling_strategies.py").write_text(
            "def PlacementGroupSchedulingStrategy(*_, **__): pass"
        )
        environs = [{**environ, "PYTHONPATH": str(tmp_path)}]
        options = ["--elastic", "2:2", "--nodes", "2", "--port", str(port), "--config", "all_reduce", "s.py"]
        lines = [[sys.executable, str(EXAMPLES / "ray_elastic.py"), *options]]
    played = [
        subprocess.Popen(line, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line, environ in zip(lines, environs, strict=True)
    ]
    said = "".join(process.communicate(timeout=120)[0] for process in played)
    assert [process.returncode for process in played] == [0] * len(played), said
    for rank in (0, 1):
        assert f"[worker {rank}] generation 1" in said, said
