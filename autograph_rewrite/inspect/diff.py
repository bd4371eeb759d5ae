"""Compare two graphs by name, recognising `replica_1/x` as a copy of `x`.

    original   %x ── %y                     copied     x, y: 2 instances each
    rewritten  %replica_0/x ── ...    ──►   added      %loss/add_n
               %replica_1/x ── ...          rewired    train: input 1 was %y, is %loss/add_n

A copy is compared with its original after its inputs have lost their replica's prefix, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.diagnostics.amounts import few, several
from autograph_rewrite.inspect.communication import INSTANCE, bare
from autograph_rewrite.inspect.graph_source import Source, as_graph
from autograph_rewrite.ir.format.printer import functions, line, shown_attrs
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.notebook import NotebookView, table

SHOWN = 20  # lines per section of the text
_COLOCATION = "_class"  # it restates the device, and expansion drops it
FIRST = frozenset(("0", "0/micro_0"))


@dataclass(frozen=True)
class Change:
    """One difference of a node that both graphs have."""

    node: str
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what} was {self.before or 'unset'}, is {self.after or 'unset'}"


@dataclass(frozen=True, repr=False)
class Diff(NotebookView):
    """The differences of two graphs.

    Attributes:
        added: nodes that only the second graph has, with their lines.
        removed: nodes that only the first graph has, with their lines.
        copied: the instances in the second graph of nodes of the first graph, by the node's name.
        rewired: changed inputs and control edges.
        moved: changed devices of nodes that are not copied.
        changed: changed ops and attributes.
        library: changed function definitions.
        order: both graphs have the same nodes, in another order.
    """

    added: Mapping[str, str]
    removed: Mapping[str, str]
    copied: Mapping[str, tuple[str, ...]]
    rewired: tuple[Change, ...]
    moved: tuple[Change, ...]
    changed: tuple[Change, ...]
    library: tuple[str, ...]
    made_by: Mapping[str, int]
    order: bool = False

    def __bool__(self) -> bool:
        """Return whether there is any difference."""
        lists = (self.added, self.removed, self.copied, self.rewired, self.moved, self.changed, self.library)
        return any(lists) or self.order

    def __str__(self) -> str:
        if not self:
            return "no differences\n"
        lines = []
        copied = grouped((len(instances), name) for name, instances in self.copied.items())
        for count, names in sorted(copied.items()):
            lines.append(f"{several(len(names), 'node')} copied, {several(count, 'instance')} each: {few(names)}")
        made = ", ".join(f"{count} by {name}" for name, count in sorted(self.made_by.items()))
        lines += _section(
            f"{several(len(self.added), 'node')} added" + (f" ({made})" if made else ""), _added(self.added), "+ "
        )
        lines += _section(f"{several(len(self.removed), 'node')} removed", list(self.removed.values()), "- ")
        lines += _section(f"{several(len(self.rewired), 'input')} rewired", list(map(str, self.rewired)))
        lines += _section(f"{several(len(self.moved), 'node')} moved", _moves(self.moved))
        lines += _section(f"{several(len(self.changed), 'attribute')} changed", list(map(str, self.changed)))
        lines += _section(f"{several(len(self.library), 'function')} changed", self.library)
        lines += ["the same nodes, in another order"] if self.order else []
        return "\n".join(lines) + "\n"

    def _html_parts(self) -> Iterator[str]:
        changes = (*self.rewired, *self.moved, *self.changed)
        yield table(
            ("node", "what", "before", "after"), ((one.node, one.what, one.before, one.after) for one in changes)
        )
        yield table(("added", ""), self.added.items())
        yield table(("removed", ""), self.removed.items())
        yield table(("copied", "#instances"), ((name, len(instances)) for name, instances in self.copied.items()))

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "added": list(self.added),
            "removed": list(self.removed),
            "copied": {name: list(instances) for name, instances in self.copied.items()},
            "rewired": [vars(change) for change in self.rewired],
            "moved": [vars(change) for change in self.moved],
            "changed": [vars(change) for change in self.changed],
            "functions": list(self.library),
            "made_by": dict(sorted(self.made_by.items())),
            "reordered": self.order,
        }


def diff(a: Source, b: Source) -> Diff:
    """Return the differences from graph `a` to graph `b`; each is an item, a graph, bytes or a path."""
    first, second = as_graph(a), as_graph(b)
    twins: dict[str, list[Node]] = {}
    added = {}
    for node in second:
        origin = _origin(node.name, first)
        if origin is None or _merges(node, origin, second):
            added[node.name] = line(node)
        else:
            twins.setdefault(origin, []).append(node)
    copied = {
        name: tuple(node.name for node in nodes)
        for name, nodes in twins.items()
        if len(nodes) > 1 or nodes[0].name != name
    }
    rewired: list[Change] = []
    moved: list[Change] = []
    changed: list[Change] = []
    for name, nodes in twins.items():
        before = first.nodes[name]
        for after in nodes:
            rewired += _rewired(before, after, first, name)
            changed += _changed(before, after, name)
            if name not in copied and before.device != after.device:
                moved.append(Change(name, "device", before.device, after.device))
    made_by = Counter(second.nodes[name].attr(PASS_ATTR, b"").decode() for name in added)
    made_by.pop("", None)
    return Diff(
        added=added,
        removed={node.name: line(node) for node in first if node.name not in twins},
        copied=copied,
        rewired=tuple(dict.fromkeys(rewired)),
        moved=tuple(moved),
        changed=tuple(dict.fromkeys(changed)),
        library=tuple(_library_changes(first, second)),
        made_by=made_by,
        order=not copied and not added and list(first.nodes) != list(second.nodes) and len(first) == len(second),
    )


def _origin(name: str, original: Graph) -> str | None:
    """Return the original of a node, by name; None if it has none."""
    if name in original:
        return name
    copied = bare(name)
    return copied if copied in original else None


def _merges(node: Node, origin: str, second: Graph) -> bool:
    """Return whether a node with the name of an original is a merge of its copies."""
    copied = f"replica_0/{origin}" in second or f"replica_0/micro_0/{origin}" in second
    return node.name == origin and PASS_ATTR in node.attrs and copied


def _bare(name: str, reader: Node, original: Graph) -> str:
    """Return a tensor name without the prefix of its replica, if its reader belongs to the same replica."""
    match = INSTANCE.fullmatch(name)
    if match is None:
        return name
    own = INSTANCE.fullmatch(reader.name)
    same = match[1] == (own[1] if own is not None else match[1] if match[1] in FIRST else "0")
    return match[2] if same or match[2].partition(":")[0] in original else name


def _rewired(before: Node, after: Node, original: Graph, name: str) -> list[Change]:
    old = [value.name for value in before.inputs]
    new = [_bare(value.name, after, original) for value in after.inputs]
    found = []
    if len(old) != len(new):
        found.append(Change(name, "inputs", _tensors(old), _tensors(new)))
    else:
        pairs = enumerate(zip(old, new, strict=True))
        found += [Change(name, f"input {i}", f"%{was}", f"%{now}") for i, (was, now) in pairs if was != now]
    waits_before = {control.name for control in before.controls}
    waits_after = {_bare(control.name, after, original) for control in after.controls}
    if waits_before != waits_after:
        gone, come = sorted(waits_before - waits_after), sorted(waits_after - waits_before)
        found.append(Change(name, "control edges", _tensors(gone, "^"), _tensors(come, "^")))
    return found


def _tensors(names: Sequence[str], mark: str = "%") -> str:
    return few([f"{mark}{name}" for name in names], 6)


def _changed(before: Node, after: Node, name: str) -> list[Change]:
    if before.op != after.op:
        return [Change(name, "op", before.op, after.op)]
    if before.attrs == after.attrs:
        return []
    old, new = shown_attrs(before), shown_attrs(after)
    if "shared_name" in new:  # that of a copy has the replica's prefix
        new["shared_name"] = INSTANCE.sub(r"\2", new["shared_name"].strip('"')).join('""')
    keys = sorted((old.keys() | new.keys()) - {_COLOCATION, PASS_ATTR, ORIGIN_ATTR})
    return [Change(name, key, old.get(key, ""), new.get(key, "")) for key in keys if old.get(key) != new.get(key)]


def _library_changes(first: Graph, second: Graph) -> list[str]:
    old = {text.partition(":")[0]: text for text in functions(first)}
    new = {text.partition(":")[0]: text for text in functions(second)}
    lines = [f"- {text}" for name, text in old.items() if name not in new]
    lines += [f"+ {text}" for name, text in new.items() if name not in old]
    return lines + [f"{old[name]} -> {text}" for name, text in new.items() if name in old and old[name] != text]


def _moves(moved: Sequence[Change]) -> list[str]:
    """Return one line per pair of devices, because a rewrite moves thousands of nodes."""
    groups = grouped(((change.before, change.after), change.node) for change in moved)
    lines = []
    for places, names in sorted(groups.items()):
        before, after = (device_specs.short(place) or "(anywhere)" for place in places)
        lines.append(f"{before} -> {after}: {few(names)}")
    return lines


def _added(added: Mapping[str, str]) -> list[str]:
    """Return one line per added node; its instances share the line of the first."""
    groups = grouped((bare(name), text) for name, text in added.items())
    return [texts[0] + (f"  ({len(texts)} instances)" if len(texts) > 1 else "") for texts in groups.values()]


def _section(title: str, lines: Sequence[str], mark: str = "") -> list[str]:
    if not lines:
        return []
    shown = [f"  {mark}{text}" for text in lines[:SHOWN]]
    more = [f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [title, *shown, *more]
