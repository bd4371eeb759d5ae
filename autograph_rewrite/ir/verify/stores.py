"""Invariants of server-side stores (accumulators, queues): a step takes out exactly what it puts in.

    rank 0   gradient ──► apply ─┐
    rank 1   gradient ──► apply ─┴─► accumulator on /job:ps ──► take(num_required = 2)      2 = 2
    rank 0   enqueue_many(2 tokens) ──► queue ──► dequeue on rank 0, dequeue on rank 1      2 = 1 + 1

Too few, and somebody waits for ever; too many, and each step works with what the one before has left. Where a number
says which of two queues is meant, that holds for both. What only counts is never emptied: one rank writes it, once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from autograph_rewrite.ir.graph import PASS_ATTR, Node, Value
from autograph_rewrite.ir.shapes.functions import constant
from autograph_rewrite.ir.shapes.inference import Shapes
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ir.verify.folded import Fault
from autograph_rewrite.ir.verify.job import SAME_PLAN, Job, odd_one
from autograph_rewrite.ops.traits import has

Count = Callable[[Node], int | None]
"""How many elements a node puts in or takes out; None where that is not constant."""


@dataclass
class _Store:
    """An accumulator or a queue: the nodes that declare it, on all ranks, and those that use it."""

    declared: list[Node] = field(default_factory=list)
    puts: list[Node] = field(default_factory=list)
    takes: list[Node] = field(default_factory=list)
    counts: list[Node] = field(default_factory=list)

    def used_in(self, step: set[Node]) -> _Store:
        """Return the store with what a step uses; what passes made for something else, such as initialisers, whole."""
        puts, takes = ([node for node in nodes if node in step] for nodes in (self.puts, self.takes))
        return self if self.is_ours and not puts and not takes else _Store(self.declared, puts, takes, self.counts)

    @property
    def is_ours(self) -> bool:
        """Whether a pass made it; what the user made may be filled by something that no step runs."""
        nodes = (*self.declared, *self.puts, *self.takes)
        return any(node.attr(PASS_ATTR, b"expand") != b"expand" for node in nodes)


def stores_come_out_even(job: Job) -> Iterator[Fault]:
    """One step of all ranks puts as much into every accumulator and token queue as it takes out."""
    for name, every in _stores(job).items():
        store = every.used_in(job.step)
        yield from _differently_declared(job, name, store)
        if store.counts and store.is_ours:
            yield from _counts_once(job, name, store)
            continue
        if not (store.puts and store.takes) and not (store.is_ours and (store.puts or store.takes)):
            continue
        frames, guards = job.conditions
        counted = {node: _PUTS[node.op](node) for node in store.puts}
        counted |= {node: _TAKES[node.op](node) for node in store.takes}
        if any(node in frames or node in guards for node in counted):
            continue  # how often it runs is not known
        unclear = next((node for node, count in counted.items() if count is None), None)
        if unclear is not None:
            problem = f"how much {job.say(unclear)} moves through {name} is not constant, so it cannot be checked"
            yield Fault(problem, unclear, "write the number as a constant")
            continue
        put = sum(counted[node] or 0 for node in store.puts)
        taken = sum(counted[node] or 0 for node in store.takes)
        if put != taken:
            problem = f"one step puts {put} into {name} and takes {taken}: {_census(job, store, counted)}"
            nodes = store.takes or store.puts
            hint = "each rank's contribution is put in once, and num_required is their number"
            yield Fault(problem, nodes[0], hint)


def _counts_once(job: Job, name: str, store: _Store) -> Iterator[Fault]:
    """A step adds one to what counts the steps of a rank, and takes nothing."""
    if len(store.puts) != 1 or store.takes or {job.rank(node) for node in store.counts} != {job.rank(store.puts[0])}:
        users = ", ".join(job.say(node) for node in (*store.puts, *store.takes, *store.counts))
        yield Fault(f"{name} counts the steps of one rank, and these use it: {users}", store.declared[0], SAME_PLAN)


def _census(job: Job, store: _Store, counted: Mapping[Node, int | None]) -> str:
    told = []
    for rank in range(len(job.graphs)):
        put = sum(counted[node] or 0 for node in store.puts if job.rank(node) == rank)
        taken = sum(counted[node] or 0 for node in store.takes if job.rank(node) == rank)
        told.append(f"rank {rank} puts {put}" + (f", takes {taken}" if taken else ""))
    return "; ".join(told)


def _differently_declared(job: Job, name: str, store: _Store) -> Iterator[Fault]:
    declared: dict[Node, Hashable] = {
        node: tuple(sorted((key, raw) for key, raw in node.attrs.items() if key[0] != "_")) for node in store.declared
    }
    if len(set(declared.values())) > 1:
        who = ", ".join(job.say(node) for node in store.declared)
        yield Fault(f"the ranks declare {name} differently ({who})", odd_one(declared), "declare it alike everywhere")


def _stores(job: Job) -> dict[str, _Store]:
    """Return the accumulators and queues of all ranks, by what messages call them."""
    found: dict[str, _Store] = {}
    for graph in job.graphs:
        for node in graph:
            role = next((role for role, ops in _ROLES.items() if node.op in ops), "declared")
            for handle in [node] if role == "declared" else _meant(node.inputs[0]):
                if has(handle.op, "accumulators", "queues"):
                    getattr(found.setdefault(_place(job, handle), _Store()), role).append(node)
    return found


def _meant(handle: Value) -> list[Node]:
    """Return the stores that a handle may mean: several, where it is chosen by number."""
    node = handle_node(handle)
    if node.op != "GatherV2":
        return [node]
    return [handle_node(value) for value in node.inputs[0].node.inputs]


def _place(job: Job, handle: Node) -> str:
    """Return what decides which store a handle means: on one device, equal names are one."""
    shared = (handle.attr("shared_name") or handle.name.encode()).decode()
    container = (handle.attr("container") or b"").decode()
    spec = device_specs.parse(handle.device)
    device = device_specs.canonical(handle.device)
    where = device if spec is not None and spec.task else f"rank {job.rank(handle)} {device}".strip()
    return f"'{container}/{shared}' on {where}" if container else f"'{shared}' on {where}"


def _one(node: Node) -> int | None:
    return 1


def _operand(node: Node) -> int | None:
    number = constant(node.inputs[1])
    return None if number is None else int(number)


def _leading(node: Node) -> int | None:
    shape = Shapes()(node.inputs[1])
    return shape[0] if isinstance(shape, tuple) and shape and isinstance(shape[0], int) else None


_KINDS = ("Accumulator", "ResourceAccumulator", "SparseAccumulator")
_PUTS: dict[str, Count] = {
    **{f"{kind}ApplyGradient": _one for kind in _KINDS},
    "QueueEnqueueV2": _one,
    "QueueEnqueueManyV2": _leading,
}
_TAKES: dict[str, Count] = {
    **{f"{kind}TakeGradient": _operand for kind in _KINDS},
    "QueueDequeueV2": _one,
    "QueueDequeueManyV2": _operand,
}
_COUNTS = ("ResourceAccumulatorNumAccumulated",)
_ROLES = {"puts": frozenset(_PUTS), "takes": frozenset(_TAKES), "counts": frozenset(_COUNTS)}
