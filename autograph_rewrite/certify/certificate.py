"""Follows a rewrite pass by pass, and rejects the first pass that changes what the graph computes.

certificate = Certificate()
pipeline.rewrite(item, plan, certificate=certificate)      raises VerifyError
certificate.not_covered                                    what it could not check

Checking each run of a compiler instead of the compiler: Pnueli, Siegel and Singerman, Translation Validation (1998).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from autograph_rewrite.certify.along_model import check_written
from autograph_rewrite.certify.baseline import Baseline
from autograph_rewrite.certify.check_claims import check_claims
from autograph_rewrite.certify.order import (
    Accesses,
    accesses_of,
    check_order,
    effects_before,
    effects_needed,
    origin,
    spans,
    writes_variable,
)
from autograph_rewrite.certify.samples import Sample
from autograph_rewrite.certify.simulate import Simulation
from autograph_rewrite.errors import VerifyError, add_note
from autograph_rewrite.ir.attr_inference import ORIGIN_ATTR, PASS_ATTR
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.control_flow import frames_of, guards_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE, PerInstance
from autograph_rewrite.ir.traversal import grouped, topological_order, traced_back
from autograph_rewrite.ir.types.opdefs import get_op

# Rematerialised copies: each is the same op on the same operands, and its readers read the same value as before.
#
# before   c = Tanh(b)                        dc = TanhGrad(c, dd)
# after    c = Tanh(b);  c' = Tanh(b) ^dd     dc = TanhGrad(c', dd)        c' is c: same op, attributes and operands
#
# Offloaded values pass through Snapshots, which equal their operands. A value that a gradient loop takes from a list
# equals the value that the loop put there in the same iteration, whichever list that is; unused lists may be removed.


PROVENANCE = frozenset((ORIGIN_ATTR, PASS_ATTR))
PUTS, TAKES = "TensorListPushBack", "TensorListPopBack"
_DOORS = frozenset(("Switch", "Merge", "Enter", "Exit"))
_OF_LISTS = _DOORS | {PUTS, TAKES, "NextIteration", "EmptyTensorList", "Const"}
_FREE = {PUTS: 1, "EmptyTensorList": 0}
"""Operands that may change: the element put into a list, which is checked where it is taken out, and a list's shape."""


def check_recomputed(before: Graph, after: Graph) -> None:
    """Compare a graph before and after rematerialisation.

    Raises:
        VerifyError: a node is gone, changed, or reads another value; a copy has an effect, or no equal original.
    """
    origins: dict[str, str] = {}
    moved: dict[str, tuple[str, int]] = {}
    given, taken = put_and_taken(before), put_and_taken(after)
    for node in topological_order(after):
        original = before.nodes.get(node.name)
        if original is None and node.op == "Snapshot":
            moved[node.name] = _read(node.inputs[0], taken, origins, moved)
            continue
        if original is None:
            original = _original(before, node)
            if node.op == "Const" and original.op == "EmptyTensorList":
                continue  # the element shape of a list
            origins[node.name] = original.name
        if node.op != original.op or _attrs(node) != _attrs(original) or node.device != original.device:
            raise VerifyError(f"'{node.name}' is not what '{original.name}' is", node=node)
        free = _FREE.get(node.op)
        reads = [_read(value, taken, origins, moved) for i, value in enumerate(node.inputs) if i != free]
        if reads != [_read(value, given, {}, {}) for i, value in enumerate(original.inputs) if i != free]:
            raise VerifyError(f"'{node.name}' does not read what '{original.name}' read", node=node)
    for name, node in before.nodes.items():
        if name not in after.nodes:
            if node.op not in _OF_LISTS:
                raise VerifyError(f"'{name}' is gone")
            continue
        lost = {one.name for one in node.controls} - {one.name for one in after.nodes[name].controls}
        if lost:
            raise VerifyError(f"'{name}' no longer waits for '{min(lost)}'", node=after.nodes[name])


def put_and_taken(graph: Graph) -> dict[Value, Value]:
    """Return, for each value that a gradient loop takes from a list, the value that was put there in that iteration.

    In each iteration, guarded only by the loop condition, one node puts an element in, and one node of the other loop
    takes one out; so all lists of two loops are filled and emptied together.
    """
    order = list(topological_order(graph))
    frames = frames_of(order)
    guards = guards_of(order, frames)
    lists = (node for node in order if node.op.startswith("TensorList") and node.inputs)
    of_loops = (node for node in lists if node.inputs[0].node.op in _DOORS)
    users = grouped((traced_back(node.inputs[0], _DOORS).node, node) for node in of_loops)
    found: dict[Value, Value] = {}
    for maker, both in users.items():
        if maker.op == "EmptyTensorList" and sorted(node.op for node in both) == [TAKES, PUTS]:
            pop, push = sorted(both, key=lambda node: node.op)
            once = all(len(guards.get(node, ())) == 1 and _comes_back(node) for node in both)
            if once and len(frames[push]) == len(frames[pop]) == 1 and frames[push] != frames[pop]:
                found[pop.output(1)] = push.inputs[1]
    return found


def _comes_back(node: Node) -> bool:
    """Return whether a node changes a list of the previous iteration, and only the next iteration reads the result."""
    switch = node.inputs[0].node
    merge = switch.inputs[0].node if switch.op == "Switch" else None
    readers = [use.node for use in node.output().uses]
    back = [value.node for value in merge.inputs[1:]] if merge is not None and merge.op == "Merge" else []
    return len(readers) == 1 and readers == back and readers[0].op == "NextIteration"


def _read(
    value: Value, taken: Mapping[Value, Value], origins: Mapping[str, str], moved: Mapping[str, tuple[str, int]]
) -> tuple[str, int]:
    """Return the value of the graph before that a value equals, traced through copies, Snapshots and lists."""
    value = taken.get(value, value)
    name = value.node.name
    return moved.get(name, (origins.get(name, name), value.index))


def _original(before: Graph, copy: Node) -> Node:
    """Return the original of a copy.

    Raises:
        VerifyError: there is none, or it has an effect.
    """
    copied = copy.name.split("/", 2)[-1]  # `remat/<segment>/<name>`: another pass may have made the original
    name = copy.attr(ORIGIN_ATTR, b"").decode()  # for a part, the name of the whole, which another node may have now
    original = before.nodes.get(copied) or before.nodes.get(name)
    if original is None:
        raise VerifyError(f"'{copy.name}' is a copy of nothing", node=copy)
    if get_op(copy.op).is_stateful:
        raise VerifyError(f"'{copy.name}' ({copy.op}) has a state or an effect, and runs a second time", node=copy)
    return original


def _attrs(node: Node) -> dict[str, object]:
    """Return the attributes to compare: not the frame of a constant Enter, nor the shapes recorded of list elements."""
    other = {"_output_shapes"} if node.op == TAKES else set()
    other |= {"frame_name"} if node.op == "Enter" and node.attr("is_constant", False) else set()
    return {key: raw for key, raw in node.attrs.items() if key not in PROVENANCE and key not in other}


NOT_COMPARED = frozenset(("insert-reshards", "delegate-to-chief", "rows-of-shards", "update-rows", "expand"))
"""Passes after which the graph is not compared: a reshard is checked once it is lowered, the other passes by
`ir.verify.folded` and by execution."""

UNORDERED = frozenset(
    (
        "lower-reshards", "find-averages", "number-replicas", "exchange-digests", "decorrelate-randomness",
        "localize-shapes", "keep-components", "declare-state", "pad-empty-blocks", "sequential-averages",
        "merge-instances", "parameter-servers",
    )
)  # fmt: skip
"""Passes after which a write may lack its edge from an earlier read: 'order-accesses' restores these edges."""


UNMERGED = UNORDERED - {"merge-instances", "parameter-servers"}
"""Passes after which an output may still have an instance for each replica."""


class Certificate:
    """Checks one rewrite; see the package.

    Args:
        strict: a failure of the certificate itself is an error, instead of an entry of `not_covered`.

    Attributes:
        not_covered: what it could not check, in words.
        inexact: the differences from one device that the configuration allows.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.not_covered: dict[str, None] = {}
        self.inexact: tuple[str, ...] = ()
        self._original: Graph | None = None
        self._before_copies: Graph | None = None
        self._accesses: Accesses | None = None
        self._targets: tuple[str, ...] = ()
        self._looped = False  # whether a loop now runs the micro-batches
        self._baseline: Baseline | None = None
        self._claimed: Accesses | None = None
        self._shards: set[str] = set()  # handles of variables, and of shards of them
        self._names: dict[str, str] = {}  # the original access of each claimed access

    def begin(self, graph: Graph, targets: Sequence[str]) -> None:
        """Take the normalised original, and forget the claims about an earlier graph."""
        self._baseline = self._claimed = None
        self._looped = False
        self._original = graph.clone()
        self._accesses = accesses_of(self._original)
        self._targets = tuple(targets)

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph whose placements are claimed; check the claims, and compare its accesses with the original's.

        Raises:
            VerifyError: a claim does not hold, or partitioning or decomposing changed the order of accesses.
        """
        copy = graph.clone()
        self._claimed = accesses_of(copy)
        self._baseline = Baseline.of(copy, claims)
        self.inexact = tuple(claims.inexact)
        assert self._accesses is not None
        assert self._original is not None
        known = {node.name: node for node in self._accesses.bit}
        names = {node: origin(node, known) for node in self._claimed.bit}
        shards = {name: origin(copy.nodes[name], self._original.nodes) for name in self._claimed.of}
        self._shards = {part for part, whole in shards.items() if whole}
        self._names = {node.name: name for node, name in names.items()}
        check_order(self._accesses, self._claimed, self._shards, names, reads_are_ordered=False)
        _check_shards(self._accesses, self._claimed, shards, names)
        with self._noting("as propagation left it", "what is claimed of values"):
            self.not_covered |= dict.fromkeys(check_claims(topological_order(copy), claims))

    def placed(self, graph: Graph, claims: Claims) -> None:
        """Check the claims of placements among the devices of a replica, before their program is written.

        Raises:
            VerifyError: a claim does not hold.
        """
        with self._noting("as propagation left it on the model axis", "what is claimed of values on the model axis"):
            self.not_covered |= dict.fromkeys(check_claims(topological_order(graph), claims))

    def written(self, before: Graph, graph: Graph, claims: Claims) -> None:
        """Compare the program of one device with the graph that it is made from.

        Raises:
            VerifyError: a node reads another value, or another placement, than its claims say.
        """
        with self._noting("as the program of one device", "the program of one device"):
            check_written(before, graph, claims)

    @contextmanager
    def _noting(self, where: str, what: str) -> Iterator[None]:
        """Add the place to an error of the rewrite; record an error of the certificate itself as not covered."""
        try:
            yield
        except VerifyError as error:
            add_note(error, where)
            raise
        except Exception as error:
            if self._strict:
                raise
            self.not_covered[f"{what}: {error!r}"] = None

    def check(self, after: str, graph: Graph) -> None:
        """Check the folded graph after a pass.

        Raises:
            VerifyError: the graph is wrong; with the node, its op, the pass and the problem.
        """
        if after == "place-reductions":
            self._before_copies = graph.clone()
        elif after == "rematerialize" and self._before_copies is not None:
            check_recomputed(self._before_copies, graph)
        if self._baseline is None or self._claimed is None:
            return
        if self._baseline.claims.processes > 1:
            self.not_covered["what several processes exchange (ir.verify_ranks checks that)"] = None
            return
        if after in NOT_COMPARED:
            return
        self._looped = self._looped or after == "roll-loop"
        with self._noting(f"after pass '{after}'", f"the graph after '{after}'"):
            self._check(after, graph, self._baseline, self._claimed)

    def _check(self, after: str, graph: Graph, baseline: Baseline, claimed: Accesses) -> None:
        order, claims = topological_order(graph), baseline.claims
        self._check_accesses(after, graph, baseline, claimed)
        spans(baseline, order)
        _check_storage(graph)
        if "compressors" in self.inexact:
            self.not_covered["values, where compressors send something else (ar.verify bounds the difference)"] = None
            return
        for batch in batches(claims):
            sample = Sample(claims, baseline.types, baseline.same, batch, baseline.lengths, baseline.of_replicas)
            for device in range(claims.model):
                simulation = Simulation(baseline, sample, order, looped=self._looped, device=device)
                simulation.run()
                if after not in UNMERGED:
                    simulation.outputs(graph.anchors)
                self.not_covered |= simulation.not_covered

    def _check_accesses(self, after: str, graph: Graph, baseline: Baseline, claimed: Accesses) -> None:
        now = accesses_of(graph)
        matches = {node: found.name for node in graph if (found := baseline.match(node)) is not None}
        local = any(text.startswith(("batch_norm", "local_sgd")) for text in self.inexact)
        in_turn: set[str] = set()
        for handle, nodes in now.of.items():
            added = [node for node in nodes if writes_variable(node.op) and node not in matches]
            if added and handle in claimed.of and not local:
                raise VerifyError(f"'{added[0].name}' writes '{handle}', which the original does not do", node=added[0])
            if added:
                in_turn.add(handle)
                self.not_covered[f"'{handle}', which micro-batches update one after the other"] = None
        looked_at = {name for name in now.of if name in claimed.of} - in_turn
        check_order(claimed, now, looked_at, matches, reads_are_ordered=after not in UNORDERED)
        if after not in UNORDERED:  # all edges between reads and writes are complete
            assert self._accesses is not None
            names = {node: self._names.get(name, "") for node, name in matches.items()}
            check_order(self._accesses, now, self._shards - in_turn, names)
        if in_turn:
            return
        for name in self._targets:
            self._check_effects(graph, name, baseline, matches)

    def _check_effects(self, graph: Graph, name: str, baseline: Baseline, matches: Mapping[Node, str]) -> None:
        """Check that a target has all its effects; those that it needs only for a size, some target of the step has."""
        was, now = baseline.nodes.get(name), graph.nodes.get(name)
        if was is None:
            return
        if now is None:
            raise VerifyError(f"the target '{name}' is gone")
        needed, sizes_asked = ({node.name for node in nodes} for nodes in effects_needed([was]))
        missing = needed - {matches.get(node) for node in effects_before([now])}
        if sizes_asked:
            step = [graph.nodes[target] for target in self._targets if target in graph]
            missing |= sizes_asked - {matches.get(node) for node in effects_before(step)}
        if missing:
            raise VerifyError(f"'{name}' no longer runs '{min(missing)}'", node=now)


def _check_shards(original: Accesses, claimed: Accesses, shards: Mapping[str, str], names: Mapping[Node, str]) -> None:
    """Check that no write of a variable writes a shard of it more than once."""
    parts = grouped((whole, name) for name, whole in shards.items() if whole)
    for whole, nodes in original.of.items():
        for node in nodes:
            if not writes_variable(node.op):
                continue
            for part in parts.get(whole, ()):
                writers = [one for one in claimed.of[part] if writes_variable(one.op) and names.get(one) == node.name]
                if len(writers) > 1:
                    raise VerifyError(f"{len(writers)} nodes write '{part}' for '{node.name}'", node=writers[1])


def _check_storage(graph: Graph) -> None:
    """Check that no two variables, and no two replicas' copies of one, share storage."""
    owner: dict[object, Node] = {}
    for node in graph:
        if node.op != "VarHandleOp":
            continue
        raw = node.attrs.get("shared_name")
        names = raw.raws if isinstance(raw, PerInstance) else (raw,)
        if len(set(names)) < len(names):
            raise VerifyError(f"two replicas share a copy of '{node.name}'", node=node)
        if not isinstance(raw, PerInstance) and node.span != ONCE:
            continue
        for name in names:
            if name is not None and owner.setdefault((name, node.attrs.get("container")), node) is not node:
                other = owner[name, node.attrs.get("container")]
                if isinstance(raw, PerInstance) or isinstance(other.attrs.get("shared_name"), PerInstance):
                    raise VerifyError(f"'{node.name}' and '{other.name}' share storage", node=node)


def batches(claims: Claims) -> tuple[int, ...]:
    """Return the batch sizes to try; for an open batch, one that divides unevenly and one that divides evenly."""
    if claims.batch is not None:
        return (claims.batch,)
    return (2 * claims.instances + 1, 3 * claims.instances)
