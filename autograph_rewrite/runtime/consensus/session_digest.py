"""Compare the runs of sessions: digests of the runs in which workers meet, and of those in between.

session.run("init")                     writes variables, and meets nobody: told with the next run that does
session.run(["loss", "train"], feeds)   meets the other workers: its digest travels with it
session.run("global_step")              only reads: any worker may do that alone
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from autograph_rewrite.ir.graph import PASS_ATTR
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ops.traits import has
from autograph_rewrite.runtime.consensus.all_reduce_session import Array
from autograph_rewrite.runtime.consensus.divergence import Account
from autograph_rewrite.runtime.consensus.step_digest import Inputs, described, digest_of, written_between
from autograph_rewrite.training_graph import TrainingGraph

_FETCHES, _BETWEEN = "what is fetched", "what was run since the last step"


class _Kind(NamedTuple):
    """What a run does besides computing, by the names of nodes; whether a digest can go with it; what is fetched."""

    meets: frozenset[str]
    writes: frozenset[str]
    tells: bool
    names: str


class SessionDigest:
    """Compares the runs of one session with those of the other workers'.

    Args:
        item: a rewritten item, of one of several processes.
        graph: the tf.Graph of the session.

    Attributes:
        feed: the tensor to feed with the digest.
        fetch: the tensor with the digests of all.
        account: of the last run that has met others.
        apart: operations that meet nobody, so that workers may differ in whether they fetch them.
    """

    def __init__(self, item: TrainingGraph, graph: Any) -> None:
        self.feed, self.fetch = item.report.digests
        self.account = Account("")
        self.apart: set[Any] = set()
        self._graph = graph
        self._is_served = bool(item.report.plan.homes)
        self._inputs = Inputs(item, lambda tensor: tensor)
        self._kinds: dict[frozenset[Any], _Kind] = {}
        needed = ancestors([graph.get_tensor_by_name(self.fetch).op])
        self._needs = {op for op in needed if op.type in ("Placeholder", "IteratorGetNext", "OneShotIterator")}
        batch = {info.tensor for info in item.inputs.values() if info.batch_axis is not None}
        self._batch = {graph.get_tensor_by_name(tensor).op for tensor in batch}
        self._steps = 0
        self._between: list[str] = []

    def wrote(self, values: Mapping[str, Any]) -> None:
        """Note that variables were written."""
        self._between += (f"{written_between(name)}: {described(value)}" for name, value in values.items())

    def before(self, fetches: Sequence[Any], feeds: Mapping[str, Any], changed: Mapping[str, str]) -> Array | None:
        """Note a run; return its digest if it meets other workers.

        Args:
            fetches: tensors and operations.
            feeds: values by tensor.
            changed: what else has to be equal in all workers, by name.
        """
        kind = self._kind(fetches)
        if not kind.tells:
            if kind.writes or kind.meets:
                fed = ", ".join(f"{name} = {described(value)}" for name, value in sorted(feeds.items()))
                self._between.append(f"{kind.names}{' with ' if fed else ''}{fed}")
            return None
        given = {**self._inputs.given(feeds), **changed}
        effects = [] if self._is_served else sorted(kind.meets | kind.writes)
        given[_FETCHES] = f"{zlib.crc32(repr(effects or kind.names).encode()):08x}"
        shown = {_FETCHES: kind.names}
        if self._between:
            given[_BETWEEN] = "; ".join(self._between)
            self._between = []
        self._steps += 1
        self.account = Account(f"step {self._steps} of the session", given, shown)
        return digest_of(given)

    def _kind(self, fetches: Sequence[Any]) -> _Kind:
        """Return what running some tensors and operations does."""
        roots = frozenset(getattr(element, "op", element) for element in fetches)
        if roots not in self._kinds:
            step = ancestors(roots)
            meets = frozenset(common_name(op.name) for op in step if _meets(op))
            writes = frozenset(common_name(op.name) for op in step if has(op.type, "writes"))
            tells = bool(meets) and step >= self._needs and not step.isdisjoint(self._needs or self._batch)
            names = sorted({common_name(op.name) for op in roots - self.apart})
            self._kinds[roots] = _Kind(meets, writes, tells, ", ".join(names))
        return self._kinds[roots]


def ancestors(roots: Iterable[Any]) -> set[Any]:
    """Return operations and all that they depend on."""
    seen = set(roots)
    pending = list(seen)
    while pending:
        op = pending.pop()
        for producer in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if producer not in seen:
                seen.add(producer)
                pending.append(producer)
    return seen


def _meets(op: Any) -> bool:
    """Return whether an operation is one by which workers meet: a collective, or a store that a pass made."""
    return is_collective(op.type) or (has(op.type, "stores") and PASS_ATTR in op.node_def.attr)


def common_name(name: str) -> str:
    """Return a name without the replica, whose number is another one in each worker."""
    replica, _, rest = name.partition("/")
    return rest if replica.startswith("replica_") and replica[8:].isdecimal() else name
