"""Checks the folded graph between passes: one generator for each invariant, all faults reported together.

    fault = (what is wrong, the node)        INVARIANTS ──► faults(view) ──► one VerifyError

It runs after every pass and takes tens of milliseconds for 13,000 nodes: each generator is one flat loop that does
expensive checks only where a cheap comparison failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autograph_rewrite.errors import GraphError, VerifyError
from autograph_rewrite.ir.format.function_library import Library
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, OFTEN, ONCE, PROCESS, Mesh, PerInstance, Select, is_axis, is_rarer, word
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ir.types.dtypes import base, dtype_name
from autograph_rewrite.ir.types.opdefs import RESHARD, OpDef, find_op, get_op, signature
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ir.verify.collective_groups import collect
from autograph_rewrite.ir.verify.loops import loop_faults
from autograph_rewrite.ir.verify.reshards import reshard_faults
from autograph_rewrite.ops.traits import ENTERS, has, ops_with

SHOWN = 12  # faults in one message
Types = tuple[tuple[int, ...], tuple[int, ...]]


class Fault(NamedTuple):
    """One broken invariant."""

    problem: str
    node: Node | None = None
    hint: str = ""


@dataclass(frozen=True)
class View:
    """A graph, and the mesh and devices that its invariants compare it with."""

    graph: Graph
    nodes: tuple[Node, ...]
    mesh: Mesh
    devices: tuple[str, ...]


Invariant = Callable[[View], Iterable[Fault]]


def check_folded(graph: Graph, mesh: Mesh, devices: Sequence[str] = ()) -> None:
    """Check every invariant of a graph between two passes.

    Args:
        graph: a folded graph, or a plain one.
        mesh: of the process: the axes along which nodes have instances or coordinates, with their sizes.
        devices: the devices that passes may use; empty to accept any.

    Raises:
        VerifyError: names every broken invariant.
    """
    raise_for(folded_faults(graph, mesh, devices))


def folded_faults(graph: Graph, mesh: Mesh, devices: Sequence[str] = ()) -> list[Fault]:
    """Return every broken invariant of a graph between two passes."""
    view = View(graph, tuple(graph), mesh, tuple(devices))
    return [fault for invariant in INVARIANTS for fault in invariant(view)]


def raise_for(faults: Sequence[Fault]) -> None:
    """Raise one VerifyError for all faults, if there are any."""
    if not faults:
        return
    lines = [f"{fault.problem}" + (f"  [{fault.node.op}]" if fault.node else "") for fault in faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"... and {len(faults) - SHOWN} more")
    head = lines[0] if len(faults) == 1 else "\n  - ".join([f"{len(faults)} invariants are broken:", *lines])
    node = next((fault.node for fault in faults if fault.node), None)
    raise VerifyError(head, node=node, hint=next((fault.hint for fault in faults if fault.hint), None))


def names_are_unique(view: View) -> Iterator[Fault]:
    """The graph has every node under the node's name."""
    for name, node in view.graph.nodes.items():
        if node.name != name:
            yield Fault(f"'{node.name}' stands in the graph as '{name}'", node)
        if node.graph is not view.graph:
            yield Fault(f"'{name}' belongs to another graph", node)


def edges_are_known_at_both_ends(view: View) -> Iterator[Fault]:
    """Each input is in the graph and lists its reader as a use; each use is an input; likewise for control edges."""
    nodes = set(view.nodes)
    inputs = uses = 0
    for node in view.nodes:
        index = 0
        for value in node._inputs:
            if value.node not in nodes:
                yield Fault(f"'{node.name}' reads '{value.name}', which is not in the graph", node)
            if (node, index) not in value._uses:
                yield Fault(f"'{value.name}' does not know its reader '{node.name}'", node)
            index += 1
        inputs += index
        for value in node._outputs:
            uses += len(value._uses)
    if inputs != uses:
        yield from _stale_uses(view)
    for node in view.nodes:
        for control in node._controls:
            if control not in nodes:
                yield Fault(f"'{node.name}' waits for '{control.name}', which is not in the graph", node)
            if node not in control._control_users:
                yield Fault(f"'{control.name}' does not know that '{node.name}' waits for it", node)
        for user in node._control_users:
            if node not in user._controls or user not in nodes:
                yield Fault(f"'{node.name}' believes that '{user.name}' waits for it", node)


def _stale_uses(view: View) -> Iterator[Fault]:
    for node in view.nodes:
        for value in node._outputs:
            for reader, index in value._uses:
                gone = view.graph.nodes.get(reader.name) is not reader
                if gone or index >= len(reader._inputs) or reader._inputs[index] is not value:
                    yield Fault(f"'{value.name}' believes that '{reader.name}' reads it", node)


def no_cycles(view: View) -> Iterator[Fault]:
    """No node waits for itself, except through the back edge of a loop."""
    try:
        topological_order(view.graph)
    except GraphError as error:
        yield Fault(error.problem, view.graph.nodes.get(error.node_name or ""))


def loops_are_closed(view: View) -> Iterator[Fault]:
    """Loops are entered by Enter and left by Exit, and no node in a loop waits for the end of that loop."""
    if not any(node.op in ENTERS for node in view.nodes):
        return
    try:
        order = topological_order(view.graph)
    except GraphError:
        return  # `no_cycles` reports it
    yield from (Fault(problem, node) for node, problem in loop_faults(order))


def types_agree(view: View) -> Iterator[Fault]:
    """Every node has as many inputs as its op declares, of the declared element types."""
    given: dict[Node, tuple[int, ...]] = {}
    asked: dict[Node, tuple[int, ...]] = {}
    known: dict[tuple[object, ...], Types] = {}
    deciding: dict[str, tuple[str, ...]] = {}
    library = Library(view.graph.library)
    for node in view.nodes:
        keys = deciding.get(node.op)
        if keys is None:
            op = find_op(node.op)
            if op is None:
                if node.op not in library:  # a node may call a function by having its name as op
                    yield Fault(f"'{node.name}' has the unknown op '{node.op}'", node)
                continue
            keys = deciding[node.op] = op.type_attrs
        attrs = node._attrs
        key = (node.op, attrs.get(keys[0])) if len(keys) == 1 else (node.op, *[attrs.get(name) for name in keys])
        found = known.get(key)
        if found is None:
            try:
                found = known[key] = signature(node.op, node._attrs)
            except (GraphError, AttributeError, TypeError) as error:
                yield Fault(f"'{node.name}': {getattr(error, 'problem', error)}", node)
                continue
        given[node] = found[1]
        if found[0] or node._inputs:
            asked[node] = found[0]
    for node, wanted in asked.items():
        try:
            if wanted == tuple([given[value.node][value.index] for value in node._inputs]) and not node.selects:
                continue
        except (KeyError, IndexError):
            pass
        yield from _type_faults(view, node, wanted, given)


def _type_faults(
    view: View, node: Node, wanted: tuple[int, ...], types: dict[Node, tuple[int, ...]]
) -> Iterator[Fault]:
    expanded = _expanded_inputs(view, node)
    if len(expanded) != len(wanted):
        yield Fault(f"'{node.name}' has {len(expanded)} inputs; its op and attributes ask for {len(wanted)}", node)
        return
    for value, dtype in zip(expanded, wanted, strict=True):
        given = types.get(value.node)
        if given is None:
            continue
        if value.index >= len(given):
            yield Fault(f"'{node.name}' reads '{value.name}', but {value.node.op} has {len(given)} outputs", node)
        elif dtype not in (given[value.index], base(given[value.index])):
            got, asked = dtype_name(given[value.index]), dtype_name(dtype)
            yield Fault(f"'{node.name}' takes {asked} where '{value.name}' gives {got}", node)


def _expanded_inputs(view: View, node: Node) -> list[Value]:
    """Return the inputs of one instance of a node as expansion writes them."""
    counts = {i: _taken(view, node, i) for i in node.selects}
    return [value for i, value in enumerate(node._inputs) for _ in range(counts.get(i, 1))]


def _taken(view: View, node: Node, index: int) -> int:
    """Return how many instances of an input one instance of a node reads."""
    select = node.selects.get(index)
    if select is None or not select.is_of_many or not 0 <= index < len(node._inputs):
        return 1
    return view.mesh.taken(node.span, node._inputs[index].node.span, select)


def selectors_fit(view: View) -> Iterator[Fault]:
    """A node has a selector for exactly those inputs that run more often; ALL fills a list argument."""
    for node in view.nodes:
        if node.selects:
            yield from _selector_faults(view, node)
        elif node.span != EACH and node.op != RESHARD:  # a reshard reads all along its axes, without a selector
            yield from _unselected(node)


def _unselected(node: Node) -> Iterator[Fault]:
    """Yield a fault for each input that lacks a selector."""
    span = node.span
    for i, value in enumerate(node._inputs):
        other = value.node.span
        if i not in node.selects and is_rarer(span, other):
            often = OFTEN.get(span, f"along {word(span)}")
            problem = f"'{node.name}' runs {often} and reads {word(other)} '{value.name}' without a selector"
            yield Fault(problem, node)


def _selector_faults(view: View, node: Node) -> Iterator[Fault]:
    for i, select in node.selects.items():
        if select in (Select.EVERY, Select.OWN):
            continue
        if node.span == EACH:
            yield Fault(f"'{node.name}' runs on each replica, so it cannot select instances", node)
        if not 0 <= i < len(node._inputs):
            yield Fault(f"'{node.name}' selects instances of an input {i}, which it does not have", node)
        elif node.span != EACH and not is_rarer(node.span, node._inputs[i].node.span):
            often = OFTEN.get(node._inputs[i].node.span, "on each replica")
            yield Fault(f"'{node.name}' selects instances of '{node._inputs[i].name}', which runs {often}", node)
    yield from _unselected(node)
    op = find_op(node.op)
    if op is None:
        return
    lists = _list_positions(op, node)
    at = 0
    for i in range(len(node._inputs)):
        count = _taken(view, node, i)
        is_of_many = i in node.selects and node.selects[i].is_of_many
        if is_of_many and not any(at >= start and at + count <= end for start, end in lists):
            yield Fault(f"'{node.name}' takes all instances as input {i}, where {node.op} has no list", node)
        at += count


def _list_positions(op: OpDef, node: Node) -> list[tuple[int, int]]:
    ranges, at = [], 0
    for arg in op.inputs:
        attr = arg.number_attr or arg.type_list_attr
        if not attr:
            at += 1
            continue
        raw = node._attrs.get(attr, op.attrs[attr].default)
        value = decode(raw) if raw else 0
        length = value if isinstance(value, int) else len(value)
        ranges.append((at, at + length))
        at += length
    return ranges


def instances_have_their_attributes(view: View) -> Iterator[Fault]:
    """An attribute that differs between instances has one value per instance, and never decides a type."""
    for node in view.nodes:
        for key, raw in node._attrs.items():
            if type(raw) is bytes:
                continue
            if not isinstance(raw, PerInstance):
                yield Fault(f"'{node.name}' has an attribute '{key}' that is not encoded", node)
            elif node.span == ONCE:
                yield Fault(f"'{node.name}' runs once, but its attribute '{key}' differs between instances", node)
            elif len(raw.raws) != view.mesh.count(node.span):
                count, often = len(raw.raws), view.mesh.count(node.span)
                yield Fault(f"'{node.name}' has {count} values of '{key}' for {often} replicas", node)
            elif find_op(node.op) is not None and key in get_op(node.op).type_attrs:
                yield Fault(f"'{node.name}' decides a type by '{key}', which differs between instances", node)


def devices_exist(view: View) -> Iterator[Fault]:
    """Device strings are valid, and nodes that a pass made are on devices of the plan."""
    used = Counter(node.device for node in view.nodes)
    allowed = device_specs.reachable(view.devices)
    suspects = {text for text in used if not _exists(text, allowed)}
    if not suspects:
        return
    for node in view.nodes:
        if node.device not in suspects:
            continue
        if device_specs.parse(node.device) is None:
            yield Fault(f"'{node.name}' is on '{node.device}', which is no device", node)
        elif PASS_ATTR in node._attrs:  # expansion replaces the devices that the user chose
            yield Fault(f"'{node.name}' is on '{node.device}', which the plan does not have", node)


def _exists(text: str, allowed: Sequence[device_specs.Spec]) -> bool:
    spec = device_specs.parse(text)
    return spec is not None and (not allowed or any(spec.fits(device) for device in allowed))


def places_lie_in_the_mesh(view: View) -> Iterator[Fault]:
    """A node has coordinates only on axes along which it has no instances; a node with a place on PROCESS runs once."""
    sizes = dict(view.mesh.axes)
    for node in view.nodes:
        for axis, at in node.place.items():
            first, last = (min(at, default=-1), max(at, default=-1)) if isinstance(at, tuple) else (at, at)
            if not is_axis(axis):
                yield Fault(f"'{node.name}' has a place along '{axis}', which is no axis of a mesh", node)
            elif axis in node.span:
                yield Fault(f"'{node.name}' has instances along the axis {axis}, and a coordinate on it", node)
            elif isinstance(at, tuple) and node.span == ONCE:
                yield Fault(f"'{node.name}' runs once, and has several places along '{axis}'", node)
            elif first < 0 or last >= sizes.get(axis, 0):
                known = f"the mesh has {sizes[axis]}" if axis in sizes else "the mesh has no such axis"
                yield Fault(f"'{node.name}' is at {axis} {last if first >= 0 else first}, and {known}", node)
        if PROCESS in node.place and node.span != ONCE:
            yield Fault(
                f"'{node.name}' is what one worker runs for all, but runs {OFTEN.get(node.span, 'often')}", node
            )


def anchors_resolve(view: View) -> Iterator[Fault]:
    """Every outside name refers to a node of the graph."""
    for name, value in view.graph.anchors.items():
        if view.graph.nodes.get(value.node.name) is not value.node:
            yield Fault(f"the outside name '{name}' points to '{value.name}', which is not in the graph", value.node)


def collectives_are_complete(view: View) -> Iterator[Fault]:
    """A collective of all replicas has as many members as its group, and no other collective has its keys.

    Their order needs no check: a folded node is the collective with all its members, so in a graph without cycles all
    replicas can run their collectives in one order.
    """
    found, _ = collect(view.nodes)
    for group in found:
        each = [node for node in group.members if node.span != ONCE]
        if each and group.group_size % view.mesh.count(each[0].span):
            count = view.mesh.count(each[0].span)
            yield Fault(f"{group.name} of {group.group_size} members runs on {count} replicas", each[0])
        if len(each) > 1 and not any("Bcast" in node.op for node in each):
            yield Fault(f"'{each[0].name}' and '{each[1].name}' are both {group.name}", each[1])


def containers_are_filled(view: View) -> Iterator[Fault]:
    """If each replica reads from a tensor array or a stack, each replica writes to it.

    TensorFlow would report no error: an array without elements gives zeros.
    """
    written: dict[Container, Node] = {}
    for node in view.nodes:
        if node.op in _WRITES:
            before = written.setdefault(_container(node), node)
            if is_rarer(node.span, before.span):
                written[_container(node)] = node
    for node in view.nodes:
        write = written.get(_container(node)) if node.op in _READS else None
        if write is not None and is_rarer(write.span, node.span):
            often, rarely = word(node.span), word(write.span)
            yield Fault(f"'{node.name}' reads {often} what '{write.name}' puts into a container {rarely}", node)


def array_elements_are_written_once(view: View) -> Iterator[Fault]:
    """Each element of a tensor array is written once, except in arrays of gradients, which add up writes."""
    written: dict[tuple[Value, Value], Node] = {}
    for node in view.nodes:
        if node.op in _ELEMENT_WRITES and len(node.inputs) > 1:
            handle, index = node.inputs[:2]
            other = written.setdefault((handle, index), node)
            if other is not node and not _container(node)[1]:
                yield Fault(f"'{other.name}' and '{node.name}' write the same elements of a tensor array", node)


def reshards_agree(view: View) -> Iterator[Fault]:
    """A reshard is over exactly the axes along which its value changes, and these are axes of a mesh."""
    yield from (Fault(problem, node) for node, problem in reshard_faults(view.nodes, view.mesh))


INVARIANTS: tuple[Invariant, ...] = (
    names_are_unique,
    containers_are_filled,
    array_elements_are_written_once,
    edges_are_known_at_both_ends,
    no_cycles,
    loops_are_closed,
    types_agree,
    selectors_fit,
    instances_have_their_attributes,
    devices_exist,
    places_lie_in_the_mesh,
    anchors_resolve,
    collectives_are_complete,
    reshards_agree,
)


_WRITES, _READS = ops_with("container_writes"), ops_with("container_reads")
_ELEMENT_WRITES = frozenset(("TensorArrayWriteV3", "TensorArrayScatterV3"))
Container = tuple[Node, bytes]
"""The node that makes it, and for a container of gradients their source."""


def _container(node: Node) -> Container:
    maker, source = handle_node(node.inputs[0]), b""
    while has(maker.op, "container_gradients"):
        maker, source = handle_node(maker.inputs[0]), maker.attr("source")
    return maker, source
