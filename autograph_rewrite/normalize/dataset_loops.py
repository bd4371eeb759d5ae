"""Turn `for x in dataset` into a `While` over an iterator, whose elements are batches like any others.

    Reduce(TakeWhile(Scan(dataset)))     AutoGraph's form: Scan runs the body, TakeWhile decides where it breaks
    while going:                         the new form
        optional = GetNextAsOptional(iterator)
        if optional:
            carried, out = scan(carried, optional)
            going = goes_on(out)
            if going: result = reduce(result, out)

AutoGraph writes `for x in iterator` as such a loop directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.format.function_library import Function, Library
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import FunctionName, encode
from autograph_rewrite.ir.types.opdefs import Arg
from autograph_rewrite.ir.types.wire import RawNode

Typed = Sequence[tuple[str, int]]
"""Values of a function body (as references in it), with their types."""
Attrs = dict[str, tuple[str, Any]]
"""Kinds and values of attributes."""


def as_while(library: Library, node: Node, pivot: Node | None) -> Node | None:
    """Return a While whose first outputs are those of a loop over a dataset; None if a function is missing.

    Args:
        library: the functions of the While are added to it.
        pivot: node that is alive in each iteration of an enclosing loop; None: there is no loop.
    """
    build = Builder.at(node)
    scan, stop, base = _stages(node)
    stages = [one for one in (scan, stop, node) if one is not None]
    if any(_function(one).name not in library for one in stages):
        return None
    first = stages[0]
    function, count = library.get(_function(first).name), _states(first)
    drawn = function.inputs[count : len(function.inputs) - _others(first)]
    shapes = library.input_shapes(function.name)
    element: Attrs = {
        "output_types": ("list(type)", [arg.dtype for arg in drawn]),
        "output_shapes": ("list(shape)", shapes[count : count + len(drawn)]),
    }
    absorbed = {one for one in (scan, stop) if one is not None}
    controls = [one for one in node.controls if one not in absorbed] + ([pivot] if pivot is not None else [])
    attrs = {key: value for key, (_, value) in element.items()}
    iterator = build.op("AnonymousIteratorV3", what="iterator", controls=controls, **attrs)
    made = build.node("MakeIterator", base, iterator, what="iterator/made", controls=controls)
    going = build.const(True, what="going", controls=controls)
    carried = list(node.inputs[1 : 1 + _states(node)])
    scanned = list(scan.inputs[1 : 1 + _states(scan)]) if scan is not None else []
    others = [value for one in stages for value in one.inputs[1 + _states(one) :]]
    values = [*carried, going, *scanned, iterator, *others]
    types = tuple(dtypes.base(value.dtype) for value in values)
    functions = _Functions(library, node.name, element, scan, stop, node)
    condition, body = functions.condition_and_body([(f"value_{i}", dtype) for i, dtype in enumerate(types)])
    known = [*(node.attr("output_shapes") or [None] * len(carried)), ()]
    known += shapes[:count] if scan is not None else []
    return build.node(
        "While",
        *values,
        what="loop",
        controls=[made, *controls],
        T=types,
        cond=FunctionName(condition),
        body=FunctionName(body),
        output_shapes=tuple(known) + (None,) * (len(values) - len(known)),
        parallel_iterations=1,
    )


def _stages(node: Node) -> tuple[Node | None, Node | None, Value]:
    """Return the Scan and the TakeWhile of a loop over a dataset, if any, and the dataset."""
    dataset, stop, scan = node.inputs[0], None, None
    if dataset.node.op == "TakeWhileDataset":
        stop = dataset.node
        dataset = stop.inputs[0]
    if dataset.node.op == "ScanDataset":
        scan = dataset.node
        dataset = scan.inputs[0]
    return scan, stop, dataset


def _function(node: Node) -> FunctionName:
    found: FunctionName = node.attr("predicate") if node.op == "TakeWhileDataset" else node.attr("f")
    return found


def _states(node: Node) -> int:
    return len(node.attr("Tstate") or ())


def _others(node: Node) -> int:
    return len(node.attr("Targuments") or ())


@dataclass
class _Body:
    """A function that is being written."""

    library: Library
    name: str
    given: Typed
    nodes: list[RawNode] = field(default_factory=list)

    def add(self, op: str, inputs: Sequence[str], attrs: Attrs, output: str, types: Sequence[int]) -> Typed:
        """Add a node that waits for the one before it; return its results."""
        name = f"{op}_{len(self.nodes)}"
        waits = [f"^{self.nodes[-1].name}"] if self.nodes else []
        encoded = {key: encode(kind, value) for key, (kind, value) in attrs.items()}
        self.nodes.append(RawNode(name, op, [*inputs, *waits], "", encoded, b""))
        return [(f"{name}:{output}:{i}", dtype) for i, dtype in enumerate(types)]

    def call(self, function: str, given: Typed, types: Sequence[int]) -> Typed:
        """Add a call."""
        attrs: Attrs = {"f": ("func", FunctionName(function)), **_signature(given, types)}
        return self.add("StatefulPartitionedCall", [name for name, _ in given], attrs, "output", types)

    def choose(self, condition: str, then: str, otherwise: str, given: Typed, types: Sequence[int]) -> Typed:
        """Add a conditional."""
        attrs: Attrs = {
            "then_branch": ("func", FunctionName(then)),
            "else_branch": ("func", FunctionName(otherwise)),
            "Tcond": ("type", dtypes.BOOL),
            **_signature(given, types),
        }
        return self.add("If", [condition, *(name for name, _ in given)], attrs, "output", types)

    def truth(self, value: bool) -> tuple[str, int]:
        """Add a constant."""
        attrs: Attrs = {"dtype": ("type", dtypes.BOOL), "value": ("tensor", np.bool_(value))}
        return self.add("Const", [], attrs, "output", [dtypes.BOOL])[0]

    def done(self, returns: Typed) -> str:
        """Put the function into the library; return its name."""
        names = [f"result_{i}" for i in range(len(returns))]
        self.library.add(
            Function(
                self.name,
                tuple(Arg(name, dtype, "", "", "", False) for name, dtype in self.given),
                tuple(Arg(name, dtype, "", "", "", False) for name, (_, dtype) in zip(names, returns, strict=True)),
                tuple(self.nodes),
                {name: value for name, (value, _) in zip(names, returns, strict=True)},
                (self.nodes[-1].name,) if self.nodes else (),
                False,
            )
        )
        return self.name


def _signature(given: Typed, types: Sequence[int]) -> Attrs:
    return {"Tin": ("list(type)", [dtype for _, dtype in given]), "Tout": ("list(type)", list(types))}


@dataclass(frozen=True)
class _Functions:
    """Writes the functions of one loop; its values are results, whether it continues, the state of Scan, and constants.

    All functions but `kept` take all values of the loop.
    """

    library: Library
    name: str
    element: Attrs
    scan: Node | None
    stop: Node | None
    reduce: Node

    @property
    def _results(self) -> int:
        return _states(self.reduce)

    @property
    def _changing(self) -> int:
        return self._results + 1 + (_states(self.scan) if self.scan is not None else 0)

    def condition_and_body(self, given: Typed) -> tuple[str, str]:
        """Write the condition and the body of the loop; return their names."""
        condition = self._begin("condition", given).done([given[self._results]])
        body = self._begin("body", given)
        iterator = given[self._changing][0]
        (optional,) = body.add("IteratorGetNextAsOptional", [iterator], self.element, "optional", [dtypes.VARIANT])
        ((has, _),) = body.add("OptionalHasValue", [optional[0]], {}, "has_value", [dtypes.BOOL])
        inside = [("optional", dtypes.VARIANT), *given]
        types = [dtype for _, dtype in given[: self._changing]]
        made = body.choose(has, self._step(inside), self._ended(inside), [optional, *given], types)
        return condition, body.done([*made, *given[self._changing :]])

    def _begin(self, part: str, given: Typed) -> _Body:
        return _Body(self.library, f"{self.name}/{part}", given)

    def _ended(self, given: Typed) -> str:
        body, carried = self._begin("ended", given), given[1:]
        return body.done([*carried[: self._results], body.truth(False), *carried[self._results + 1 : self._changing]])

    def _step(self, given: Typed) -> str:
        body, carried = self._begin("step", given), given[1:]
        results, state = carried[: self._results], carried[self._results + 1 : self._changing]
        rest = list(carried[self._changing + 1 :])
        out = body.add("OptionalGetValue", ["optional"], self.element, "components", self.element["output_types"][1])
        if self.scan is not None:
            made = self._call(body, self.scan, [*state, *out, *_taken(rest, self.scan)])
            state, out = made[: len(state)], made[len(state) :]
        going = None
        if self.stop is not None:
            (going,) = self._call(body, self.stop, [*out, *_taken(rest, self.stop)])
        reduced, inputs, kinds = _function(self.reduce).name, [*results, *out, *rest], [dtype for _, dtype in results]
        if going is None:
            return body.done([*body.call(reduced, inputs, kinds), body.truth(True), *state])
        return body.done([*body.choose(going[0], reduced, self._kept(inputs), inputs, kinds), going, *state])

    def _kept(self, inputs: Typed) -> str:
        body = self._begin("kept", [(f"value_{i}", dtype) for i, (_, dtype) in enumerate(inputs)])
        return body.done(body.given[: self._results])

    def _call(self, body: _Body, node: Node, inputs: Typed) -> Typed:
        function = _function(node).name
        return body.call(function, inputs, [arg.dtype for arg in self.library.get(function).outputs])


def _taken(rest: list[tuple[str, int]], node: Node) -> Typed:
    """Remove a node's extra arguments from the front of the remaining values, and return them."""
    count = _others(node)
    found, rest[:] = rest[:count], rest[count:]
    return found
