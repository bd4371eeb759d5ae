"""Digests: compare whether all workers do the same, before the first step, in each step, or in parallel with it.

    worker 0   rate 0.01, x of length 5, w written   ──► digest ──┐  with the size of its part,
    worker 1   rate 0.02, x of length 5              ──► digest ──┴─ through the graph: an error on all

A variable is compared only if something other than the step has written it: else it is equal in all workers.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError, RewriteError
from autograph_rewrite.ir.graph import PASS_ATTR
from autograph_rewrite.ir.traversal import reachable
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.job.exchanges import ACCOUNTS, FIRST_KEY, Array, Rendezvous, RepeatedSum, table_of
from autograph_rewrite.runtime.job.liveness import listed, name_of
from autograph_rewrite.runtime.job.tf_server import counts
from autograph_rewrite.training_graph import TrainingGraph

_FEW = 6
"""Arrays of up to this many elements are described by their elements."""
_CONTAINERS = ("resource", "variant")


def digest_of(given: Mapping[str, str]) -> Array:
    """Return the digest of values that have to be equal in all workers; zeros if there are none."""
    if not given:
        return np.zeros(DIGEST, np.int32)
    text = "\0".join(f"{key}\0{given[key]}" for key in sorted(given))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=4 * DIGEST).digest(), np.int32)


def described(value: Any) -> str:
    """Return a text that differs where type, shape or contents do."""
    array = np.asarray(value)
    form = f"{array.dtype.name}{list(array.shape)}"
    if array.size <= _FEW:
        text = repr(array.tolist())
        return text if array.dtype.kind in "fiub" and not array.ndim else f"{form} {text}"
    is_text = array.dtype.kind in "OSU"
    data = repr(array.tolist()).encode() if is_text else array.tobytes()
    return f"{form} #{zlib.crc32(data):08x}"


def written_between(name: str) -> str:
    """Return what messages call a variable that was written from Python."""
    return f"variable '{name}', written between steps"


class Inputs:
    """Describes the inputs of a graph without a batch axis, and the open lengths of batch inputs: alike in all workers.

    Args:
        key: returns the key of a tensor's value in `given`, by the tensor's name; None if it has no value.
    """

    def __init__(self, item: TrainingGraph, key: Callable[[str], Hashable | None]) -> None:
        self._whole: list[tuple[str, Any]] = []
        self._open: list[tuple[str, Any, tuple[int, ...]]] = []
        ragged = {one.name: one.ragged for one in item.report.plan.batch_inputs} if item.report is not None else {}
        for info in item.inputs.values():
            found = key(info.tensor)
            if found is None:
                continue
            if info.batch_axis is None:
                self._whole.append((f"'{info.name}'", found))
            elif info.shape is not None:
                free = (info.batch_axis, *ragged.get(info.name, ()))
                dims = tuple(d for d, size in enumerate(info.shape) if size is None and d not in free)
                self._open += [(info.name, found, dims)] if dims else []

    def given(self, values: Any) -> dict[str, str]:
        """Return descriptions of the values that a step is given, by name."""
        has = values.__contains__ if isinstance(values, Mapping) else lambda key: True
        said = {
            name: described(values[key])
            for name, key in self._whole
            if has(key) and getattr(getattr(values[key], "dtype", None), "name", "") not in _CONTAINERS
        }
        for name, key, dims in self._open:
            if has(key):
                shape = np.shape(values[key])
                said |= {f"the length of dimension {dim} of '{name}'": str(shape[dim]) for dim in dims}
        return said


# Compare the runs of sessions: digests of the runs in which workers meet, and of those in between.
#
# session.run("init")                     writes variables, and meets nobody: told with the next run that does
# session.run(["loss", "train"], feeds)   meets the other workers: its digest travels with it
# session.run("global_step")              only reads: any worker may do that alone

_FETCHES, _BETWEEN = "what is fetched", "what was run since the last step"


class _Kind(NamedTuple):
    """The nodes by which a run meets others and writes; whether a digest can go with it; its fetches."""

    meets: frozenset[str]
    writes: frozenset[str]
    tells: bool
    names: str


class SessionDigest:
    """Compares the runs of one session with those of the other workers' sessions.

    Attributes:
        feed: the tensor to feed with the digest.
        fetch: the tensor with the digests of all.
        account: of the last run that has met others.
        apart: operations that exchange nothing, so that workers may differ in whether they fetch them.
    """

    def __init__(self, item: TrainingGraph, graph: Any) -> None:
        self.feed, self.fetch = item.report.digests
        self.account = StepAccount("")
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
        """Note a run; return its digest if one can go with it.

        Args:
            changed: descriptions of other values that must be equal in all workers, by name.
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
        self.account = StepAccount(f"step {self._steps} of the session", given, shown)
        return digest_of(given)

    def _kind(self, fetches: Sequence[Any]) -> _Kind:
        """Return what a run of some tensors and operations does."""
        roots = frozenset(getattr(element, "op", element) for element in fetches)
        if roots not in self._kinds:
            step = ancestors(roots)
            meets = frozenset(common_name(op.name) for op in step if _meets(op))
            writes = frozenset(common_name(op.name) for op in step if has(op.type, "writes"))
            # Fetching the digests runs `_needs`: the run must feed these placeholders and draw these elements.
            tells = bool(meets) and step >= self._needs and not step.isdisjoint(self._needs or self._batch)
            names = sorted({common_name(op.name) for op in roots - self.apart})
            self._kinds[roots] = _Kind(meets, writes, tells, ", ".join(names))
        return self._kinds[roots]


def ancestors(roots: Iterable[Any]) -> set[Any]:
    """Return operations and all operations that they depend on."""
    return set(reachable(roots, producers))


def producers(op: Any) -> list[Any]:
    """Return the operations that an operation depends on directly."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def _meets(op: Any) -> bool:
    """Return whether workers meet by an operation: a collective, or a store that a pass has added."""
    return is_collective(op.type) or (has(op.type, "stores") and PASS_ATTR in op.node_def.attr)


def common_name(name: str) -> str:
    """Return a name without its replica, whose number differs between workers."""
    replica, _, rest = name.partition("/")
    return rest if replica.startswith("replica_") and replica[8:].isdecimal() else name


# Compare the workers' inputs while the step runs: digests are exchanged in a background thread.
#
#     the program   step ────────────────────────────► its results, or an error on all workers
#     a thread      digest of all of it ──► exchange ──┘
#
# For inputs that are too large to be digested before the step, and for workers that run nothing themselves.


class Beside:
    """Compares one series of steps, while they run; all workers make the same steps."""

    def __init__(self, member: Membership, seconds: float) -> None:
        self._member, self._seconds = member, seconds
        self._channel = next(counts().channels)
        self._exchange: RepeatedSum | None = None
        self._pool = ThreadPoolExecutor(1, "autograph_beside")
        self._pending: Future[tuple[StepAccount, Array] | None] | None = None

    def start(self, account: Callable[[], StepAccount]) -> None:
        """Begin to compare a step.

        Args:
            account: makes this worker's account of the step; called in the thread.
        """
        self._pending = self._pool.submit(self._odd, account)

    def is_done(self, seconds: float) -> bool:
        """Wait for a while; return whether the last comparison has ended."""
        return self._pending is None or bool(wait([self._pending], seconds).done)

    def problem(self, *, failed: bool = False) -> ClusterError | None:
        """Return the error of the step that was started last, if its inputs differ between workers.

        Args:
            failed: whether the step has failed: then a worker that is missing is no error.

        Raises:
            ClusterError: a worker is missing.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            odd = pending.result()
        except ClusterError:
            if failed:
                return None
            raise
        return disagreement(self._member, odd[0], self._seconds, odd[1]) if odd is not None else None

    def _odd(self, account: Callable[[], StepAccount]) -> tuple[StepAccount, Array] | None:
        """Return this worker's account and the digests of all workers, if the digests differ."""
        told = account()
        table = table_of(self._member, digest_of({"": told.what, **told.given}))
        if self._exchange is None:
            self._exchange = RepeatedSum(self._member, self._seconds, table, FIRST_KEY + self._channel, FIRST_KEY)
        table = self._exchange.add_up(table, f"finish {told.what}")
        return (told, table) if (table != table[0]).any() else None


# Diagnose divergence: when workers did not do the same in a step, they exchange records of what they did.
#
#     worker 0   step 3: rate = 0.01   ─┐                ┌─►  ClusterError: not the same in step 3:
#     worker 1   step 3: rate = 0.02   ─┴─ exchanged ────┴─►  'rate' is 0.01 on worker 0, 0.02 on worker 1
#
# They are exchanged in a separate session, which works even if the step has failed.

PATIENCE = 4.0
"""Seconds that a worker which has waited in vain waits for the accounts of the others."""
_SHOWN, _WIDTH = 8, 120
_SAME = "not do the same as worker 0"
HINT = (
    "what all replicas share has to be the same everywhere: feed equal values, write variables in every worker, make "
    "the same calls in the same order"
)


@dataclass(frozen=True)
class StepAccount:
    """One worker's description of a step.

    Attributes:
        what: the step, for messages.
        given: descriptions of the values that must be equal in all workers, by name.
        shown: texts for messages, in place of those values of `given` that are only checksums.
        hint: what to do if the workers differ.
    """

    what: str
    given: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    hint: str = HINT


Telling = Callable[[], StepAccount | None]
"""Returns the account of values that must be equal in all workers but are no arguments of the step."""


def nothing() -> None:
    """Return no account."""


def difference(member: Membership, account: StepAccount, seconds: float = PATIENCE) -> ClusterError | None:
    """Return the error of what the workers do differently; None if nothing, or if a worker does not answer."""
    if len(member.workers) < 2:
        return None
    text = json.dumps([account.what, dict(account.given), dict(account.shown)])
    try:
        job = Rendezvous(member, seconds, group=ACCOUNTS, numbers=counts().accounts, tells=False)
        told = [StepAccount(*json.loads(said)) for said in job.texts(text, "tell what they do")]
    except RewriteError:
        return None
    return _compared(member, told, account.hint)


def disagreement(member: Membership, account: StepAccount, seconds: float, table: Array) -> ClusterError:
    """Return the error of a step in which the digests of the workers differ.

    Args:
        seconds: how long others may still wait for each other in the step.
    """
    found = difference(member, account, seconds + PATIENCE)
    if found is not None:
        return found
    odd = [task for task, row in enumerate(table) if (row != table[0]).any()]
    return ClusterError.of_difference(f"{_not_the_same(member, odd)} in {account.what}", hint=account.hint)


def is_told(error: BaseException) -> bool:
    """Return whether an error says what workers do differently."""
    return isinstance(error, ClusterError) and error.differs


def _not_the_same(member: Membership, odd: Sequence[int]) -> str:
    names = listed(name_of("worker", task, member.workers[task]) for task in odd)
    return f"{names} {'do' if len(odd) > 1 else 'does'} {_SAME}"


def _compared(member: Membership, told: Sequence[StepAccount], hint: str) -> ClusterError | None:
    """Return the error that says what differs."""
    parts = list(_differences(told))
    if not parts:
        return None
    odd = [task for task, one in enumerate(told) if (one.what, one.given) != (told[0].what, told[0].given)]
    lines = "".join(f"\n         {part}" for part in parts[:_SHOWN])
    more = f"\n         and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ClusterError.of_difference(f"{_not_the_same(member, odd)} in {told[0].what}:{lines}{more}", hint=hint)


def _differences(told: Sequence[StepAccount]) -> Iterator[str]:
    """Yield a line for each value that differs between workers."""
    steps = [one.what for one in told]
    if len(set(steps)) > 1:
        yield listed(f"worker {task} is in {what}" for task, what in enumerate(steps))
        return
    for key in dict.fromkeys(key for one in told for key in one.given):
        values = [one.given.get(key) for one in told]
        if len(set(values)) > 1:
            shown = [str(one.shown.get(key, one.given.get(key, "as before")))[:_WIDTH] for one in told]
            yield f"{key}: {listed(f'{text} on worker {task}' for task, text in enumerate(shown))}"


# Consensus before the first step: workers compare graph and plan, and take the chief's initial values.
#
# Every worker rewrites the graph by itself. Equal graphs and plans give equal keys and orders, so collectives match. If
# a worker ran another program, or another version of it, they would wait for ever.

COMPARE = "compare what they run"
CARRY_ON = "carry on after an error, too"
LINES = 14
"""How many lines of a difference a message shows."""
WIDTH = 160


def require_consensus(
    member: Membership,
    plan: Plan,
    graph: bytes = b"",
    captured: Iterable[Array] = (),
    *,
    what: str = COMPARE,
) -> None:
    """Compare plan, graph and versions with those of the other workers.

    Args:
        graph: the `contents` of what was rewritten.
        captured: values that have to be equal, too.

    Raises:
        ClusterError: they differ, or a worker is missing.
    """
    job = Rendezvous(member, plan.timeout_seconds)
    values = [f"captured {v.dtype.name}{list(v.shape)} #{zlib.crc32(described(v).encode()):08x}" for v in captured]
    parts = [plan.digest(), _versions(), *values, zlib.decompress(graph).decode() if graph else ""]
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    rows = job.rows(np.frombuffer(digest, np.int32), what)
    odd = [task for task in range(len(rows)) if not np.array_equal(rows[task], rows[0])]
    if not odd:
        return
    request = replace(plan, id="", graph_digest="", notes=(), edges=())
    said = [_versions(), request.to_yaml(), *parts[2:], replace(plan, id="", graph_digest="", notes=()).to_yaml()]
    texts = job.texts("\n".join(said), what)
    names = listed(name_of("worker", task, member.workers[task]) for task in odd)
    pair = texts[0].splitlines(), texts[odd[0]].splitlines()
    lines = list(difflib.unified_diff(*pair, "worker 0", f"worker {odd[0]}", n=0, lineterm=""))
    some = {i for sign in "-+" for i in islice((i for i, line in enumerate(lines) if line[0] == sign), LINES // 2)}
    shown = [f"         {lines[i][:WIDTH]}" for i in sorted(some)]
    problem = (
        f"{names} would run something else than worker 0, and their collectives would wait for each other for ever"
    )
    raise ClusterError.of_difference(
        "\n".join([problem, *shown]),
        hint="start the same program with the same configuration and versions everywhere; what it draws by chance "
        "while it builds the graph needs a seed",
    )


def adopt_from_chief(member: Membership, seconds: float, values: Iterable[Array]) -> Iterator[Array]:
    """Yield the values of the chief's variables: each worker has drawn other initial values.

    Raises:
        ClusterError: a worker is missing.
    """
    return Rendezvous(member, seconds).of_chief(values, "adopt the variables of worker 0")


def common_seed(member: Membership, seconds: float, own: int | None) -> int:
    """Return the random seed of all workers: the one that they have set, or else one that the chief draws.

    Args:
        own: the seed that this worker's program has set; None: none.

    Raises:
        ClusterError: workers have set different seeds.
    """
    drawn = int.from_bytes(os.urandom(4), "big")
    rows = Rendezvous(member, seconds).rows(np.array([own is not None, own or 0, drawn], np.int64), "agree on a seed")
    said = {int(seed) for is_set, seed, _ in rows if is_set}
    if len(said) > 1:
        raise ClusterError.of_difference(
            f"the workers have set different random seeds ({listed(map(str, sorted(said)))}), so they would shuffle "
            "the data differently, of which each is to take its part",
            hint="set the same seed everywhere, or give each worker its own data with input: per_worker",
        )
    return said.pop() if said else int(rows[0][2])


def session_name(member: Membership, seconds: float) -> str:
    """Return a name that the chief draws, unique among the sessions of all starts of the job.

    Raises:
        ClusterError: a worker is missing.
    """
    drawn = int.from_bytes(os.urandom(6), "big")
    if len(member.workers) > 1:
        drawn = int(Rendezvous(member, seconds).rows(np.array(drawn, np.int64), "open a session")[0])
    return f"{drawn:012x}"


def _versions() -> str:
    """Return the versions that the rewritten graph depends on."""
    names = ("autograph_rewrite", "tensorflow", "tensorflow-cpu", "keras", "numpy")
    return "\n".join(f"{name} {version}" for name in names if (version := _version(name)))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
