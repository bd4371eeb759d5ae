"""Reads the function library of a graph: parses each function once, at its first use, with attributes still encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import FunctionName, decode
from autograph_rewrite.ir.types.opdefs import Arg, args_of, find_op
from autograph_rewrite.ir.types.protos import proto

_FUNCTION, _SIGNATURE, _NODE, _RETURN, _CONTROL_RETURN = 1, 1, 3, 4, 6


@dataclass(frozen=True)
class Function:
    """A FunctionDef: a graph with named arguments and results.

    Attributes:
        nodes: the body; inputs in function syntax (`arg`, `node:out:0`, `^node`).
        returns: the tensor of each result, by the result's name, in function syntax.
        control_returns: the nodes that a call must run for their effect.
        polymorphic: the function declares attributes, which a call must give.
    """

    name: str
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    nodes: tuple[wire.RawNode, ...]
    returns: dict[str, str]
    control_returns: tuple[str, ...]
    polymorphic: bool


class Library:
    """Functions by name. A look-up reads only names; `get` parses a body."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._parsed: dict[str, Function] = {}

    @cached_property
    def _where(self) -> dict[str, tuple[int, int]]:
        found = {}
        for field, _, _, start, stop in wire.fields(self._data):
            if field == _FUNCTION:
                found[_name(self._data, start, stop)] = (start, stop)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._where or name in self._parsed

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def get(self, name: str) -> Function:
        """Return a function.

        Raises:
            GraphError: the library does not have it.
        """
        if name not in self._parsed:
            if name not in self._where:
                raise GraphError(f"the graph's library has no function '{name}'")
            self._parsed[name] = _parse(self._data, *self._where[name])
        return self._parsed[name]

    def add(self, function: Function) -> None:
        """Add a function that a lowering writes; `subset` does not encode it."""
        self._parsed[function.name] = function

    def input_shapes(self, name: str) -> list[tuple[int | None, ...] | None]:
        """Return the recorded static shapes of a function's arguments; None for an unknown rank."""
        function = proto("FunctionDef")()
        start, stop = self._where[name]
        function.ParseFromString(self._data[start:stop])
        found: list[tuple[int | None, ...] | None] = []
        for i in range(len(function.signature.input_arg)):
            attrs = function.arg_attr[i].attr
            stated: Any = decode(attrs["_output_shapes"].SerializeToString()) if "_output_shapes" in attrs else ()
            found.append(stated[0] if len(stated) == 1 else None)
        return found

    def subset(self, names: Iterable[str]) -> bytes:
        """Return the encoded library of some functions and their callees, without recorded static shapes.

        An export adds the shapes; the runtime has the function under the same name without them.
        """
        library = proto("FunctionDefLibrary")()
        wanted = list(dict.fromkeys(names))
        for name in wanted:  # grows while it is walked
            if name not in self:
                continue
            start, stop = self._where[name]
            function = library.function.add()
            function.ParseFromString(self._data[start:stop])
            function.attr.pop("_input_shapes", None)
            for node in function.node_def:
                node.attr.pop("_output_shapes", None)
            wanted += [called for called in self.calls(name) if called not in wanted]
        data: bytes = library.SerializeToString(deterministic=True)
        return data

    def expanded_sizes(self, roots: Iterable[str]) -> dict[str, int]:
        """Return how many nodes a call of each function has after inlining, callees included.

        A function that calls itself is counted once: inlining refuses it.
        """
        sizes: dict[str, int] = {}
        for root in roots:
            stack = [(root, False)]
            while stack:
                name, is_behind = stack.pop()
                if is_behind:
                    inner = (sizes.get(one, 0) for one in self.calls(name))
                    sizes[name] = len(self.get(name).nodes) + sum(inner)
                elif name not in sizes:
                    sizes[name] = 0
                    stack.append((name, True))
                    stack += [(one, False) for one in self.calls(name) if one in self]
        return sizes

    def calls(self, name: str) -> Iterator[str]:
        """Yield the functions that a function's body names."""
        for node in self.get(name).nodes:
            yield from called(node.op, node.attrs, self)


def called(op_name: str, attrs: Mapping[str, object], library: Library) -> Iterator[str]:
    """Yield the functions that a node names: by its op, or in an attribute."""
    if op_name in library:
        yield op_name
    for key in _function_attrs(op_name):
        raw = attrs.get(key)
        found = decode(raw) if isinstance(raw, bytes) else None
        for function in found if isinstance(found, tuple) else (found,):
            if isinstance(function, FunctionName) and function.name:
                yield function.name


@cache
def _function_attrs(op_name: str) -> tuple[str, ...]:
    op = find_op(op_name)
    return () if op is None else tuple(key for key, attr in op.attrs.items() if "func" in attr.kind)


def _name(data: bytes, start: int, stop: int) -> str:
    for field, _, _, at, end in wire.fields(data, start, stop):
        if field == _SIGNATURE:
            for inner, _, _, name_at, name_end in wire.fields(data, at, end):
                if inner == 1:
                    return str(data[name_at:name_end], "utf-8")
    return ""


def _parse(data: bytes, start: int, stop: int) -> Function:
    nodes = []
    returns: dict[str, str] = {}
    controls: list[str] = []
    signature = proto("OpDef")()
    for field, _, _, at, end in wire.fields(data, start, stop):
        if field == _SIGNATURE:
            signature = proto("OpDef").FromString(data[at:end])
        elif field == _NODE:
            node = wire.read_node(data, at, end)
            node.attrs.pop("_class", None)  # colocation inside the body: the device of the call decides
            nodes.append(node)
        elif field == _RETURN:
            key, value = _entry(data, at, end)
            returns[key] = value
        elif field == _CONTROL_RETURN:
            controls.append(_entry(data, at, end)[1])
    return Function(
        signature.name,
        args_of(signature.input_arg),
        args_of(signature.output_arg),
        tuple(nodes),
        returns,
        tuple(sorted(set(controls))),
        bool(signature.attr),
    )


def _entry(data: bytes, start: int, stop: int) -> tuple[str, str]:
    """Decode one entry of a map<string, string>."""
    parts = {field: str(data[at:end], "utf-8") for field, _, _, at, end in wire.fields(data, start, stop)}
    return parts.get(1, ""), parts.get(2, "")
