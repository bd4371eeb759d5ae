"""Plans as protobuf messages and back: dataclass fields and message fields have the same names.

Only `from` differs: a keyword of Python, it is the field `from_` of the dataclass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.types.protos import message_class
from autograph_rewrite.plan.parts import messages

Part = TypeVar("Part")

_PLAN = Path(__file__).with_name("plan.binpb")
_OWN = "own_"
"""Begins the name of a field with the name of what is the user's own, where the enumerated one says `own`."""
_PARTS: dict[str, type[Any]] = {
    "Policy": messages.Policy,
    "LocalSgd": messages.LocalSgd,
    "Axis": messages.Axis,
    "Semantics": messages.Semantics,
    "Micro": messages.Micro,
    "Pipeline": messages.Pipeline,
    "Remat": messages.Remat,
    "Model": messages.Model,
    "TensorSharding": messages.TensorSharding,
    "OwnPass": messages.OwnPass,
    "OwnOp": messages.OwnOp,
    "BatchInput": messages.BatchInput,
    "Options": messages.Options,
    "VariableRequest": messages.VariableRequest,
    "Server": messages.Server,
    "Edge": messages.EdgePlan,
}


def new(name: str) -> Any:  # its class is made at run time
    """Return an empty message of plan.proto."""
    return message_class(_PLAN, f"autograph_rewrite.plan.{name}")()


def fill(message: Message, part: object) -> None:
    """Write the dataclass `part` into an empty `message`.

    Raises:
        PlanError: when a field holds what its type in plan.proto cannot.
    """
    for field in _fields(message):
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
    for field in _fields(message):
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


def _fields(message: Message) -> list[FieldDescriptor]:
    """The fields of a message, without those that hold names of the user's own for enumerated ones."""
    return [field for field in descriptor_of(message).fields if not field.name.startswith(_OWN)]


def _is_own(field: FieldDescriptor, value: object) -> bool:
    """Whether an enumerated field says that a field beside it has the name."""
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


def _numbers(field: FieldDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in field.enum_type.values} if field.enum_type else {}


def _read(field: FieldDescriptor, value: Any) -> object:
    if field.message_type is not None:
        return read(_PARTS[field.message_type.name], value)
    if field.enum_type is None:
        return value
    for name, number in _numbers(field).items():
        if number == value:
            return name
    raise PlanError(f"{field.name} has the unknown value {value}", hint="a later version wrote this plan")
