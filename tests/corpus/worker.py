"""A process that takes pairs of a program and a configuration from a pipe and answers with lines."""

from __future__ import annotations

import gc
import importlib
import os
import resource
from collections.abc import Mapping
from multiprocessing.connection import Connection

from tests.fuzz.worker import prepare


def serve(pipe: Connection, environment: Mapping[str, str], needs: tuple[str, ...]) -> None:
    """Answer until the pipe is closed; the first answer says which module is missing, if one is."""
    os.environ.update(environment)
    prepare()
    pipe.send(_missing(needs))
    from tests.corpus import catalogue, configurations
    from tests.corpus.judge import Judge

    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    judge = None
    while True:
        try:
            name, configuration = pipe.recv()
        except EOFError:
            return
        if judge is None or judge.program.name != name:
            judge = Judge(catalogue.programs()[name][1])
            gc.collect()
        line = judge.run(configurations.BY_NAME[configuration])
        pipe.send((line, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def _missing(needs: tuple[str, ...]) -> str:
    """Return why a library cannot be used, or nothing."""
    for name in needs:
        try:
            importlib.import_module(name)
        except Exception as error:  # libraries fail at import in many ways; all of them mean that it cannot be used
            return f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    return ""
