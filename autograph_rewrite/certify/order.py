"""Checks the order of variable accesses: every ordered pair of the original is ordered alike in the rewritten graph.

    original     assign_sub(w) ──^──► ResourceApply(w)
    shards       assign_sub(w/part_k) ──► ResourceApply(w/part_k)      for every k

For each variable, each pair of accesses of which one writes keeps its order. No read waits for a write that it did not
wait for, no write is lost or repeated, and targets and outputs keep their effects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from autograph_rewrite.certify.along_model import is_along_model
from autograph_rewrite.certify.baseline import Baseline
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.attr_inference import ORIGIN_ATTR
from autograph_rewrite.ir.control_flow import Frame, by_loops, frames_of
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, OFTEN, ONCE, PER_REPLICA
from autograph_rewrite.ir.traversal import ancestors, dependencies, grouped, marks_before, reachable, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op, get_op

ENTERS = frozenset(("Enter", "RefEnter"))
EXITS = frozenset(("Exit", "RefExit"))
BACK_EDGES = frozenset(("NextIteration", "RefNextIteration"))
READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
_OF_THE_PROGRAM = re.compile(r"Iterator|Dataset|PyFunc|Queue|Reader|Save|Restore|ReadFile|WriteFile|Summary|^Print")
"""Ops that use files, input, Python code or the console of the process whose program runs."""
_WRITES = re.compile(
    r"Assign(Add|Sub|)VariableOp|Resource(Sparse)?Apply\w+|ResourceCountUpTo"
    r"|ResourceScatter\w+|ResourceStridedSliceAssign"
    # legacy reference variables
    r"|Assign(Add|Sub|)|(Sparse)?Apply(Adam?|Ada\w+|AddSign|CenteredRMSProp|Ftrl\w*|GradientDescent|Momentum|PowerSign"
    r"|Proximal\w+|RMSProp)|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|CountUpTo|StridedSliceAssign"
)
_SIZES = frozenset(("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs", "ZerosLike", "OnesLike"))
"""Ops that read only the size of a value."""
HANDLES = frozenset(("VarHandleOp", "Placeholder", "VariableV2", "Variable"))


def writes_variable(op: str) -> bool:
    """Return whether an op changes a variable, including a legacy reference variable."""
    return _WRITES.fullmatch(op) is not None


@dataclass(frozen=True)
class Accesses:
    """The accesses of one graph.

    Attributes:
        of: by variable, the nodes that access it.
        before: bit masks of the accesses that run before each node.
        bit: of each access.
        order: all nodes, producers first.
    """

    of: Mapping[str, list[Node]]
    before: Mapping[Node, int]
    bit: Mapping[Node, int]
    order: list[Node]

    def is_before(self, first: Node, second: Node) -> bool:
        """Return whether one access certainly runs before another."""
        return bool(self.before[second] & self.bit[first])


def accesses_of(graph: Graph) -> Accesses:
    """Find all accesses of a graph, and their order."""
    order = topological_order(graph)
    of = grouped((handle.name, node) for node in order for handle in accessed(node))
    bit: dict[Node, int] = {}
    for nodes in of.values():
        for node in nodes:
            bit.setdefault(node, 1 << len(bit))
    return Accesses(of, _before(order, bit), bit, order)


def _before(order: list[Node], bit: Mapping[Node, int]) -> dict[Node, int]:
    """Return the bit mask of the accesses that run before each node.

    If iterations of a loop do not overlap, all accesses in it have run once the loop is left.
    """
    frames = frames_of(order)
    alone: dict[Frame, bool] = {}
    for node in frames:
        if node.op in ENTERS:
            alone[frames[node]] = alone.get(frames[node], True) and node.attr("parallel_iterations") == 1
    if not any(alone.values()):
        return marks_before(order, bit)
    before: dict[Node, int] = {}
    ended: dict[Frame, int] = {}
    for node in (node for part in by_loops(order) for node in part):
        mask = 0
        for producer in dependencies(node):
            mask |= before[producer] | bit.get(producer, 0)
        if node.op in EXITS:
            mask |= ended.get(frames.get(node.inputs[0].node, ()), 0)
        before[node] = mask
        frame = frames.get(node, ())
        if alone.get(frame):
            ended[frame] = ended.get(frame, 0) | mask | bit.get(node, 0)
    return before


def accessed(node: Node) -> list[Node]:
    """Return the handles of the variables that a node reads or writes."""
    if node.op not in READS and not writes_variable(node.op):
        return []
    found = (variable_ops.handle_node(value) for value in node.inputs if variable_ops.is_handle(value))
    return [handle for handle in dict.fromkeys(found) if handle.op in HANDLES]


def origin(node: Node, known: Mapping[str, Node]) -> str:
    """Return the name of the original access of a node: the node's name if it is original, "" where there is none."""
    seen = set()
    name = node.name
    current: Node | None = node
    while current is not None and name not in known and name not in seen:
        seen.add(name)
        raw = current.attr(ORIGIN_ATTR)
        if raw is None:
            return ""
        name = raw.decode()
        current = current.graph.nodes.get(name)
    return name if name in known else ""


def check_order(
    original: Accesses,
    rewritten: Accesses,
    shards: Collection[str],
    names: Mapping[Node, str],
    *,
    reads_are_ordered: bool = True,
) -> None:
    """Check the accesses to every variable, or to every shard of it.

    Args:
        shards: the handles of the rewritten graph to check.
        names: the original access of each access of the rewritten graph.
        reads_are_ordered: whether writes already wait for earlier reads; otherwise a later pass adds these edges.

    Raises:
        VerifyError: an order is lost or reversed; the message names the accesses.
    """
    originals = {node.name: node for node in original.bit}
    for handle, nodes in rewritten.of.items():
        if handle not in shards:
            continue
        known = [(node, originals[names[node]]) for node in nodes if names.get(node) in originals]
        for i, (a, first) in enumerate(known):
            for b, second in known[i + 1 :]:
                if first is not second and (writes_variable(first.op) or writes_variable(second.op)):
                    _check_pair(original, rewritten, (a, b), (first, second), handle, reads_are_ordered)


def _check_pair(
    original: Accesses,
    rewritten: Accesses,
    pair: tuple[Node, Node],
    were: tuple[Node, Node],
    handle: str,
    reads_are_ordered: bool,
) -> None:
    for i, j in ((0, 1), (1, 0)):
        if original.is_before(were[i], were[j]):
            if not reads_are_ordered and not writes_variable(were[i].op) and not rewritten.is_before(pair[j], pair[i]):
                return
            if not rewritten.is_before(pair[i], pair[j]):
                raise VerifyError(
                    f"'{pair[j].name}' no longer waits for '{pair[i].name}', which accesses '{handle}' before it",
                    node=pair[j],
                )
            return
    for i, j in ((0, 1), (1, 0)):
        if writes_variable(were[i].op) and not writes_variable(were[j].op) and rewritten.is_before(pair[i], pair[j]):
            raise VerifyError(
                f"'{pair[j].name}' reads '{handle}' after '{pair[i].name}', which it did not wait for", node=pair[j]
            )


def effects_before(roots: Iterable[Node]) -> set[Node]:
    """Return the nodes with effects that a run of the roots runs."""
    return {node for node in ancestors(roots) if has_effect(node)}


def effects_needed(roots: Iterable[Node]) -> tuple[set[Node], set[Node]]:
    """Return the nodes of `effects_before` that must still run, and those that the roots need only for a size.

    A random draw that is needed only for its size need not run at all.
    """

    def needed(node: Node) -> list[Node]:
        values = () if node.op in _SIZES else node.inputs
        return [*(value.node for value in values), *node.controls]

    asked = reachable(roots, needed)
    found = effects_before(roots)
    return found & asked.keys(), {node for node in found - asked.keys() if not _only_draws(node)}


def _only_draws(node: Node) -> bool:
    op = find_op(node.op)
    return op is not None and "seed2" in op.attrs and _OF_THE_PROGRAM.search(node.op) is None


def has_effect(node: Node) -> bool:
    """Return whether running a node changes state that outlives the run."""
    if writes_variable(node.op):
        return True
    op = find_op(node.op)
    return op is not None and op.is_stateful and node.op not in QUIET and not node.op.startswith(SETUP)


QUIET = READS | frozenset(
    ("VarHandleOp", "VariableV2", "Variable", "VarIsInitializedOp", "VariableShape", "NoOp", "Placeholder")
)
SETUP = ("Collective", "ResourceAccumulator", "ConditionalAccumulator", "TensorArray", "HashTable", "Lookup")


# -- how often nodes run

OF_REPLICA = ("TensorArray", "Stack", "CheckNumerics", "Assert")
"""Prefixes of stateful ops that every replica may run: on its containers, or only checking its values."""


def spans(baseline: Baseline, nodes: Iterable[Node]) -> None:
    """Check that nodes with effects run as often as in the original, and nodes with differing values on each replica.

    Raises:
        VerifyError: one does not.
    """
    for node in nodes:
        found = baseline.match(node)
        if found is None:
            continue
        names = [found.output(i).name for i in range(len(found.output_dtypes))]
        claims = [baseline.claims.values[name] for name in names if name in baseline.claims.values]
        differs = found.name not in baseline.claims.folded and any(claim.differs for claim in claims)
        if differs and node.span == ONCE:
            raise VerifyError(f"'{node.name}' runs once, but each replica holds a value of its own", node=node)
        of_replicas = not baseline.of_replicas.isdisjoint(names)
        if of_replicas and node.span == EACH and baseline.claims.micro > 1:
            raise VerifyError(
                f"'{node.name}' runs for every micro-batch, and is made of a shard of the replica", node=node
            )
        if differs and node.span == PER_REPLICA and not of_replicas:
            raise VerifyError(f"'{node.name}' runs once for all micro-batches, which differ", node=node)
        _check_writes(node)
        op = get_op(node.op)
        if differs or node.span == ONCE or not op.is_stateful or is_along_model(found):
            continue
        handles = [kind for kind in node.input_dtypes if kind == dtypes.RESOURCE]
        if not handles and node.op not in ("VarHandleOp", "NoOp") and not node.op.startswith(OF_REPLICA):
            raise VerifyError(f"'{node.name}' ({node.op}) has an effect, and runs on each replica", node=node)


def _check_writes(node: Node) -> None:
    """Check that a write runs once for each copy of the variable."""
    for handle in variable_ops.written(node):
        if handle.span != node.span:
            copies = "one copy" if handle.span == ONCE else "a copy on each"
            raise VerifyError(
                f"'{node.name}' runs {OFTEN[node.span]}, and there is {copies} of '{handle.name}'", node=node
            )
