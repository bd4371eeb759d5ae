"""Call a graph as a function without tracing it: make its FunctionDef, register it, and execute it by name.

TensorFlow calls its own functions by name, at half the start-up cost of the public call op. The modules for it are
private: where they are missing or different, the public op is used.

Grappler is switched off for functions on CPUs: it took up to three quarters of the first step and never made a later
step faster. On accelerators it chooses layouts and stays on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite import tf_private
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import OWN_FUNCTIONS
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.traversal import reachable
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.ir.types.dtypes import RESOURCE, VARIANT
from autograph_rewrite.ir.types.opdefs import get_op, signature
from autograph_rewrite.ir.types.wire import delimited, varint
from autograph_rewrite.ir.verify.collective_groups import GROUP_KEY
from autograph_rewrite.ops.traits import has
from autograph_rewrite.requires import tensorflow


def new_name(base: str) -> str:
    """Return a unique function name."""
    return f"{OWN_FUNCTIONS}{base}_{uuid.uuid4().hex[:12]}"


class Call:
    """A function, registered as long as this object lives. Call it with flat tensors, eagerly or in a traced function.

    Attributes:
        types: of the results.
    """

    def __init__(self, function: EncodedFunction, *, on_cpu: bool = True) -> None:
        self._tf = tensorflow()
        self._name = function.name
        self.types = [self._tf.as_dtype(t) for t in function.output_types]
        self._private = tf_private.executor()
        self._config = _config(self._tf, self._private, on_cpu)
        self._keep = _register(self._tf, self._private, function)
        self._loops: dict[Any, Any] = {}

    def __call__(self, inputs: Sequence[Any], cancellation: Any = None) -> list[Any]:
        """Run the function and return its results.

        Args:
            inputs: one tensor per argument.
            cancellation: a manager from `cancellation_manager`; cancelling it ends the call.
        """
        if self._private is None or not self._tf.executing_eagerly():
            return self.add_op(inputs)[0]
        return self._execute(self._name, len(self.types), inputs, cancellation)

    def _execute(self, name: str, count: int, inputs: Sequence[Any], cancellation: Any) -> list[Any]:
        assert self._private is not None
        context, execute = self._private
        attrs = ("executor_type", "", "config_proto", self._config)
        given = name, count, list(inputs), attrs, context.context()
        if cancellation is None:
            results: list[Any] = execute.execute(*given)
        else:
            results = execute.execute_with_cancellation(*given, cancellation)
        return results

    def looped(self, inputs: Sequence[Any], stacked: Stacked, cancellation: Any = None) -> list[Any]:
        """Do several steps, each a call of the function, in one eager call; return the last results.

        Args:
            stacked: which of them have rows.
        """
        key = stacked, tuple(one.dtype for one in inputs)
        if key not in self._loops:
            self._loops[key] = self._traced_loop(*key)
        concrete = self._loops[key]
        if self._private is None:
            return list(concrete(*inputs))[1:]
        return self._execute(concrete.name, len(self.types) + 1, inputs, cancellation)[1:]

    def _traced_loop(self, stacked: Stacked, types: tuple[Any, ...]) -> Any:
        """Return the loop as a concrete function; its first result is the number of steps done."""

        def steps(*inputs: Any) -> list[Any]:
            number, results = run_steps(self.add_op, self.types, inputs, stacked)
            return [number, *results]

        specs = [self._tf.TensorSpec([] if one == self._tf.resource else None, one) for one in types]
        with self._tf.init_scope():
            return self._tf.function(steps, autograph=False).get_concrete_function(*specs)

    def add_op(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Add a call to the graph under construction; return its results, and the operation."""
        return add_call(self._name, self.types, inputs, self._config)


def add_call(name: str, types: Sequence[Any], inputs: Sequence[Any], config: bytes = b"") -> tuple[list[Any], Any]:
    """Add a call of a known function to the graph under construction; return its results, and the operation."""
    tf = tensorflow()
    made = tf.raw_ops.StatefulPartitionedCall(args=list(inputs), Tout=types, f=name, config_proto=config)
    if tf.executing_eagerly():
        return list(made) if types else [], None
    return (list(made), made[0].op) if types else ([], made)


def _config(tf: Any, private: tuple[Any, Any] | None, on_cpu: bool) -> bytes:
    """Return the encoded ConfigProto of the calls: that of the process, with or without Grappler."""
    config = tf.compat.v1.ConfigProto()
    if private is not None:
        config.ParseFromString(private[0].context().function_call_options.config_proto_serialized)
    if on_cpu:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    encoded: bytes = config.SerializeToString()
    return encoded


def _register(tf: Any, private: tuple[Any, Any] | None, function: EncodedFunction) -> Any:
    """Register a function and its library with TensorFlow; return an object that keeps the registration alive."""
    if private is None:  # wrapping an imported graph registers the functions in its library
        return tf.compat.v1.wrap_function(lambda: add_library(function), [])
    context = private[0].context()
    context.ensure_initialized()
    unknown = [one for one in function.library if not context.has_function(function_name(one))]  # those not traced here
    for definition in (*unknown, function.definition):
        parsed = tf.compat.v1.GraphDef().library.function.add()
        parsed.ParseFromString(definition)
        context.add_function_def(parsed)
    return _Registration(context, function.name)


def add_library(function: EncodedFunction) -> None:
    """Add a function and its library to the default graph."""
    tf = tensorflow()
    graph = tf.compat.v1.GraphDef()
    for definition in (*function.library, function.definition):
        graph.library.function.add().ParseFromString(definition)
    tf.graph_util.import_graph_def(graph, name="")


class _Registration:
    """Removes a function from TensorFlow when its `Call` is deleted."""

    def __init__(self, context: Any, name: str) -> None:
        self._remove: Callable[[str], None] = context.remove_function
        self._name = name

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # when the interpreter exits, TensorFlow may be gone already
            self._remove(self._name)


def on_cpu(devices: Iterable[str]) -> bool:
    """Return whether all of the devices are CPUs."""
    return all("CPU" in device.upper() for device in devices)


# Reads many variables in one call: one call costs less than one for each.
#
#     handles on a CPU ──► one variant, packed once ──► function ──► values, and stacks of values
#     other handles    ─────────────────────────────►
#
# Each argument of a call costs about half a microsecond, so the handles on a CPU are passed as one argument.


class Reader:
    """Reads the same variables again and again.

    Args:
        types: of the variables, as TensorFlow's enum.
        stacks: which variables (by position) are read as the rows of one tensor: those of a stack have one type, shape
            and CPU.
    """

    def __init__(self, handles: Sequence[Any], types: Sequence[int], stacks: Sequence[Sequence[int]] = ()) -> None:
        tf = tensorflow()
        stacked = {index for rows in stacks for index in rows}
        single = [index for index in range(len(handles)) if index not in stacked]
        by_device: dict[str, list[int]] = {}
        for index, handle in enumerate(handles):
            by_device.setdefault(handle.device if "CPU" in handle.device else "", []).append(index)
        elsewhere = by_device.pop("", [])
        self._arguments: list[Any] = []
        nodes: list[bytes] = []
        values: dict[int, str] = {}
        for number, (device, those) in enumerate(by_device.items()):
            with tf.device(device):
                self._arguments.append(tf.raw_ops.OptionalFromValue(components=[handles[index] for index in those]))
            attrs = {
                "output_types": encode("list(type)", [RESOURCE] * len(those)),
                "output_shapes": encode("list(shape)", [()] * len(those)),
            }
            nodes.append(encoded(f"get{number}", "OptionalGetValue", [f"a{number}"], attrs, device))
            handed = [(f"get{number}:components:{at}", types[index]) for at, index in enumerate(those)]
            node, found = read_together(f"read{number}", handed, device=device)
            nodes.append(node)
            values |= dict(zip(those, found, strict=True))
        first = len(self._arguments)
        self._arguments += [handles[index] for index in elsewhere]
        own = [(f"a{first + at}", types[index]) for at, index in enumerate(elsewhere)]
        more, found = read_each("each", own)
        values |= dict(zip(elsewhere, found, strict=True))
        results = [values[index] for index in single]
        for number, rows in enumerate(stacks):
            which = [values[index] for index in rows]
            node, result = stack(f"stack{number}", which, types[rows[0]], handles[rows[0]].device)
            nodes.append(node)
            results.append(result)
        given = [VARIANT] * first + [RESOURCE] * len(elsewhere)
        made = [*(types[index] for index in single), *(types[rows[0]] for rows in stacks)]
        name = new_name("read")
        self._call = Call(of_nodes(name, given, [*nodes, *more], results, made))

    def __call__(self) -> list[Any]:
        """Return the values of the variables outside stacks, in order, and then the stacks."""
        return self._call(self._arguments)


# One function made of a whole graph: GraphDef bytes in, FunctionDef bytes out.
#
#     graph     x = Placeholder      loss = Mean(x)         train = NoOp(^assign)
#     function  x: an argument       returns loss:output:0  must run: train
#
# TensorFlow does not trace the graph, and so adds no nodes or edges: the control dependencies that tf.function adds
# between stateful ops would chain the collectives of different devices, and connect nodes of different loop frames.

_SIGNATURE, _NODE_DEF, _RET, _ATTR, _CONTROL_RET = 1, 3, 4, 5, 6  # FunctionDef
_NAME, _INPUT_ARG, _OUTPUT_ARG, _IS_STATEFUL, _CONTROL_OUTPUT = 1, 2, 3, 17, 20  # OpDef
_ARG_NAME, _ARG_TYPE = 1, 3  # OpDef.ArgDef
_TRUE = b"\x28\x01"  # AttrValue{b: true}
_DONE = "autograph_rewrite/done"
_OWN_GROUP = "_autograph_own_group"  # marks a changed key, which collectives may share


@dataclass(frozen=True)
class EncodedFunction:
    """An encoded function.

    Attributes:
        definition: an encoded FunctionDef.
        library: encoded FunctionDefs that it refers to.
        arguments: the placeholders that became arguments, in order.
        output_types: of the results, as TensorFlow's enum.
    """

    name: str
    definition: bytes
    library: tuple[bytes, ...]
    arguments: tuple[str, ...]
    output_types: tuple[int, ...]


class _Node(NamedTuple):
    """A NodeDef; `rest` holds its encoded device and attributes, which are copied as they are."""

    name: str
    op: str
    inputs: list[str]
    rest: bytes

    @property
    def attrs(self) -> dict[str, bytes]:
        """The attributes, by name."""
        return wire.read_node(self.rest).attrs


class Stack(NamedTuple):
    """Variables of one type and shape, whose values are the rows of one tensor.

    Attributes:
        dtype: of the variables, as TensorFlow's enum.
    """

    handles: tuple[str, ...]
    dtype: int


@dataclass(frozen=True)
class ReadAfter:
    """Variables to read after everything else has run.

    Attributes:
        single: types of the variables that are read one by one, by placeholder; those that the graph lacks are dropped.
        stacks: lists of variables that are read as rows; each list is on one device.
    """

    single: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stacks: Sequence[Sequence[Stack]] = ()

    @property
    def handles(self) -> list[str]:
        """All placeholders."""
        return [*self.single, *(name for stacks in self.stacks for one in stacks for name in one.handles)]


@dataclass(frozen=True)
class FunctionSignature:
    """The arguments, results and effects of a function.

    Attributes:
        arguments: placeholders to turn into arguments; those that the graph lacks, or does not need, are dropped.
        outputs: tensors to return, as `node:index`.
        read_after: arguments that are handles of variables: their values after everything else has run are returned,
            too, after the outputs.
    """

    arguments: Sequence[str] = ()
    outputs: Sequence[str] = ()
    targets: Sequence[str] = ()
    read_after: ReadAfter = dataclasses.field(default_factory=ReadAfter)


@no_garbage_collection()
def build(data: bytes, name: str, signature: FunctionSignature, *, salt: bytes | None = None) -> EncodedFunction:
    """Make a function of a graph; leave out nodes that no output or target depends on.

    Args:
        data: an encoded GraphDef, as `ir.format.serde` writes it: the fields of each node in order.
        salt: of the group keys of its collectives; None: one of this graph alone; b"": the keys of the plan. All
            processes of a job must use the same.

    Raises:
        GraphError: an output or target does not exist.
    """
    targets, read_after = list(dict.fromkeys(signature.targets)), signature.read_after
    nodes, library = _read(data)
    if salt is None:
        salt = hashlib.sha256(data).digest()
    if salt:
        _separate_groups(nodes, salt)
    returned = [_split(output) for output in signature.outputs]
    roots = [*(node for node, _ in returned), *targets]
    for node in roots:
        if node not in nodes:
            raise GraphError(f"the graph has no node '{node}', which the function is to return or to run")
    needed = _needed(nodes, [*roots, *(node for node in read_after.handles if node in nodes)])
    taken = {argument: f"a{i}" for i, argument in enumerate(a for a in signature.arguments if a in needed)}
    writer = _Writer(nodes, taken)
    by_rows = {
        text
        for name in needed
        for text in nodes[name].inputs
        if text in read_after.single and not has(nodes[name].op, "shares_buffer")
    }
    reads, read, read_types = _reads(read_after, taken, [node for node in roots if node not in taken], by_rows)
    types = [writer.dtype(node, index) for node, index in returned] + read_types
    rets = [writer.slot(node, index) for node, index in returned] + read
    parts = [delimited(_SIGNATURE, _op_def(name, [writer.dtype(a, 0) for a in taken], types, targets))]
    parts += [writer.node(node) for node in nodes.values() if node.name in needed]
    parts += reads
    parts += [_entry(_RET, f"o{i}", ret.encode()) for i, ret in enumerate(rets)]
    parts += [_entry(_CONTROL_RET, target, target.encode()) for target in targets]
    # Inlined into its caller, the function would lose what runs only for its effect.
    parts.append(_entry(_ATTR, "_noinline", _TRUE))
    return EncodedFunction(name, b"".join(parts), library, tuple(taken), tuple(types))


def of_nodes(
    name: str, arguments: Sequence[int], nodes: Sequence[bytes], results: Sequence[str], types: Sequence[int]
) -> EncodedFunction:
    """Make a function of nodes that already have the syntax of a function's nodes.

    Args:
        arguments: the types of `a0`, `a1` and so on.
        nodes: encoded, as `node` fields of GraphDef.
    """
    parts = [delimited(_SIGNATURE, _op_def(name, arguments, types, ())), *map(_as_node_def, nodes)]
    parts += [_entry(_RET, f"o{i}", result.encode()) for i, result in enumerate(results)]
    return EncodedFunction(name, b"".join(parts), (), tuple(f"a{i}" for i in range(len(arguments))), tuple(types))


def function_name(definition: bytes) -> str:
    """Return the name of an encoded FunctionDef."""
    for field, _, _, start, stop in wire.fields(definition):
        if field == _SIGNATURE:
            for inner, _, _, at, end in wire.fields(definition, start, stop):
                if inner == _NAME:
                    return str(definition[at:end], "utf-8")
    raise GraphError("a function of the library has no name")


def _read(data: bytes) -> tuple[dict[str, _Node], tuple[bytes, ...]]:
    """Return the nodes by name, and the functions of the library."""
    nodes: dict[str, _Node] = {}
    functions: list[bytes] = []
    for field, _, _, start, stop in wire.fields(data):
        if field == wire.NODE:
            node = _read_node(data, start, stop)
            nodes[node.name] = node
        elif field == wire.LIBRARY:
            functions += [data[a:b] for inner, _, _, a, b in wire.fields(data, start, stop) if inner == 1]
    return nodes, tuple(functions)


def _read_node(data: bytes, at: int, stop: int) -> _Node:
    """Read name, op and inputs, which are the first fields; keep the rest as bytes."""
    name = op = ""
    inputs: list[str] = []
    while at < stop:
        field = data[at] >> 3
        if field > wire.INPUT:
            break
        size, begin = wire.read_varint(data, at + 1)
        at = begin + size
        text = str(data[begin:at], "utf-8")
        if field == wire.INPUT:
            inputs.append(text)
        elif field == wire.OP:
            op = text
        else:
            name = text
    return _Node(name, op, inputs, data[at:stop])


def _separate_groups(nodes: dict[str, _Node], salt: bytes) -> None:
    """Give the collectives of this graph group keys that no graph with another salt has.

    All functions of a process share one table of collectives, in which TensorFlow stores type and shape of each
    instance of a group. It would refuse another function's collective with the same keys, and then all later ones.
    """
    for node in list(nodes.values()):
        if not has(node.op, "exchanges"):
            continue
        key = nodes[node.inputs[GROUP_KEY]]
        attrs = key.attrs
        if has(key.op, "constant") and _OWN_GROUP not in attrs:
            old = int(decode(attrs["value"]))
            digest = hashlib.sha256(salt + old.to_bytes(8, "big", signed=True)).digest()
            value = encode("tensor", np.array(int.from_bytes(digest[:4], "big") % 2**30 + 1, np.int32))
            read = wire.read_node(key.rest)
            device = delimited(wire.DEVICE, read.device.encode()) if read.device else b""
            rest = device + wire.write_attrs({**attrs, "value": value, _OWN_GROUP: _TRUE}) + read.rest
            nodes[key.name] = key._replace(rest=rest)


def _split(tensor: str) -> tuple[str, int]:
    node, _, index = tensor.partition(":")
    return node, int(index or 0)


def _needed(nodes: Mapping[str, _Node], roots: Iterable[str]) -> set[str]:
    """Return the names of the roots and of all nodes that they depend on."""
    return set(reachable(roots, lambda name: [text.removeprefix("^").partition(":")[0] for text in nodes[name].inputs]))


class _Writer:
    """Translates nodes and references: `x:1` of a graph is `x:output_name:1` in a function."""

    def __init__(self, nodes: Mapping[str, _Node], arguments: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._arguments = arguments
        self._references: dict[str, bytes] = {}
        self._slots: dict[str, list[str]] = {}  # by op; by op and node where the number of outputs varies

    def node(self, node: _Node) -> bytes:
        """Encode a node as a field of FunctionDef; b"" for an argument."""
        if node.name in self._arguments:
            return b""
        known = self._references
        inputs = []
        for text in node.inputs:
            reference = known.get(text)
            if reference is None:
                reference = known[text] = self._reference(text)
            if reference:
                inputs.append(reference)
        return _as_node_def(wire.write_node(node.name.encode(), node.op.encode(), inputs, b"", node.rest))

    def _reference(self, text: str) -> bytes:
        """Return an input in the syntax of functions; b"" for a control edge from an argument, which needs no wait."""
        if text[0] == "^":
            return b"" if text[1:] in self._arguments else text.encode()
        return self.slot(*_split(text)).encode()

    def slot(self, name: str, index: int) -> str:
        """Return the reference to one output of a node."""
        if name in self._arguments:
            return self._arguments[name]
        node = self._nodes[name]
        slots = self._slots.get(node.op) or self._slots.get(f"{node.op} {name}")
        if slots is None:
            slots = _slots(node)
            varies = any(arg.number_attr or arg.type_list_attr for arg in get_op(node.op).outputs)
            self._slots[f"{node.op} {name}" if varies else node.op] = slots
        try:
            return f"{name}:{slots[index]}"
        except IndexError:
            raise GraphError(f"'{name}' ({node.op}) has no output {index}") from None

    def dtype(self, name: str, index: int) -> int:
        """Return the element type of one output of a node."""
        node = self._nodes[name]
        return signature(node.op, node.attrs)[1][index]


def _slots(node: _Node) -> list[str]:
    """Return `argument:position` for each output."""
    found: list[str] = []
    for arg in get_op(node.op).outputs:
        count = 1
        if arg.type_list_attr:
            count = len(decode(node.attrs[arg.type_list_attr]) or ())
        elif arg.number_attr:
            count = decode(node.attrs[arg.number_attr])
        found += [f"{arg.name}:{i}" for i in range(count)]
    return found


def _reads(
    reads: ReadAfter, taken: Mapping[str, str], last: Iterable[str], by_rows: Collection[str]
) -> tuple[list[bytes], list[str], list[int]]:
    """Return nodes that read variables after the nodes in `last`, references to the values, and the types of these.

    Args:
        by_rows: variables of which rows are updated: later reads are made to share their buffers again.
    """
    done = wire.write_node(_DONE.encode(), b"NoOp", [f"^{name}".encode() for name in dict.fromkeys(last)], b"", b"")
    single = [(taken[node], dtype) for node, dtype in reads.single.items() if node in taken]
    # An op that updates rows switches its variable to copying reads: each later read would copy the whole variable.
    shared = {f"{_DONE}/share{i}": taken[node] for i, node in enumerate(n for n in reads.single if n in by_rows)}
    nodes, results = read_each(f"{_DONE}/", single, [_DONE, *shared])
    nodes += [encoded(name, "DisableCopyOnRead", [handle, f"^{_DONE}"], {}) for name, handle in shared.items()]
    types = [dtype for _, dtype in single]
    for device, stacks in enumerate(reads.stacks):
        handles = [(taken[node], one.dtype) for one in stacks for node in one.handles]
        node, found = read_together(f"{_DONE}/all{device}", handles, [_DONE])
        nodes.append(node)
        values = iter(found)
        for number, one in enumerate(stacks):
            node, result = stack(f"{_DONE}/all{device}/{number}", [next(values) for _ in one.handles], one.dtype)
            nodes.append(node)
            results.append(result)
            types.append(one.dtype)
    return [_as_node_def(node) for node in [done, *nodes]], results, types


def _as_node_def(encoded: bytes) -> bytes:
    """Turn a `node` field of GraphDef into a `node_def` field of FunctionDef."""
    return bytes(((_NODE_DEF << 3) | wire.LENGTH_DELIMITED,)) + encoded[1:]


def _op_def(name: str, inputs: Iterable[int], outputs: Iterable[int], targets: Iterable[str]) -> bytes:
    parts = [delimited(_NAME, name.encode())]
    parts += [delimited(_INPUT_ARG, _arg(f"a{i}", dtype)) for i, dtype in enumerate(inputs)]
    parts += [delimited(_OUTPUT_ARG, _arg(f"o{i}", dtype)) for i, dtype in enumerate(outputs)]
    parts.append(varint(_IS_STATEFUL << 3) + b"\x01")
    parts += [delimited(_CONTROL_OUTPUT, target.encode()) for target in targets]
    return b"".join(parts)


def _arg(name: str, dtype: int) -> bytes:
    return delimited(_ARG_NAME, name.encode()) + varint(_ARG_TYPE << 3) + varint(dtype)


def _entry(field: int, key: str, value: bytes) -> bytes:
    return delimited(field, delimited(1, key.encode()) + delimited(2, value))


# Nodes of a function that read variables: one by one, or all of a device by one node, some stacked as rows of a tensor.
#
#     any handle            ──► ReadVariableOp
#     handles on one device ──► _ReadVariablesOp ──► values
#                                                └─► Pack ──► one tensor of those of one type and shape
#
# A node takes about a microsecond, and so does the tensor object for each result of a function.

Handles = Sequence[tuple[str, int]]
"""References to handles of variables, as a function's nodes spell them, with the types of the variables."""


def read_each(prefix: str, handles: Handles, controls: Iterable[str] = ()) -> tuple[list[bytes], list[str]]:
    """Return nodes that read one variable each, and references to the values.

    Args:
        controls: nodes that must have run before.
    """
    waits = [f"^{name}" for name in controls]
    nodes = [
        encoded(f"{prefix}{i}", "ReadVariableOp", [handle, *waits], {"dtype": encode("type", dtype)})
        for i, (handle, dtype) in enumerate(handles)
    ]
    return nodes, [f"{prefix}{i}:value:0" for i in range(len(nodes))]


def read_together(
    name: str, handles: Handles, controls: Iterable[str] = (), device: str = ""
) -> tuple[bytes, list[str]]:
    """Return one node that reads variables of one device, and references to the values.

    Args:
        controls: nodes that must have run before.
        device: "": that of the handles.
    """
    types = [dtype for _, dtype in handles]
    attrs = {"N": encode("int", len(types)), "dtypes": encode("list(type)", types)}
    inputs = [*(handle for handle, _ in handles), *(f"^{control}" for control in controls)]
    return encoded(name, "_ReadVariablesOp", inputs, attrs, device), [f"{name}:values:{i}" for i in range(len(types))]


def stack(name: str, values: Sequence[str], dtype: int, device: str = "") -> tuple[bytes, str]:
    """Return a node that stacks values of one type and shape as the rows of a tensor, and a reference to the tensor.

    Args:
        dtype: of the values, as TensorFlow's enum.
        device: "": TensorFlow chooses.
    """
    attrs = {"N": encode("int", len(values)), "T": encode("type", dtype), "axis": encode("int", 0)}
    return encoded(name, "Pack", values, attrs, device), f"{name}:output:0"


def encoded(name: str, op: str, inputs: Iterable[str], attrs: Mapping[str, bytes], device: str = "") -> bytes:
    """Return a node, as a `node` field of GraphDef.

    Args:
        inputs: as a function's nodes spell them.
        attrs: encoded, by name.
        device: "": TensorFlow chooses.
    """
    listed = [text.encode() for text in inputs]
    return wire.write_node(name.encode(), op.encode(), listed, device.encode(), wire.write_attrs(attrs))


# Several steps in one loop inside a graph (`steps_per_run`), around a function that does one.
#
#     while number < count:     each stacked argument gives its row `number`, the others are the same in every step
#         results = step(...)   all replicas are in the one body, so their collectives meet in one loop
#     results                   those of the last step
#
# An iteration begins when the one before has ended, with all its writes: the call of the step is one node, and the loop
# carries its results. If a step fails, as at the end of its data, the steps before it remain done.


OneStep = Callable[[Sequence[Any]], tuple[list[Any], Any]]
"""Adds one step; returns its results, and the operation that runs it."""


class Stacked(NamedTuple):
    """How the arguments of a run divide into those of its steps.

    Attributes:
        rows: for each argument, whether it has one row per step.
        steps: the number of steps if no argument has rows.
    """

    rows: tuple[bool, ...]
    steps: int


def run_steps(step: OneStep, types: Sequence[Any], inputs: Sequence[Any], stacked: Stacked) -> tuple[Any, list[Any]]:
    """Add the loop to the graph under construction; return the number of steps done, and the last step's results.

    Args:
        inputs: one tensor per argument; those with rows have the shape [steps, ...].
    """
    tf = tensorflow()
    sizes = [tf.shape(one)[0] for one, has_rows in zip(inputs, stacked.rows, strict=True) if has_rows]
    count = sizes[0] if sizes else tf.constant(stacked.steps)

    def one_step(number: Any, *_: Any) -> list[Any]:
        given = [tf.gather(x, number) if rows else x for x, rows in zip(inputs, stacked.rows, strict=True)]
        results, done = step(given)
        with tf.control_dependencies([done]):
            return [number + 1, *(tf.identity(result) for result in results)]

    number, *results = tf.while_loop(
        lambda number, *_: number < count,
        one_step,
        [tf.constant(0), *(tf.zeros([], dtype) for dtype in types)],
        shape_invariants=[tf.TensorShape([]), *(tf.TensorShape(None) for _ in types)],
        parallel_iterations=1,
    )
    return number, results
