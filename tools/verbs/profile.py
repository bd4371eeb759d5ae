"""`profile SCRIPT`: run a script as `run` or `launch` does, and show where the time of some of its steps went.

The first distributed function, Keras model or session that trains is measured on every rank. Each process writes its
trace into a folder; this verb combines the traces by one clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from autograph_rewrite.errors import GraphError
from autograph_rewrite.tools.launcher.script import add_script, at_least, in_environment, require_script
from autograph_rewrite.tools.verbs import launch
from autograph_rewrite.tools.verbs import run as run_verb

if TYPE_CHECKING:
    from autograph_rewrite.inspect.profile import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--steps", metavar="K", type=at_least(1), default=5, help="how many steps are measured (default 5)")
    add(
        "--skip",
        metavar="K",
        type=at_least(0),
        default=2,
        help="how many steps run before them (default 2), while TensorFlow traces",
    )
    add("--calibrate", action="store_true", help="measure this machine for the prediction (seconds)")
    add("-o", dest="out", metavar="FILE", default="profile.json", help="timeline for Perfetto (default: profile.json)")
    launch.add_process_arguments(parser)
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script, combine the traces of its processes, and print the profile."""
    config = require_script(args)
    is_job = args.workers is not None or (config is not None and config.cluster is not None)
    quiet = argparse.Namespace(**{**vars(args), "json": False})
    with tempfile.TemporaryDirectory(prefix="autograph_profile_") as folder, in_environment(_asked(args, folder)):
        code = launch.run_job(quiet, config) if is_job else run_verb.run_supervised(quiet)
        if code:
            return code
        found = collected(Path(folder), args.script)
    found.save(args.out)
    if args.json:
        print(json.dumps({"out": args.out, **found.figures()}))
    else:
        print(f"{found}{args.out}: open it in Perfetto, or give it to report --measured")
    return 0


def collected(folder: Path, script: str) -> Profile:
    """Return the profile of the ranks whose traces are in a folder.

    Args:
        folder: with a file for each rank.

    Raises:
        GraphError: there is no trace.
    """
    from autograph_rewrite.inspect.profile import Profile
    from autograph_rewrite.inspect.rank_trace import RankTrace

    said = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank_*.json"))]
    if not said:
        hint = "does it train more steps than --skip, with what ar.distribute or new.session() returned?"
        raise GraphError(f"nothing was profiled: '{script}' ran no step to measure", hint=hint)
    traces = [RankTrace.of(one["trace"]) for one in said]
    fewest = min(len(trace.steps) for trace in traces)
    first = next((one for one in said if one["predicted"] or one["notes"]), said[0])
    return Profile.of([trace.first(fewest) for trace in traces], first["predicted"], first["notes"])


def _asked(args: argparse.Namespace, folder: str) -> dict[str, str]:
    """Return the environment variable that makes the started processes measure a profile."""
    from autograph_rewrite.runtime.engine.step_observers import PROFILE

    return {
        PROFILE: json.dumps({"folder": folder, "skip": args.skip, "steps": args.steps, "calibrate": args.calibrate})
    }
