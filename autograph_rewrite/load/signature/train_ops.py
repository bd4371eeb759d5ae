"""Find the train op and the init op of a graph that does not name them."""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.load.signature.collections import Collected
from autograph_rewrite.load.signature.inputs import source_values
from autograph_rewrite.ops.traits import has


def infer_train_ops(graph: Graph, collected: Collected) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a step runs, and which sinks that update variables from inputs it leaves out.

    A step is what the registered train ops belong to: the group that the user runs, moving averages that wait for
    them, and what layers registered to be run with them. Where nothing is registered, it is every sink that updates a
    variable from an input.
    """
    registered = [graph.node(name) for name in collected.train_ops if name in graph]
    if not registered:
        return _trained_sinks(graph), ()
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
    """Return what to run for a train op and the updates that wait for it."""
    missing = {node for node in descendants([train_op]) if node is not train_op and _updates(node)}
    if not missing:
        return [_outermost_group(train_op)]
    return _sinks_that_run(missing)


def _sinks_that_run(updates: set[Node]) -> list[Node]:
    """Return sinks that together run some updates: groups rather than what only reads behind them."""
    sinks = sorted((node for node in descendants(updates) if _is_sink(node)), key=lambda node: node.name)
    needs = {sink: ancestors([sink]) & updates for sink in sinks}
    found, missing = [], set(updates)
    for sink in sorted(sinks, key=lambda node: (-len(needs[node]), node.op != "NoOp", node.op == "ReadVariableOp")):
        if needs[sink] & missing:
            found.append(sink)
            missing -= needs[sink]
    return found


def _trained_sinks(graph: Graph) -> tuple[str, ...]:
    trained = descendants(_fed_updates(graph))
    return tuple(node.name for node in graph if node in trained and _is_sink(node))


def _fed_updates(graph: Graph) -> set[Node]:
    """Return the updates that depend on an input, but for those that restore checkpoints."""
    fed = descendants(value.node for value in source_values(graph))
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
    """Whether a node writes a variable."""
    if has(node.op, "variables") or node.op in ("ReadVariableOp", "VarIsInitializedOp", "IsVariableInitialized"):
        return False
    op = find_op(node.op)
    if op is None or not op.is_stateful:
        # Legacy updates (Assign, ApplyAdam...) are not registered as stateful: they take a reference.
        takes_reference = op is not None and bool(op.inputs) and op.inputs[0].is_ref
        return takes_reference and has(_first_source(node), "reference_variables")
    return has(_first_source(node), "variables") and "Gather" not in node.op


def _first_source(node: Node) -> str:
    return node.inputs[0].node.op if node.inputs else ""


def infer_init_op(graph: Graph, targets: Sequence[str]) -> str | None:
    """Return the group that initialises the most variables and reads nothing fed; None when there is none.

    Only ops that collect others by control edges can be one, so the walk stays in them and is short.
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
    """Return how many variables a group of assignments initialises; 0 when it does anything else to one."""
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
