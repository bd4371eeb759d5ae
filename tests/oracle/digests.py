"""Whether a change of the code leaves every rewritten graph and every resolved plan as they were, byte by byte.

python -m tests.oracle.digests record     before: the items as files, and the digest of what each rewrite gives
python -m tests.oracle.digests compare    after: the same files again; exit code 1, and a line for each difference
python -m tests.oracle.digests compare --only transformer --jobs 2

Attributes that tell which pass made a node are left out of the digest: passes may be divided and renamed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = Path("build/golden_digests")
DIGESTS = "digests.json"
PORTS = [f"127.0.0.1:{port}" for port in (1, 2, 3)]


def configurations() -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield a name, a configuration and the number of ranks that each make a graph of it."""
    from tests.seeded_mistakes.draws import CONFIGS

    for name, config in CONFIGS.items():
        yield name, config, 1
    yield "random_axis2", _strategy("RandomAxisPartitionAR", 2), 1
    yield "uneven_ps3", _strategy("UnevenPartitionedPS", 3), 1
    yield "auto2", _strategy("Auto", 2), 1
    yield "mirrored_job", _job("AllReduce", 1, workers=2), 2
    yield "mirrored_job_2x2", _job("AllReduce", 2, workers=2), 2
    yield "shared_job_2x2", _job("AllReduce", 2, workers=2, variables="shared"), 2
    yield "fsdp_job", _job("FSDP", 1, workers=2), 2
    yield "partitioned_ar_job", _job("PartitionedAR", 1, workers=3), 3
    yield "ps_job", _job("PS", 1, workers=2, servers=1), 2
    yield "balanced_job", _job("PSLoadBalancing", 2, workers=3, servers=2), 3
    yield "parallax_job", _job("Parallax", 1, workers=3, servers=2), 3
    yield "compressed_job", _job("AllReduce", 1, workers=2, compressor="powersgd"), 2


def _strategy(name: str, replicas: int) -> dict[str, Any]:
    return {"devices": [f"CPU:{i}" for i in range(replicas)], "strategy": {"name": name}}


def _job(name: str, replicas: int, *, workers: int, servers: int = 0, **strategy: Any) -> dict[str, Any]:
    cluster = {"workers": PORTS[:workers]} | (
        {"ps": [f"127.0.0.1:{10 + i}" for i in range(servers)]} if servers else {}
    )
    settings = _strategy(name, replicas)
    return {**settings, "cluster": cluster, "strategy": settings["strategy"] | strategy}


def make_items(folder: Path) -> None:
    """Write the zoo as files: what tracing names differently the next time would hide a difference, or be one."""
    from autograph_rewrite.runtime.function.session_step import stand_alone
    from tests.support.rank_jobs import EXTRA, item_of
    from tests.support.staged import MODELS, staged_item
    from tests.zoo import ZOO

    folder.mkdir(parents=True, exist_ok=True)
    for name in (*ZOO, *EXTRA):
        item = item_of(name)
        (stand_alone(item) if item.binding is not None else item).save(folder / f"{name}.ar")
    for name, model in MODELS.items():
        item, cuts = staged_item(model)
        item.save(folder / f"staged_{name}.ar")
        (folder / f"staged_{name}.json").write_text(json.dumps(cuts))


def digests(file: Path) -> dict[str, str]:
    """Return the digest of every rewrite of an item's file, or the error that it ends with."""
    import autograph_rewrite as ar

    item = ar.GraphItem.load(file)
    cuts = file.with_suffix(".json")
    found = {}
    for name, config, ranks in pipelines(json.loads(cuts.read_text())) if cuts.exists() else configurations():
        for rank in range(ranks):
            try:
                new = ar.rewrite(item, dict(config), task=rank if ranks > 1 else None)
            except ar.RewriteError as error:
                found[f"{file.stem} {name} {rank}"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            digest = hashlib.sha256(_without_provenance(new.graph_bytes))
            digest.update(new.report.plan.to_yaml().encode())
            found[f"{file.stem} {name} {rank}"] = digest.hexdigest()[:24]
    return found


def pipelines(cuts: list[str]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield the configurations of a model with boundaries."""
    for schedule in ("gpipe", "1f1b"):
        pipeline = {"stages": len(cuts) + 1, "microbatches": 4, "boundaries": cuts, "schedule": schedule}
        yield schedule, {"devices": ["CPU:0"], "pipeline": pipeline}, 1
    pipeline = {"stages": 2, "microbatches": 4, "boundaries": cuts[:1], "form": "loop"}
    yield "loop", {"devices": ["CPU:0"], "pipeline": pipeline}, 1
    pipeline = {"stages": 2, "microbatches": 2, "boundaries": cuts[:1]}
    hosts = {"devices": ["CPU:0"], "cluster": {"workers": PORTS[:2]}, "strategy": {"name": "Pipeline"}}
    yield "hosts", {**hosts, "pipeline": pipeline}, 2


def _without_provenance(graph: bytes) -> bytes:
    from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR
    from autograph_rewrite.ir.types.protos import proto

    parsed = proto("GraphDef").FromString(graph)
    for node in parsed.node:
        for key in (PASS_ATTR, ORIGIN_ATTR):
            node.attr.pop(key, None)
    return bytes(parsed.SerializeToString(deterministic=True))


def all_digests(folder: Path, only: str, jobs: int) -> dict[str, str]:
    """Return the digests of all items of a folder."""
    files = sorted(file for file in folder.glob("*.ar") if only in file.stem)
    with ProcessPoolExecutor(jobs) as pool:
        return {name: digest for found in pool.map(digests, files) for name, digest in found.items()}


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.digests")
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--only", default="", help="items with this text in their name")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    kept = options.folder / DIGESTS
    if options.verb == "record":
        make_items(options.folder)
        found = all_digests(options.folder, "", options.jobs)
        kept.write_text(json.dumps(found, indent=1, sort_keys=True))
        refused = sum(":" in digest for digest in found.values())
        print(f"{len(found)} rewrites recorded, {refused} of them refusals")
        return 0
    wanted = {name: digest for name, digest in json.loads(kept.read_text()).items() if options.only in name.split()[0]}
    found = all_digests(options.folder, options.only, options.jobs)
    differing = [name for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]
    for name in differing:
        print(f"{name}: {wanted.get(name)} before, {found.get(name)} now")
    print(f"{len(found)} rewrites compared, {len(differing)} differ")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
