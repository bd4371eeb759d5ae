"""Turn a tf.Graph or GraphDef, and a few names in it, into a TrainingGraph.

    graph ──bytes──► ir.Graph ──names──► targets, outputs, init_op ──reach──► inputs, variables

The graph is kept whole, because a user may fetch any tensor of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.diagnostics.amounts import few
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.load import inputs, validate, variables
from autograph_rewrite.load.marks import CHECKPOINTS, mark_checkpoints
from autograph_rewrite.load.variables import Collected, find_variables
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph

_SHOWN = 5
"""The most nodes that a note names."""


def from_graph(
    graph: Any,
    *,
    train_op: Any = None,
    outputs: Sequence[Any] = (),
    init_op: Any = None,
    batch_inputs: Mapping[str, int | None] | None = None,
) -> TrainingGraph:
    """Wrap a tf.Graph, a GraphDef or its bytes, or a MetaGraphDef. See `GraphItem.from_graph`.

    Raises:
        GraphError: the graph is malformed, a name is unknown, or a batch has an unknown rank.
    """
    with no_garbage_collection():
        known = variables.from_tf_graph(graph) if hasattr(graph, "as_graph_def") else Collected()
        if hasattr(graph, "graph_def") and hasattr(graph, "collection_def"):
            known, graph = collected(graph), graph.graph_def
        return build_item(read(graph), known, Declared(train_op, outputs, init_op, batch_inputs))


def read(graph: Any) -> Graph:
    """Return the IR of a tf.Graph (with its static shapes), a GraphDef or encoded bytes.

    Raises:
        GraphError: `graph` is another object, over 2 GiB, or malformed.
    """
    if isinstance(graph, Graph):
        return graph
    data = graph if isinstance(graph, bytes) else _encode(graph)
    result = serde.from_bytes(data)
    validate.check(result)
    if not hasattr(graph, "as_graph_def"):  # TensorFlow has checked every node of a tf.Graph
        validate.check_file(result)
    return result


def _encode(graph: Any) -> bytes:
    if not hasattr(graph, "as_graph_def") and not hasattr(graph, "SerializeToString"):
        raise GraphError(
            f"expected a tf.Graph or a GraphDef, not {type(graph).__name__}",
            hint="for a function use from_function, for a Keras model from_keras, for a file load",
        )
    try:
        message = graph.as_graph_def(add_shapes=True) if hasattr(graph, "as_graph_def") else graph
        data: bytes = message.SerializeToString(deterministic=True)  # sorts the map of attributes
    except Exception as error:  # protobuf and TensorFlow raise several types, all for graphs that are too large
        raise GraphError(
            f"the graph cannot be encoded: {error}",
            hint="a GraphDef must be smaller than 2 GiB: keep large constants in variables or files",
        ) from error
    return data


@dataclass(frozen=True)
class Declared:
    """The names that a user declares for a graph; the rest is inferred.

    Attributes:
        train_op: the ops that a training step runs, by name or as TensorFlow objects; None: inferred.
        outputs: tensors to report; None: only train ops that are tensors.
        init_op: the op that initialises the variables; None: inferred.
        batch_inputs: axis of the examples by input; None: an input has none.
    """

    train_op: Any = None
    outputs: Sequence[Any] | None = None
    init_op: Any = None
    batch_inputs: Mapping[str, int | None] | None = None


def build_item(graph: Graph, collected: Collected, declared: Declared) -> TrainingGraph:
    """Wrap an IR graph; names that are not declared are inferred if the graph leaves no doubt.

    Raises:
        GraphError: a name is unknown, or a batch has an unknown rank.
    """
    mark_checkpoints(graph, collected.checkpoints)
    named = inputs.as_list(declared.train_op)
    targets = tuple(dict.fromkeys(inputs.find_node(graph, one, "train_op").name for one in named))
    left_out: tuple[str, ...] = ()
    if not named:
        targets, left_out = infer_train_ops(graph, collected)
    # A train op that is a tensor is an output, too.
    values = [
        one
        for one in named
        if inputs.is_tensor(one) and inputs.output_count(inputs.find_node(graph, one, "train_op")) != 0
    ]
    described = [inputs.describe_output(graph, one) for one in (*inputs.as_list(declared.outputs), *values)]
    outputs = {info.name: info for info in described}
    init = declared.init_op
    init = infer_init_op(graph, targets) if init is None else inputs.find_node(graph, init, "init_op").name
    roots = [graph.node(name) for name in (*targets, *(info.tensor.partition(":")[0] for info in outputs.values()))]
    step = ancestors(roots) if roots else set(graph)
    initial = ancestors([graph.node(init)]) if init is not None else set()
    kept = (*collected.keep, *savers(graph, step | initial))
    return TrainingGraph(
        graph,
        inputs=inputs.graph_inputs(graph, step, initial - step, declared.batch_inputs),
        outputs=outputs,
        targets=targets,
        init_op=init,
        variables=find_variables(graph, collected, init, step),
        keep=tuple(name for name in dict.fromkeys(kept) if name in graph),
        notes=(*_left_out(graph, targets, left_out), *_undeclared(graph, targets, outputs, step | initial)),
    )


def _left_out(graph: Graph, targets: Sequence[str], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return and warn of the updates that are not in the inferred step."""
    if not names:
        return []
    text = (
        f"updates variables, but is no part of the step ({', '.join(targets)}): name all that a step runs in train_op"
    )
    listed = few([f"'{name}'" for name in names], _SHOWN)
    warnings.warn(
        f"the step was inferred from the collection of train ops: it runs {', '.join(map(repr, targets))}, and leaves "
        f"out {listed}, which update variables, too; name all that a step runs in train_op",
        stacklevel=5,
    )
    return [(name, graph.node(name).op, text) for name in names]


def _undeclared(
    graph: Graph, targets: Collection[str], outputs: Collection[str], kept: Collection[Node]
) -> list[tuple[str, str, str]]:
    """Return notes on the results that no step computes, if only a train op was named."""
    if outputs or not targets:
        return []
    given = [node for node in kept if has(node.op, "placeholders", "input_elements")]
    computed = descendants(given, controls=False) - set(kept)
    ends = [
        node
        for node in graph
        if node in computed
        and inputs.output_count(node)
        and not any(value.uses for value in node.read_outputs)
        and not (has(node.op, "forwards") and node.inputs[0].node in kept)  # the step has the same value
    ]
    text = "no output is declared, so no step computes this: name it as one (outputs=[...], --output) to keep it"
    return [(node.name, node.op, text) for node in ends[:_SHOWN]]


# Find the subgraphs that save and restore by their ops, because a Saver adds nothing to a graph's collections.
#
# v ──► SaveV2 ──^──► Identity "save/control_dependency"         fetched by Saver.save
# RestoreV2 ──► AssignVariableOp ──^──► NoOp "save/restore_all"    run by Saver.restore


def savers(graph: Graph, used: Collection[Node]) -> tuple[str, ...]:
    """Return the names of the last nodes of save and restore subgraphs, which only the program runs.

    Args:
        used: the nodes of the step and the init op, which may restore variables as well; they are left out.
    """
    files = (node for node in graph if has(node.op, "checkpoint_files") and node not in used)
    after = {node for node in descendants(files) if node not in used}
    ends = (node for node in graph if node in after and not _is_read_in(node, after))
    return tuple(node.name for node in ends)


def _is_read_in(node: Node, after: Collection[Node]) -> bool:
    readers = [use.node for value in node.read_outputs for use in value.uses]
    return any(reader in after for reader in (*readers, *node.control_users))


# Infer the train op and the init op of a graph.


def infer_train_ops(graph: Graph, collected: Collected) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ops that a step runs, and the sinks with updates from inputs that it leaves out.

    A step runs the outermost groups of the registered train ops, the updates that wait for them (moving averages), and
    the registered update ops of layers. If nothing is registered, it runs every sink that updates a variable from an
    input.
    """
    registered = [graph.node(name) for name in collected.train_ops if name in graph]
    if not registered:
        trained = descendants(_fed_updates(graph))
        return tuple(node.name for node in graph if node in trained and _is_sink(node)), ()
    found = dict.fromkeys(one for node in registered for one in _step_of(node))
    covered = ancestors(found)
    for name in collected.update_ops:
        node = graph.nodes.get(name)
        if node is not None and node not in covered:
            found[_outermost_group(node)] = None
            covered |= ancestors([node])
    found = {node: None for node in found if not (descendants([node]) - {node}) & found.keys()}  # not part of another
    missed = _fed_updates(graph) - ancestors(found)
    return tuple(node.name for node in found), tuple(node.name for node in _sinks_that_run(missed))


def _step_of(train_op: Node) -> list[Node]:
    """Return the nodes that run a train op and the updates that wait for it."""
    missing = {node for node in descendants([train_op]) if node is not train_op and _updates(node)}
    if not missing:
        return [_outermost_group(train_op)]
    return _sinks_that_run(missing)


def _sinks_that_run(updates: set[Node]) -> list[Node]:
    """Return sinks that together run some updates, preferring groups to reads after the updates."""
    sinks = sorted((node for node in descendants(updates) if _is_sink(node)), key=lambda node: node.name)
    needs = {sink: ancestors([sink]) & updates for sink in sinks}
    found, missing = [], set(updates)
    for sink in sorted(sinks, key=lambda node: (-len(needs[node]), node.op != "NoOp", node.op == "ReadVariableOp")):
        if needs[sink] & missing:
            found.append(sink)
            missing -= needs[sink]
    return found


def _fed_updates(graph: Graph) -> set[Node]:
    """Return the updates that depend on an input, without those that restore checkpoints."""
    fed = descendants(value.node for value in inputs.source_values(graph))
    restored = descendants(node for node in graph if node.op == "RestoreV2")
    return {node for node in graph if node in fed and node not in restored and _updates(node)}


def _outermost_group(node: Node) -> Node:
    users = node.control_users
    while len(users) == 1 and users[0].op == "NoOp":
        node, users = users[0], users[0].control_users
    return node


def _is_sink(node: Node) -> bool:
    return not node.control_users and not any(value.uses for value in node.read_outputs)


def _updates(node: Node) -> bool:
    """Return whether a node writes a variable."""
    if has(node.op, "variables") or node.op in ("ReadVariableOp", "VarIsInitializedOp", "IsVariableInitialized"):
        return False
    op = find_op(node.op)
    if op is None or not op.is_stateful:
        # Updates of reference variables (Assign, ApplyAdam...) take a reference and are not registered as stateful.
        takes_reference = op is not None and bool(op.inputs) and op.inputs[0].is_ref
        return takes_reference and has(_first_source(node), "reference_variables")
    return has(_first_source(node), "variables") and "Gather" not in node.op


def _first_source(node: Node) -> str:
    return node.inputs[0].node.op if node.inputs else ""


def infer_init_op(graph: Graph, targets: Sequence[str]) -> str | None:
    """Return the group that initialises the most variables and depends on no feed; None if there is none.

    Only NoOps with control inputs are candidates, and only groups are searched, which is fast.
    """
    trained = {graph.node(name) for name in targets}
    best: tuple[tuple[int, bool, bool], str] | None = None
    for node in graph:
        if node.op != "NoOp" or node in trained or not node.controls:
            continue
        assigned = _assigned(node)
        rank = (assigned, not node.control_users, node.name == "init")
        if assigned and (best is None or rank > best[0]):
            best = (rank, node.name)
    return best[1] if best is not None else None


def _assigned(group: Node) -> int:
    """Return how many variables a group initialises; 0 if it updates any, or a value needs a feed or a checkpoint."""
    count = 0
    seen = {group}
    stack = [group]
    while stack:
        for node in stack.pop().controls:
            if node in seen:
                continue
            seen.add(node)
            if has(node.op, "groups"):
                stack.append(node)
            elif has(node.op, "assigns"):
                if any(n.op in ("RestoreV2", "Placeholder") for n in ancestors([node.inputs[1].node])):
                    return 0
                count += 1
            elif _updates(node):
                return 0
    return count


# Read MetaGraphDefs: a GraphDef with collections and a saver, written by `tf.train.Saver` and v1 SavedModels.

_GRAPH_DEF = 2


def graph_bytes(meta_graph: bytes) -> bytes:
    """Return the bytes of the GraphDef inside an encoded MetaGraphDef.

    Raises:
        ValueError: the bytes are no MetaGraphDef.
    """
    for field, kind, _, start, stop in wire.fields(meta_graph):
        if field == _GRAPH_DEF and kind == wire.LENGTH_DELIMITED:
            return meta_graph[start:stop]
    raise ValueError("it holds no graph")


def collected(meta_graph: Any) -> Collected:
    """Read the collections and the saver of a MetaGraphDef message."""
    collections = meta_graph.collection_def
    listed = [v for key in ("variables", "local_variables") for v in _variables(collections, key)]
    trainable = _variables(collections, "trainable_variables")
    saver = meta_graph.saver_def
    saver_names = (saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name)
    return Collected(
        trainable=frozenset(_node(v.variable_name) for v in trainable) if listed or trainable else None,
        initializers={_node(v.variable_name): _node(v.initializer_name) for v in (*listed, *trainable)},
        train_ops=_nodes(collections, "train_op"),
        update_ops=_nodes(collections, "update_ops"),
        keep=tuple(dict.fromkeys((*map(_node, filter(None, saver_names)), *_nodes(collections, "table_initializer")))),
        checkpoints=_nodes(collections, CHECKPOINTS),
    )


def _variables(collections: Any, key: str) -> list[Any]:
    if key not in collections:
        return []
    return [proto("VariableDef").FromString(raw) for raw in collections[key].bytes_list.value]


def _nodes(collections: Any, key: str) -> tuple[str, ...]:
    if key not in collections:
        return ()
    return tuple(dict.fromkeys(_node(name) for name in collections[key].node_list.value))


def _node(tensor: str) -> str:
    return tensor.partition(":")[0]
