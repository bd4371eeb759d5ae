"""Which ops measure, route, read and write, as the certificate knows it: a table of its own, which no pass asks."""

from __future__ import annotations

import re

MEASURES = frozenset(("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"))
ENTERS = frozenset(("Enter", "RefEnter"))
EXITS = frozenset(("Exit", "RefExit"))
BACK_EDGES = frozenset(("NextIteration", "RefNextIteration"))
READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
_OF_THE_PROGRAM = re.compile(r"Iterator|Dataset|PyFunc|Queue|Reader|Save|Restore|ReadFile|WriteFile|Summary|^Print")
_WRITES = re.compile(
    r"Assign(Add|Sub|)VariableOp|Resource(Sparse)?Apply\w+|ResourceCountUpTo"
    r"|ResourceScatter\w+|ResourceStridedSliceAssign"
    # legacy reference variables
    r"|Assign(Add|Sub|)|(Sparse)?Apply(Adam?|Ada\w+|AddSign|CenteredRMSProp|Ftrl\w*|GradientDescent|Momentum|PowerSign"
    r"|Proximal\w+|RMSProp)|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|CountUpTo|StridedSliceAssign"
)


def writes_variable(op: str) -> bool:
    """Return whether an op changes a variable, a legacy reference variable included."""
    return _WRITES.fullmatch(op) is not None


def is_of_the_program(op: str) -> bool:
    """Return whether an op is about files, input, Python code or a console: those of the process whose program runs."""
    return _OF_THE_PROGRAM.search(op) is not None
