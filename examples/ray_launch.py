"""Start a training script on a Ray cluster: one process per node, each with its TF_CONFIG.

    pip install 'autograph-rewrite[ray]'
    python examples/ray_launch.py --workers 2 --config config.yaml train.py --epochs 3

The script runs inside the Ray actor, so Ray shows its output and ends it for certain; files must be where every node
finds them, or below `--working-dir`, which Ray copies. On one machine: `--placement PACK`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from typing import Any


class Member:
    """A process of the job; Ray makes an actor of it."""

    def address(self) -> str:
        """Return where this process can listen: the node's address in the cluster, and a free port."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, environment: dict[str, str], command: list[str]) -> int:
        """Run the script as `autograph-rewrite run` does, and return its exit code."""
        os.environ.update(environment)  # before the package is imported, which reads it
        from autograph_rewrite.tools.cli import main

        return main(["run", *command])


def start(ray: Any, args: argparse.Namespace, restarts: int) -> int:
    """Run the job once; return 0 when all workers ended well, else the exit code of the first that did not."""
    count = args.workers + args.ps
    resources = {"CPU": args.cpus, "GPU": args.gpus}
    group = ray.util.placement_group([resources] * count, strategy=args.placement)
    try:
        ray.get(group.ready(), timeout=args.timeout)
        actor = ray.remote(num_cpus=args.cpus, num_gpus=args.gpus)(Member)
        places = [
            ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            for i in range(count)
        ]
        members = [actor.options(scheduling_strategy=place).remote() for place in places]
        addresses = ray.get([member.address.remote() for member in members])
        cluster = {"worker": addresses[: args.workers], "ps": addresses[args.workers :]}
        tasks = [(job, index) for job, listed in cluster.items() for index in range(len(listed))]
        config = [] if args.config is None else ["--config", args.config]
        runs = {}
        for member, (job, index) in zip(members, tasks, strict=True):
            tf_config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            environment = {"TF_CONFIG": tf_config, "AUTOGRAPH_RESTART": str(restarts)}
            runs[member.run.remote(environment, [*config, args.script, *args.args])] = (job, index)
        return first_failure(ray, runs)
    except ray.exceptions.GetTimeoutError:
        sys.exit(f"the cluster has no room for {count} processes ({args.placement}) within {args.timeout:g} s")
    finally:
        ray.util.remove_placement_group(group)  # and with it every actor that still runs


def first_failure(ray: Any, runs: dict[Any, tuple[str, int]]) -> int:
    """Wait for the workers, and for a failure of anybody; parameter servers end with the last worker."""
    waiting = dict(runs)
    while any(job == "worker" for job, _ in waiting.values()):
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        job, index = waiting.pop(done)
        try:
            code = ray.get(done)
        except ray.exceptions.RayError as error:
            print(f"{job} {index} died: {error}", file=sys.stderr)
            return 1
        if code:
            print(f"{job} {index} failed with exit code {code}", file=sys.stderr)
            return int(code)
    return 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--ps", type=int, default=0, help="parameter servers")
    parser.add_argument("--config", help="a configuration for a script that names none")
    parser.add_argument("--cpus", type=float, default=1, help="of each process")
    parser.add_argument("--gpus", type=float, default=0, help="of each process")
    parser.add_argument("--placement", choices=("STRICT_SPREAD", "SPREAD", "PACK"), default="STRICT_SPREAD")
    parser.add_argument("--working-dir", help="a folder that Ray copies to every node")
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait for room in the cluster")
    parser.add_argument("--restart", type=int, default=0, help="start again after a failure, at most so often")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args()


def main() -> int:
    """Run the job, again after a failure if asked to."""
    args = arguments()
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        sys.exit("Ray is not installed: pip install 'autograph-rewrite[ray]', or pip install ray")
    ray.init(runtime_env={"working_dir": args.working_dir} if args.working_dir else None)
    for restarts in range(args.restart + 1):
        code = start(ray, args, restarts)
        if code == 0:
            return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
