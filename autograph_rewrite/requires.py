"""Version checks of TensorFlow, at its first import by this package.

It is no install requirement (`tensorflow` and `tensorflow-cpu` are two names for the same files), so the
first call that needs it is where its absence, or its age, must be explained.
"""

from __future__ import annotations

import functools
import importlib
import re
from types import ModuleType

from autograph_rewrite.errors import ClusterError

OLDEST_TENSORFLOW = (2, 21)

_INSTALL = "pip install 'autograph-rewrite[tensorflow]', or 'autograph-rewrite[cpu]' where there are no GPUs"


@functools.cache
def tensorflow() -> ModuleType:
    """Import and return TensorFlow.

    Raises:
        ClusterError: if TensorFlow is missing or too old.
    """
    try:
        module = importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise  # TensorFlow is there, one of its own requirements is not
        raise missing_tensorflow() from None
    check_tensorflow_version(getattr(module, "__version__", ""))
    return module


def missing_tensorflow() -> ClusterError:
    """Return the error that says how to install TensorFlow."""
    return ClusterError("TensorFlow is not installed in this Python environment", hint=_INSTALL)


def check_tensorflow_version(version: str) -> None:
    """Refuse a TensorFlow older than `OLDEST_TENSORFLOW`; a release candidate counts as its release."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) >= OLDEST_TENSORFLOW:
        return
    oldest = ".".join(map(str, OLDEST_TENSORFLOW))
    raise ClusterError(
        f"TensorFlow '{version}' is too old: {oldest} or later is needed",
        hint=f"upgrade it: pip install --upgrade 'tensorflow>={oldest}' (or 'tensorflow-cpu>={oldest}')",
    )
