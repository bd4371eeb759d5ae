"""A plan's YAML: protobuf's JSON form of the message, checked key by key so that mistakes have lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import yaml
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from autograph_rewrite.diagnostics.faults import Fault, did_you_mean, either, raise_if_any
from autograph_rewrite.diagnostics.located_yaml import KeyPath, Located, Source, dotted
from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan.proto_form import choices, descriptor_of, is_repeated

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
}
_FLOW_KEYS = 4  # mappings of so few scalars are written on one line
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
    # In other styles, PyYAML writes some line separators so that they are read back as something else.
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


def _faults(data: object, kind: Descriptor, source: Source, path: KeyPath) -> Iterator[Fault]:
    """What is wrong with `data` as a message of this kind."""
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


def _faults_of_value(value: object, field: FieldDescriptor, source: Source, path: KeyPath) -> Iterator[Fault]:
    """What is wrong with one value of a field."""
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
    """What the field takes, if it does not take `value`."""
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
