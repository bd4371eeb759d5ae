"""Lower functional ops: the steps that all lowerings share, and branches as Switch and Merge.

The shared steps copy a body into the graph, replace the node's results, keep its name valid and its effects running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.format.function_library import Function, Library
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import record_shapes
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import FunctionName, decode, encode
from autograph_rewrite.ir.types.opdefs import RESULT_TYPES, Arg, dtypes_of, find_op, places_of
from autograph_rewrite.ir.types.wire import RawNode, read_varint
from autograph_rewrite.ops.traits import ENTERS, has


@dataclass
class FunctionLowering:
    """The state of one run of `flatten`: the graph, the nodes that wait to be lowered, and the gates."""

    graph: Graph
    library: Library
    has_routing: bool  # the original graph has v1 control flow, in which a call may be
    run_only: frozenset[str]  # names that the program runs without fetching their results
    loops_over_data: bool = False  # lower loops over datasets, too
    pending: deque[tuple[Node, Node | None, tuple[str, ...]]] = field(default_factory=deque)
    gates: list[Node] = field(default_factory=list)
    frames: set[str] = field(default_factory=set)
    predicates: dict[Node, Value] = field(default_factory=dict)  # of each Merge of an If, else side first
    callers: tuple[str, ...] = ()  # the functions whose inlined bodies contain the current node, outermost first

    def body(self, node: Node, function: FunctionName, part: str, arguments: Sequence[Value], entry: Entry) -> Body:
        """Copy a function that `node` names into the graph, and queue the functional nodes of the copy.

        Args:
            part: between the node's name and those of the copies, such as "then"; "" for none.
            arguments: one value per parameter.
            entry: the nodes that the body's first nodes wait for.

        Raises:
            GraphError: the function is missing, is recursive, does not fit its arguments, or reads an unknown name.
        """
        if function.name not in self.library:
            raise GraphError(
                f"'{node.name}' calls '{function.name}', which the function library does not have", node=node
            )
        if function.name in self.callers:
            cycle = " -> ".join((*self.callers, function.name))
            raise GraphError(f"the function '{function.name}' calls itself ({cycle})", node=node)
        attrs = {**{k: v for k, v in node.attrs.items() if isinstance(v, bytes)}, **dict(function.attrs)}
        prefix = f"{node.name}/{part}" if part else node.name
        declared = self.library.get(function.name)
        given = _bind(declared, arguments, attrs)
        copies: dict[str, Node] = {}
        for raw in declared.nodes:
            name, device = self.graph.unique_name(f"{prefix}/{raw.name}"), raw.device or node.device
            kept = _instance_attrs(raw, declared, attrs, prefix)
            copies[raw.name] = self.graph.insert(Node(self.graph, name, raw.op, device, kept, raw.rest))
            if raw.op in self.library:
                state_results(copies[raw.name], self.library)
        scope = _Scope(declared, self.library, given, copies)
        for raw in declared.nodes:
            _connect(copies[raw.name], raw, scope, entry)
        results = (scope.results(declared.returns[arg.name], arg, attrs) for arg in declared.outputs)
        returns = tuple(chain.from_iterable(results))
        effects = [copies[name] for name in declared.control_returns if name in copies]
        callers = (*self.callers, function.name)
        self.pending.extend((new, entry.pivot, callers) for new in copies.values() if self.is_functional(new))
        return Body(returns, tuple(effects or _loose_effects(copies.values())))

    def is_functional(self, node: Node) -> bool:
        """Return whether a node calls functions and can be lowered."""
        if node.op == DATASET_LOOP:
            return self.loops_over_data
        return has(node.op, "functional") or node.op in self.library

    def gated(self, node: Node, index: int, value: Value, effects: Sequence[Node]) -> Value:
        """Make the readers of a result also run the effects; `inline` removes this gate if the effects run anyway.

        Args:
            effects: nodes of the body that must run.
        """
        if not effects or not node.output(index).uses:
            return value
        gate = Builder.at(node).node(
            "Identity", value, what=f"output_{index}", controls=effects, T=node.output_dtypes[index]
        )
        self.gates.append(gate)
        return gate.output()

    def tied(self, node: Node, index: int, value: Value, pivot: Node | None) -> Value:
        """Tie a loop constant that a node passes through to the iteration, because the node that did so is removed.

        Args:
            pivot: node that is alive in each iteration; None: there is no loop.
        """
        if pivot is None or not is_invariant(value):
            return value
        name = f"{node.name}/through_{index}"
        return Builder(self.graph, name, node).op("Identity", value, controls=[pivot])

    def finish(self, node: Node, results: Sequence[Value], effects: Sequence[Node], done: Sequence[Node]) -> None:
        """Replace a lowered node by `results`, keep its name valid, and remove it.

        Args:
            effects: the nodes that must run if its name is run.
            done: the nodes for which its control users wait now.
        """
        dtypes = node.output_dtypes
        name, origin, is_named = node.name, node, not self.callers
        done = list(dict.fromkeys(done))
        users = node.control_users
        if users and len(done) > 1:
            done = [Builder(self.graph, f"{name}/done", origin).node("NoOp", controls=done)]
        for user in users:
            user.remove_control(node)
            for one in done:
                user.add_control(one)
        for value in node.read_outputs:
            value.replace_all_uses_with(results[value.index])
        self.graph.erase(node)
        if is_named:
            self._alias(name, results, dtypes, effects, done)

    def _alias(
        self, name: str, results: Sequence[Value], dtypes: Sequence[int], effects: Sequence[Node], done: Sequence[Node]
    ) -> None:
        """Add a node with a name of the original graph, for use from outside."""
        if not results or name in self.run_only:
            Builder(self.graph, name).node("NoOp", controls=effects or done)
        elif len(results) == 1:
            Builder(self.graph, name).node("Identity", *results, controls=effects, T=dtypes[0])
        else:
            Builder(self.graph, name).node("IdentityN", *results, controls=effects, T=tuple(dtypes))


# Lower `If` and `Case` to Switch and Merge.
#
#     pred ──► Switch ──true──► then body ──► Merge ──► results
#                 └──false──► else body ──┘
#
# Only one side of a Switch is alive, and nodes that depend on the other side are skipped. A node without inputs would
# always run, so it waits for its branch's pivot, an Identity of the predicate that is alive only with the branch. A
# Case is a chain of such decisions, whose last branch is taken for every other index.


def lower_branches(state: FunctionLowering, node: Node, pivot: Node | None) -> None:
    """Replace an If or Case by its branches, in place.

    Args:
        pivot: node that is alive in each iteration of the enclosing loop; None: there is no loop.
    """
    selector, *arguments = node.inputs
    # All nodes of a branch depend on the selector. A loop constant is also alive in the last iteration, which does not
    # run the body, so it is tied to the iteration first.
    tie = [pivot] if pivot is not None and is_invariant(selector) else []
    selector = ordered(node, selector, (*node.controls, *tie))
    if has(node.op, "conditionals"):
        predicates = [boolean(node, selector)]
        functions = [node.attr("then_branch"), node.attr("else_branch")]
        parts = ["then", "else"]
    else:
        functions = list(node.attr("branches"))
        predicates = [_equals(node, selector, i) for i in range(len(functions) - 1)]
        parts = [f"branch_{i}" for i in range(len(functions))]
    bodies, pivots = _branches(state, node, predicates, functions, parts, arguments)
    _merge(state, node, bodies, pivots, predicates)


def ordered(node: Node, value: Value, controls: Sequence[Node]) -> Value:
    """Return `value` after `controls`.

    Args:
        node: the lowered node, from which the new one takes its name.
        controls: the nodes to wait for.
    """
    if not controls:
        return value
    return Builder.at(node).op("Identity", value, what="start", controls=controls)


def boolean(node: Node, value: Value) -> Value:
    """Return the truth value of a value, as If and While define it for types other than bool."""
    if dtypes.base(value.dtype) == dtypes.BOOL:
        return value
    return Builder.at(node).op("ToBool", value, what="to_bool")


def _equals(node: Node, selector: Value, index: int) -> Value:
    # The constant waits for a node made from the selector, so it is alive exactly when the Case is, without a pivot.
    build = Builder.at(node)
    zero = build.node("ZerosLike", selector, what=f"zero_{index}")
    number = build.node("Const", what=f"index_{index}", controls=[zero], dtype=dtypes.INT32, value=np.int32(index))
    return build.op("Equal", selector, number.output(), what=f"is_{index}")


def _branches(
    state: FunctionLowering,
    node: Node,
    predicates: Sequence[Value],
    functions: Sequence[FunctionName],
    parts: Sequence[str],
    arguments: Sequence[Value],
) -> tuple[list[Body], list[Node]]:
    """Copy every branch, fed by its Switches; predicate i decides between branch i and the later ones."""
    build = Builder.at(node)
    bodies: list[Body] = []
    pivots: list[Node] = []
    remaining = list(arguments)
    gate: Value | None = None  # alive when no earlier branch was taken
    for i, predicate in enumerate(predicates):
        decision = _switch(node, f"switch_{i}", gate if gate is not None else predicate, predicate)
        pivot = build.node("Identity", decision.output(1), what=f"{parts[i]}_pivot")
        switches = [_switch(node, f"switch_{i}_{k}", value, predicate) for k, value in enumerate(remaining)]
        taken = [switch.output(1) for switch in switches]
        bodies.append(state.body(node, functions[i], parts[i], taken, Entry(pivot=pivot)))
        pivots.append(pivot)
        remaining = [switch.output(0) for switch in switches]
        gate = decision.output(0)
    assert gate is not None
    pivot = build.node("Identity", gate, what=f"{parts[-1]}_pivot")
    bodies.append(state.body(node, functions[-1], parts[-1], remaining, Entry(pivot=pivot)))
    return bodies, [*pivots, pivot]


def _switch(node: Node, name: str, value: Value, predicate: Value) -> Node:
    return Builder.at(node).node("Switch", value, predicate, what=name, T=dtypes.base(value.dtype))


def _merge(
    state: FunctionLowering, node: Node, bodies: Sequence[Body], pivots: Sequence[Node], predicates: Sequence[Value]
) -> None:
    """Merge the results of the branches, and the effects into one node that runs after those of the taken branch."""
    build = Builder.at(node)
    shapes = node.attr("_output_shapes") or node.attr("output_shapes") or ()
    results: list[Value] = []
    for i, dtype in enumerate(node.output_dtypes):
        values = [body.returns[i] for body in reversed(bodies)]  # else, then: value_index is the predicate
        merge = build.node("Merge", *values, what=f"merge_{i}", T=dtype, N=len(values))
        if i < len(shapes):  # TensorFlow's gradient adds outputs later, not always with their shapes
            record_shapes(merge, [shapes[i], ()])
        if len(predicates) == 1:
            state.predicates[merge] = predicates[0]
        results.append(merge.output())
    effects = [effect for body in bodies for effect in body.effects]
    executed: list[Node] = []
    if effects or not results:
        alive = [pivot.output() for pivot in reversed(pivots)]
        executed = [build.node("Merge", *alive, what="executed", controls=effects)]
    results = [state.gated(node, i, value, executed if effects else []) for i, value in enumerate(results)]
    state.finish(node, results, executed if effects else [], executed or [value.node for value in results])


# Copy a function body into a graph: arguments become values, and `node:out:0` becomes a value of the copied node.

DATASET_LOOP = "ReduceDataset"

_PLACEHOLDER_TAG = 0x4A  # AttrValue.placeholder: "take the caller's attribute of this name"


@dataclass(frozen=True)
class Entry:
    """The nodes that the first nodes of a body wait for.

    Attributes:
        starts: all first nodes wait for these (the control inputs of a call).
        pivot: first nodes without a data input from the iteration or branch wait for this node. It is alive exactly
            when the loop iteration or the branch is, and in the same frame.
    """

    starts: tuple[Node, ...] = ()
    pivot: Node | None = None


@dataclass(frozen=True)
class Body:
    """A body that was copied into a graph.

    Attributes:
        effects: nodes that must run whenever the body runs.
    """

    returns: tuple[Value, ...]
    effects: tuple[Node, ...]


def is_invariant(value: Value) -> bool:
    """Return whether a value enters a loop as a constant, which is alive in every iteration, also in the last one."""
    return value.node.op == "Enter" and bool(value.node.attr("is_constant"))


def state_results(node: Node, library: Library) -> None:
    """Record the result types of a call by function name, which its readers may need before it is lowered."""
    attrs = {key: raw for key, raw in node.attrs.items() if isinstance(raw, bytes)}
    types = dtypes_of(library.get(node.op).outputs, attrs)
    node.set_raw_attr(RESULT_TYPES, encode("list(type)", types))


@dataclass(frozen=True)
class _Scope:
    """Resolves the names in a body."""

    function: Function
    library: Library
    arguments: Mapping[str, tuple[Value, ...]]
    copies: Mapping[str, Node]

    def value(self, reference: str) -> Value:
        """Return the value of `arg`, `arg:1`, `node:out` or `node:out:1`."""
        name, _, rest = reference.partition(":")
        if name in self.arguments:
            return self.arguments[name][int(rest) if rest else 0]
        node = self.node(name)
        output, _, index = rest.partition(":")
        return node.output(_offset(node, output, self.library) + (int(index) if index else 0))

    def node(self, name: str) -> Node:
        """Return the copy of a body node."""
        if name not in self.copies:
            raise GraphError(f"the function '{self.function.name}' reads '{name}', which its body does not have")
        return self.copies[name]

    def results(self, reference: str, arg: Arg, attrs: Mapping[str, bytes]) -> tuple[Value, ...]:
        """Return the values of one declared result, which may be a list."""
        first = self.value(reference)
        count = len(dtypes_of((arg,), attrs))
        if count == 1:
            return (first,)
        if reference in self.arguments:
            return self.arguments[reference]
        return tuple(first.node.output(first.index + i) for i in range(count))


def _connect(node: Node, raw: RawNode, scope: _Scope, entry: Entry) -> None:
    values = [scope.value(text) for text in raw.inputs if text[0] != "^"]
    controls = [text[1:] for text in raw.inputs if text[0] == "^"]
    node.set_inputs(values)
    for name in controls:
        if name not in scope.arguments:  # an argument is complete before the body starts
            node.add_control(scope.node(name))
    is_inner = bool(node.controls) or any(text.partition(":")[0] in scope.copies for text in raw.inputs)
    # Once a call is inlined, its nodes wait only for the arguments that they read, so an inner call waits here, too.
    if not is_inner or has(node.op, "functional") or node.op in scope.library:
        for start in entry.starts:
            node.add_control(start)
    if is_inner:
        return
    if entry.pivot is not None and all(map(is_invariant, values)):
        node.add_control(entry.pivot)


def _bind(function: Function, arguments: Sequence[Value], attrs: Mapping[str, bytes]) -> dict[str, tuple[Value, ...]]:
    places = places_of(function.inputs, attrs)
    taken = sum(map(len, places.values()))
    if taken != len(arguments):
        raise GraphError(f"the function '{function.name}' takes {taken} tensors, but is given {len(arguments)}")
    return {name: tuple(arguments[i] for i in place) for name, place in places.items()}


def _offset(node: Node, output: str, library: Library) -> int:
    """Return the index of the first tensor of a named output."""
    if not output:
        return 0
    op = find_op(node.op)
    declared = op if op is not None else library.get(node.op)
    places = places_of(declared.outputs, {**(op.defaults if op is not None else {}), **node.attrs})
    if output not in places:
        raise GraphError(f"a function body reads the output '{output}' of '{node.name}', which has none", node=node)
    return places[output].start


def _instance_attrs(raw: RawNode, function: Function, attrs: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    if function.polymorphic:
        return {key: _substituted(value, attrs) for key, value in raw.attrs.items()}
    if raw.op in ENTERS:  # every copy of a loop needs a different frame name
        frame = f"{prefix}/{decode(raw.attrs['frame_name']).decode()}"
        return {**raw.attrs, "frame_name": encode("string", frame)}
    return raw.attrs


def _substituted(raw: bytes, attrs: Mapping[str, bytes]) -> bytes:
    """Replace a placeholder for the caller's attribute by its value, also inside a function-valued attribute."""
    if raw and raw[0] == _PLACEHOLDER_TAG:
        size, at = read_varint(raw, 1)
        return attrs[str(raw[at : at + size], "utf-8")]
    value = decode(raw) if raw and raw[0] == 0x52 else None  # AttrValue.func
    if isinstance(value, FunctionName) and value.attrs:
        inner = tuple((key, _substituted(item, attrs)) for key, item in value.attrs)
        return encode("func", FunctionName(value.name, inner))
    return raw


def _loose_effects(nodes: Iterable[Node]) -> Iterable[Node]:
    """Yield stateful nodes without readers, which are the effects of an old function without control results."""
    for node in nodes:
        op = find_op(node.op)
        if op is None or not op.is_stateful or has(node.op, "kept") or node.op == "VarIsInitializedOp":
            continue
        if not any(value.uses for value in node.read_outputs):
            yield node
