"""Certificate: follows a rewrite pass by pass, and rejects the first that changes what the graph computes.

certificate = Certificate()
pipeline.rewrite(item, plan, certificate=certificate)      raises VerifyError
certificate.not_covered                                    what it could not check

Checking each run of a compiler instead of the compiler: Pnueli, Siegel and Singerman, Translation Validation (1998).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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
from autograph_rewrite.certify.recomputed import check_recomputed
from autograph_rewrite.certify.samples import Sample
from autograph_rewrite.certify.simulate import Simulation
from autograph_rewrite.errors import VerifyError, add_note
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import ONCE, PerInstance
from autograph_rewrite.ir.traversal import topological_order

BEHIND = frozenset(("delegate-to-chief", "update-rows", "expand"))
"""Passes behind which the graph is no longer compared: what they do is checked by `ir.verify.folded` and by
execution."""

UNORDERED = frozenset(
    (
        "insert-reshards", "find-averages", "number-replicas", "exchange-digests", "decorrelate-randomness",
        "localize-shapes", "keep-components", "declare-state", "pad-empty-blocks", "sequential-averages",
        "merge-instances", "parameter-servers",
    )
)  # fmt: skip
"""Passes behind which a read may not wait yet where it comes before a write: 'order-accesses' puts lost edges back."""


UNMERGED = UNORDERED - {"merge-instances", "parameter-servers"}
"""Passes behind which an output may still have an instance for each replica."""


class Certificate:
    """Checks one rewrite; see the package.

    Args:
        strict: a failure of the certificate itself is an error, too, and not only something that is not covered.

    Attributes:
        not_covered: what it could not check, in words.
        inexact: what the configuration lets differ from one device.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.not_covered: dict[str, None] = {}
        self.inexact: tuple[str, ...] = ()
        self._original: Graph | None = None
        self._before_copies: Graph | None = None
        self._accesses: Accesses | None = None
        self._targets: tuple[str, ...] = ()
        self._looped = False  # a loop runs the micro-batches by now
        self._baseline: Baseline | None = None
        self._claimed: Accesses | None = None
        self._shards: set[str] = set()  # handles of variables, and of shards of them
        self._names: dict[str, str] = {}  # by claimed access, the original one

    def begin(self, graph: Graph, targets: Sequence[str]) -> None:
        """Take the normalised original; nothing is claimed of it yet, whatever was of the graph before."""
        self._baseline = self._claimed = None
        self._looped = False
        self._original = graph.clone()
        self._accesses = accesses_of(self._original)
        self._targets = tuple(targets)

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph that placements are claimed of; check the claims, compare its accesses with the original's.

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

    @contextmanager
    def _noting(self, where: str, what: str) -> Iterator[None]:
        """Tell an error of the rewrite where it is; note one of the certificate itself as what is not covered."""
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
        """Check the folded graph behind a pass.

        Raises:
            VerifyError: with the node, its op, the pass and what is wrong.
        """
        if after == "place-reductions":
            self._before_copies = graph.clone()
        elif after == "rematerialize" and self._before_copies is not None:
            check_recomputed(self._before_copies, graph)
        if self._baseline is None or self._claimed is None:
            return
        claims = self._baseline.claims
        if claims.processes > 1:
            self.not_covered["what several processes exchange (ir.verify_ranks checks that)"] = None
            return
        if after in BEHIND:
            return
        self._looped = self._looped or after == "roll-loop"
        with self._noting(f"after pass '{after}'", f"the graph after '{after}'"):
            self._check(after, graph, claims)

    def _check(self, after: str, graph: Graph, claims: Claims) -> None:
        assert self._baseline is not None
        order = topological_order(graph)
        self._check_accesses(after, graph)
        spans(self._baseline, order)
        _check_storage(graph)
        if "compressors" in self.inexact:
            self.not_covered["values, where compressors send something else (ar.verify bounds the difference)"] = None
            return
        for batch in batches(claims):
            known = self._baseline
            sample = Sample(claims, known.types, known.same, batch, known.lengths)
            simulation = Simulation(self._baseline, sample, order, looped=self._looped)
            simulation.run()
            if after not in UNMERGED:
                simulation.outputs(graph.anchors)
            self.not_covered |= simulation.not_covered

    def _check_accesses(self, after: str, graph: Graph) -> None:
        baseline, claimed = self._baseline, self._claimed
        assert baseline is not None
        assert claimed is not None
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
        if after not in UNORDERED:  # by now reads wait for writes, and writes for reads
            assert self._accesses is not None
            names = {node: self._names.get(name, "") for node, name in matches.items()}
            check_order(self._accesses, now, self._shards - in_turn, names)
        if in_turn:
            return
        for name in self._targets:
            self._check_effects(graph, name, matches)

    def _check_effects(self, graph: Graph, name: str, matches: Mapping[Node, str]) -> None:
        """Check that a target brings about what it brought about; what it asks a size of, some target of the step."""
        baseline = self._baseline
        assert baseline is not None
        was, now = baseline.nodes.get(name), graph.nodes.get(name)
        if was is None:
            return
        if now is None:
            raise VerifyError(f"the target '{name}' is gone")
        needed, sizes_asked = ({node.name for node in nodes} for nodes in effects_needed([was]))
        missing = needed - self._brought_about([now], matches)
        if sizes_asked:
            step = [graph.nodes[target] for target in self._targets if target in graph]
            missing |= sizes_asked - self._brought_about(step, matches)
        if missing:
            raise VerifyError(f"'{name}' no longer runs '{min(missing)}'", node=now)

    @staticmethod
    def _brought_about(roots: Sequence[Node], matches: Mapping[Node, str]) -> set[str]:
        return {matches[node] for node in effects_before(roots) if node in matches}


def _check_shards(original: Accesses, claimed: Accesses, shards: Mapping[str, str], names: Mapping[Node, str]) -> None:
    """Check that every write of a variable writes each of its shards once.

    Raises:
        VerifyError: one does not.
    """
    parts: dict[str, list[str]] = {}
    for name, whole in shards.items():
        if whole:
            parts.setdefault(whole, []).append(name)
    for whole, nodes in original.of.items():
        for node in nodes:
            if not writes_variable(node.op):
                continue
            for part in parts.get(whole, ()):
                writers = [one for one in claimed.of[part] if writes_variable(one.op) and names.get(one) == node.name]
                if len(writers) > 1:
                    raise VerifyError(f"{len(writers)} nodes write '{part}' for '{node.name}'", node=writers[1])


def _check_storage(graph: Graph) -> None:
    """Check that no two variables, and no two replicas' copies of one, share storage.

    Raises:
        VerifyError: two do.
    """
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
    """Return the sizes of the batch that are tried: uneven, and such that no block is empty."""
    if claims.batch is not None:
        return (claims.batch,)
    return (2 * claims.instances + 1, 3 * claims.instances)
