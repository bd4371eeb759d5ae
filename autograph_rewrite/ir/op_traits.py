"""Op traits: which ops forward a value or a handle, route it, read or write a variable, or have side effects.

Identity, StopGradient, Snapshot, ...           forwards_value    the same tensor again
Switch, Merge, Enter, Exit, NextIteration       routes            the same tensor, on one way through branches and loops
Identity and all routes, of a resource          forwards_handle   the same variable
ReadVariableOp, ResourceGather                  reads_variable
AssignVariableOp, ResourceApplyAdam             writes_variable
MatMul, not RandomUniform nor ReadVariableOp    is_pure           values made of the operands, and nothing else
"""

from __future__ import annotations

import functools
import re

from autograph_rewrite.ir.types.opdefs import find_op

FORWARDS = ("Identity", "StopGradient", "PreventGradient", "Snapshot", "DeepCopy", "Copy", "CopyHost")
"""Ops of ordinary values that give their operand as it is."""
SWITCHES = frozenset(("Switch", "RefSwitch"))
MERGES = frozenset(("Merge", "RefMerge"))
ENTERS = frozenset(("Enter", "RefEnter"))
EXITS = frozenset(("Exit", "RefExit"))
BACK_EDGES = frozenset(("NextIteration", "RefNextIteration"))
"""They lead from one iteration of a loop to the next."""
READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
"""Ops that take the contents of a variable, or rows of it, and leave it as it is."""
MEASURES = frozenset(("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"))
"""Ops that ask how large a value is, or compare sizes: what they make is small, and known as soon as the value is."""
DRAWS = frozenset(("IteratorGetNext", "IteratorGetNextSync"))
"""Ops that take the next element of an iterator, or fail where there is none."""
PUSHES = frozenset(("ResourceAccumulatorApplyGradient",))
"""Ops that write a store of gradients, which is a resource, but no variable."""

_OF_THE_PROGRAM = re.compile(r"Iterator|Dataset|PyFunc|Queue|Reader|Save|Restore|ReadFile|WriteFile|Summary|^Print")

_ROUTES = SWITCHES | MERGES | ENTERS | EXITS | BACK_EDGES
_VALUES = frozenset(FORWARDS) | {"RefIdentity"}
_HANDLES = _ROUTES | {"Identity", "RefIdentity"}
_WRITES = re.compile(
    r"Assign(Add|Sub|)VariableOp|Resource(Sparse)?Apply\w+|ResourceCountUpTo"
    r"|ResourceScatter\w+|ResourceStridedSliceAssign"
    # legacy reference variables
    r"|Assign(Add|Sub|)|(Sparse)?Apply(Adam?|Ada\w+|AddSign|CenteredRMSProp|Ftrl\w*|GradientDescent|Momentum|PowerSign"
    r"|Proximal\w+|RMSProp)|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|CountUpTo|StridedSliceAssign"
)


def forwards_value(op: str) -> bool:
    """Return whether an op gives its first operand as it is, wherever it runs."""
    return op in _VALUES


def routes(op: str) -> bool:
    """Return whether an op is the entrance, the exit or a junction of a branch or a loop."""
    return op in _ROUTES


def forwards_handle(op: str) -> bool:
    """Return whether an op that is given a variable's handle gives one of the same variable."""
    return op in _HANDLES


def reads_variable(op: str) -> bool:
    """Return whether an op takes the contents of a variable, or rows of it, and leaves it as it is."""
    return op in READS


@functools.cache
def writes_variable(op: str) -> bool:
    """Return whether an op changes a variable, a legacy reference variable included."""
    return _WRITES.fullmatch(op) is not None


def is_pure(op: str) -> bool:
    """Return whether an op does nothing but make its values, the same ones of the same operands; an unknown op may."""
    known = find_op(op)
    return known is not None and not known.is_stateful


def is_of_the_program(op: str) -> bool:
    """Return whether an op is about files, input, Python code or a console: those of the process whose program runs."""
    return _OF_THE_PROGRAM.search(op) is not None
