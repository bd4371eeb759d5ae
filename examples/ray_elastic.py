"""Start an elastic job on a Ray cluster: an actor per node, in each of which an agent runs.

    pip install 'autograph-rewrite[ray]'
    python examples/ray_elastic.py --elastic 2:4 --nodes 4 train.py --epochs 3

The first two actors are where the agents meet. An actor whose node is lost is not waited for: the others go on.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from typing import Any


class Host:
    """A host of the job; Ray makes an actor of it."""

    def address(self) -> str:
        """Return the node's address in the cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, token: str, options: list[str]) -> int:
        """Run an agent, and return its exit code; it forks, so it has a process of its own."""
        line = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch", *options]
        return subprocess.run(line, env={**os.environ, "AUTOGRAPH_TOKEN": token}, check=False).returncode


def start(ray: Any, args: argparse.Namespace) -> int:
    """Run the job; return 0 if an agent ended well, which they do together."""
    places = [{"CPU": args.cpus, "GPU": args.gpus}] * args.nodes
    group = ray.util.placement_group(places, strategy=args.placement)
    try:
        ray.get(group.ready(), timeout=args.timeout)
        actor = ray.remote(num_cpus=args.cpus, num_gpus=args.gpus)(Host)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        hosts = [
            actor.options(scheduling_strategy=strategy(group, placement_group_bundle_index=i)).remote()
            for i in range(args.nodes)
        ]
        addresses = ray.get([host.address.remote() for host in hosts])
        meet = ",".join(f"{address}:{args.port + i}" for i, address in enumerate(addresses[:2]))
        options = ["--elastic", args.elastic, "--rdzv-endpoint", meet, "--nproc-per-node", str(args.workers_per_node)]
        options += [] if args.config is None else ["--config", args.config]
        token = secrets.token_hex(16)
        runs = [
            host.run.remote(token, [*options, "--address", address, args.script, *args.args])
            for host, address in zip(hosts, addresses, strict=True)
        ]
        return 0 if any(ended(ray, run) == 0 for run in runs) else 1
    except ray.exceptions.GetTimeoutError:
        sys.exit(f"the cluster has no room for {args.nodes} nodes ({args.placement}) within {args.timeout:g} s")
    finally:
        ray.util.remove_placement_group(group)  # and with it every actor that still runs


def ended(ray: Any, run: Any) -> int:
    """Wait for an agent; return its exit code, or 1 if its node is lost."""
    try:
        return int(ray.get(run))
    except ray.exceptions.RayError as error:
        print(f"a host is lost: {error}", file=sys.stderr)
        return 1


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elastic", metavar="MIN:MAX", required=True, help="workers of all nodes")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--workers-per-node", type=int, default=1)
    parser.add_argument("--config", help="a configuration for a script that names none")
    parser.add_argument("--cpus", type=float, default=1, help="of each node")
    parser.add_argument("--gpus", type=float, default=0, help="of each node")
    parser.add_argument("--port", type=int, default=29400, help="where the agents meet")
    parser.add_argument("--placement", choices=("STRICT_SPREAD", "SPREAD", "PACK"), default="STRICT_SPREAD")
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait for room in the cluster")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args()


def main() -> int:
    """Run the job."""
    args = arguments()
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        sys.exit("Ray is not installed: pip install 'autograph-rewrite[ray]', or pip install ray")
    ray.init()
    return start(ray, args)


if __name__ == "__main__":
    sys.exit(main())
