"""Steps of each replica's own: what is computed of its part of the batch, or of a variable that it trains alone.

    before   x: split(0)   loss = Mean(...): replicated   dw: partial(sum) ──► sum ──► w := w - rate dw
    after    x ──► own     loss: own ──► mean ──► output   dw: own                ──► w := w - rate dw, each its own

A node that is marked takes its block for the whole batch (`OF_ONE`), so every op, loops included, does what it does on
one device. Outputs are merged in each step: rows are joined, sums and maxima combined, everything else is the mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.replica_marks import ADDED, VARYING, replica_mark
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_handle, updates
from autograph_rewrite.ops.rules.base import OF_BLOCK, OF_ONE, TOTAL
from autograph_rewrite.ops.rules.varying import let_out_mark
from autograph_rewrite.ops.traits import READS, SWITCHES, has
from autograph_rewrite.passes.canonicalize.varying_values import share_of
from autograph_rewrite.training_graph import Variable

OWN_NODE = encode("string", OF_ONE)
EXACT = "or leave local_sgd out"


@dataclass(frozen=True)
class OwnSteps:
    """What each replica has of its own.

    Attributes:
        nodes: that compute it.
        variables: names of the variables that are written with it.
        parts: what hands each replica its part of an input.
    """

    nodes: frozenset[Node]
    variables: tuple[str, ...]
    parts: tuple[Node, ...]


def find_own_steps(state: Propagation, variables: Mapping[str, Variable]) -> OwnSteps:
    """Find, and mark, what replicas compute by themselves.

    Args:
        state: placements; the graph is edited.
        variables: of the item.

    Raises:
        GraphError: something of it is one decision, or one value, for all replicas.
    """
    if state.semantics.batch is not None:
        raise GraphError(
            f"the graph is made for batches of {state.semantics.batch}, and its constants may count them all: "
            "with local_sgd each replica needs those of its own part",
            hint=f"leave the first dimension of the inputs open (None), {EXACT}",
        )
    parts = tuple(_part(value) for value in state.whole_inputs)
    sources = [*parts, *(node for node in state.order if VARYING in node.attrs)]
    handles = {state.graph.nodes[v.handle]: name for name, v in variables.items() if v.handle in state.graph.nodes}
    nodes, trained = _reached(sources, handles)
    for node in [one for one in state.graph if one in nodes]:
        _require_alone(node, nodes)
        if VARYING not in node.attrs:
            node.set_raw_attr(OF_BLOCK, OWN_NODE)
    return OwnSteps(frozenset(nodes), tuple(handles[one] for one in handles if one in trained), parts)


def _part(value: Value) -> Node:
    part = Builder.at(value.node).node("Identity", value, what="own")
    value.replace_all_uses_with(part.output(), keep={part})
    return part


def _reached(sources: Iterable[Node], handles: Mapping[Node, str]) -> tuple[set[Node], set[Node]]:
    """Return what depends on sources, also through variables and arrays; and the handles of those variables."""
    reached: set[Node] = set()
    trained: set[Node] = set()
    pending = list(sources)
    while pending:
        new = ({*pending} | descendants(pending, controls=False)) - reached
        reached |= new
        written = {handle for handle in updates(new) if handle in handles} - trained
        trained |= written
        pending = [use.node for handle in written for use in handle_uses(handle) if use.node.op in READS]
        stores = {handle_node(value) for node in new for value in node.inputs if is_handle(value)}
        pending += [store for store in stores if has(store.op, "cell_makers") and store not in reached]
    return reached, trained


def _require_alone(node: Node, own: Collection[Node]) -> None:
    decides = node.op == "LoopCond" or (node.op in SWITCHES and node.inputs[1].node in own)
    if decides:
        raise GraphError(
            f"'{node.name}' decides by what each replica computes of its own part, and a condition is one decision "
            "for all replicas",
            node=node,
            hint=f"choose values instead (tf.where), let loops run as often on all replicas, {EXACT}",
        )
    if replica_mark(node.name) in ADDED:
        raise GraphError(
            f"'{node.name}' meets the other replicas in every step, and with local_sgd they train by themselves",
            node=node,
            hint=f"leave ar.all_reduce and ar.all_gather out, {EXACT}",
        )


def let_out(state: Propagation, outputs: Collection[Value], own: OwnSteps, replicas: int) -> None:
    """Merge what outputs are on each replica.

    Args:
        state: placements, as they are without local steps; the graph is edited.
        outputs: declared values.
        own: what differs between replicas.
        replicas: how many there are.

    Raises:
        GraphError: nothing makes one value of an output.
    """
    graph = state.graph
    merged: dict[Value, Value] = {}
    for anchor, value in list(graph.anchors.items()):
        if value not in outputs or value.node not in own.nodes:
            continue
        if value not in merged:
            merged[value] = _exit(state, value, replicas)
        graph.set_anchor(anchor, merged[value])


def _exit(state: Propagation, value: Value, replicas: int) -> Value:
    graph, fact, node = state.graph, state.source(value), value.node
    if fact.placement.is_split or (fact.placement.is_partial and not _is_mean(state, value)):
        exit_, mark = Builder.at(node).node("Identity", value, what="merged"), let_out_mark(fact)
    elif dtypes.base(value.dtype) in dtypes.INEXACT:
        exit_, mark = share_of(value, replicas, f"{node.name}/merged"), TOTAL
    elif fact.is_local:
        exit_, mark = Builder.at(node).node("Identity", value, what="merged"), TOTAL
    else:
        raise GraphError(
            f"the output '{value.name}' is of type {dtypes.dtype_name(value.dtype)}, and each replica has one of its "
            "own: nothing makes one of them",
            node=node,
            hint=f"return it for each example, or as a float, which is averaged, {EXACT}",
        )
    exit_.set_raw_attr(OF_BLOCK, encode("string", mark))
    if len(node.output_dtypes) == 1:  # whoever fetches it by name gets what is merged
        name = node.name
        take_name(graph, node, graph.unique_name(f"{name}/of_replica"))
        take_name(graph, exit_, name)
    return exit_.output()


def _is_mean(state: Propagation, value: Value) -> bool:
    """Return whether contributions to a value are shares of a mean over examples, so that they do not add up here."""
    seen, pending = {value.node}, [value.node]
    for node in pending:
        if node.op == "Mean" and state.transfers[node].decompose:
            return True
        for operand in node.inputs:
            fact = state.facts.get(operand)
            if fact is not None and fact.placement.is_partial and operand.node not in seen:
                seen.add(operand.node)
                pending.append(operand.node)
    return False
