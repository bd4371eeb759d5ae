"""Limits: how large what is read may be, and how long reading takes, with defaults that the environment changes.

AUTOGRAPH_REWRITE_LIMITS="bytes=100000000,nodes=50000" autograph-rewrite inspect uploaded.pb
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from autograph_rewrite.errors import ConfigError

VARIABLE = "AUTOGRAPH_REWRITE_LIMITS"
DEFAULTS: Mapping[str, int] = MappingProxyType(
    {
        "bytes": 2**32,  # of a file
        "nodes": 10_000_000,  # of a graph, those of its functions included
        "name": 2**16,  # letters of the name of a node, a function or a device
        "expanded": 1_000_000,  # copies of the nodes of functions, of one call
        "text": 2**25,  # bytes of a configuration, or of a plan as text
        "depth": 100,  # of collections in each other there
        "seconds": 300,  # that reading a file takes
    }
)


def limit(name: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return a limit.

    Args:
        environ: where somebody may have set it.

    Raises:
        ConfigError: it is set to what is no number, or another limit is meant that does not exist.
    """
    given = dict(DEFAULTS)
    for entry in filter(None, environ.get(VARIABLE, "").split(",")):
        key, _, value = (part.strip() for part in entry.partition("="))
        if key not in DEFAULTS or not value.isascii() or not value.isdigit():
            raise ConfigError(f"{VARIABLE}: '{entry}' sets no limit", hint=f"write NAME=NUMBER: {', '.join(DEFAULTS)}")
        given[key] = int(value)
    return given[name]
