"""A tf.Graph or GraphDef, and a few names in it, as a TrainingGraph.

    graph ──bytes──► ir.Graph ──names──► targets, outputs, init_op ──reach──► inputs, variables

The graph is kept whole: a user may fetch any tensor of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.load.marks import mark_checkpoints
from autograph_rewrite.load.signature import collections
from autograph_rewrite.load.signature.collections import Collected
from autograph_rewrite.load.signature.inputs import describe_output, graph_inputs
from autograph_rewrite.load.signature.references import as_list, find_node, is_tensor, output_count
from autograph_rewrite.load.signature.savers import savers
from autograph_rewrite.load.signature.train_ops import infer_init_op, infer_train_ops
from autograph_rewrite.load.signature.variables import find_variables
from autograph_rewrite.load.sources import metagraph, validate
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph

_SHOWN = 5
"""How many nodes a note names."""


def from_graph(
    graph: Any,
    *,
    train_op: Any = None,
    outputs: Sequence[Any] = (),
    init_op: Any = None,
    batch_inputs: Mapping[str, int | None] | None = None,
) -> TrainingGraph:
    """Wrap a tf.Graph, a GraphDef or its bytes, or a MetaGraphDef. See `GraphItem.from_graph`.

    Args:
        graph: tf.Graph, GraphDef, its bytes, or MetaGraphDef.
        train_op: what one step runs, by name or as TensorFlow object.
        outputs: tensors to report.
        init_op: the initialiser.
        batch_inputs: axis of the examples by input; None: an input has none.

    Raises:
        GraphError: malformed graph, unknown name, or a batch of unknown rank.
    """
    with no_garbage_collection():
        known = collections.from_tf_graph(graph) if hasattr(graph, "as_graph_def") else Collected()
        if hasattr(graph, "graph_def") and hasattr(graph, "collection_def"):
            known, graph = metagraph.collected(graph), graph.graph_def
        return build_item(
            read(graph), known, train_op=train_op, outputs=outputs, init_op=init_op, batch_inputs=batch_inputs
        )


def read(graph: Any) -> Graph:
    """Return the IR of a tf.Graph (with the static shapes that it knows), a GraphDef or encoded bytes.

    Raises:
        GraphError: it is none of these, over 2 GiB, or malformed.
    """
    if isinstance(graph, Graph):
        return graph
    data = graph if isinstance(graph, bytes) else _encode(graph)
    result = serde.from_bytes(data)
    validate.check(result)
    if not hasattr(graph, "as_graph_def"):  # of those TensorFlow has seen every node
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
        data: bytes = message.SerializeToString(deterministic=True)  # attributes are a map: sort it
    except Exception as error:  # protobuf and TensorFlow raise several types here, all for the same reason
        raise GraphError(
            f"the graph cannot be encoded: {error}",
            hint="a GraphDef must be smaller than 2 GiB: keep large constants in variables or files",
        ) from error
    return data


@dataclass(frozen=True)
class Declared:
    """What the user says of a graph; the rest is inferred.

    Attributes:
        train_op: what a training step runs, one or several.
        outputs: what a step returns.
        init_op: what initialises the variables.
        batch_inputs: the axis of each input that counts examples.
    """

    train_op: Any = None
    outputs: Sequence[str] | None = None
    init_op: str | None = None
    batch_inputs: Mapping[str, int | None] | None = None


def build_item(
    graph: Graph,
    collected: Collected,
    *,
    train_op: Any = None,
    outputs: Sequence[Any] | None = None,
    init_op: Any = None,
    batch_inputs: Mapping[str, int | None] | None = None,
) -> TrainingGraph:
    """Wrap an IR graph; what is not named is inferred where the graph leaves no doubt.

    Args:
        graph: in normal form or not.
        collected: what its collections say.
        train_op: what one step runs; None: inferred.
        outputs: tensors to report; None: none but a train op that is a tensor.
        init_op: the initialiser; None: inferred.
        batch_inputs: axis of the examples by input; None: an input has none.

    Raises:
        GraphError: unknown name, or a batch of unknown rank.
    """
    mark_checkpoints(graph, collected.checkpoints)
    named = as_list(train_op)
    targets = tuple(dict.fromkeys(find_node(graph, one, "train_op").name for one in named))
    left_out: tuple[str, ...] = ()
    if not named:
        targets, left_out = infer_train_ops(graph, collected)
    # A train op that is a tensor is fetched for its value, too.
    values = [one for one in named if is_tensor(one) and output_count(find_node(graph, one, "train_op")) != 0]
    declared = {info.name: info for one in (*as_list(outputs), *values) for info in [describe_output(graph, one)]}
    init = find_node(graph, init_op, "init_op").name if init_op is not None else infer_init_op(graph, targets)
    roots = [graph.node(name) for name in (*targets, *(info.tensor.partition(":")[0] for info in declared.values()))]
    step = ancestors(roots) if roots else set(graph)
    initial = ancestors([graph.node(init)]) if init is not None else set()
    kept = (*collected.keep, *savers(graph, step | initial))
    return TrainingGraph(
        graph,
        inputs=graph_inputs(graph, step, initial - step, batch_inputs),
        outputs=declared,
        targets=targets,
        init_op=init,
        variables=find_variables(graph, collected, init, step),
        keep=tuple(name for name in dict.fromkeys(kept) if name in graph),
        notes=(*_left_out(graph, targets, left_out), *_undeclared(graph, targets, declared, step | initial)),
    )


def _left_out(graph: Graph, targets: Sequence[str], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Say which updates are no part of the step that was inferred."""
    if not names:
        return []
    text = (
        f"updates variables, but is no part of the step ({', '.join(targets)}): name all that a step runs in train_op"
    )
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    listed = ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more
    warnings.warn(
        f"the step was inferred from the collection of train ops: it runs {', '.join(map(repr, targets))}, and leaves "
        f"out {listed}, which update variables, too; name all that a step runs in train_op",
        stacklevel=5,
    )
    return [(name, graph.node(name).op, text) for name in names]


def _undeclared(
    graph: Graph, targets: Collection[str], outputs: Collection[str], kept: Collection[Node]
) -> list[tuple[str, str, str]]:
    """Say which results of a graph no step computes, where only its train op was named."""
    if outputs or not targets:
        return []
    given = [node for node in kept if has(node.op, "placeholders", "input_elements")]
    computed = descendants(given, controls=False) - set(kept)
    ends = [
        node
        for node in graph
        if node in computed
        and output_count(node)
        and not any(value.uses for value in node.read_outputs)
        and not (has(node.op, "forwards") and node.inputs[0].node in kept)  # the step has its value by another name
    ]
    text = "no output is declared, so no step computes this: name it as one (outputs=[...], --output) to keep it"
    return [(node.name, node.op, text) for node in ends[:_SHOWN]]
