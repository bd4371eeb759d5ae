"""Fresh processes: whatever is measured starts from an empty one, and cannot hang for ever.

call("benchmarks.memory:measure", {"how": "shared"}, timeout=60, cores=1)  ──►  what `measure` returns, through JSON

parent                                     child
python -m benchmarks                       python -m benchmarks.child MODULE:FUNCTION RESULT_FILE CORES JSON

The result comes back as a file, because TensorFlow prints what it likes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
# They would decide how many threads TensorFlow has: what is measured is its own choice.
_LEFT_OUT = ("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


class ChildFailed(Exception):
    """A measuring process failed or took too long."""


def call(
    function: str,
    arguments: Mapping[str, Any],
    *,
    timeout: float,
    cores: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `module:function` in a fresh process and return its result.

    Args:
        function: what to call.
        arguments: its keyword arguments, as far as JSON can tell them.
        timeout: seconds.
        cores: how many processor cores it may use; 0 for all.
        environment: more variables for it.

    Raises:
        ChildFailed: it failed or did not end in time; the message holds the end of what it printed.
    """
    variables = environment_of(environment or {})
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.child", function, str(result), str(cores), json.dumps(arguments)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, timeout=timeout, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{function}({arguments}) did not end within {timeout:g} s") from None
        if done.returncode or not result.exists():
            tail = "\n".join(done.stderr.strip().splitlines()[-12:])
            raise ChildFailed(f"{function}({arguments}) ended with code {done.returncode}\n{tail}")
        return json.loads(result.read_text())


def environment_of(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is measured, with more variables."""
    kept = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    return {**kept, **_ENVIRONMENT, **more}


def peak_bytes() -> int:
    """Return the most memory that this process has had in RAM so far."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike ru_maxrss, it does not start with what the parent had
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _use_cores(count: int) -> None:
    if count and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])


def _main(function: str, result: str, cores: str, arguments: str) -> None:
    _use_cores(int(cores))
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":
    _main(*sys.argv[1:])
    sys.stdout.flush()
    if "TF_CONFIG" not in os.environ:  # a worker of a job ends as programs do: its last answers are still on their way
        os._exit(0)  # tearing TensorFlow down takes time, and sometimes fails, after everything is done
