"""The body of a function, checked as a graph is: what its names stand for, and each node by `node_check`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.function_library import Function, Library
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import Arg, dtypes_of, find_op
from autograph_rewrite.ir.types.wire import RawNode
from autograph_rewrite.load.sources.node_check import NodeCheck, Stated

_INDEX = re.compile("[0-9]{1,5}")


def check_body(function: Function, library: Library, check: NodeCheck) -> None:
    """Check a function.

    Args:
        function: of the library.
        library: the functions that there are.
        check: of its nodes.

    Raises:
        GraphError: a name is missing or there twice, a node does not fit its op, a result is not what is declared.
    """
    _Body(function, library, check).check()


class _Body:
    def __init__(self, function: Function, library: Library, check: NodeCheck) -> None:
        self._function, self._library, self._check = function, library, check
        self._of = f" of the function '{function.name}'"
        self._nodes: dict[str, RawNode] = {}
        self._arguments: dict[str, tuple[int | None, ...] | None] = {}

    def check(self) -> None:
        """Check all of it."""
        for arg in self._function.inputs:
            self._arguments[arg.name] = self._types(arg)
        for node in self._function.nodes:
            if not node.name or not node.op:
                raise GraphError(f"a node{self._of} has no name or no op")
            if node.name in self._nodes or node.name in self._arguments:
                raise GraphError(f"two nodes or arguments{self._of} are named '{node.name}'")
            self._nodes[node.name] = node
        for node in self._function.nodes:
            read = [(text, self._read(text, node)) for text in node.inputs if not text.startswith("^")]
            self._check.check(self._stated(node, read))
            for text in node.inputs:
                if text.startswith("^") and text[1:] not in self._nodes and text[1:] not in self._arguments:
                    raise GraphError(f"'{node.name}'{self._of} waits for '{text[1:]}', which its body does not have")
        for arg in self._function.outputs:
            self._check_result(arg)

    def _check_result(self, arg: Arg) -> None:
        text = self._function.returns.get(arg.name)
        if text is None:
            raise GraphError(f"the function '{self._function.name}' does not say what its result '{arg.name}' is")
        given, declared = self._read(text, None), self._types(arg)
        if given is not None and declared is not None and len(declared) == 1 and declared[0] is not None:
            wanted = declared[0]
            if given % dtypes.REF_OFFSET != wanted % dtypes.REF_OFFSET:
                names = dtypes.dtype_name(given), dtypes.dtype_name(wanted)
                raise GraphError(f"result '{arg.name}'{self._of}, '{text}', is {names[0]} instead of {names[1]}")

    def _types(self, arg: Arg) -> tuple[int, ...] | None:
        """Return the element types of a declared argument or result; None: the function's caller says them."""
        return None if arg.type_attr or arg.number_attr or arg.type_list_attr else dtypes_of((arg,), {})

    def _stated(self, node: RawNode, operands: Sequence[tuple[str, int | None]]) -> Stated:
        return Stated(f"'{node.name}'{self._of}", node.op, node.attrs, operands)

    def _read(self, text: str, reader: RawNode | None) -> int | None:
        """Return the element type of what `arg`, `arg:1`, `node:out` or `node:out:1` stands for; None: not known here.

        Raises:
            GraphError: there is no such thing.
        """
        name, _, rest = text.partition(":")
        if name in self._arguments:
            types, index = self._arguments[name], rest
        elif name in self._nodes:
            output, _, index = rest.partition(":")
            types = self._outputs(self._nodes[name], output)
        else:
            types, index = (), ""
        if types is None:
            return None
        if not _INDEX.fullmatch(index or "0") or int(index or 0) >= len(types):
            who = f"'{reader.name}'{self._of}" if reader is not None else f"the function '{self._function.name}'"
            raise GraphError(f"{who} reads '{text}', which its body does not have")
        return types[int(index or 0)]

    def _outputs(self, node: RawNode, output: str) -> tuple[int, ...] | None:
        """Return the element types of one named output of a node and of those behind it; all, if none is named."""
        given = self._check.types(self._stated(node, ()))[1]
        if given is None or not output:
            return given
        op = find_op(node.op) if node.op not in self._library else None
        declared = op.outputs if op is not None else self._library.get(node.op).outputs
        attrs = {key: one.default for key, one in op.attrs.items() if one.default is not None} if op is not None else {}
        at = 0
        for arg in declared:
            count = len(dtypes_of((arg,), {**attrs, **node.attrs}))
            if arg.name == output:
                return given[at : at + count]
            at += count
        return ()
