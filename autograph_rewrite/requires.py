"""Import TensorFlow and check its version, at the first call that needs it.

TensorFlow is no install requirement, because `tensorflow` and `tensorflow-cpu` are two names for the same files. So
the first call that needs it has to explain that it is missing or too old.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from types import ModuleType

from autograph_rewrite.errors import ClusterError

OLDEST_TENSORFLOW = (2, 16)
NEWEST_TENSORFLOW = (2, 21)
"""The newest tested version."""

_INSTALL = "pip install 'autograph-rewrite[tensorflow]', or 'autograph-rewrite[cpu]' where there are no GPUs"


@functools.cache
def tensorflow() -> ModuleType:
    """Import and return TensorFlow; warn if it is newer than `NEWEST_TENSORFLOW`.

    Raises:
        ClusterError: TensorFlow is missing or too old.
    """
    try:
        module = importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise  # TensorFlow is there, but one of its requirements is missing
        raise missing_tensorflow() from None
    check_tensorflow_version(getattr(module, "__version__", ""))
    return module


def missing_tensorflow() -> ClusterError:
    """Return the error that tells the user how to install TensorFlow."""
    return ClusterError("TensorFlow is not installed in this Python environment", hint=_INSTALL)


def check_tensorflow_version(version: str) -> None:
    """Refuse a TensorFlow older than `OLDEST_TENSORFLOW`; a release candidate counts as its release.

    Warn of one newer than `NEWEST_TENSORFLOW`: `verify` shows whether a program still computes the same with it.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found is not None else ()
    oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST_TENSORFLOW, NEWEST_TENSORFLOW))
    if number < OLDEST_TENSORFLOW:
        raise ClusterError(
            f"TensorFlow '{version}' is too old: {oldest} or later is needed",
            hint=f"upgrade it: pip install --upgrade 'tensorflow>={oldest}' (or 'tensorflow-cpu>={oldest}')",
        )
    if number > NEWEST_TENSORFLOW:
        warnings.warn(
            f"autograph_rewrite was tested with TensorFlow {oldest} to {newest}, not with {version}: "
            "compare your program with one device by ar.verify",
            stacklevel=2,
        )
