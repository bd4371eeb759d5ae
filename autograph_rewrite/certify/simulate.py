"""Find out what each node of the folded graph reads, and compare it with what it should read.

    %dw (original, each) ──► AddN(all) ──► ResourceApplyAdam
    own(0), own(1)           their sum      has to read: whole(%dw)

Original nodes are not computed: what they give is sample data of the value that they give, which is right if what they
read is right. Everything else is computed (`kernels`), whatever it is called and whoever made it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.certify import kernels
from autograph_rewrite.certify.samples import COMBINE, Sample, Token, TooLargeError
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir import dtypes, resources
from autograph_rewrite.ir.claims import OWN, Claim, Claims, Read
from autograph_rewrite.ir.graph import Graph, Node, PerInstance, Select, Span, Value
from autograph_rewrite.ir.opdefs import get_op
from autograph_rewrite.ir.walk import topological_order

FORWARDS = frozenset(("Identity", "StopGradient", "Snapshot", "PreventGradient", "NextIteration", "Enter", "Exit"))
MERGES = {b"Add": "sum", b"Max": "max", b"Min": "min", b"Mul": "prod"}
COLLECTIVES = frozenset(("CollectiveReduceV2", "CollectiveGatherV2"))
RENAMED = re.compile(r"(.*)/(?:instance|served)(?:_\d+)?")
OF_REPLICA = ("TensorArray", "Stack", "CheckNumerics", "Assert")
"""What each replica has of its own, and no other sees; and what only looks at its values."""
SHAPES_OF_ELEMENTS = frozenset(("TensorListReserve", "EmptyTensorList"))
RESTATED = frozenset(
    ("shared_name", "container", "element_shape", "element_shape_except0", "tensor_array_name", "stack_name")
)
"""Attributes that may differ between instances of one node; what they mean is checked elsewhere."""


class Leaf(NamedTuple):
    """What an original node gives: `whole`, or `own` on each instance."""

    name: str
    form: str


class Unknown(NamedTuple):
    """What nothing here can compute, and why."""

    why: str


@dataclass(frozen=True)
class Baseline:
    """The graph that placements are claimed of, by name, with its claims."""

    nodes: Mapping[str, Node]
    claims: Claims
    types: Mapping[str, int]
    same: Mapping[str, str]

    @staticmethod
    def of(graph: Graph, claims: Claims) -> Baseline:
        """Index a graph; nobody may change it."""
        types: dict[str, int] = {}
        same: dict[str, str] = {}
        for node in topological_order(graph):
            for value in node.read_outputs:
                types[value.name] = value.dtype
            if node.op in FORWARDS and node.inputs and node.op != "NextIteration":
                source = node.inputs[0].name
                same[node.output().name] = same.get(source, source)
        for name in claims.values:
            types.setdefault(name, graph.value(name).dtype)
        nodes = {node.name: node for node in graph}
        return Baseline(nodes, replace(claims, values=_as_long_as_the_batch(nodes, claims)), types, same)

    def match(self, node: Node) -> Node | None:
        """Return the claimed node that a node of the rewritten graph is, by name, op and attributes."""
        found = self.nodes.get(node.name)
        claim = self.claims.values.get(node.name)
        if node.op in FORWARDS & kernels.KERNELS.keys() and node.span is Span.ONCE and claim and claim.differs:
            return None  # it hands on what it reads, whole by now
        if found is not None and found.op == node.op and not self._stands_for_merged(node, found):
            return found
        renamed = RENAMED.fullmatch(node.name)
        found = self.nodes.get(renamed[1]) if renamed else None
        return found if found is not None and found.op == node.op else None

    def _stands_for_merged(self, node: Node, found: Node) -> bool:
        """Return whether a node took the name of one that is called otherwise now."""
        renamed = (node.graph.nodes.get(f"{node.name}/{suffix}") for suffix in ("instance", "served"))
        return any(one is not None and one.op == found.op for one in renamed)


def _as_long_as_the_batch(nodes: Mapping[str, Node], claims: Claims) -> Mapping[str, Claim]:
    """Return the claims, with a size for each open dimension of which replicas read their blocks."""
    values = dict(claims.values)
    for (name, index), read in claims.reads.items():
        if read.kind != "split":
            continue
        value = nodes[name].inputs[index].name
        shape = values[value].shape if values[value].shape is not None else (None,) * (read.dim + 1)
        if shape is not None and shape[read.dim] is None:
            rows = (read.unit, ("B",))
            values[value] = values[value]._replace(shape=(*shape[: read.dim], rows, *shape[read.dim + 1 :]))
    return values


class Simulation:
    """One walk over a folded graph, with one sample.

    Args:
        baseline: what it should do.
        sample: data.
        order: the nodes, producers first.
    """

    def __init__(self, baseline: Baseline, sample: Sample, order: Sequence[Node]) -> None:
        self._baseline, self._sample, self._order = baseline, sample, order
        self._held: dict[Value, Any] = {}
        self._matches = {node: baseline.match(node) for node in order}
        self.not_covered: dict[str, None] = {}

    def run(self) -> None:
        """Compute what is not original; then compare what original nodes read.

        Raises:
            VerifyError: something is wrong.
        """
        for node in self._order:
            found = self._matches[node]
            if found is None:
                self._compute(node)
            else:
                for value in node.read_outputs:
                    self._held[value] = Leaf(found.output(value.index).name, self._form(node, found, value.index))
        for node in self._order:
            found = self._matches[node]
            if found is not None:
                self._compare(node, found)

    def _form(self, node: Node, found: Node, index: int) -> str:
        claim = self._baseline.claims.values.get(found.output(index).name)
        return (
            "own" if claim is not None and claim.differs and found.name not in self._baseline.claims.folded else "whole"
        )

    def outputs(self, anchors: Mapping[str, Value]) -> None:
        """Check that declared outputs are whole.

        Raises:
            VerifyError: one is not.
        """
        for anchor, name in self._baseline.claims.outputs.items():
            value = anchors.get(anchor)
            if value is None:
                raise VerifyError(f"the output '{name}' is gone")
            if value.node.span is Span.EACH or value.dtype in (dtypes.VARIANT, dtypes.RESOURCE):
                continue  # behind the pass that merges them, they run once
            held = self._held.get(value)
            self._same_data(value.node, f"the output '{name}'", held, [name], Read("replicated"), 0, once=True)

    # -- what is not original

    def _compute(self, node: Node) -> None:
        try:
            results = self._results(node)
        except (TooLargeError, kernels.NoKernelError) as error:
            results = None
            self._mark(node, Unknown(f"{node.op} ({error})"))
        except _UnknownInputError as error:
            results = None
            self._mark(node, error.unknown)
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            raise VerifyError(
                f"'{node.name}' ({node.op}) cannot compute with a batch of {self._sample.batch}: {error}", node=node
            ) from error
        for index, data in enumerate(results or ()):
            self._held[node.output(index)] = data

    def _mark(self, node: Node, unknown: Unknown) -> None:
        for value in node.read_outputs:
            self._held[value] = unknown

    def _results(self, node: Node) -> Sequence[Any] | None:
        """Return for each output the data, a list for EACH nodes."""
        if node.op in COLLECTIVES:
            return [self._collective(node)]
        if node.op == "NoOp":
            return None
        instances = range(self._sample.instances) if node.span is Span.EACH else range(1)
        per_instance = []
        for instance in instances:
            if node.op == "Const":
                per_instance.append([_constant(node, instance)])
                continue
            if not node.inputs:
                raise kernels.NoKernelError(node.op)
            per_instance.append(list(kernels.run(node, self._operands(node, instance))))
        if node.span is Span.ONCE:
            return per_instance[0]
        return [list(each) for each in zip(*per_instance, strict=True)]

    def _operands(self, node: Node, instance: int) -> list[Any]:
        operands: list[Any] = []
        for index, value in enumerate(node.inputs):
            select = node.selects.get(index)
            if select is Select.ALL:
                operands += [self._at(value, r) for r in range(self._sample.instances)]
            else:
                operands.append(self._at(value, instance))
        return operands

    def _at(self, value: Value, instance: int) -> Any:
        """Return what an instance of a value holds."""
        held = self._held.get(value)
        if held is None:
            raise _UnknownInputError(Unknown(f"'{value.name}' of a loop that the rewrite made"))
        if isinstance(held, Unknown):
            raise _UnknownInputError(held)
        if isinstance(held, Leaf):
            return self._sample.own(held.name, instance) if held.form == "own" else self._sample.whole(held.name)
        return held[instance] if value.node.span is Span.EACH else held

    def _collective(self, node: Node) -> Any:
        if node.span is Span.ONCE:  # the only member of its process
            return self._at(node.inputs[0], 0)
        own = [self._at(node.inputs[0], r) for r in range(self._sample.instances)]
        members = int(self._at(node.inputs[1], 0))
        if members != len(own):
            raise ValueError(f"{members} members of {len(own)}")
        if node.op == "CollectiveGatherV2":
            joined = np.concatenate(own, 0)
        else:
            combine = COMBINE[MERGES[node.attr("merge_op")]]
            joined = own[0]
            for part in own[1:]:
                joined = combine(joined, part)
            if node.attr("final_op") == b"Div":
                joined = joined / len(own)
        return [joined] * len(own)

    def _compare(self, node: Node, found: Node) -> None:
        if len(node.inputs) != len(found.inputs):
            raise VerifyError(
                f"'{node.name}' reads {len(node.inputs)} values, the original {len(found.inputs)}", node=node
            )
        self._compare_attributes(node, found)
        claims = self._baseline.claims
        for index, (value, wanted) in enumerate(zip(node.inputs, found.inputs, strict=True)):
            read = claims.reads.get((found.name, index), OWN)
            what = f"input {index} of '{node.name}' ({node.op})"
            select = node.selects.get(index)
            if select is Select.ALL:
                raise VerifyError(f"{what} reads all instances of '{value.name}'", node=node)
            held = self._held.get(value)
            if node.op in SHAPES_OF_ELEMENTS and not index:
                self.not_covered["the shapes that lists state of their elements (their kernels check them)"] = None
                continue
            if isinstance(held, Leaf) and held == self._wanted(wanted, read, value.node.span, node.span):
                continue
            self._same_data(node, what, held, [wanted.name], read, index, once=node.span is Span.ONCE)

    def _wanted(self, wanted: Value, read: Read, span: Span, reader: Span) -> Leaf | None:
        """Return the original value that may be read as it is."""
        claim = self._baseline.claims.values.get(wanted.name)
        differs = claim is not None and claim.differs
        if read == OWN:
            return Leaf(wanted.name, "own" if differs else "whole")
        return Leaf(wanted.name, "whole") if read.kind == "replicated" and not differs else None

    def _compare_attributes(self, node: Node, found: Node) -> None:
        for key in {*node.attrs, *found.attrs}:
            if key.startswith("_") or node.attrs.get(key) == found.attrs.get(key) or key in RESTATED:
                continue
            if isinstance(node.attrs.get(key), PerInstance) and key in ("seed", "seed2") and self._may_differ():
                continue
            raise VerifyError(f"attribute '{key}' of '{node.name}' ({node.op}) is not the original's", node=node)

    def _may_differ(self) -> bool:
        return any(text.startswith("random") for text in self._baseline.claims.inexact)

    def _same_data(
        self, node: Node, what: str, held: Any, names: Sequence[str], read: Read, index: int, *, once: bool
    ) -> None:
        name = names[0]
        if held is None or isinstance(held, Unknown):
            why = held.why if held is not None else "a value that the rewrite carries round a loop"
            self.not_covered[f"{what}: {why}"] = None
            return
        instances = range(1) if once else range(self._sample.instances)
        try:
            actual = [self._actual(held, node, index, r) for r in instances]
            if read.kind == "partial" and not once:
                good = alike(sum(actual[1:], np.asarray(actual[0])), self._sample.whole(name))
            else:
                good = all(alike(data, self._expected(name, read, r)) for r, data in enumerate(actual))
        except IndexError:
            self.not_covered[f"{what}: its rows do not follow from the size of the batch"] = None
            return
        except TooLargeError:
            if not isinstance(held, Leaf) or held.name != name:
                self.not_covered[f"{what}: too large"] = None
            return
        except _UnknownInputError as error:
            self.not_covered[f"{what}: {error.unknown.why}"] = None
            return
        if not good:
            raise VerifyError(
                f"{what} should read {_said(read)} '{name}', but does not with a batch of {self._sample.batch}",
                node=node,
            )

    def _actual(self, held: Any, node: Node, index: int, instance: int) -> Any:
        if isinstance(held, Leaf):
            return self._sample.own(held.name, instance) if held.form == "own" else self._sample.whole(held.name)
        return held[instance] if isinstance(held, list) else held

    def _expected(self, name: str, read: Read, instance: int) -> Any:
        sample = self._sample
        if read == OWN:
            return sample.own(name, instance)
        whole = sample.whole(name)
        if read.kind == "split":
            return sample.rows(whole, read.dim, read.unit, instance, read.segments)
        if read.kind == "entry":
            changed = np.array(whole)
            changed[read.dim] = sample.size(read.size, instance, name)
            return changed
        return whole


class _UnknownInputError(Exception):
    def __init__(self, unknown: Unknown) -> None:
        self.unknown = unknown


def _constant(node: Node, instance: int) -> Any:
    contents = node.attr("value")
    return kernels.constant(contents[instance] if isinstance(contents, tuple) else contents)


def alike(left: Any, right: Any) -> bool:
    """Return whether two values are exactly the same."""
    if isinstance(left, Token) or isinstance(right, Token):
        return isinstance(left, Token) and isinstance(right, Token) and left.name == right.name
    left, right = np.asarray(left), np.asarray(right)
    return left.shape == right.shape and left.dtype == right.dtype and np.array_equal(left, right)


def _said(read: Read) -> str:
    return {
        "own": "its own instance of",
        "replicated": "the whole of",
        "split": "its own block of",
        "partial": "a contribution to",
        "entry": "the local size in",
    }[read.kind]


def spans(baseline: Baseline, nodes: Iterable[Node]) -> None:
    """Check that what has an effect runs as often as the original's, and what differs runs on each replica.

    Raises:
        VerifyError: one does not.
    """
    for node in nodes:
        found = baseline.match(node)
        if found is None:
            continue
        claims = [baseline.claims.values.get(found.output(i).name) for i in range(len(found.output_dtypes))]
        differs = (
            any(claim is not None and claim.differs for claim in claims) and found.name not in baseline.claims.folded
        )
        if differs and node.span is Span.ONCE:
            raise VerifyError(f"'{node.name}' runs once, but each replica holds a value of its own", node=node)
        _check_writes(node)
        op = get_op(node.op)
        if differs or node.span is Span.ONCE or not op.is_stateful:
            continue
        handles = [kind for kind in node.input_dtypes if kind == dtypes.RESOURCE]
        if not handles and node.op not in ("VarHandleOp", "NoOp") and not node.op.startswith(OF_REPLICA):
            raise VerifyError(f"'{node.name}' ({node.op}) has an effect, and runs on each replica", node=node)


def _check_writes(node: Node) -> None:
    """Check that a write runs as often as there are copies of what it writes.

    Raises:
        VerifyError: it does not.
    """
    for handle in resources.written(node):
        if handle.span is not node.span:
            often = "once" if node.span is Span.ONCE else "on each replica"
            copies = "one copy" if handle.span is Span.ONCE else "a copy on each"
            raise VerifyError(f"'{node.name}' runs {often}, and there is {copies} of '{handle.name}'", node=node)
