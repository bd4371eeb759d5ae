"""Reads TensorFlow's op registry (operands, results, attributes of each op type) without TensorFlow.

Where the process has imported TensorFlow, that registry takes precedence over the shipped one: it has custom ops, and
another release may declare other attributes. `OWN` adds the package's ops, which no finished graph contains.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from autograph_rewrite import tf_private
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.ir.types.placement import MODEL, REPLICA
from autograph_rewrite.ir.types.protos import proto

RESULT_TYPES = "_result_types"
"""Attribute of a node whose op is a function's name, which no registry has: the types of its results."""


@dataclass(frozen=True)
class Arg:
    """One declared input or output: one tensor, `number_attr` of them, or one per type in a list."""

    name: str
    dtype: int = 0
    type_attr: str = ""
    number_attr: str = ""
    type_list_attr: str = ""
    is_ref: bool = False


@dataclass(frozen=True)
class Attr:
    """One declared attribute; `default` is raw, None where the op has none."""

    name: str
    kind: str
    default: bytes | None


@dataclass(frozen=True)
class OpDef:
    """The signature of an op type."""

    name: str
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    attrs: Mapping[str, Attr]
    is_stateful: bool
    type_attrs: tuple[str, ...] = field(default=())  # the attributes that decide its dtypes and counts

    @property
    def defaults(self) -> dict[str, bytes]:
        """The raw defaults of its attributes."""
        return {name: attr.default for name, attr in self.attrs.items() if attr.default is not None}


@cache
def _shipped() -> dict[str, Any]:
    packed = Path(__file__).with_name("tensorflow_ops.binpb.gz").read_bytes()
    return {op.name: op for op in proto("OpList").FromString(gzip.decompress(packed)).op}


def _from_running_tensorflow(name: str) -> Any:
    found = tf_private.registered_op(name)
    return None if found is None else proto("OpDef").FromString(found.SerializeToString())


def args_of(items: Any) -> tuple[Arg, ...]:
    """Return the arguments that an OpDef message declares."""
    return tuple(Arg(a.name, a.type, a.type_attr, a.number_attr, a.type_list_attr, a.is_ref) for a in items)


def find_op(name: str) -> OpDef | None:
    """Return the signature of an op type, or None for an unknown op."""
    try:
        return _known(name, tf_private.is_imported())
    except LookupError:
        return None


@cache  # an exception is not kept: the library of an unknown op may be loaded later
def _known(name: str, is_running: bool) -> OpDef:
    if name in OWN:
        return OWN[name]
    declared = (_from_running_tensorflow(name) if is_running else None) or _shipped().get(name)
    if declared is None:
        raise LookupError(name)
    return _read(declared)


def is_pure(name: str) -> bool:
    """Return whether an op has no side effects and gives equal results for equal operands; False for an unknown op."""
    known = find_op(name)
    return known is not None and not known.is_stateful


def _read(found: Any) -> OpDef:
    attrs = {
        a.name: Attr(a.name, a.type, a.default_value.SerializeToString() if a.HasField("default_value") else None)
        for a in found.attr
    }
    inputs, outputs = args_of(found.input_arg), args_of(found.output_arg)
    deciding = (n for arg in (*inputs, *outputs) for n in (arg.type_attr, arg.number_attr, arg.type_list_attr) if n)
    return OpDef(found.name, inputs, outputs, attrs, found.is_stateful, tuple(dict.fromkeys(deciding)))


def get_op(name: str) -> OpDef:
    """Return the signature of an op type.

    Raises:
        GraphError: the op is unknown.
    """
    found = find_op(name)
    if found is None:
        hint = "load the library that registers it (tf.load_op_library) before the graph"
        raise GraphError(f"unknown op '{name}'", hint=hint)
    return found


def default_attr(op: str, key: str) -> bytes | None:
    """Return the raw default of an attribute, None where the op or the default does not exist."""
    found = find_op(op)
    declared = found.attrs.get(key) if found is not None else None
    return declared.default if declared is not None else None


def drop_newer_attrs(graph: Any) -> None:
    """Remove attributes that a later TensorFlow added, and that have their defaults, from a GraphDef.

    Args:
        graph: of TensorFlow's class, edited in place.
    """
    for node in (*graph.node, *(node for function in graph.library.function for node in function.node_def)):
        for key, default in _newer_attrs(node.op):
            if key in node.attr and node.attr[key].SerializeToString() == default:
                del node.attr[key]


@cache
def _newer_attrs(name: str) -> tuple[tuple[str, bytes], ...]:
    """Return the attributes, with defaults, of the shipped registry that the running TensorFlow lacks."""
    shipped, running = _shipped().get(name), tf_private.registered_op(name)
    if shipped is None or running is None:
        return ()
    lacking = set(_read(shipped).attrs) - {attr.name for attr in running.attr}
    return tuple((key, one.default) for key, one in _read(shipped).attrs.items() if key in lacking and one.default)


RESHARD, SHARD_ALIKE, REGION, EFFECT = "ar.reshard", "ar.shard_alike", "ar.region", "ar.effect"


def _own(name: str, result: Arg, attrs: Mapping[str, str], **defaults: Any) -> OpDef:
    """Return the signature of an op of the package whose results have the types of its operands."""
    declared = {
        key: Attr(key, kind, encode(kind, defaults[key]) if key in defaults else None) for key, kind in attrs.items()
    }
    deciding = tuple(key for key in (result.type_attr, result.type_list_attr) if key)
    return OpDef(name, (result,), (result,), declared, is_stateful=False, type_attrs=deciding)


_LIST = "list(string)"
_RESHARD_ATTRS = {
    "T": "type", "over": _LIST, "before": "string", "after": "string", "edge": "int", "dim": "int",
    "shards": "list(int)", "rows": "list(int)", "lowest": "bool",
}  # fmt: skip
OWN: Mapping[str, OpDef] = {
    RESHARD: _own(
        RESHARD, Arg("value", type_attr="T"), _RESHARD_ATTRS, edge=-1, dim=0, shards=(), rows=(), lowest=False
    ),
    SHARD_ALIKE: OpDef(
        SHARD_ALIKE,
        (Arg("value", type_attr="T"), Arg("like", type_attr="L")),
        (Arg("value", type_attr="T"),),
        {"T": Attr("T", "type", None), "L": Attr("L", "type", None)},
        is_stateful=False,
        type_attrs=("T", "L"),
    ),
    REGION: _own(
        REGION,
        Arg("values", type_list_attr="T"),
        {"T": "list(type)", "region": "string", "over": _LIST, "border": "string", "exits": _LIST},
        exits=(),
    ),
    EFFECT: _own(EFFECT, Arg("handle", dtypes.RESOURCE), {}),
}
"""Ops that exist only in graphs between two passes.

op               what it is
ar.reshard       a value with other placements along some axes: of one edge of the plan, -1 where none is planned
ar.shard_alike   a value placed as another one is, dimension by dimension (JAX's `shard_alike`)
ar.region        the border where values enter (`border` "begin") or leave ("end") a set of nodes; each instance along
                 some axes computes the set on its values alone; `exits`: sum, mean, first or keep, for each value
ar.effect        the handle of a variable after the nodes that it waits for: later reads and writes take this handle
"""


MOST = 2**20
"""Inputs or outputs of one node, at most: a corrupt count would take unbounded memory."""


def dtypes_of(args: tuple[Arg, ...], attrs: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the element types of declared inputs or outputs.

    Args:
        attrs: encoded; the attributes that decide the types.

    Raises:
        KeyError: a deciding attribute is missing.
        TypeError: a deciding attribute is not of the declared kind.
        GraphError: there would be more than `MOST`.
    """
    result: list[int] = []
    for arg in args:
        if arg.type_list_attr:
            result += decode(attrs[arg.type_list_attr]) or ()
            continue
        dtype = arg.dtype or decode(attrs[arg.type_attr])
        if not isinstance(dtype, int):
            raise TypeError(dtype)
        if arg.is_ref:
            dtype += 100
        count = decode(attrs[arg.number_attr]) if arg.number_attr else 1
        if count > MOST:
            raise GraphError(f"a node says {arg.number_attr} = {count:,}: it cannot have that many inputs or outputs")
        result += [dtype] * count
    return tuple(result)


def places_of(args: tuple[Arg, ...], attrs: Mapping[str, bytes]) -> dict[str, range]:
    """Return the positions of each declared input or output among the tensors of all; it raises like `dtypes_of`."""
    found, at = dict[str, range](), 0
    for arg in args:
        found[arg.name] = range(at, at + len(dtypes_of((arg,), attrs)))
        at = found[arg.name].stop
    return found


@cache
def _signature(name: str, deciding: tuple[bytes | None, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    op = get_op(name)
    attrs = {}
    for key, raw in zip(op.type_attrs, deciding, strict=True):
        value = raw if raw is not None else op.attrs[key].default
        if value is None:
            raise GraphError(f"a {name} node lacks its attribute '{key}'")
        attrs[key] = value
    try:
        return dtypes_of(op.inputs, attrs), dtypes_of(op.outputs, attrs)
    except TypeError:  # an attribute of another kind than the op declares
        raise GraphError(f"a {name} node has a malformed attribute among {', '.join(op.type_attrs)}") from None


def signature(name: str, attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dtypes of the inputs and of the outputs of a node.

    Args:
        attrs: raw attribute values; per-instance ones never decide a dtype.

    Raises:
        GraphError: unknown op, or a deciding attribute is missing.
    """
    stated = attrs.get(RESULT_TYPES)
    if stated is not None and find_op(name) is None:
        return (), tuple(decode(stated))
    return _signature(name, tuple([attrs.get(key) for key in get_op(name).type_attrs]))


class _OpLike(Protocol):
    """A node, or a rule's view of a node."""

    @property
    def op(self) -> str:
        """The op type."""

    @property
    def attr(self) -> Callable[..., Any]:
        """Reads a decoded attribute by name."""


def is_over(node: _OpLike, axis: str) -> bool:
    """Return whether a node is a reshard whose value changes along an axis of the mesh."""
    return node.op == RESHARD and axis.encode() in node.attr("over")


def axis_along(node: _OpLike) -> str:
    """Return the model axis along which a reshard changes a value; "" where there is none."""
    axes = [axis.decode() for axis in node.attr("over")] if node.op == RESHARD else []
    return next((axis for axis in axes if axis.startswith(MODEL)), "") if REPLICA not in axes else ""
