"""Read and write the files of a plan: protobuf, and YAML, checked key by key so that mistakes have lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from autograph_rewrite.diagnostics.faults import FileFault, did_you_mean, either, raise_if_any
from autograph_rewrite.diagnostics.located_yaml import KeyPath, Located, Source, dotted
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.types.protos import message_class
from autograph_rewrite.plan.parts import messages

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
}
_FLOW_KEYS = 4  # mappings of up to so many scalars are written on one line
_WIDTH = 110
_MOST_FAULTS = 1000


def parse(located: Located, message: Message) -> None:
    """Fill `message` from a YAML tree.

    Raises:
        PlanError: with every unknown key and wrong type, each at its line.
    """
    found = islice(_faults(located.data, descriptor_of(message), located.source, ()), _MOST_FAULTS)
    raise_if_any([*located.faults, *found], error=PlanError, title=located.source.name)
    try:
        json_format.ParseDict(cast(dict[str, object], located.data), message)
    except json_format.ParseError as error:
        raise PlanError(f"{located.source.name}: {error}") from None


def dump(message: Message) -> str:
    """The YAML of a message: its JSON form, in the order of the fields."""
    tree = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return yaml.dump(
        _readable(tree, descriptor_of(message)),
        Dumper=_Dumper,
        sort_keys=False,
        width=_WIDTH,
        allow_unicode=True,
        default_flow_style=False,
    )


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Flow` mappings on one line, and never an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    _Flow,
    lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True),
)
_Dumper.add_representer(
    str,
    # In other styles, PyYAML writes some line separators in a form that reads back differently.
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def _readable(tree: dict[str, Any], kind: Descriptor) -> dict[str, Any]:
    """The tree with 64-bit integers as numbers (JSON form has them as text) and short mappings marked."""
    result: dict[str, Any] = {}  # values are whatever JSON has
    for field in kind.fields:
        if field.name not in tree:
            continue
        value = tree[field.name]
        if field.message_type is not None:
            inner = field.message_type
            many = is_repeated(field)
            value = [_readable(item, inner) for item in value] if many else _readable(value, inner)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_INT64:
            value = [int(item) for item in value] if is_repeated(field) else int(value)
        result[field.name] = value
    scalars = not any(isinstance(value, dict | list) for value in result.values())
    return _Flow(result) if scalars and len(result) <= _FLOW_KEYS else result


def _faults(data: object, kind: Descriptor, source: Source, path: KeyPath) -> Iterator[FileFault]:
    """The faults of `data` as a message of this kind."""
    if not isinstance(data, dict):
        yield source.fault(path, f"{dotted(path) or 'a plan'} must be a mapping (key: value)")
        return
    fields = kind.fields_by_name
    for key, value in data.items():
        here = (*path, key)
        if key not in fields:
            inside = f" in {dotted(path)}" if path else ""
            yield source.fault(here, f"unknown key '{key}'{inside}", did_you_mean(key, list(fields)))
        elif not is_repeated(fields[key]):
            yield from _faults_of_value(value, fields[key], source, here)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                yield from _faults_of_value(item, fields[key], source, (*here, i))
        else:
            yield source.fault(here, f"{dotted(here)} must be a list")


def _faults_of_value(value: object, field: FieldDescriptor, source: Source, path: KeyPath) -> Iterator[FileFault]:
    """The faults of one value of a field."""
    if field.message_type is not None:
        yield from _faults(value, field.message_type, source, path)
        return
    wanted = _wanted(value, field)
    if wanted is None:
        return
    hint = None
    if field.enum_type is not None and isinstance(value, str):
        hint = did_you_mean(value, choices(field), noun="known ones")
    yield source.fault(path, f"{dotted(path)} must be {wanted}, not {value!r}", hint)


def _wanted(value: object, field: FieldDescriptor) -> str | None:
    """The values that the field takes, in words, if it does not take `value`."""
    if field.enum_type is not None:
        return None if value in choices(field) else either(choices(field))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return None if isinstance(value, str) else "a text (quote it)"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, bool):
        return "a number"
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return None if isinstance(value, int) and low <= value < high else f"a whole number below {high}"
    return None if isinstance(value, int | float) and math.isfinite(value) else "a finite number"


# Plans as protobuf messages and back: dataclasses and messages have the same names, and so have their fields.
#
# Two differ: the message `Edge` is an `EdgePlan`, and `from`, a keyword of Python, is its field `from_`.

Part = TypeVar("Part")

_PLAN = Path(__file__).with_name("plan.binpb")
_OWN = "own_"
"""Prefix of the field that holds a user's name, where the enumerated field is `own`."""


def new(name: str) -> Any:  # its class is made at run time
    """Return an empty message of plan.proto."""
    return message_class(_PLAN, f"autograph_rewrite.plan.{name}")()


def fill(message: Message, part: object) -> None:
    """Write the dataclass `part` into an empty `message`.

    Raises:
        PlanError: when a field holds what its type in plan.proto cannot.
    """
    for field in _fields(descriptor_of(message)):
        value = getattr(part, _attribute(field))
        if value is None:
            continue
        if field.message_type is not None and is_repeated(field):
            for item in value:
                fill(getattr(message, field.name).add(), item)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), value)
        else:
            _set(message, field, value)


def read(kind: type[Part], message: Message) -> Part:
    """Read a dataclass out of `message`; what the message leaves out takes the dataclass's default."""
    values: dict[str, Any] = {}  # field values are of many types
    for field in _fields(descriptor_of(message)):
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        many = is_repeated(field)
        read_ = tuple(_read(field, one) for one in value) if many else _read(field, value)
        values[_attribute(field)] = getattr(message, _OWN + field.name) if _is_own(field, read_) else read_
    return kind(**values)


def descriptor_of(message: Message) -> Descriptor:
    """The message's type (the stubs leave open which of protobuf's two implementations it comes from)."""
    return cast(Descriptor, message.DESCRIPTOR)


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether the field holds a list (the spelling for this differs between protobuf 6.31 and 7)."""
    return bool(field.default_value == [])


def choices(field: FieldDescriptor) -> list[str]:
    """The values that an enumerated field may be given."""
    return [name for name in _numbers(field) if name != "unset"]


def _attribute(field: FieldDescriptor) -> str:
    return "from_" if field.name == "from" else field.name


@cache
def _fields(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    """The fields of a message, without those that hold users' names for enumerated fields."""
    return tuple(field for field in kind.fields if not field.name.startswith(_OWN))


def _is_own(field: FieldDescriptor, value: object) -> bool:
    """Whether the value of an enumerated field means that the name is in the field with the prefix `own_`."""
    return field.enum_type is not None and value == _OWN.rstrip("_") and value in _numbers(field)


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.enum_type is not None and isinstance(value, str) and "@" in value and "own" in _numbers(field):
        setattr(message, _OWN + field.name, value)
        value = "own"
    try:
        if is_repeated(field):
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, _number(field, value) if field.enum_type else value)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{field.name} of a {message.DESCRIPTOR.name} cannot be {value!r}: {error}") from None


def _number(field: FieldDescriptor, name: str) -> int:
    numbers = _numbers(field)
    if name not in numbers:
        hint = did_you_mean(str(name), choices(field), noun="known ones")
        raise PlanError(f"'{name}' is no {field.name}", hint=hint)
    return numbers[name]


@cache
def _numbers(field: FieldDescriptor) -> Mapping[str, int]:
    return {value.name: value.number for value in field.enum_type.values} if field.enum_type else {}


def _read(field: FieldDescriptor, value: Any) -> object:
    if field.message_type is not None:
        name = field.message_type.name
        return read(messages.EdgePlan if name == "Edge" else getattr(messages, name), value)
    if field.enum_type is None:
        return value
    for name, number in _numbers(field).items():
        if number == value:
            return name
    raise PlanError(f"{field.name} has the unknown value {value}", hint="a later version wrote this plan")
