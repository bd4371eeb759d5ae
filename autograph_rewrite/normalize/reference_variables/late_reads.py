"""Add a read behind an update for each reader that ran there, so that reads need not alias buffers.

    before   w/read ──► Mul          train ──^──► Mul            Mul sees what train has written
    after    w ──► Identity ──► Mul  train ──^──► Identity       so it does, whatever w/read gave before

Whether a reader runs behind an update follows from the graph's edges, within an iteration of a loop or from one to the
next. Where no edge decides, the original is a race; its usual winner, the early read, is kept, and noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from autograph_rewrite.ir.copying import Variant, copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.normalize.reference_variables.aliases import Aliases
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, SWITCHES

Race = tuple[Node, Node, Node]
"""A variable, what reads it, and an update that no edge orders with the reader."""
_KEPT_READS = 3  # readers that one note names


def read_late(graph: Graph, aliases: Aliases) -> int:
    """Give readers behind updates reads of their own, in place; return how many readers there were."""
    read = {variable for node, index in aliases.readers for variable in aliases.variables[node.inputs[index]]}
    marks = _marks(aliases, read)
    if not marks:
        return 0
    behind = _Behind(graph, marks)
    found = [(node, index, waits) for node, index in aliases.readers if (waits := _waits(behind, aliases, node, index))]
    copies = _Copies(graph, aliases)
    for node, index, waits in found:
        node.set_input(index, copies.of(node.inputs[index], f"{node.name}/read_{index}", waits))
    return len(found)


def races(graph: Graph, aliases: Aliases, step: Collection[Node]) -> list[Race]:
    """Return which readers of a step no edge orders with an update of the step.

    Args:
        graph: with reference variables.
        aliases: which values are their buffers.
        step: nodes of one step.
    """
    readers = {one: 1 << i for i, one in enumerate(dict.fromkeys(n for n, _ in aliases.readers if n in step))}
    order = topological_order(graph)
    before_update = marks_before(order, readers)
    updates = {one for members in aliases.updates.values() for one in members if one in step}
    marks = {one: 1 << i for i, one in enumerate(sorted(updates, key=lambda node: node.name))}
    before_reader = marks_before(order, marks)
    found: dict[Race, None] = {}
    for node, index in aliases.readers:
        for variable in aliases.variables[node.inputs[index]] if node in step else ():
            for update in aliases.updates.get(variable, ()):
                if update not in marks or update is node:
                    continue
                if not before_reader[node] & marks[update] and not before_update[update] & readers[node]:
                    found[variable, node, update] = None
    return list(found)


def notes(found: Iterable[Race]) -> list[tuple[str, str, str]]:
    """Return what to say of races: node, op and text, one for each variable."""
    by_variable: dict[Node, dict[str, str]] = {}
    for variable, reader, update in found:
        by_variable.setdefault(variable, {})[reader.name] = update.name
    said = []
    for variable, readers in by_variable.items():
        listed = ", ".join(f"'{name}'" for name in list(readers)[:_KEPT_READS])
        more = f" and {len(readers) - _KEPT_READS} more" if len(readers) > _KEPT_READS else ""
        written = next(iter(readers.values()))
        text = f"no edge orders its readers {listed}{more} with its update '{written}': they read it before"
        said.append((variable.name, variable.op, text))
    return said


def _marks(aliases: Aliases, read: Collection[Node]) -> dict[Node, int]:
    """Return a bit for each update of a variable that somebody reads."""
    updates = dict.fromkeys(one for variable, members in aliases.updates.items() if variable in read for one in members)
    return {one: 1 << i for i, one in enumerate(updates)}


class _Behind:
    """Which updates run before a node: in its own iteration, and in this or an earlier one."""

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
        """Return the updates before a node and the node itself, if it is one."""
        own = self.marks.get(node, 0)
        return self._within[node] | own, self._across[node] | own


def _waits(behind: _Behind, aliases: Aliases, node: Node, index: int) -> tuple[Node, ...]:
    """Return what a read for a reader has to wait for; nothing where the reader sees what the present read gives."""
    value = node.inputs[index]
    if node.op in ("Merge", "Exit"):  # they take what a route of the loop gives them, nothing else
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
    """Return where the buffer is read as things are: by a node, or right behind what gives a reference."""
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
    """Copies chains of aliases, each beginning with a read that waits for something."""

    def __init__(self, graph: Graph, aliases: Aliases) -> None:
        self._graph = graph
        self._aliases = aliases
        self._made: dict[tuple[Value, frozenset[Node], tuple[Node, ...]], Value] = {}

    def of(self, value: Value, name: str, waits: Iterable[Node], enters: tuple[Node, ...] = ()) -> Value:
        """Return a value like `value`, read anew behind `waits`.

        Args:
            value: an alias.
            name: of the read.
            waits: nodes in the reader's loop.
            enters: what leads from the value's loop into the reader's, outermost first.
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
            branch = (given.node,) if node.op == "Merge" and not enters else ()  # alive in its branch only
            inputs.append(self.of(given, name, (*waits, *branch), enters))
        copy_name = f"{name}/{node.name.rpartition('/')[2]}"
        controls, op = () if enters else node.controls, "Switch" if routed else ""
        copy = copy_node(self._graph, node, inputs, name=copy_name, controls=controls, variant=Variant(op))
        return copy.output(value.index)

    def _read(self, variable: Node, name: str, waits: Iterable[Node], enters: Iterable[Node]) -> Value:
        value = variable.output()
        for enter in enters:
            attrs = {"frame_name": enter.attr("frame_name"), "is_constant": True}
            attrs["parallel_iterations"] = enter.attr("parallel_iterations")
            value = self._graph.add("RefEnter", [value], name=f"{name}/enter", attrs=attrs, origin=variable).output()
        return self._graph.add(
            "Identity", [value], name=name, controls=waits, device=variable.device,
            origin=variable, attrs={"T": dtypes.base(variable.attr("dtype"))},
        ).output()  # fmt: skip

    def _entered(self, value: Value, enters: Iterable[Node]) -> Value:
        for enter in enters:
            attrs = {"frame_name": enter.attr("frame_name"), "is_constant": True}
            attrs["parallel_iterations"] = enter.attr("parallel_iterations")
            name = f"{value.node.name}/enter"
            value = self._graph.add("Enter", [value], name=name, attrs=attrs, origin=value.node).output()
        return value
