"""`for x in dataset` becomes a `While` over an iterator, so that what it draws is a batch like any other.

    Reduce(TakeWhile(Scan(dataset)))     how AutoGraph writes it: Scan runs the body, TakeWhile says where it breaks
    while going:                         what it becomes
        optional = GetNextAsOptional(iterator)
        if optional:
            carried, out = scan(carried, optional)
            going = goes_on(out)
            if going: result = reduce(result, out)

`for x in iterator` is such a loop from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autograph_rewrite.ir.format.function_library import Function, Library
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import FunctionName, encode
from autograph_rewrite.ir.types.opdefs import Arg
from autograph_rewrite.ir.types.wire import RawNode

Typed = Sequence[tuple[str, int]]
"""Values of a function body, in its syntax, with their types."""


def as_while(graph: Graph, library: Library, node: Node, pivot: Node | None) -> Node | None:
    """Return a While that gives what a loop over a dataset gives, first; None where the functions are not known.

    Args:
        graph: where it is added.
        library: gets the functions that it calls.
        node: the loop.
        pivot: node that is alive in each iteration of a loop around; None: there is none.
    """
    scan, stop, base = _stages(node)
    stages = [one for one in (scan, stop, node) if one is not None]
    if any(_function(one).name not in library for one in stages):
        return None
    first = stages[0]
    function, count = library.get(_function(first).name), _states(first)
    drawn = function.inputs[count : len(function.inputs) - _others(first)]
    shapes = library.input_shapes(function.name)
    element: dict[str, tuple[str, Any]] = {
        "output_types": ("list(type)", [arg.dtype for arg in drawn]),
        "output_shapes": ("list(shape)", shapes[count : count + len(drawn)]),
    }
    absorbed = {one for one in (scan, stop) if one is not None}
    controls = [one for one in node.controls if one not in absorbed] + ([pivot] if pivot is not None else [])
    attrs = {key: value for key, (_, value) in element.items()}
    name = f"{node.name}/iterator"
    iterator = graph.add("AnonymousIteratorV3", name=name, controls=controls, attrs=attrs, origin=node).output()
    made = graph.add("MakeIterator", [base, iterator], name=f"{name}/made", controls=controls, origin=node)
    going = graph.add(
        "Const", name=f"{node.name}/going", controls=controls, origin=node,
        attrs={"dtype": dtypes.BOOL, "value": np.bool_(True)},
    )  # fmt: skip
    carried = list(node.inputs[1 : 1 + _states(node)])
    scanned = list(scan.inputs[1 : 1 + _states(scan)]) if scan is not None else []
    others = [value for one in stages for value in one.inputs[1 + _states(one) :]]
    values = [*carried, going.output(), *scanned, iterator, *others]
    body = _Functions(library, node.name, element, scan, stop, node).body(
        [(f"value_{i}", dtypes.base(value.dtype)) for i, value in enumerate(values)], len(carried), len(scanned)
    )
    known = [*(node.attr("output_shapes") or [None] * len(carried)), ()]
    known += shapes[:count] if scan is not None else []
    loop = {
        "T": tuple(dtypes.base(value.dtype) for value in values),
        "cond": FunctionName(body.condition),
        "body": FunctionName(body.body),
        "output_shapes": tuple(known) + (None,) * (len(values) - len(known)),
        "parallel_iterations": 1,
    }
    return graph.add("While", values, name=f"{node.name}/loop", controls=[made, *controls], attrs=loop, origin=node)


def _stages(node: Node) -> tuple[Node | None, Node | None, Value]:
    """Return the Scan and the TakeWhile that a loop over a dataset goes through, and the dataset."""
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

    def add(
        self, op: str, inputs: Sequence[str], attrs: dict[str, tuple[str, Any]], output: str, count: int
    ) -> list[str]:
        """Add a node that waits for those before it; return its results."""
        name = f"{op}_{len(self.nodes)}"
        waits = [f"^{self.nodes[-1].name}"] if self.nodes else []
        encoded = {key: encode(kind, value) for key, (kind, value) in attrs.items()}
        self.nodes.append(RawNode(name, op, [*inputs, *waits], "", encoded, b""))
        return [f"{name}:{output}:{i}" for i in range(count)]

    def call(self, function: str, given: Typed, types: Sequence[int]) -> Typed:
        """Add a call."""
        attrs = {"f": ("func", FunctionName(function)), **self._types(given, types)}
        return self._typed(self.add("StatefulPartitionedCall", _names(given), attrs, "output", len(types)), types)

    def choose(self, condition: str, then: str, otherwise: str, given: Typed, types: Sequence[int]) -> Typed:
        """Add a conditional."""
        attrs: dict[str, tuple[str, Any]] = {
            "then_branch": ("func", FunctionName(then)),
            "else_branch": ("func", FunctionName(otherwise)),
            "Tcond": ("type", dtypes.BOOL),
            **self._types(given, types),
        }
        return self._typed(self.add("If", [condition, *_names(given)], attrs, "output", len(types)), types)

    def truth(self, value: bool) -> tuple[str, int]:
        """Add a constant."""
        attrs: dict[str, tuple[str, Any]] = {"dtype": ("type", dtypes.BOOL), "value": ("tensor", np.bool_(value))}
        return self.add("Const", [], attrs, "output", 1)[0], dtypes.BOOL

    def done(self, returns: Typed) -> str:
        """Put the function into the library; return its name."""
        outputs = {f"result_{i}": value for i, (value, _) in enumerate(returns)}
        self.library.add(
            Function(
                self.name,
                tuple(Arg(name, dtype, "", "", "", False) for name, dtype in self.given),
                tuple(Arg(f"result_{i}", dtype, "", "", "", False) for i, (_, dtype) in enumerate(returns)),
                tuple(self.nodes),
                outputs,
                (self.nodes[-1].name,) if self.nodes else (),
                False,
            )
        )
        return self.name

    @staticmethod
    def _types(given: Typed, types: Sequence[int]) -> dict[str, tuple[str, Any]]:
        return {"Tin": ("list(type)", [dtype for _, dtype in given]), "Tout": ("list(type)", list(types))}

    @staticmethod
    def _typed(names: Sequence[str], types: Sequence[int]) -> Typed:
        return list(zip(names, types, strict=True))


def _names(values: Typed) -> list[str]:
    return [name for name, _ in values]


@dataclass(frozen=True)
class _Loop:
    condition: str
    body: str


@dataclass(frozen=True)
class _Functions:
    """Writes the functions of one loop. All but `kept` take what the loop carries."""

    library: Library
    name: str
    element: dict[str, tuple[str, Any]]
    scan: Node | None
    stop: Node | None
    reduce: Node

    def body(self, given: Typed, results: int, scanned: int) -> _Loop:
        """Write condition and body of a loop that carries results, whether it goes on, and what Scan carries."""
        condition = self._begin("condition", given).done([given[results]])
        changing = results + 1 + scanned
        body = self._begin("body", given)
        (optional,) = body.add("IteratorGetNextAsOptional", [given[changing][0]], self.element, "optional", 1)
        (has,) = body.add("OptionalHasValue", [optional], {}, "has_value", 1)
        types = [dtype for _, dtype in given[:changing]]
        inside = [("optional", dtypes.VARIANT), *given]
        step, ended = self._step(inside, results, scanned), self._ended(inside, results, scanned)
        made = body.choose(has, step, ended, [(optional, dtypes.VARIANT), *given], types)
        return _Loop(condition, body.done([*made, *given[changing:]]))

    def _begin(self, part: str, given: Typed) -> _Body:
        return _Body(self.library, f"{self.name}/{part}", given)

    def _ended(self, given: Typed, results: int, scanned: int) -> str:
        body = self._begin("ended", given)
        carried = given[1:]
        return body.done([*carried[:results], body.truth(False), *carried[results + 1 : results + 1 + scanned]])

    def _step(self, given: Typed, results: int, scanned: int) -> str:
        body, carried = self._begin("step", given), given[1:]
        state = carried[results + 1 : results + 1 + scanned]
        rest = list(carried[results + 2 + scanned :])
        types = self.element["output_types"][1]
        out: Typed = list(
            zip(body.add("OptionalGetValue", ["optional"], self.element, "components", len(types)), types, strict=True)
        )
        if self.scan is not None:
            others = [rest.pop(0) for _ in range(_others(self.scan))]
            made = self._call(body, self.scan, [*state, *out, *others])
            state, out = made[:scanned], made[scanned:]
        going = None
        if self.stop is not None:
            others = [rest.pop(0) for _ in range(_others(self.stop))]
            (going,) = self._call(body, self.stop, [*out, *others])
        reduced = _function(self.reduce).name
        inputs = [*carried[:results], *out, *rest]
        kinds = [dtype for _, dtype in carried[:results]]
        if going is None:
            return body.done([*body.call(reduced, inputs, kinds), body.truth(True), *state])
        return body.done([*body.choose(going[0], reduced, self._kept(inputs, results), inputs, kinds), going, *state])

    def _kept(self, inputs: Typed, results: int) -> str:
        body = self._begin("kept", [(f"value_{i}", dtype) for i, (_, dtype) in enumerate(inputs)])
        return body.done(body.given[:results])

    def _call(self, body: _Body, node: Node, inputs: Typed) -> Typed:
        function = _function(node).name
        return body.call(function, inputs, [arg.dtype for arg in self.library.get(function).outputs])
