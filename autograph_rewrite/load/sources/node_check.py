"""One check of a node as a file states it, in a graph or in the body of a function: attributes, operands, their types.

    'y' of the function 'f'     MatMul(x, w:output:0)     T = float
    └─ where                    │  └─ operands: two, and float, as T says
                                └─ known; it has what it needs: T, or a default

What only the caller of a function knows (`placeholder`) is left to whoever puts its body in the place of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.function_library import Library
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import OpDef, dtypes_of, find_op, signature
from autograph_rewrite.ir.types.protos import proto

Types = tuple[int, ...] | None
"""Element types of what a node takes, or gives; None: nobody here can know them."""

_FIELDS = {"string": "s", "int": "i", "float": "f", "bool": "b"}
_KNOWN_EVERYWHERE = {"_output_shapes": "list(shape)", "_class": "list(string)"}
_PLACEHOLDER = "placeholder"


@dataclass(frozen=True)
class Stated:
    """A node as it is stated.

    Attributes:
        where: `'y'`, or `'y' of the function 'f'`.
        op: type of its op.
        attrs: encoded.
        operands: name of each value that it reads, with its element type; None: not to be checked.
        node: of a graph; None in a body.
    """

    where: str
    op: str
    attrs: Mapping[str, object]
    operands: Sequence[tuple[str, int | None]] | None
    node: Node | None = None


class NodeCheck:
    """Checks nodes.

    Args:
        library: the functions that there are; their names are ops, too.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._fields: dict[bytes, str] = {}
        self._ops: dict[str, OpDef | None] = {}
        self._types: dict[tuple[object, ...], tuple[Types, Types]] = {}

    def types(self, stated: Stated) -> tuple[Types, Types]:
        """Return the element types that a node takes and gives.

        Raises:
            GraphError: its attributes do not say them.
        """
        op = self._op(stated.op)
        if op is None and stated.op not in self._library:
            return None, None
        names = op.type_attrs if op is not None else tuple(stated.attrs)
        deciding = {name: raw for name in names if isinstance(raw := stated.attrs.get(name), bytes)}
        key = (stated.op, *deciding.items())
        if key not in self._types:
            is_open = any(self._field(stated, name, raw) == _PLACEHOLDER for name, raw in deciding.items())
            self._types[key] = (None, None) if is_open else self._stated_types(stated, deciding)
        return self._types[key]

    def _stated_types(self, stated: Stated, attrs: Mapping[str, bytes]) -> tuple[Types, Types]:
        try:
            if stated.op not in self._library:
                return signature(stated.op, attrs)
            function = self._library.get(stated.op)
            return dtypes_of(function.inputs, attrs), dtypes_of(function.outputs, attrs)
        except KeyError as error:
            raise _fault(stated, f"{stated.where} has no attribute {error}, which a {stated.op} needs") from None
        except (GraphError, TypeError) as error:
            raise _fault(stated, f"{stated.where}: {getattr(error, 'problem', error)}") from None

    def check(self, stated: Stated) -> None:
        """Check one node.

        Raises:
            GraphError: an attribute is missing, corrupt or of another kind, or an operand does not fit.
        """
        fields = {key: self._field(stated, key, raw) for key, raw in stated.attrs.items() if isinstance(raw, bytes)}
        op = self._op(stated.op)
        if op is not None:
            _check_attrs(stated, op, fields)
        if stated.operands is not None:
            _check_operands(stated, self.types(stated)[0])

    def _op(self, name: str) -> OpDef | None:
        if name not in self._ops:
            self._ops[name] = find_op(name) if name not in self._library else None
        return self._ops[name]

    def _field(self, stated: Stated, key: str, raw: bytes) -> str:
        """Return which field of AttrValue an attribute has."""
        if raw not in self._fields:
            try:
                self._fields[raw] = str(proto("AttrValue").FromString(raw).WhichOneof("value"))
            except DecodeError as error:
                raise _fault(stated, f"attribute '{key}' of {stated.where} is corrupt ({error})") from None
        return self._fields[raw]


def _check_attrs(stated: Stated, op: OpDef, fields: Mapping[str, str]) -> None:
    is_body = stated.node is None
    for key, found in fields.items():
        kind = op.attrs[key].kind if key in op.attrs else _KNOWN_EVERYWHERE.get(key, "")
        wanted = "list" if kind.startswith("list") else _FIELDS.get(kind, kind)
        if wanted and found != wanted and not (is_body and found == _PLACEHOLDER):
            raise _fault(stated, f"attribute '{key}' of {stated.where} is no {kind}")
    for key, one in op.attrs.items():
        if one.default is None and key not in stated.attrs:
            raise _fault(stated, f"{stated.where} has no attribute '{key}', which a {stated.op} needs")


def _check_operands(stated: Stated, wanted: Types) -> None:
    assert stated.operands is not None
    if wanted is None:
        return
    if len(wanted) != len(stated.operands):
        problem = f"{stated.where} reads {len(stated.operands)} values, a {stated.op} takes {len(wanted)}"
        raise _fault(stated, problem)
    for index, ((name, given), dtype) in enumerate(zip(stated.operands, wanted, strict=True)):
        if given is not None and given % dtypes.REF_OFFSET != dtype % dtypes.REF_OFFSET:
            names = dtypes.dtype_name(given), dtypes.dtype_name(dtype)
            raise _fault(stated, f"operand {index} of {stated.where}, '{name}', is {names[0]} instead of {names[1]}")


def _fault(stated: Stated, problem: str) -> GraphError:
    return GraphError(problem, node=stated.node)
