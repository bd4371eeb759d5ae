"""Make a graph flat: function calls become their bodies, functional branches and loops become Switch, Merge and frames.

    call, If, Case, While ──lower──► nodes of the one graph; bodies may hold more of them, so: a worklist

This is what TensorFlow's own runtime does just before it runs a graph. Done at load, one analysis sees everything.
The function that computes only initial values, or a dataset, is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from autograph_rewrite.diagnostics.limits import limit
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.control_flow import OPENS
from autograph_rewrite.ir.format.function_library import Library, called
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.normalize.functions.bodies import DATASET_LOOP, state_results
from autograph_rewrite.normalize.functions.branches import lower_branches
from autograph_rewrite.normalize.functions.calls import lower_call
from autograph_rewrite.normalize.functions.dataset_loops import as_while
from autograph_rewrite.normalize.functions.loops import lower_while
from autograph_rewrite.normalize.functions.lowering import Lowering
from autograph_rewrite.normalize.functions.optionals import look_through
from autograph_rewrite.ops.traits import ENTERS, has


def flatten(
    graph: Graph, roots: Iterable[Node], read_outside: Collection[str] = (), *, loops_over_data: bool = False
) -> None:
    """Lower every functional node that `roots` need, in place.

    Args:
        graph: the graph.
        roots: the nodes that a step is run for.
        read_outside: names of those whose results are fetched; the others are only run.
        loops_over_data: whether loops over datasets are lowered, too.

    Raises:
        GraphError: a function is missing or recursive, or is a symbolic gradient.
    """
    library = Library(graph.library)
    roots = list(roots)
    run_only = frozenset(node.name for node in roots).difference(read_outside)
    state = Lowering(graph, library, any(node.op in OPENS for node in graph), run_only, loops_over_data)
    if any(state.is_functional(node) for node in graph):
        _require_finite(graph, library)
        _flatten(state, roots)
    if graph.library:
        names = dict.fromkeys(name for node in graph for name in called(node.op, node.attrs, library))
        graph.library = library.subset(names)


def _require_finite(graph: Graph, library: Library) -> None:
    """Refuse functions that call each other so often that their copies would fill the memory.

    Raises:
        GraphError: they do.
    """
    most = limit("expanded")
    callers = {node: [n for n in called(node.op, node.attrs, library) if n in library] for node in graph}
    sizes = library.expanded_sizes(chain.from_iterable(callers.values()))
    for node, names in callers.items():
        copies = sum(sizes[name] for name in names)
        if copies > most:
            problem = f"the functions that '{node.name}' calls come to {copies:,} nodes, calls within calls included"
            raise GraphError(problem, node=node, hint=f"at most {most:,} can be rewritten")


def _flatten(state: Lowering, roots: Iterable[Node]) -> None:
    graph = state.graph
    original = frozenset(graph.nodes)
    names = [node.name for node in roots]
    needed = ancestors(map(graph.node, names))
    state.frames = {node.attr("frame_name").decode() for node in graph if node.op in ENTERS}
    state.pending.extend(
        (node, None, ())
        for node in graph
        # A call by function name has no op definition, so nothing else can handle it, needed or not.
        if node.op in state.library or (node in needed and state.is_functional(node))
    )
    for node, _, _ in state.pending:
        if node.op in state.library:
            state_results(node, state.library)
    while state.pending:
        node, pivot, state.chain = state.pending.popleft()
        _lower(state, node, pivot)
    _open_gates(state, map(graph.node, names))
    look_through(graph, state.predicates)
    _sweep(graph, original)


def _lower(state: Lowering, node: Node, pivot: Node | None) -> None:
    if node.op == "SymbolicGradient":
        raise GraphError(
            "SymbolicGradient computes a gradient at run time, so its graph is not known",
            node=node,
            hint="build the gradient with tf.gradients or tf.GradientTape",
        )
    if node.op == DATASET_LOOP:
        loop = as_while(state.graph, state.library, node, pivot)
        if loop is not None:
            results = [loop.output(i) for i in range(len(node.output_dtypes))]
            state.finish(node, results, [loop], [loop])
            lower_while(state, loop, pivot)
    elif has(node.op, "loops"):
        lower_while(state, node, pivot)
    elif has(node.op, "branches"):
        lower_branches(state, node, pivot)
    else:
        lower_call(state, node, pivot)


def _open_gates(state: Lowering, roots: Iterable[Node]) -> None:
    """Remove the gates whose effects are run anyway, so that no reader waits for what it does not need."""
    gates = set(state.gates)
    seen = set(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        producers = [value.node for value in node.inputs]
        for producer in producers if node in gates else (*producers, *node.controls):
            if producer not in seen:
                seen.add(producer)
                stack.append(producer)
    behind: dict[Value, Value] = {}
    for gate in state.gates:
        if all(effect in seen for effect in gate.controls):
            behind[gate.output()] = gate.inputs[0]
            gate.output().replace_all_uses_with(gate.inputs[0])
            state.graph.erase(gate)
    for merge, predicate in state.predicates.items():
        while predicate in behind:
            predicate = behind[predicate]
        state.predicates[merge] = predicate


def _sweep(graph: Graph, original: frozenset[str]) -> None:
    """Remove new nodes that nothing of the original graph needs: unread results, and arguments that bodies ignore."""
    needed = ancestors(node for node in graph if node.name in original)
    needed |= ancestors(value.node for value in graph.anchors.values())
    graph.erase_all([node for node in graph if node not in needed])
