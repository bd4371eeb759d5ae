"""Names in rewritten graphs that the runtime relies on."""

from __future__ import annotations

from autograph_rewrite.training_graph import Variable

ROLE_ATTR = "_autograph_role"
"""Attribute that tells the merging nodes of one value apart, as the role of an edge does."""

MODEL_AXIS_ATTR = "_autograph_model_axis"
"""Attribute of a node that makes an exchange between the logical devices of a replica: the axis of the mesh."""


def proxy_name(variable: Variable) -> str:
    """Return the name of the node that gives the handle of a variable's copy."""
    return proxy_of(variable.handle)


def proxy_of(handle: str) -> str:
    """Return the name of the node that gives the handle of a copy, by that of the variable."""
    return f"{handle}/proxy"
