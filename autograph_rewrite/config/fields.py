"""Define the field types of a configuration, each with its validation."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from autograph_rewrite.config.split_parts import read_parts
from autograph_rewrite.diagnostics.limits import check_pattern
from autograph_rewrite.ir.types.device_names import canonical

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?P<unit>[A-Za-z]*)")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_FUNCTION = re.compile(r".+\.py:[A-Za-z_][A-Za-z0-9_]*")
_REMAT = re.compile(
    r"none|sqrt|hierarchical|names|collection|scopes|save_matmuls|every:[1-9][0-9]*|budget:(?P<size>.+)"
)

# `4m` could mean MB or MiB, so it is an error.
SIZE_HINT = "write a number of bytes, or a text like 512KiB, 4MiB or 4MB"


def read_size(value: object) -> int:
    """Read a number of bytes: 4194304 or "4MiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match["unit"].lower() not in _UNITS:
        raise ValueError(f"must be a size, not {value!r}; {SIZE_HINT}")
    size = Decimal(match["number"]) * _UNITS[match["unit"].lower()]
    if size != int(size):
        raise ValueError(f"must be whole bytes, and {value!r} is not")
    return int(size)


def read_address(value: str) -> str:
    """Read the address at which a process listens: host:port."""
    match = _ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"must be an address like 10.0.0.1:2222, not {value!r}")
    return value


def _remat_policy(value: str) -> str:
    match = _REMAT.fullmatch(value)
    if match is None:
        known = "none, sqrt, hierarchical, names, collection, scopes, save_matmuls, every:N or budget:SIZE"
        raise ValueError(f"must be {known}, not {value!r}")
    if match["size"] is not None:
        read_size(match["size"])
    return value


def _parts(value: object) -> int:
    found = read_parts(value)
    if found is None:
        raise ValueError(f"must be a number of parts (1 or more), 'model' or '?', not {value!r}")
    return found


# pydantic would read True as 1 and "2" as 2, so scalars are strict.
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
MeshAxis = Annotated[int, Field(strict=True, ge=-1)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
DeviceName = Annotated[str, Field(strict=True), AfterValidator(canonical)]
Pattern = Annotated[str, Field(strict=True, min_length=1), AfterValidator(check_pattern)]
Address = Annotated[str, Field(strict=True), AfterValidator(read_address)]


def _function_name(value: str) -> str:
    if not _FUNCTION.fullmatch(value):
        raise ValueError(f"must be path/to/file.py:function, not {value!r}")
    return value


FunctionName = Annotated[str, Field(strict=True), AfterValidator(_function_name)]
RematPolicy = Annotated[str, Field(strict=True), AfterValidator(_remat_policy)]
Parts = Annotated[
    int,
    BeforeValidator(_parts),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["model", "?", None]}]}),
]
Size = Annotated[
    int,
    Field(ge=0, le=2**62),
    BeforeValidator(read_size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9.]+ *[A-Za-z]*$"}]}
    ),
]


def _plain_name(value: object) -> object:
    """Read the name of a value of TensorFlow's enumerations, in any case, or the value itself."""
    name = getattr(value, "name", value)
    return name.rpartition(".")[2].lower() if isinstance(name, str) else value


Synchronization = Annotated[Literal["auto", "none", "on_write", "on_read"], BeforeValidator(_plain_name)]
Aggregation = Annotated[Literal["none", "sum", "mean", "only_first_replica"], BeforeValidator(_plain_name)]
