"""Encodes the attributes of a new node as its op declares them, and infers types and counts from its inputs."""

from __future__ import annotations

import difflib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.mesh import PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.ir.types.opdefs import OpDef, get_op

if TYPE_CHECKING:
    from autograph_rewrite.ir.graph import Node, Value


PASS_ATTR = "_autograph_pass"
ORIGIN_ATTR = "_autograph_origin"
OWN_FUNCTIONS = "__autograph_rewrite_"
"""Prefix of the names of functions that hold rewritten graphs."""


def provenance(current_pass: str, origin: Node | str | None) -> dict[str, bytes]:
    """Return the attributes that say which pass made a node, and for which original node.

    Args:
        origin: the node that the new node replaces or supports; if a pass made that node, its origin is recorded.
    """
    made_by = {PASS_ATTR: encode("string", current_pass)}
    if origin is None:
        return made_by
    if isinstance(origin, str):
        return made_by | {ORIGIN_ATTR: encode("string", origin)}
    return made_by | {ORIGIN_ATTR: origin.attrs.get(ORIGIN_ATTR) or encode("string", origin.name)}


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return a hint with the known names most like `name`, else that contain it, else that end alike; None without."""
    names, depth = list(known), name.count("/") + 1
    close = difflib.get_close_matches(name, names, n=3) or sorted((one for one in names if name in one), key=len)[:3]
    if not close:
        ends = {one: "/".join(one.split("/")[-depth:]) for one in names}
        alike = difflib.get_close_matches(name, set(ends.values()), n=3)
        close = [one for one, end in ends.items() if end in alike][:3]
    return f"closest names: {', '.join(close)}" if close else None


def raw_attrs(
    op_name: str, inputs: Sequence[Value], attrs: Mapping[str, Any], selects: Mapping[int, Select]
) -> dict[str, Any]:
    """Return the encoded attributes of a new node; attributes that decide types may be left out.

    Args:
        inputs: its operands, with lists flattened.
        selects: which instances it reads, by operand position.

    Raises:
        GraphError: unknown op or attribute, a value of the wrong kind, or a needed attribute is missing.
    """
    op = get_op(op_name)
    raw = {key: raw_attr(op, key, value) for key, value in attrs.items()}
    if any(name not in raw for name in op.type_attrs):
        infer(op, inputs, raw, selects)
    for name, declared in op.attrs.items():
        if name not in raw and declared.default is None:
            raise GraphError(f"a new {op_name} node needs its attribute '{name}'")
    return raw


def raw_attr(op: OpDef, key: str, value: Any) -> bytes | PerInstance:
    """Return one encoded attribute.

    Args:
        key: name of the attribute; one that begins with `_` needs no declaration.

    Raises:
        GraphError: the op does not declare the attribute, or declares another kind.
    """
    if isinstance(value, PerInstance):
        return value
    declared = op.attrs.get(key)
    if declared is None and not key.startswith("_"):
        raise GraphError(f"op '{op.name}' has no attribute '{key}'", hint=closest(key, op.attrs))
    kind = declared.kind if declared is not None else "string"
    try:
        return encode(kind, value)
    except (TypeError, ValueError, KeyError, OverflowError, struct.error) as error:
        raise GraphError(f"attribute '{key}' of {op.name} is a {kind}, not {value!r} ({error})") from None


def infer(op: OpDef, inputs: Sequence[Value], raw: dict[str, Any], selects: Mapping[int, Select]) -> None:
    """Fill in type and count attributes from the inputs, as TensorFlow's op builders do.

    Args:
        raw: encoded attributes by name, completed in place.
        selects: an operand that reads all instances counts once for each.

    Raises:
        GraphError: the inputs do not fit the op.
    """
    folded = [i for i, select in selects.items() if select.is_of_many]
    lengths = _lengths(op, len(inputs), raw, folded)
    copies = _instances(op, len(inputs), lengths, len(folded))
    types = [dtypes.base(value.dtype) for i, value in enumerate(inputs) for _ in range(copies if i in folded else 1)]
    at = 0
    for arg in op.inputs:
        count = lengths.get(arg.number_attr or arg.type_list_attr, 1)
        here = types[at : at + count]
        if arg.number_attr:
            raw.setdefault(arg.number_attr, encode("int", count))
        if arg.type_list_attr:
            raw.setdefault(arg.type_list_attr, encode("list(type)", here))
        elif arg.type_attr and here:
            raw.setdefault(arg.type_attr, encode("type", here[0]))
        at += count


def _lengths(op: OpDef, given: int, raw: Mapping[str, Any], folded: Sequence[int]) -> dict[str, int]:
    """Return how many inputs each variadic argument takes, by the attribute that counts them."""
    parts = Counter(arg.number_attr or arg.type_list_attr for arg in op.inputs)
    lengths: dict[str, int] = {}
    for name in parts:
        if name in raw:
            value = decode(raw[name])
            lengths[name] = value if isinstance(value, int) else len(value)
    unknown = [name for name in parts if name and name not in lengths]
    if len(unknown) > 1 or (unknown and folded):
        raise GraphError(
            f"a new {op.name} node has lists whose lengths cannot be inferred",
            hint=f"give its attributes {', '.join(unknown)}",
        )
    if unknown:
        fixed = sum(count * lengths.get(name, 1) for name, count in parts.items() if name != unknown[0])
        lengths[unknown[0]] = max(0, given - fixed) // parts[unknown[0]]
    return lengths


def _instances(op: OpDef, given: int, lengths: Mapping[str, int], folded: int) -> int:
    """Return how many values an input that takes all instances stands for; refuse inputs that cannot fit the op."""
    taken = sum(lengths.get(arg.number_attr or arg.type_list_attr, 1) for arg in op.inputs)
    copies, over = divmod(taken - given + folded, folded) if folded else (1, taken - given)
    if over or copies < 1:
        raise GraphError(f"{given} input{'' if given == 1 else 's'} do not fit {op.name}, which takes {taken}")
    return copies
