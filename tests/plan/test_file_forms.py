"""plan.proto, the code generated from it and the dataclasses that mirror it stay one thing."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autograph_rewrite.plan import plan_pb2
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.plan import Plan
from tests.support.paths import ROOT

PROTO = Path("autograph_rewrite") / "plan" / "plan.proto"
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


def generated() -> set[tuple[str, ...]]:
    """The same, of the generated module."""
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

    file = FileDescriptorProto()
    plan_pb2.DESCRIPTOR.CopyToProto(file)
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


def test_the_generated_code_declares_what_plan_proto_declares() -> None:
    source = declared((ROOT / PROTO).read_text(encoding="utf-8"))
    assert len(source) > 40
    assert source == generated()


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="needs grpcio-tools")
def test_generating_the_code_anew_gives_the_same_files(tmp_path: Path) -> None:
    protoc = [sys.executable, "-m", "grpc_tools.protoc"]
    version = subprocess.run([*protoc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    if not version.startswith("libprotoc 31."):
        pytest.skip(f"{version.strip()} writes code for another protobuf than 6.31, the oldest that is allowed")
    command = [*protoc, "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", str(PROTO)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    for suffix in ("_pb2.py", "_pb2.pyi"):
        path = PROTO.with_name(PROTO.stem + suffix)
        assert (tmp_path / path).read_text() == (ROOT / path).read_text()


def test_the_generated_code_runs_with_the_oldest_protobuf_that_is_allowed() -> None:
    code = (ROOT / PROTO.with_name("plan_pb2.py")).read_text(encoding="utf-8")
    assert "# Protobuf Python Version: 6.31.1\n" in code


@pytest.mark.parametrize("name", MIRRORS)
def test_a_dataclass_has_the_fields_of_its_message_in_their_order(name: str) -> None:
    message = plan_pb2.DESCRIPTOR.message_types_by_name[name]
    fields = [one.name for one in message.fields if not one.name.startswith("own_")]  # `proto_form` folds these in
    expected = {"from_" if name == "from" else name for name in fields}
    assert {field.name for field in dataclasses.fields(MIRRORS[name])} - {"source"} == expected


def test_every_message_has_a_dataclass() -> None:
    assert set(plan_pb2.DESCRIPTOR.message_types_by_name) == set(MIRRORS)


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

    assert set(plan_pb2.Plan.Mode.keys()) - {"unset"} == set(get_args(Mode))
    assert set(plan_pb2.Options.Hint.keys()) == set(get_args(Hint))
    assert set(plan_pb2.Options.Compressor.keys()) - {"own"} == set(get_args(Compressor)) == {"none", *BUILTIN}
