"""Stages of long work, said to a logger of Python: the command line shows the last one, a program may listen, too.

logging.getLogger("autograph_rewrite.stages").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging

LOGGER = "autograph_rewrite.stages"
_log = logging.getLogger(LOGGER)


def stage(text: str, *details: object) -> None:
    """Say what begins now.

    Args:
        text: in a few words, with `%s` for details.
        details: what stands in it.
    """
    _log.debug(text, *details)
