"""Defines Graph and Node (and exports Value, Use of `ir.value`): a graph and the closed set of methods that edit it.

    Graph ──nodes──► Node ──outputs──► Value ──uses──► Use(node, index)     data edges
      │                └─controls──► Node (both directions kept)            ordering edges
      └─anchors: {name from outside: Value}                                 fetches, gradients, saver tensors

The graph is *folded*: it holds a node that every replica runs once, with `span` EACH. Where a node that
runs once reads it, the input says which instances it takes (`Select`). `passes.emit.expand` unfolds the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import ORIGIN_ATTR, PASS_ATTR, closest, provenance, raw_attr, raw_attrs
from autograph_rewrite.ir.mesh import ANYWHERE, ONCE, PROCESS, PerInstance, Place, Select, Span
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ir.types.opdefs import default_attr, get_op, signature
from autograph_rewrite.ir.value import Use, Value

T = TypeVar("T")

__all__ = ["ORIGIN_ATTR", "PASS_ATTR", "Graph", "Node", "PerInstance", "Select", "Span", "Use", "Value"]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\\/>-]")

Dtypes = tuple[tuple[int, ...], tuple[int, ...]]
"""Element types of the inputs, and of the outputs."""


class Node:
    """One operation. Change it through its methods only; they keep the uses of its inputs up to date.

    Args:
        graph: the node's future graph; `Graph.insert` adds it there.
        op: op type.
        device: as the GraphDef spells it, "" for none.
        attrs: encoded values by name.
        rest: NodeDef fields that are not interpreted, as bytes.
    """

    __slots__ = (
        "_attrs", "_control_users", "_controls", "_inputs", "_outputs", "_types",
        "device", "graph", "name", "op", "place", "rest", "selects", "span",
    )  # fmt: skip

    def __init__(self, graph: Graph, name: str, op: str, device: str, attrs: dict[str, Any], rest: bytes) -> None:
        self.graph = graph
        self.name = name
        self.op = op
        self.device = device
        self.rest = rest
        self.span = ONCE
        self.place: Place = ANYWHERE
        self.selects: dict[int, Select] = {}
        self._attrs = attrs
        self._inputs: tuple[Value, ...] = ()
        self._controls: dict[Node, None] = {}
        self._control_users: dict[Node, None] = {}
        self._outputs: list[Value] = []
        self._types: tuple[str, dict[str, Any], Dtypes] | None = None  # the op and attributes of the cached signature

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that it reads, in order."""
        return self._inputs

    @property
    def controls(self) -> tuple[Node, ...]:
        """The nodes that must run before it."""
        return tuple(self._controls)

    @property
    def control_users(self) -> tuple[Node, ...]:
        """The nodes that wait for it."""
        return tuple(self._control_users)

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Raw attribute values (bytes or PerInstance), read-only."""
        return MappingProxyType(self._attrs)

    def attr(self, key: str, default: Any = None) -> Any:
        """Return a decoded attribute; where the node lacks it, the default that the op declares, else `default`."""
        raw = self._attrs.get(key)
        if raw is None and not key.startswith("_"):  # no op declares an attribute with an underscore
            raw = default_attr(self.op, key)
        if isinstance(raw, PerInstance):
            return tuple(decode(one) for one in raw.raws)
        return default if raw is None else decode(raw)

    def set_attr(self, key: str, value: Any) -> None:
        """Set an attribute from a Python value of the kind that its op declares; `_x` are strings."""
        self.set_raw_attr(key, raw_attr(get_op(self.op), key, value))

    def set_raw_attr(self, key: str, raw: bytes | PerInstance) -> None:
        """Set an attribute from encoded bytes."""
        self._attrs = {**self._attrs, key: raw}  # nodes made from one template share the dict
        self.graph.edits += 1

    def drop_attr(self, key: str) -> None:
        """Remove an attribute if it is there."""
        if key in self._attrs:
            self._attrs = {k: v for k, v in self._attrs.items() if k != key}
            self.graph.edits += 1

    def set_span(self, span: Span) -> None:
        """Say how often the node runs."""
        if span != self.span:
            self.span = span
            self.graph.edits += 1

    def set_place(self, place: Place) -> None:
        """Give the node its coordinates on axes along which it has no instances."""
        if place != self.place:
            self.place = place
            self.graph.edits += 1

    def at(self, axis: str, default: int = 0) -> int:
        """Return the coordinate on an axis along which the node has no instances; the first of several."""
        found = self.place.get(axis, default)
        return found if isinstance(found, int) else found[0]

    def put(self, axis: str, coordinate: int) -> None:
        """Give the node a coordinate on one axis."""
        self.set_place({**self.place, axis: coordinate})

    def leave(self, axis: str) -> None:
        """Remove the node's coordinate on one axis."""
        if axis in self.place:
            self.set_place({name: i for name, i in self.place.items() if name != axis})

    def set_device(self, device: str) -> None:
        """Assign the node to a device."""
        if device != self.device:
            self.device = device
            self.graph.edits += 1

    @property
    def is_driven(self) -> bool:
        """Whether one worker runs it for the whole job."""
        return PROCESS in self.place

    @property
    def input_dtypes(self) -> tuple[int, ...]:
        """The element types that it takes."""
        return self._signature()[0]

    @property
    def output_dtypes(self) -> tuple[int, ...]:
        """The element types that it gives."""
        return self._signature()[1]

    def _signature(self) -> Dtypes:
        known = self._types
        if known is not None and known[1] is self._attrs and known[0] == self.op:
            return known[2]
        try:
            found = signature(self.op, self._attrs)
        except GraphError as error:
            raise GraphError(error.problem, node=self, hint=error.hint) from None
        self._types = self.op, self._attrs, found
        return found

    @property
    def outputs(self) -> tuple[Value, ...]:
        """All its output values."""
        return tuple(self.output(i) for i in range(len(self.output_dtypes)))

    def output(self, index: int = 0) -> Value:
        """Return one output value."""
        outputs = self._outputs
        if index < len(outputs):
            return outputs[index]
        while len(outputs) <= index:
            outputs.append(Value(self, len(outputs)))
        return outputs[index]

    @property
    def read_outputs(self) -> tuple[Value, ...]:
        """The output values that were requested so far (a superset of those with readers)."""
        return tuple(self._outputs)

    def drop_outputs(self) -> None:
        """Forget output values that were requested of an op which the node is no more, and which it does not have."""
        del self._outputs[len(self.output_dtypes) :]

    def set_inputs(self, inputs: Iterable[Value], selects: Mapping[int, Select] | None = None) -> None:
        """Replace all inputs and all selectors."""
        new = tuple(inputs)  # before anything changes: the iterable may read the old inputs
        for index, value in enumerate(self._inputs):
            value._uses.pop((self, index), None)
        self._inputs = new
        for index, value in enumerate(new):
            value._uses[self, index] = None
        self.selects = dict(selects) if selects else {}
        self.graph.edits += 1

    def set_input(self, index: int, value: Value, select: Select | None = None) -> None:
        """Replace one input, and its selector.

        Args:
            select: which of several instances the node reads; None: the matching one.

        Raises:
            GraphError: there is no such input.
        """
        inputs = self._inputs
        if not 0 <= index < len(inputs):
            raise GraphError(f"'{self.name}' has {len(inputs)} inputs, so no input {index}", node=self)
        inputs[index]._uses.pop((self, index), None)
        self._inputs = (*inputs[:index], value, *inputs[index + 1 :])
        value._uses[self, index] = None
        if select is not None:
            self.selects[index] = select
        else:
            self.selects.pop(index, None)
        self.graph.edits += 1

    def add_control(self, node: Node) -> None:
        """Make this node wait for `node`."""
        if node not in self._controls:
            self._controls[node] = None
            node._control_users[self] = None
            self.graph.edits += 1

    def remove_control(self, node: Node) -> None:
        """Stop waiting for `node`."""
        if node in self._controls:
            del self._controls[node]
            del node._control_users[self]
            self.graph.edits += 1

    def disconnect(self) -> None:
        """Read nothing, and wait for nothing."""
        self.set_inputs(())
        for control in self.controls:
            self.remove_control(control)

    def __repr__(self) -> str:
        return f"<{self.op} '{self.name}'>"


class Graph:
    """Nodes in insertion order, the function library, and the outside names of values (`anchors`)."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.library = b""  # FunctionDefLibrary, encoded
        self.versions = b""  # VersionDef, encoded
        self.rest = b""  # other GraphDef fields, encoded
        self.anchors: dict[str, Value] = {}
        self.edits = 0  # the number of changes so far; cached results of the same number are still valid
        self._remembered: dict[str, tuple[int, object, Any]] = {}
        self.current_pass = ""
        self._suffixes: dict[str, int] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, name: str) -> bool:
        return name in self.nodes

    def node(self, name: str) -> Node:
        """Return the node of that name.

        Raises:
            GraphError: no node has the name; the hint lists the closest names.
        """
        found = self.nodes.get(name)
        if found is None:
            raise GraphError(f"the graph has no node '{name}'", hint=closest(name, self.nodes))
        return found

    def value(self, tensor: str) -> Value:
        """Return a value by tensor name, `x`, `x:0` or `x:1`.

        Raises:
            GraphError: there is no such node or output.
        """
        name, colon, index = tensor.partition(":")
        node = self.node(name)
        number = int(index) if index.isascii() and index.isdigit() else -1 if colon else 0
        if not 0 <= number < len(node.output_dtypes):
            raise GraphError(f"'{name}' has {len(node.output_dtypes)} outputs, so no '{tensor}'", node=node)
        return node.output(number)

    def set_anchor(self, name: str, value: Value) -> None:
        """Bind an outside name to a value."""
        if self.anchors.get(name) is not value:
            self.anchors[name] = value
            self.edits += 1

    def move_anchors(self, old: Value, new: Value) -> None:
        """Bind the outside names of one value to another."""
        for name in [name for name, value in self.anchors.items() if value is old]:
            self.set_anchor(name, new)

    def unique_name(self, base: str) -> str:
        """Return the first free name of `base`, `base_1`, `base_2`...

        Characters that no node name may have become `_`: names of variables, for example, may have any.
        """
        base = _NOT_IN_NAMES.sub("_", base)
        if not base[:1].isalnum() and base[:1] != ".":
            base = f".{base}"
        if base not in self.nodes:
            return base
        count = self._suffixes.get(base, 0) + 1
        while f"{base}_{count}" in self.nodes:
            count += 1
        self._suffixes[base] = count
        return f"{base}_{count}"

    def insert(self, node: Node, inputs: Iterable[Value] = (), controls: Iterable[Node] = ()) -> Node:
        """Add a finished node under its name.

        Args:
            node: not in the graph yet.

        Raises:
            GraphError: the name is taken.
        """
        if node.name in self.nodes:
            raise GraphError(f"two nodes are named '{node.name}'", node=node)
        self.nodes[node.name] = node
        node.set_inputs(inputs)
        for control in controls:
            node.add_control(control)
        return node

    def add(
        self,
        op: str,
        inputs: Sequence[Value] = (),
        *,
        name: str,
        attrs: Mapping[str, Any] | None = None,
        device: str = "",
        controls: Iterable[Node] = (),
        span: Span = ONCE,
        place: Place = ANYWHERE,
        selects: Mapping[int, Select] | None = None,
        origin: Node | str | None = None,
    ) -> Node:
        """Add a node; dtype and count attributes that `attrs` leaves out are inferred from the inputs.

        Args:
            name: wanted name; made unique.
            attrs: Python values by attribute name, encoded by the kind that the op declares.
            device: device string, empty for none yet.
            span: how often it runs.
            place: its coordinates on axes along which it has no instances.
            selects: which instances it reads, by input index.
            origin: the original node that it replaces or supports (provenance).

        Raises:
            GraphError: unknown op, or a needed attribute cannot be inferred.
        """
        raw = raw_attrs(op, inputs, attrs or {}, selects or {})
        if self.current_pass:
            raw |= provenance(self.current_pass, origin)
        node = Node(self, self.unique_name(name), op, device, raw, b"")
        node.span, node.place = span, place
        self.insert(node, inputs, controls)
        node.selects = dict(selects) if selects else {}
        return node

    def erase(self, node: Node) -> None:
        """Remove a node.

        Raises:
            GraphError: it is gone already, or still has a reader, a waiting node or an anchor.
        """
        if self.nodes.get(node.name) is not node:
            raise GraphError(f"the graph has no node '{node.name}' to erase", node=node)
        readers = [use.node.name for value in node.read_outputs for use in value.uses]
        readers += [user.name for user in node._control_users]
        readers += [f"outside name {a}" for a, value in self.anchors.items() if value.node is node]
        if readers:
            raise GraphError(
                f"cannot erase '{node.name}': still read by {', '.join(readers[:5])}",
                node=node,
                hint="rewire its readers first with replace_all_uses_with()",
            )
        node.disconnect()
        del self.nodes[node.name]
        self.edits += 1

    def erase_all(self, nodes: Collection[Node]) -> None:
        """Remove nodes whose only readers and waiters are among them.

        Raises:
            GraphError: another node reads one of them or waits for it.
        """
        for node in nodes:
            node.disconnect()
        for node in nodes:
            self.erase(node)

    def replace(self, node: Node, new: Node) -> None:
        """Redirect the readers, waiters and outside names of `node` to `new`, then erase `node`.

        Raises:
            GraphError: `new` needs `node`.
        """
        if any(value.node is node for value in new._inputs):
            raise GraphError(f"'{new.name}' reads '{node.name}', so it cannot replace it", node=new)
        for value in node.read_outputs:
            value.replace_all_uses_with(new.output(value.index))
        for user in node.control_users:
            user.remove_control(node)
            if user is not new:
                user.add_control(new)
        self.erase(node)

    def put_in_order(self, nodes: Iterable[Node]) -> None:
        """Reorder all nodes, for printing and writing."""
        ordered = {node.name: node for node in nodes}
        assert ordered.keys() == self.nodes.keys()
        self.nodes = ordered
        self.edits += 1

    def remembered(self, what: str, find: Callable[[], T], *, of: object = None) -> T:
        """Return the cached result of `find`, which is called again after an edit of the graph.

        Args:
            what: the key of the cache.
            of: an immutable object that the result also depends on, compared by identity.
        """
        edits, was_of, found = self._remembered.get(what, (-1, None, None))
        if edits != self.edits or was_of is not of:
            found = find()
            self._remembered[what] = self.edits, of, found
        return found  # type: ignore[no-any-return]

    def clone(self) -> Graph:
        """Return an independent copy, with library, versions and anchors."""
        copy = type(self)()
        copies = clone_into(self, copy, "")
        copy.library, copy.versions, copy.rest = self.library, self.versions, self.rest
        copy.anchors = {name: copies[v.node].output(v.index) for name, v in self.anchors.items()}
        copy.edits = 0
        return copy


def unique_among(base: str, taken: set[str]) -> str:
    """Return the first of `base`, `base_1`, `base_2`... that is not in `taken`, and add it there."""
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def clone_into(graph: Graph, target: Graph, prefix: str) -> dict[Node, Node]:
    """Copy every node into `target`, which may be `graph` itself, under `prefix`; return old -> new.

    Args:
        prefix: of the copies' names, including the separator.
    """
    copies: dict[Node, Node] = {}  # no recursion: graphs are deeper than its limit
    for node in tuple(graph):
        copy = type(node)(target, prefix + node.name, node.op, node.device, node._attrs, node.rest)
        copy.span, copy.place = node.span, node.place
        if copy.name in target.nodes:
            target.insert(copy)  # raises
        target.nodes[copy.name] = copies[node] = copy
    for node, copy in copies.items():  # what set_inputs and add_control do, without their checks
        inputs = tuple([copies[v.node].output(v.index) for v in node._inputs])
        for index, value in enumerate(inputs):
            value._uses[copy, index] = None
        copy._inputs = inputs
        if node.selects:
            copy.selects = dict(node.selects)
        for control in node._controls:
            waited = copies[control]
            copy._controls[waited] = None
            waited._control_users[copy] = None
    target.edits += len(copies)
    return copies
