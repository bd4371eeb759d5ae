"""Handle values that vary between replicas by design: they begin at marks, and end in a sum, in blocks or in an error.

    before   autograph_replica/id (0)                x * id ──► autograph_replica/sum = Identity ──► loss
    after    id: own                                 x * id: own ──► contribution: partial(sum) ──► loss

After the conversions, `NUMBER_REPLICAS` fills in the value of each replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.replica_marks import (
    ADDED,
    COUNT,
    GATHER,
    ID,
    IS_FIRST,
    IS_FIRST_PART,
    WEIGHT,
    replica_mark,
)
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.rules.marked import MEAN, OF_BLOCK, OF_EACH, SUM, TOTAL, as_mark, kind_of, mark, marked
from autograph_rewrite.ops.traits import SWITCHES, has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.plan.plan import Plan

ADD_UP = "say what it comes to: ar.all_reduce(value, 'sum' or 'mean'), or ar.all_gather(value)"


def _has_marks(rewrite: Rewrite) -> bool:
    """Return whether the program asks about replicas."""
    return any(map(replica_mark, rewrite.graph.nodes))


def _mark_replicas(rewrite: Rewrite) -> None:
    """Let `ar.replica_id` differ between replicas, and `ar.num_replicas` be their number."""
    for node in tuple(rewrite.graph):
        asked = replica_mark(node.name) if node.op == "PlaceholderWithDefault" else ""
        if asked == ID:
            become(node, "Identity", node.inputs, {"T": dtypes.INT32})
            mark(node, OF_EACH, ID)
        elif asked == COUNT:
            _state(node, np.asarray(rewrite.plan.replicas, np.int32))


def _state(node: Node, content: np.ndarray) -> None:
    """Turn a mark into a constant, with the control edges that tie its operand to a loop or a branch."""
    for control in node.inputs[0].node.controls if node.inputs else ():
        node.add_control(control)
    become(node, "Const", (), {"dtype": node.output_dtypes[0], "value": content})


def add_up(state: Propagation, plan: Plan) -> Propagation:
    """Turn the varying values that `ar.all_reduce` and `ar.all_gather` mark into sums over the replicas.

    Raises:
        GraphError: `ar.all_gather` is given a value that is split.
    """
    for node in [node for node in state.order if replica_mark(node.name) in ADDED and node.op == "Identity"]:
        value = node.inputs[0]
        if replica_mark(node.name) == GATHER and state.facts[value].placement.is_split:
            raise GraphError(
                "ar.all_gather is given examples, which are those of the whole batch already",
                node=node,
                hint="use the value itself, or gather what is computed of them: a sum, a mean",
            )
        if state.facts[value].placement != OWN_VALUE:
            continue
        of_batch, kind = is_of_batch(state, value), SUM
        for operand in value.node.inputs:
            if replica_mark(operand.node.name) == WEIGHT and operand.node.op == "Identity":
                count, kind = plan.instances if of_batch else plan.replicas, MEAN
                _state(operand.node, np.asarray(1 / count, dtypes.numpy_dtype(operand.dtype)))
        node.set_input(0, once_for_each_replica(state, value, plan))
        mark(node, OF_BLOCK, kind if of_batch else TOTAL)
        state = revise(state)
    return state


def read_with_own(state: Propagation) -> set[Node]:
    """Return the readers of varying values, and all that they are computed from: whole values would be wrong there."""
    if not any(replica_mark(node.name) or kind_of(node) == OF_EACH for node in state.order):
        return set()  # only statistics of blocks vary, and they stay in their block
    meets = [node for node, made in state.transfers.items() if any(fact.placement == OWN_VALUE for fact in made.inputs)]
    return ancestors(meets, controls=False) if meets else set()


def is_of_batch(state: Propagation, value: Value) -> bool:
    """Return whether a varying value is computed from the batch, and so differs between micro-batches, too."""
    seen, pending = {value.node}, [value.node]
    for node in pending:
        made = state.transfers.get(node)
        for index, operand in enumerate(node.inputs):
            fact = state.facts.get(operand)
            is_whole = made is not None and made.operand_reshards.get(index) == REPLICATED
            if is_whole or (fact is not None and fact.placement == REPLICATED and not fact.is_local):
                continue
            if fact is not None and fact.placement != OWN_VALUE:
                return True
            if operand.node not in seen:
                seen.add(operand.node)
                pending.append(operand.node)
    return False


def once_for_each_replica(state: Propagation, value: Value, plan: Plan) -> Value:
    """Return a value that counts once per replica: if all its micro-batches have the same, only the first keeps it."""
    if plan.microbatches == 1 or is_of_batch(state, value):
        return value
    return only_where(value, IS_FIRST_PART)


def only_where(value: Value, which: str) -> Value:
    """Return a varying value in the chosen instances, and zeros in the others.

    Args:
        which: `IS_FIRST` (the first instance of all) or `IS_FIRST_PART` (the first micro-batch of each replica).
    """
    build = Builder.at(value.node, which)
    mine = build.op("Identity", build.const(True, what="of_one"), marks=as_mark(OF_EACH, which))
    zeros = build.op("ZerosLike", value, what="zeros")
    return build.op("SelectV2", mine, value, zeros, what="or_zeros")


def share_of(value: Value, count: int, name: str) -> Node:
    """Add a node `name` that divides a varying value by `count`: the contribution of one member to the mean."""
    build = Builder(value.node.graph, name, value.node)
    return build.node("Mul", value, build.const(1 / count, value.dtype, "share"))


def require_apart(state: Propagation, outputs: Iterable[Value], owners: Mapping[str, str]) -> None:
    """Refuse a varying value where one value is needed for all replicas.

    Args:
        owners: names of variables by the names of their handles.

    Raises:
        GraphError: a node or an output needs one value for all; the first one is named.
    """
    for node in state.order:
        for index in state.transfers[node].operand_reshards:
            if state.facts[node.inputs[index]].placement == OWN_VALUE and not has(node.op, "sizes"):
                raise _refused(node, node.inputs[index], owners)
    for value in outputs:
        if state.facts[value].placement == OWN_VALUE:
            raise GraphError(
                f"the output '{value.name}' differs between replicas, and one value is to be returned",
                node=value.node,
                hint=ADD_UP,
            )


def _refused(node: Node, value: Value, owners: Mapping[str, str]) -> GraphError:
    origin = f"'{value.name}' differs between replicas (it depends on ar.replica_id, or on a variable of each replica)"
    if is_update(node):
        name = owners.get(handle_node(node.inputs[0]).name, handle_node(node.inputs[0]).name)
        hint = (
            "say how replicas' values become one: "
            f"variable_policies: [{{match: {name}, synchronization: on_write, aggregation: mean}}], or sum, "
            "only_first_replica, none"
        )
        return GraphError(f"the variable '{name}' would be written with what differs: {origin}", node=node, hint=hint)
    if node.op in SWITCHES or node.op == "LoopCond":
        return GraphError(
            f"{origin}, and a condition is one decision for all replicas",
            node=node,
            hint="choose values instead: tf.where(condition, a, b)",
        )
    return GraphError(f"{origin}, and {node.op} '{node.name}' runs once for all", node=node, hint=ADD_UP)


def uses_of_ids(state: Propagation) -> list[Node]:
    """Return the readers of `ar.replica_id`; if there are none, the ids."""
    ids = [node for node in state.order if marked(node, OF_EACH) == ID]
    return list(dict.fromkeys(use.node for node in ids for use in node.output().uses)) or ids


def _fill_in(rewrite: Rewrite) -> None:
    """Give each replica its number where the program asks for it."""
    micro, instances = rewrite.micro, range(rewrite.replicas)
    meant: dict[str, tuple[list[int], type]] = {
        ID: ([i // micro for i in instances], np.int32),
        IS_FIRST: ([i == 0 for i in instances], np.bool_),
        IS_FIRST_PART: ([i % micro == 0 for i in instances], np.bool_),
    }
    for node in rewrite.state.order:
        what = marked(node, OF_EACH)
        if what in meant:
            contents, dtype = meant[what]
            node.set_input(0, rewrite.const_each(contents, dtype, name=f"{node.name}/of_each", near=node.inputs[0]))


def _merge(rewrite: Rewrite) -> None:
    """Add up varying values where `ar.all_reduce` says so; refuse them where one value is needed for all replicas."""
    state = add_up(rewrite.get(Propagation), rewrite.plan)
    owners = {variable.handle: name for name, variable in rewrite.item.variables.items()}
    require_apart(state, rewrite.outputs, owners)
    rewrite.put(state)


def _may_vary(rewrite: Rewrite) -> bool:
    return _has_marks(rewrite) or bool(rewrite.plan.policies)


def _has_varying_values(rewrite: Rewrite) -> bool:
    return any(kind_of(node) == OF_EACH for node in rewrite.get(Propagation).order)


MARK_REPLICAS = Pass("mark-replicas", _mark_replicas, _has_marks)
MERGE_VARYING = Pass("merge-varying", _merge, _may_vary, (Propagation,), (Propagation,))
NUMBER_REPLICAS = Pass("number-replicas", _fill_in, _has_varying_values, (Homes,))
