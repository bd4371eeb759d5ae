"""Checks exchanges among the devices of a replica: the claims of reshards along the model axis, and their lowered ops.

claimed    h: split(0) ──► ar.reshard {model: partial(sum)} ──► split(0)      on the batch's axis it stays what it is
lowered    CollectiveReduceV2(h, 2 members, ...)      run for both devices, with other data for each: h0 + h1 on both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from autograph_rewrite.certify import kernels
from autograph_rewrite.certify.samples import COMBINE, draw
from autograph_rewrite.certify.seen import Seen, is_local, said
from autograph_rewrite.certify.windows import own_rows, unpadded
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.claims import OWN, Claim, Claims, Read
from autograph_rewrite.ir.format.annotations import placements_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MODEL, Mesh, PerInstance
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ir.types.opdefs import axis_along
from autograph_rewrite.ir.types.placement import REPLICATED, Placement

SHARED = "autograph_model"
"""The scope of constants that several conversions read."""
COLLECTIVES = frozenset(("CollectiveReduceV2", "CollectiveGatherV2", "CollectiveAllToAllV2"))
SHAPES_OF_ELEMENTS = frozenset(("TensorListReserve", "EmptyTensorList"))
"""Ops that make lists, whose first operand states the shape of the elements."""
_MERGES = {b"Add": "sum", b"Mul": "prod", b"Max": "max", b"Min": "min"}


def is_along_model(node: Node, axis: str = "") -> bool:
    """Return whether a node is a reshard among the devices of a replica, along a given axis; "": any axis."""
    return axis_along(node) == axis if axis else bool(axis_along(node))


def _kinds(node: Node) -> tuple[Placement, Placement]:
    axis = axis_along(node)
    before, after = (placements_of(node.attr(key).decode()).get(axis, REPLICATED) for key in ("before", "after"))
    return before, after


def judge_reshard(seen: Seen) -> str | None:
    """Return the problem with the claims of a reshard on the batch's axis: it moves, adds or drops elements only."""
    node, read, made = seen.node, seen.operands[0], seen.results[0]
    (before, after), sizes, dim = _kinds(node), node.attr("shards"), node.attr("dim")
    if read.kind == "split" and sizes and read.dim == dim:
        return f"input 0 is {said(read)}, along which its devices hold blocks"
    folds = [one.op for one in (before, after) if one.is_partial]
    if read.kind == "partial" and {read.op, *folds} != {"sum"}:
        return f"input 0 is {said(read)}, and is combined among devices by {', '.join(folds) or 'nothing'}"
    if made[:3] != read[:3] or (made.zero and not read.zero):
        return f"result 0 is claimed {said(made)}, of {said(read)}"
    if made.value is not None:
        return "its contents are claimed, of which nothing is known"
    wanted = _shape(read, before, after, dim, sizes, node.attr("rows"))
    if None not in (made.shape, wanted) and made.shape != wanted:
        return f"the shape of result 0 is claimed {made.shape}, and is {wanted}"
    return None


def _shape(
    read: Claim, before: Placement, after: Placement, dim: int, sizes: Sequence[int], rows: Sequence[int]
) -> tuple[Any, ...] | None:
    if read.shape is None or not (before.is_split or after.is_split):
        return read.shape
    size = rows[1] - rows[0] if rows else sizes[0] if after.is_split else sum(sizes)
    return (*read.shape[:dim], size, *read.shape[dim + 1 :])


# The lowered ops of a reshard are run for every device, each with different data.


def is_exchange(node: Node, mesh: Mesh) -> bool:
    """Return whether the members of a collective are devices of one replica: several of these have one group key."""
    if node.op not in COLLECTIVES or mesh.size(MODEL) == 1:
        return False
    key = node.inputs[2].node
    raw = key.attrs.get("value")
    devices = range(mesh.size(MODEL))
    return isinstance(raw, PerInstance) and len(
        {raw.raws[_number(key, {MODEL: device}, mesh)] for device in devices}
    ) < len(devices)


def _number(node: Node, at: Mapping[str, int], mesh: Mesh) -> int:
    return mesh.number(mesh.whole(node.span), at)


def met(node: Node, data: Sequence[Any]) -> list[Any]:
    """Return the result of each member of a collective; a sum is divided only where the op says so."""
    if node.op == "CollectiveAllToAllV2":
        return [np.stack([one[k] for one in data]) for k in range(len(data))]
    if node.op == "CollectiveGatherV2":
        return [np.concatenate(data, 0)] * len(data)
    total = reduce(COMBINE[_MERGES[node.attr("merge_op")]], data)
    return [total / len(data) if node.attr("final_op") == b"Div" else total] * len(data)


def check_lowered(node: Node, reshard: Node, shapes: Sequence[Sequence[int]], mesh: Mesh) -> Value:
    """Run the lowered ops of a reshard on every device of each replica; return the value that they read.

    Args:
        node: has the result of the reshard; the other ops have names below that of the reshard.
        shapes: of the reshard's operand on one device, by instance.

    Raises:
        VerifyError: a device gets another value than the reshard states.
    """
    value, devices = reshard.inputs[0], range(mesh.size(MODEL))
    order = _between(node, f"{reshard.name}/")
    inside = set(order)
    sources = list(dict.fromkeys(read for one in order for read in one.inputs if read.node not in inside))
    if len(sources) != 1:
        raise VerifyError(f"'{node.name}' reads {len(sources)} values, where '{reshard.name}' reads one", node=node)
    coordinates = (mesh.coordinates(node.span, i) for i in range(mesh.count(node.span)))
    groups = [at for at in coordinates if at.get(MODEL, 0) == 0]
    for number, (first, shape) in enumerate(zip(groups, shapes, strict=True)):
        data = [draw(f"{value.name}/{number}/{device}", tuple(shape), value.dtype) for device in devices]
        held: dict[Value, list[Any]] = {sources[0]: data}
        try:
            for one in order:
                for index, made in enumerate(_run(one, held, [{**first, MODEL: device} for device in devices], mesh)):
                    held[one.output(index)] = made
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise VerifyError(f"'{node.name}' cannot compute what its reshard promises: {error}", node=node) from error
        for device, left, right in zip(devices, held[node.output()], _wanted(reshard, data, mesh), strict=True):
            left, right = np.asarray(left), np.asarray(right)
            if left.shape != right.shape or left.dtype != right.dtype or not np.array_equal(left, right):
                problem = f"device {device} of a replica gets something else of '{node.name}' than its reshard promises"
                raise VerifyError(problem, node=node)
    return sources[0]


def _between(node: Node, below: str) -> list[Node]:
    """Return a node and the nodes with names below a name that it is computed from, producers first."""
    order: dict[Node, None] = {}

    def visit(one: Node) -> None:
        for value in one.inputs:
            if value.node not in order and value.node.name.startswith((below, f"{SHARED}/")):
                visit(value.node)
        order[one] = None

    visit(node)
    return list(order)


def _run(node: Node, held: Mapping[Value, list[Any]], at: Sequence[Mapping[str, int]], mesh: Mesh) -> list[list[Any]]:
    """Return, for each output, the data of each device; `at` has the devices' coordinates."""
    if node.op == "Const":
        raw = node.attrs["value"]
        raws = [raw.raws[_number(node, one, mesh)] if isinstance(raw, PerInstance) else raw for one in at]
        return [[kernels.constant(decode(one)) for one in raws]]
    operands = [[held[value][device] for value in node.inputs] for device in range(len(at))]
    if node.op in COLLECTIVES:
        keys = [int(one[2]) for one in operands]
        groups = {key: [one[0] for one, other in zip(operands, keys, strict=True) if other == key] for key in keys}
        made = {key: iter(met(node, data)) for key, data in groups.items()}
        return [[next(made[key]) for key in keys]]
    results = [list(kernels.run(node, one)) for one in operands]
    return [list(each) for each in zip(*results, strict=True)]


def _wanted(reshard: Node, data: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Return the data that each device of a replica should get; those in a line along the axis exchange data."""
    wanted = list(data)
    for line in mesh.lines([axis_along(reshard)]):
        for device, made in zip(line, _wanted_of(reshard, [data[i] for i in line]), strict=True):
            wanted[device] = made
    return wanted


def _wanted_of(reshard: Node, data: Sequence[Any]) -> list[Any]:
    before, after = _kinds(reshard)
    dim, sizes = reshard.attr("dim"), reshard.attr("shards")
    if before.is_partial:
        data = [reduce(COMBINE[before.op], data)] * len(data)
    if before.is_split:
        data = [np.concatenate(data, dim)] * len(data)
    if rows := reshard.attr("rows"):
        return [_with_padding(one, dim, i * sizes[0] + rows[0], i * sizes[0] + rows[1], reshard.attr("lowest"))
                for i, one in enumerate(data)]  # fmt: skip
    if after.is_split:
        ends = np.cumsum([0, *sizes])
        return [np.take(one, np.arange(ends[i], ends[i + 1]), dim) for i, one in enumerate(data)]
    if before.differs:
        return list(data)
    return [one if device == 0 else np.zeros_like(one) for device, one in enumerate(data)]


def _with_padding(whole: Any, dim: int, begin: int, end: int, lowest: bool) -> Any:
    """Return rows of a value; rows outside it are padding."""
    size, filled = whole.shape[dim], 0.0
    if lowest:
        filled = -np.inf if whole.dtype.kind == "f" else float(np.iinfo(whole.dtype).min)
    inside = np.take(whole, np.arange(max(0, begin), min(size, end)), dim)
    ends = [(0, 0)] * whole.ndim
    ends[dim] = max(0, -begin), max(0, end - size)
    return np.pad(inside, ends, constant_values=filled)


# The program of one device, made from a graph whose values have placements: operands are traced back to their values.
#
#     claimed    h: partial(sum), and y reads the whole of it
#     written    y reads h/whole, an ar.reshard of h: partial(sum) ──► replicated


def check_written(before: Graph, after: Graph, claims: Claims) -> None:
    """Check that each node of the program of one device reads its original operands in the claimed placements.

    Raises:
        VerifyError: a node is gone or differs, or reads another value or placement.
    """
    now = {node.name: _now(node, after, claims.axis) for node in before}
    for node in before:
        found = now[node.name]
        if node.name in claims.folded or node.op == "VariableShape":  # constants
            continue
        if found is None or found.op != node.op or len(found.inputs) != len(node.inputs):
            raise VerifyError(f"'{node.name}' ({node.op}) is not in the program of one device", node=node)
        if (problem := unpadded(found, node, claims)) is not None:
            raise VerifyError(f"'{node.name}' ({node.op}) {problem}", node=found)
        for index, (value, wanted) in enumerate(zip(found.inputs, node.inputs, strict=True)):
            read = claims.reads.get((node.name, index), OWN)
            if (node.op in SHAPES_OF_ELEMENTS and not index) or (read.kind == "entry" and read.rows):
                continue  # the kernels check these shapes
            if (problem := _follow(value, wanted, read, claims, now[wanted.node.name])) is not None:
                raise VerifyError(f"input {index} of '{node.name}' ({node.op}) {problem}", node=found)


def _now(node: Node, after: Graph, axis: str) -> Node | None:
    """Return the node in the program: if the outside reads its whole value, a reshard has its name."""
    found = after.nodes.get(node.name)
    while found is not None and is_along_model(found, axis) and not is_along_model(node, axis):
        found = found.inputs[0].node
    return found


def _follow(value: Value, wanted: Value, read: Read, claims: Claims, made: Node | None) -> str | None:
    """Return the problem with an operand, which is traced back through reshards to the wanted value.

    Args:
        value: the operand in the program.
        made: the node in the program that makes the wanted value.
    """
    claim, block = claims.values[wanted.name], made.output(wanted.index).name if made is not None else wanted.name
    if claim.kind == "local" or read.kind == "entry" or wanted.node.name in claims.folded:
        known = (wanted.name, block, f"{wanted.node.name}/folded_{wanted.index}")
        is_converted = read != OWN and wanted.node.name not in claims.folded
        if _are_sizes(value, wanted, known, read, claims) if is_converted else value.name in known:
            return None
        return f"reads '{value.name}', which counts other elements than it should of '{wanted.name}'"
    steps = []
    while is_along_model(value.node, claims.axis):
        steps.append(value.node)
        value = value.node.inputs[0]
    if value.node.op == "Slice" and made is not None and value.node.name.startswith(f"{made.name}/own"):
        if (problem := own_rows(value.node, wanted, claims)) is not None:
            return problem
        value = value.node.inputs[0]
    if value.name not in (wanted.name, block):
        return f"reads '{value.name}', and not '{wanted.name}'"
    at = _as(claim)
    for step in reversed(steps):
        before, after = _kinds(step)
        if _as(before) != at:
            return f"converts '{wanted.name}' from {before!r}, and it is {said(claim)}"
        at = (*_as(after), *step.attr("rows"), *([step.attr("lowest")] if step.attr("rows") else []))
    goal = _as(claim if read == OWN else Claim(read.kind, read.dim, "sum"))
    goal += (*read.rows, *([read.lowest] if read.rows else []))
    return None if at == goal else f"reads '{wanted.name}' {at}, and should read it {goal}"


def _are_sizes(value: Value, wanted: Value, known: Sequence[str], read: Read, claims: Claims) -> bool:
    """Return whether a value converts sizes of the whole to those of one device's block, or the other way round.

    Args:
        known: the possible names of the wanted value.
        read: of kind entry: that entry becomes the size of a block; else all entries become sizes of the whole.
    """
    claim, made, count = claims.values[wanted.name], value.node, claims.instances
    entries = claim.value or ()
    chosen = [i == read.dim if read.kind == "entry" else is_local(entry) for i, entry in enumerate(entries)]
    if made.op == "Const":
        sizes = [entry // count if one else entry for one, entry in zip(chosen, entries, strict=True)
                 if isinstance(entry, int)]  # fmt: skip
        return read.kind == "entry" and list(np.ravel(made.attr("value"))) == sizes
    is_scaled = made.op == ("FloorDiv" if read.kind == "entry" else "Mul") and made.inputs[1].node.op == "Const"
    if not is_scaled or made.inputs[0].name not in known:
        return False
    return list(np.ravel(made.inputs[1].node.attr("value"))) == [count if one else 1 for one in chosen]


def _as(placed: Claim | Placement) -> tuple[Any, ...]:
    if placed.kind == "split":
        return placed.kind, placed.dim
    return (placed.kind, placed.op) if placed.kind == "partial" else ("replicated",)
