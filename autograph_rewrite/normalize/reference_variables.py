"""Convert TensorFlow 1 reference variables to resource variables; all names keep their meaning.

    w  = VariableV2           w/handle = VarHandleOp,  w = ReadVariableOp(w/handle)
    w/read = Identity(w)      w/read = ReadVariableOp(w/handle)
    Assign, ApplyAdam(w, ..)  AssignVariableOp, ResourceApplyAdam(w/handle, ..)   under the same name

A reference read through an update (`AssignAdd(...)` as a value) is the value after the update: the update moves to
`<name>/update`, and `<name>` reads the variable after it. A reader with control inputs gets a separate read that waits
for them, because the reader read the buffer only then. Before the conversion, a reader of an alias that runs after an
update gets a separate read, too (`read_late`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autograph_rewrite.diagnostics.amounts import few
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import static_shape
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, SWITCHES, has

_SPECIAL = {
    "Assign": "AssignVariableOp",
    "AssignAdd": "AssignAddVariableOp",
    "AssignSub": "AssignSubVariableOp",
    "IsVariableInitialized": "VarIsInitializedOp",
}


@dataclass(frozen=True)
class _Reference:
    """The meaning of a reference-typed value: a handle, read after some updates."""

    variable: Node
    handle: Value
    after: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Converted:
    """The new names of the variables.

    Attributes:
        handles: name of the handle, by variable node.
        updates: name of the update op, by assignment that was split.
        aliases: nodes that gave out a variable's buffer, by variable node.
        notes: node, op and text of races that the original has.
    """

    handles: dict[str, str]
    updates: dict[str, str]
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[tuple[str, str, str], ...] = ()


def convert(graph: Graph, anchored: Collection[str], step: Collection[str]) -> Converted:
    """Convert every reference variable of a graph, in place.

    Args:
        anchored: names of nodes whose outputs are fetched.
        step: names of the targets and outputs of a step.

    Raises:
        GraphError: an op that uses a reference has no resource form.
    """
    variables = [node for node in graph if has(node.op, "reference_variables")]
    if not variables:
        return Converted({}, {})
    read_before_routes(graph)
    aliases = Aliases(graph)
    if read_late(graph, aliases):
        aliases = Aliases(graph)
    said = tuple(races(graph, aliases, ancestors(map(graph.node, step))))
    repeats = {node: [value.node for value in aliases.unchanged(node)] for node in variables}
    taken = {node.attr("shared_name", b"") for node in graph if node.op == "VarHandleOp"}
    handles = {node: _handle(node, taken) for node in variables}
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


def _handle(node: Node, taken: set[bytes]) -> Node:
    shared = (node.attr("shared_name", b"") or node.name.encode()).decode()
    while shared.encode() in taken:  # a resource variable may have the name, because references have another namespace
        shared += "_ref"
    taken.add(shared.encode())
    loose = any(use.node.op == "Assign" and not use.node.attr("validate_shape") for use in node.output().uses)
    return Builder.at(node, device=node.device).node(
        "VarHandleOp",
        what="handle",
        dtype=node.attr("dtype"),
        shape=None if loose else node.attr("shape"),
        container=node.attr("container", b""),
        shared_name=shared,
    )


def _trace(handles: dict[Node, Node]) -> dict[Value, _Reference]:
    """Return every reference-typed value of a variable, with its meaning."""
    found = {node.output(): _Reference(node, handle.output()) for node, handle in handles.items()}
    pending = deque(found)
    while pending:
        value = pending.popleft()
        reference = found[value]
        for node, index in value.uses:
            if not is_reference(node, index):
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
    """Return the op on a resource handle that corresponds to `op` on a reference; None if there is none."""
    name = _SPECIAL.get(op, f"Resource{op}")
    old, new = find_op(op), find_op(name)
    return name if old is not None and new is not None and len(old.inputs) == len(new.inputs) else None


def _aliases(node: Node) -> Iterable[Value]:
    return [node.output(i) for i, dtype in enumerate(node.output_dtypes) if dtype > dtypes.REF_OFFSET]


def _update_of(graph: Graph, value: Value, anchored: Collection[str]) -> Node:
    """Return the node that becomes the update: a copy if the variable is read through the node, else the node."""
    node = value.node
    is_read = node.name in anchored or any(not is_reference(*use) for use in value.uses)
    if not is_read:
        return node
    update = copy_node(graph, node, node.inputs, name=f"{node.name}/update", controls=node.controls)
    for user in node.control_users:
        user.remove_control(node)
        user.add_control(update)
    return update


def _convert_user(node: Node, references: dict[Value, _Reference], updates: dict[Node, Node]) -> None:
    """Convert a node that reads references: handles replace references, and reads replace plain values."""
    if node not in updates.values() and node in updates:
        return  # a split update: its copy is converted, and this node becomes a read
    wanted = {i: references[value] for i, value in enumerate(node.inputs) if value in references}
    takes = {i for i in wanted if is_reference(node, i)}
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
    """Return the value that `node` reads: a separate read if the node waits for something, else the common one."""
    source = reference.after[-1] if reference.after else reference.variable
    if not node.controls and reference.handle.node.op == "VarHandleOp":
        return source.output()
    after = [updates.get(one, one) for one in reference.after]
    return Builder.at(node, device=reference.variable.device).op(
        "ReadVariableOp",
        reference.handle,
        what=f"read_{index}",
        controls=[*node.controls, *after],
        dtype=reference.variable.attr("dtype"),
    )


def _wait(node: Node, after: Iterable[Node]) -> None:
    for one in after:
        if one is not node:
            node.add_control(one)


def _read_after(old: Node, update: Node, references: dict[Value, _Reference]) -> None:
    """Make a split update's node read the variable after the update."""
    reference = references[old.output()]
    become(old, "ReadVariableOp", [reference.handle], {"dtype": old.attrs["T"]})
    for control in old.controls:
        old.remove_control(control)
    old.add_control(update)


# Add a read after an update for each reader that ran there, so that reads need not alias buffers.
#
#     before   w/read ──► Mul          train ──^──► Mul            Mul reads the value that train has written
#     after    w ──► Identity ──► Mul  train ──^──► Identity       the same, although w/read no longer aliases w
#
# The graph's edges, within an iteration of a loop or between iterations, show whether a reader runs after an update. If
# no edge orders them, the original is a race: its usual result, the early read, is kept, and a note is added.


_KEPT_READS = 3  # the most readers that a note names


def read_late(graph: Graph, aliases: Aliases) -> int:
    """Give readers that run after updates separate reads, in place; return the number of readers."""
    read = {variable for node, index in aliases.readers for variable in aliases.variables[node.inputs[index]]}
    updates = dict.fromkeys(one for variable, members in aliases.updates.items() if variable in read for one in members)
    marks = {one: 1 << i for i, one in enumerate(updates)}
    if not marks:
        return 0
    behind = _Behind(graph, marks)
    found = [(node, index, waits) for node, index in aliases.readers if (waits := _waits(behind, aliases, node, index))]
    copies = _Copies(graph, aliases)
    for node, index, waits in found:
        node.set_input(index, copies.of(node.inputs[index], f"{node.name}/read_{index}", waits))
    return len(found)


def races(graph: Graph, aliases: Aliases, step: Collection[Node]) -> list[tuple[str, str, str]]:
    """Return a note (node, op, text) on each variable with readers that no edge orders with an update of the step."""
    readers = {one: 1 << i for i, one in enumerate(dict.fromkeys(n for n, _ in aliases.readers if n in step))}
    order = topological_order(graph)
    before_update = marks_before(order, readers)
    updates = {one for members in aliases.updates.values() for one in members if one in step}
    marks = {one: 1 << i for i, one in enumerate(sorted(updates, key=lambda node: node.name))}
    before_reader = marks_before(order, marks)
    found: dict[Node, dict[str, str]] = {}
    for node, index in aliases.readers:
        for variable in aliases.variables[node.inputs[index]] if node in step else ():
            for update in aliases.updates.get(variable, ()):
                if update not in marks or update is node:
                    continue
                if not before_reader[node] & marks[update] and not before_update[update] & readers[node]:
                    found.setdefault(variable, {})[node.name] = update.name
    said = []
    for variable, read_by in found.items():
        listed = few([f"'{name}'" for name in read_by], _KEPT_READS)
        written = next(iter(read_by.values()))
        text = f"no edge orders its readers {listed} with its update '{written}': they read it before"
        said.append((variable.name, variable.op, text))
    return said


class _Behind:
    """Finds the updates that run before a node: in the same iteration, and in the same or an earlier one."""

    def __init__(self, graph: Graph, marks: Mapping[Node, int]) -> None:
        self.marks = marks
        order = topological_order(graph)
        self._within = marks_before(order, marks)
        self._across = dict(self._within)
        changed = any(node.op in BACK_EDGES for node in order)
        while changed:
            changed = False
            for node in order:
                mask = self._across[node]
                for producer in (*[value.node for value in node.inputs], *node.controls):
                    mask |= self._across[producer] | marks.get(producer, 0)
                if mask != self._across[node]:
                    self._across[node] = mask
                    changed = True

    def of(self, node: Node) -> tuple[int, int]:
        """Return the updates before a node, as two masks."""
        return self._within[node], self._across[node]

    def and_self(self, node: Node) -> tuple[int, int]:
        """Return the updates before a node, and the node itself if it is an update."""
        own = self.marks.get(node, 0)
        return self._within[node] | own, self._across[node] | own


def _waits(behind: _Behind, aliases: Aliases, node: Node, index: int) -> tuple[Node, ...]:
    """Return the nodes that a new read for a reader has to wait for; empty if the present read is right."""
    value = node.inputs[index]
    if node.op in ("Merge", "Exit"):  # they only pass values on
        return ()
    own = 0
    for variable in aliases.variables[value]:
        for update in aliases.updates.get(variable, ()):
            own |= behind.marks.get(update, 0)
    missed = 0, 0
    for read in _reads(aliases, value):
        seen = behind.and_self(read.node) if isinstance(read, Value) else behind.of(read)
        now = behind.of(node)
        missed = missed[0] | now[0] & ~seen[0], missed[1] | now[1] & ~seen[1]
    if not (missed[0] | missed[1]) & own:
        return ()
    producers = dict.fromkeys((*[one.node for one in node.inputs], *node.controls))
    return tuple(p for p in producers if (behind.and_self(p)[0] | behind.and_self(p)[1]) & own)


def _reads(aliases: Aliases, value: Value) -> list[Node | Value]:
    """Return where the buffer is read now: at an Identity, or at a value that gives the reference."""
    if value.dtype > dtypes.REF_OFFSET:
        return [value]
    found: list[Node | Value] = []
    stack, seen = [value], {value}
    while stack:
        node = stack.pop().node
        for given in node.inputs:
            if given not in aliases.variables or given in seen:
                continue
            seen.add(given)
            if given.dtype <= dtypes.REF_OFFSET:
                stack.append(given)
            else:
                found.append(node if node.op == "Identity" else given)
    return found


class _Copies:
    """Copies chains of aliases, each beginning with a read that waits for some nodes."""

    def __init__(self, graph: Graph, aliases: Aliases) -> None:
        self._graph = graph
        self._aliases = aliases
        self._made: dict[tuple[Value, frozenset[Node], tuple[Node, ...]], Value] = {}

    def of(self, value: Value, name: str, waits: Iterable[Node], enters: tuple[Node, ...] = ()) -> Value:
        """Return a copy of `value` whose read runs after `waits`.

        Args:
            waits: nodes in the reader's loop.
            enters: the Enters from the value's loop into the reader's, outermost first.
        """
        key = value, frozenset(waits), enters
        if key not in self._made:
            self._made[key] = self._copy(value, name, tuple(waits), enters)
        return self._made[key]

    def _copy(self, value: Value, name: str, waits: tuple[Node, ...], enters: tuple[Node, ...]) -> Value:
        node = value.node
        if node.op in ENTERS:
            return self.of(node.inputs[0], name, waits, (node, *enters))
        routed = node.op in SWITCHES
        if value.dtype > dtypes.REF_OFFSET and not routed:
            return self._read(self._aliases.variables[value][0], name, waits, enters)
        inputs = []
        for given in node.inputs:
            if given not in self._aliases.variables:
                inputs.append(self._entered(given, enters))
                continue
            branch = (given.node,) if node.op == "Merge" and not enters else ()  # the read must be dead with its branch
            inputs.append(self.of(given, name, (*waits, *branch), enters))
        copy_name = f"{name}/{node.name.rpartition('/')[2]}"
        controls, op = () if enters else node.controls, "Switch" if routed else ""
        copy = copy_node(self._graph, node, inputs, name=copy_name, controls=controls, op=op)
        return copy.output(value.index)

    def _read(self, variable: Node, name: str, waits: Iterable[Node], enters: Iterable[Node]) -> Value:
        value = variable.output()
        for enter in enters:
            value = Builder(self._graph, f"{name}/enter", variable).op("RefEnter", value, **_entering(enter))
        return Builder(self._graph, name, variable, device=variable.device).op(
            "Identity", value, controls=waits, T=dtypes.base(variable.attr("dtype"))
        )

    def _entered(self, value: Value, enters: Iterable[Node]) -> Value:
        for enter in enters:
            value = Builder.at(value.node).op("Enter", value, what="enter", **_entering(enter))
        return value


def _entering(enter: Node) -> dict[str, Any]:
    return {
        "frame_name": enter.attr("frame_name"),
        "is_constant": True,
        "parallel_iterations": enter.attr("parallel_iterations"),
    }


# Dereference references that pass through control flow and are not updated after it.
#
#     before   RefMerge(Assign(w, a), Assign(w, b)) ──► Mul
#     after    Merge(Identity(Assign(w, a)), Identity(Assign(w, b))) ──► Mul
#
# Branches and loops that return assignments make these references. A handle may only pass a Switch or an Enter, because
# after other routes it could be that of several variables. So references that are updated after another route stay, and
# are refused later.


def read_before_routes(graph: Graph) -> None:
    """Replace references that pass joins of control flow by values, in place."""
    routes = [node for node in graph if has(node.op, "reference_routes")]
    if not any(has(node.op, "joins_references") for node in routes):
        return
    needed: set[Node] = set()  # an update after them needs the reference
    changed = True
    while changed:
        more = [node for node in routes if node not in needed and _is_needed(node, needed)]
        needed.update(more)
        changed = bool(more)
    found = dict.fromkeys(n for n in routes if has(n.op, "joins_references") and n not in needed)
    pending = list(found)
    while pending:
        node = pending.pop()
        users = [use.node for value in node.outputs for use in value.uses if has(use.node.op, "reference_routes")]
        pending += [user for user in users if user not in found]
        found |= dict.fromkeys(users)
    for node in found:
        node_type = node.attr("T")
        become(node, node.op.removeprefix("Ref"), node.inputs, {"T": dtypes.base(node_type)})
    for node in found:
        for index, value in enumerate(node.inputs):
            if value.dtype > dtypes.REF_OFFSET:
                read = Builder.at(node).node("Identity", value, what=f"read_{index}")
                node.set_input(index, read.output())


def _is_needed(node: Node, needed: set[Node]) -> bool:
    """Return whether a reader needs an output of a route as a reference: an update, or a route that is needed."""
    return any(
        use.node in needed or not has(use.node.op, "reference_routes")
        for value in node.outputs
        for use in value.uses
        if use.node.input_dtypes[use.index] > dtypes.REF_OFFSET
    )


# Alias analysis of TensorFlow 1 graphs: find the values that are the buffer of a reference variable, not copies.
#
#     w = VariableV2 ─► w/read = Identity ─► Reshape ─► Switch ─► Merge        all one buffer
#                                               └─► Mul                         reads it, when it runs
#
# Kernels of the ops below pass on their input's buffer (measured on TensorFlow 2.21), so a reader that runs after an
# update reads the new value, however early `w/read` ran.


_SINGLE = {"Pack": ("N", 0), "AddN": ("N", 0), "Split": ("num_split", 1), "SplitV": ("num_split", 0)}


def is_reference(node: Node, index: int) -> bool:
    """Return whether a node takes an input as a reference."""
    return node.input_dtypes[index] > dtypes.REF_OFFSET


def is_loop_head(node: Node) -> bool:
    """Return whether a Merge joins a loop's iterations."""
    return any(value.node.op in BACK_EDGES for value in node.inputs)


def handed_on(node: Node, index: int) -> Iterable[Value]:
    """Return the outputs that are the buffer of an input."""
    op = node.op
    if has(op, "keeps_buffer"):
        return [node.output()] if index == 0 else ()
    if has(op, "switches") or op == "RefEnter":
        return node.outputs if index == 0 else ()
    if op == "IdentityN":
        return [node.output(index)]
    if op == "Merge":
        return () if is_loop_head(node) else [node.output()]
    if op == "Enter":
        return [node.output()] if node.attr("is_constant") else ()
    if op in _SINGLE:
        count, place = _SINGLE[op]
        return [node.output()] if index == place and node.attr(count) == 1 else ()
    if op == "Cast":
        return [node.output()] if node.attr("SrcT") == node.attr("DstT") else ()
    if has(op, "keeps_buffer_of_size") and index == 0:
        return [node.output()] if _size(node.inputs[0]) == _size(node.output()) is not None else ()
    if has(op, "writes") and is_reference(node, index):
        return node.outputs if index == 0 else ()
    return ()


def _size(value: Value) -> int | None:
    shape = static_shape(value)
    return None if shape is None or None in shape else math.prod(size or 0 for size in shape)


class Aliases:
    """The aliases of every reference variable of a graph.

    Attributes:
        variables: the variables whose buffer a value may be.
        readers: the inputs of nodes that read a buffer: node, index.
        updates: the nodes that write each variable.
    """

    def __init__(self, graph: Graph) -> None:
        self.variables: dict[Value, tuple[Node, ...]] = {}
        self.readers: dict[tuple[Node, int], None] = {}
        self.updates: dict[Node, dict[Node, None]] = {}
        pending = deque(node.output() for node in graph if has(node.op, "reference_variables"))
        self.variables |= {value: (value.node,) for value in pending}
        while pending:
            value = pending.popleft()
            for node, index in value.uses:
                if has(node.op, "writes") and is_reference(node, index):
                    for variable in self.variables[value]:
                        self.updates.setdefault(variable, {})[node] = None
                outputs = handed_on(node, index)
                pending.extend(out for out in outputs if self._is_new(out, value))
                if not outputs and not is_reference(node, index):
                    self.readers[node, index] = None

    def _is_new(self, out: Value, value: Value) -> bool:
        known = self.variables.get(out, ())
        joined = tuple(dict.fromkeys((*known, *self.variables[value])))
        self.variables[out] = joined
        return joined != known

    def unchanged(self, variable: Node) -> Iterator[Value]:
        """Yield the values that equal a variable: the variable, its updates, and ops that only repeat them."""
        stack, seen = [variable.output()], {variable.output()}
        while stack:
            value = stack.pop()
            yield value
            for node, index in value.uses:
                updates = has(node.op, "writes") and is_reference(node, index)
                for out in handed_on(node, index) if has(node.op, "keeps_value") or updates else ():
                    if out not in seen:
                        seen.add(out)
                        stack.append(out)
