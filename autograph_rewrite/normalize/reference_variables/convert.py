"""Convert TensorFlow 1 reference variables to resource variables; every name keeps its meaning.

    w  = VariableV2           w/handle = VarHandleOp,  w = ReadVariableOp(w/handle)
    w/read = Identity(w)      w/read = ReadVariableOp(w/handle)
    Assign, ApplyAdam(w, ..)  AssignVariableOp, ResourceApplyAdam(w/handle, ..)   under the same name

A reference read through an update (`AssignAdd(...)` as a value) means "the value after it": such an update moves to
`<name>/update`, and `<name>` reads the variable after it. A reader with control inputs gets a read of its own that
waits for them, because that is when it would have looked. So does, before, a reader of an alias that runs behind an
update (`normalize.reference_variables.late_reads`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.normalize.reference_variables.aliases import Aliases
from autograph_rewrite.normalize.reference_variables.late_reads import notes, races, read_late
from autograph_rewrite.normalize.reference_variables.routes import read_before_routes
from autograph_rewrite.ops.traits import has

_SPECIAL = {
    "Assign": "AssignVariableOp",
    "AssignAdd": "AssignAddVariableOp",
    "AssignSub": "AssignSubVariableOp",
    "IsVariableInitialized": "VarIsInitializedOp",
}


@dataclass(frozen=True)
class _Reference:
    """What a reference-typed value stands for: a handle, seen after some updates."""

    variable: Node
    handle: Value
    after: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Converted:
    """What became of the variables.

    Attributes:
        handles: new name of the handle, by variable node.
        updates: name of the update op, by assignment that was split.
        aliases: nodes that gave a variable's buffer, by variable node.
        notes: node, op and text of what is left to chance.
    """

    handles: dict[str, str]
    updates: dict[str, str]
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[tuple[str, str, str], ...] = ()


def convert(graph: Graph, anchored: Collection[str], step: Collection[str] = ()) -> Converted:
    """Convert every reference variable of a graph, in place.

    Args:
        graph: the graph.
        anchored: names of nodes whose output somebody outside reads.
        step: names of the nodes that a step is run for.

    Raises:
        GraphError: a reference is used by an op that has no resource form.
    """
    variables = [node for node in graph if has(node.op, "reference_variables")]
    if not variables:
        return Converted({}, {})
    read_before_routes(graph)
    aliases = Aliases(graph)
    if read_late(graph, aliases):
        aliases = Aliases(graph)
    raced = races(graph, aliases, ancestors(map(graph.node, step))) if step else []
    said = tuple(notes(raced))
    repeats = {node: [value.node for value in aliases.unchanged(node)] for node in variables}
    taken = {node.attr("shared_name", b"") for node in graph if node.op == "VarHandleOp"}
    handles = {node: _handle(graph, node, taken) for node in variables}
    references = _trace(handles)
    updates = {
        value.node: _update_of(graph, value, anchored) for value, reference in references.items() if reference.after
    }
    users = dict.fromkeys(use.node for value in references for use in value.uses)
    for user in users:
        _convert_user(user, references, updates)
    for node, handle in handles.items():
        become(node, "ReadVariableOp", [handle.output()], {"dtype": handle.attr("dtype")})
    for old, new in updates.items():
        if new is not old:
            _read_after(old, new, references)
    return Converted(
        {node.name: handle.name for node, handle in handles.items()},
        {old.name: new.name for old, new in updates.items() if new is not old},
        {node.name: tuple(one.name for one in found if one.output_dtypes) for node, found in repeats.items()},
        said,
    )


def _handle(graph: Graph, node: Node, taken: set[bytes]) -> Node:
    shared = (node.attr("shared_name", b"") or node.name.encode()).decode()
    while shared.encode() in taken:  # references and resources have separate name spaces, resources share one
        shared += "_ref"
    taken.add(shared.encode())
    loose = any(use.node.op == "Assign" and not use.node.attr("validate_shape") for use in node.output().uses)
    return graph.add(
        "VarHandleOp",
        name=f"{node.name}/handle",
        device=node.device,
        origin=node,
        attrs={
            "dtype": node.attr("dtype"),
            "shape": None if loose else node.attr("shape"),
            "container": node.attr("container", b""),
            "shared_name": shared,
        },
    )


def _is_reference(node: Node, index: int) -> bool:
    return node.input_dtypes[index] > dtypes.REF_OFFSET


def _trace(handles: dict[Node, Node]) -> dict[Value, _Reference]:
    """Return every reference-typed value that comes from a variable."""
    found = {node.output(): _Reference(node, handle.output()) for node, handle in handles.items()}
    pending = deque(found)
    while pending:
        value = pending.popleft()
        reference = found[value]
        for node, index in value.uses:
            if not _is_reference(node, index):
                continue
            if has(node.op, "routes_reference"):
                new = {out: _Reference(reference.variable, out, reference.after) for out in _aliases(node)}
            elif index == 0 and resource_form(node.op) is not None:
                new = {out: _Reference(reference.variable, reference.handle, (node,)) for out in _aliases(node)}
            elif resource_form(node.op) is None:
                raise GraphError(
                    f"the legacy op {node.op} on the variable '{reference.variable.name}' has no resource form",
                    node=node,
                    hint="create the variable with use_resource=True",
                )
            else:
                new = {}
            found |= new
            pending.extend(new)
    return found


def resource_form(op: str) -> str | None:
    """Return the op on a resource handle that does what `op` does on a reference."""
    name = _SPECIAL.get(op, f"Resource{op}")
    old, new = find_op(op), find_op(name)
    return name if old is not None and new is not None and len(old.inputs) == len(new.inputs) else None


def _aliases(node: Node) -> Iterable[Value]:
    return [node.output(i) for i, dtype in enumerate(node.output_dtypes) if dtype > dtypes.REF_OFFSET]


def _update_of(graph: Graph, value: Value, anchored: Collection[str]) -> Node:
    """Return the node that will be the update: the same, unless somebody reads the variable through it."""
    node = value.node
    is_read = node.name in anchored or any(not _is_reference(*use) for use in value.uses)
    if not is_read:
        return node
    update = copy_node(graph, node, node.inputs, name=f"{node.name}/update", controls=node.controls)
    for user in node.control_users:
        user.remove_control(node)
        user.add_control(update)
    return update


def _convert_user(node: Node, references: dict[Value, _Reference], updates: dict[Node, Node]) -> None:
    """Convert a node that reads references: it takes handles where it took references, else values."""
    if node not in updates.values() and node in updates:
        return  # split: its copy is converted, this one becomes a read
    wanted = {i: references[value] for i, value in enumerate(node.inputs) if value in references}
    takes = {i for i in wanted if _is_reference(node, i)}
    after = [updates.get(n, n) for i in wanted for n in wanted[i].after]
    if node.op == "Identity" and not takes:
        become(node, "ReadVariableOp", [wanted[0].handle], {"dtype": node.attrs["T"]})
        _wait(node, after)
        return
    for i in wanted.keys() - takes:
        node.set_input(i, _read(node, i, wanted[i], updates))
    if not takes:
        return
    inputs = [wanted[i].handle if i in takes else value for i, value in enumerate(node.inputs)]
    _to_resource_form(node, inputs)
    _wait(node, after)


def _to_resource_form(node: Node, inputs: list[Value]) -> None:
    if has(node.op, "routes_reference"):
        become(node, node.op.removeprefix("Ref"), inputs, {"T": dtypes.RESOURCE})
        node.drop_attr("_output_shapes")
        return
    form = resource_form(node.op)
    declared = find_op(form or "")
    assert form is not None
    assert declared is not None
    kind = node.attrs.get("T")
    attrs = {"dtype": kind} if "dtype" in declared.attrs and kind is not None else {}
    become(node, form, inputs, attrs)
    if not declared.outputs:
        node.drop_attr("_output_shapes")


def _read(node: Node, index: int, reference: _Reference, updates: dict[Node, Node]) -> Value:
    """Return the value that `node` sees: its own read when it waits for something, else the one they share."""
    graph = node.graph
    source = reference.after[-1] if reference.after else reference.variable
    if not node.controls and reference.handle.node.op == "VarHandleOp":
        return source.output()
    after = [updates.get(one, one) for one in reference.after]
    return graph.add(
        "ReadVariableOp",
        [reference.handle],
        name=f"{node.name}/read_{index}",
        controls=[*node.controls, *after],
        device=reference.variable.device,
        attrs={"dtype": reference.variable.attr("dtype")},
        origin=node,
    ).output()


def _wait(node: Node, after: Iterable[Node]) -> None:
    for one in after:
        if one is not node:
            node.add_control(one)


def _read_after(old: Node, update: Node, references: dict[Value, _Reference]) -> None:
    """Let the name of a split update mean the variable's value after it."""
    reference = references[old.output()]
    become(old, "ReadVariableOp", [reference.handle], {"dtype": old.attrs["T"]})
    for control in old.controls:
        old.remove_control(control)
    old.add_control(update)
