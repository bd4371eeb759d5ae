"""plan.proto, what is compiled from it and the dataclasses that mirror it stay one thing."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest

from autograph_rewrite.plan import file_forms
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.tools.dev.make_protos import plan_descriptor
from tests.support.paths import ROOT

PROTO = ROOT / "autograph_rewrite" / "plan" / "plan.proto"
FILE = file_forms.new("Plan").DESCRIPTOR.file
MIRRORS = {
    "Plan": Plan,
    "Policy": messages.Policy,
    "LocalSgd": messages.LocalSgd,
    "Axis": messages.Axis,
    "Semantics": messages.Semantics,
    "BatchInput": messages.BatchInput,
    "Options": messages.Options,
    "VariableRequest": messages.VariableRequest,
    "Server": messages.Server,
    "Micro": messages.Micro,
    "Pipeline": messages.Pipeline,
    "OwnPass": messages.OwnPass,
    "OwnOp": messages.OwnOp,
    "Model": messages.Model,
    "TensorSharding": messages.TensorSharding,
    "Remat": messages.Remat,
    "Edge": messages.EdgePlan,
}
DECLARATION = re.compile(r"(?:(repeated|optional) )?(\w+) (\w+) = (\d+);|(\w+) = (\d+);|(message|enum) (\w+) \{|\}")


def declared(text: str) -> set[tuple[str, ...]]:
    """Every field and enum value that proto source declares: (scope, label, type, name, number)."""
    found: set[tuple[str, ...]] = set()
    scope: list[str] = []
    for match in DECLARATION.finditer(re.sub(r"//.*|syntax = .*|package .*", "", text)):
        label, kind, name, number, value, value_number, _, opened = match.groups()
        if opened:
            scope.append(opened)
        elif name:
            found.add((".".join(scope), label or "", kind, name, number))
        elif value:
            found.add((".".join(scope), "", "", value, value_number))
        else:
            scope.pop()
    return found


def compiled() -> set[tuple[str, ...]]:
    """The same, of the descriptor."""
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

    file = FileDescriptorProto()
    FILE.CopyToProto(file)
    found: set[tuple[str, ...]] = set()

    def kind(field: FieldDescriptorProto) -> str:
        named = field.type_name.rpartition(".")[2]
        return named or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def visit(message: DescriptorProto) -> None:
        for field in message.field:
            repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
            label = "repeated" if repeated else "optional" if field.proto3_optional else ""
            found.add((message.name, label, kind(field), field.name, str(field.number)))
        for enum in message.enum_type:
            scope = f"{message.name}.{enum.name}"
            found.update((scope, "", "", value.name, str(value.number)) for value in enum.value)

    for message in file.message_type:
        visit(message)
    return found


def test_the_shipped_descriptor_declares_what_plan_proto_declares() -> None:
    source = declared(PROTO.read_text(encoding="utf-8"))
    assert len(source) > 40
    assert source == compiled()


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="needs grpcio-tools")
def test_compiling_plan_proto_anew_gives_the_same_descriptor() -> None:
    assert plan_descriptor(ROOT) == PROTO.with_suffix(".binpb").read_bytes()


@pytest.mark.parametrize("name", MIRRORS)
def test_a_dataclass_has_the_fields_of_its_message_in_their_order(name: str) -> None:
    message = FILE.message_types_by_name[name]
    fields = [one.name for one in message.fields if not one.name.startswith("own_")]  # `proto_form` folds these in
    expected = {"from_" if name == "from" else name for name in fields}
    assert {field.name for field in dataclasses.fields(MIRRORS[name])} - {"source"} == expected


def test_every_message_has_a_dataclass() -> None:
    assert set(FILE.message_types_by_name) == set(MIRRORS)


def test_the_defaults_of_the_configuration_and_of_the_plan_are_the_same() -> None:
    from autograph_rewrite.config.config import Config
    from autograph_rewrite.plan.request import default_options

    config = Config.of({"devices": ["CPU:0"]})
    assert default_options(config) == messages.Options()
    assert messages.Semantics(**config.semantics.model_dump()) == messages.Semantics()
    assert config.timeout_seconds == Plan(()).timeout_seconds


def test_what_the_configuration_names_and_the_plan_has_is_spelt_alike() -> None:
    from typing import get_args

    from autograph_rewrite.codecs.builtin import BUILTIN
    from autograph_rewrite.config.compressor_names import Compressor
    from autograph_rewrite.config.sections import Hint, Mode

    assert set(file_forms.new("Plan").Mode.keys()) - {"unset"} == set(get_args(Mode))
    assert set(file_forms.new("Options").Hint.keys()) == set(get_args(Hint))
    assert set(file_forms.new("Options").Compressor.keys()) - {"own"} == set(get_args(Compressor)) == {"none", *BUILTIN}
