"""Run a script like `python SCRIPT`, or a module like `python -m`; print this package's errors without a traceback.

`launch` starts this file, by its path, in each process of a job. It imports the package first, which is cheap, and
joins the job as soon as the script imports TensorFlow, so the script may import the package at any time. A script that
never imports TensorFlow starts neither TensorFlow nor a server.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PACKAGE = "autograph_rewrite"
INTERRUPTED = 130
ASKED_TO_END = (129, INTERRUPTED, 143)
"""Exit codes of programs that end because of a signal."""
FLUSH = 0.3
"""Seconds for gRPC to send messages that other processes may still wait for."""
CONFIG_VARIABLE = "AUTOGRAPH_REWRITE_CONFIG"
ANSWERED_VARIABLE = "AUTOGRAPH_REWRITE_CONFIG_ANSWERED"


def main() -> int:
    """Run the command line: [-m] SCRIPT ARGUMENTS."""
    if sys.path[:1] == [str(Path(__file__).parent)]:
        del sys.path[0]  # the script must not import the modules next to this file
    module = sys.argv[1] == "-m"
    script, *arguments = sys.argv[2:] if module else sys.argv[1:]
    try:
        code = execute(script, arguments, module=module)
        sys.stdout.flush()  # a closed pipe must fail here, not at interpreter exit
        return code
    except KeyboardInterrupt as error:
        sys.last_value = error
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        sys.last_value = error
        from autograph_rewrite.tools.cli import report  # this package raised it, so the package can be imported

        return report(error, as_json=False)


def execute(script: str, arguments: Sequence[str], *, module: bool = False) -> int:
    """Run a script as a process of the job in the environment; return its exit code, 1 if it raises.

    Raises:
        RewriteError: the script raised it; the caller prints it.
    """
    importlib.import_module(f"{PACKAGE}.runtime.job.join_on_import").join_on_import()
    try:
        with _arguments_and_path(script, arguments, module=module):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = _exit_code(end)
        if not code:
            _tell_if_idle(script)
        return code
    except Exception as error:
        sys.last_value = error  # as Python does; functions that run at exit see that the program has failed
        if _is_ours(error):
            raise
        _print_traceback(error)
        return 1
    _tell_if_idle(script)
    return 0


def _tell_if_idle(script: str) -> None:
    """Warn if the script has never used the given configuration."""
    config = os.environ.get(CONFIG_VARIABLE)
    if config and not os.environ.get(ANSWERED_VARIABLE):
        told = f"{script} never called ar.distribute or ar.rewrite, so it was not distributed as {config} says"
        print(f"autograph_rewrite: {told}", file=sys.stderr, flush=True)


@contextmanager
def _arguments_and_path(script: str, arguments: Sequence[str], *, module: bool) -> Iterator[None]:
    before = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _is_ours(error: Exception) -> bool:
    errors = sys.modules.get(f"{PACKAGE}.errors")
    return errors is not None and isinstance(error, errors.RewriteError)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _print_traceback(error: Exception) -> None:
    """Print the part of the traceback that is in the script, without the frames of this file and runpy."""
    own = error.__traceback__
    while own is not None and "runpy" not in own.tb_frame.f_code.co_filename:
        own = own.tb_next
    while own is not None and "runpy" in own.tb_frame.f_code.co_filename:
        own = own.tb_next
    traceback.print_exception(type(error), error, own or error.__traceback__)


def _leave(code: int) -> None:
    """End the process as Python does, but without TensorFlow's clean-up.

    The clean-up takes one or two of the few seconds until the process is killed, and has no use.
    """
    threading._shutdown()  # type: ignore[attr-defined] # joins threads, such as writers of checkpoints
    atexit._run_exitfuncs()
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for file in [found for found in gc.get_objects() if type(found) in kinds]:
        with suppress(Exception):
            file.flush()
    time.sleep(FLUSH)
    os._exit(code)


if __name__ == "__main__":
    ended = main()
    if ended in ASKED_TO_END:
        _leave(ended)
    sys.exit(ended)
