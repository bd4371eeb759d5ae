"""Checks invariants across the graphs of all ranks of a job, before anything runs.

    rank 0's graph ─┐
    rank 1's graph ─┼──► verify_ranks ──► faults: what is wrong on which rank, in which collective, and what to do
    rank 2's graph ─┘

+ collectives: complete, alike, on distinct devices, in one order, on one condition, and whole in every run
+ processes:   every graph is for a different process, and places no node in another one
+ the step:    every output and target can be run on all ranks
+ variables:   alike on all ranks, and two are one everywhere or nowhere
+ servers:     a step puts into accumulators and queues what it takes out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE, common_name
from autograph_rewrite.ir.recorded_shapes import constant
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ir.verify.collectives import collective_faults
from autograph_rewrite.ir.verify.expanded import Original, job_of, roots_in
from autograph_rewrite.ir.verify.folded import Fault, raise_for
from autograph_rewrite.ir.verify.job import SAME_PLAN, Job, odd_one
from autograph_rewrite.ops.rules.inference import Shapes
from autograph_rewrite.ops.traits import has

# Invariants of server-side stores (accumulators, queues): a step takes out exactly what it puts in.
#
#     rank 0   gradient ──► apply ─┐
#     rank 1   gradient ──► apply ─┴─► accumulator on /job:ps ──► take(num_required = 2)      2 = 2
#     rank 0   enqueue_many(2 tokens) ──► queue ──► dequeue on rank 0, dequeue on rank 1      2 = 1 + 1
#
# If a step puts in too few, a rank waits for ever; if too many, the next step reads left-over elements. Where a number
# chooses between two queues, that holds for both. A store that only counts is never emptied: one rank adds to it, once.


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
        """Return the store with the nodes of a step only; a pass's store that no step uses keeps all nodes."""
        puts, takes = ([node for node in nodes if node in step] for nodes in (self.puts, self.takes))
        return self if self.is_ours and not puts and not takes else _Store(self.declared, puts, takes, self.counts)

    @property
    def is_ours(self) -> bool:
        """Whether a pass made it; a store of the user may be filled outside of steps."""
        nodes = (*self.declared, *self.puts, *self.takes)
        # Expansion marks its copies of the user's nodes, too.
        return any(node.attr(PASS_ATTR, b"expand") != b"expand" for node in nodes)


def stores_come_out_even(job: Job) -> Iterator[Fault]:
    """One step of all ranks puts as many elements into every accumulator and queue as it takes out."""
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
            continue  # how often these nodes run is not known
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
    """A step adds one element to a store that counts the steps of a rank, and takes none."""
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
    """Return the accumulators and queues of all ranks, by their labels in messages."""
    found: dict[str, _Store] = {}
    for graph in job.graphs:
        for node in graph:
            role = next((role for role, ops in _ROLES.items() if node.op in ops), "declared")
            for handle in [node] if role == "declared" else _meant(node.inputs[0]):
                if has(handle.op, "accumulators", "queues"):
                    getattr(found.setdefault(_place(job, handle), _Store()), role).append(node)
    return found


def _meant(handle: Value) -> list[Node]:
    """Return the nodes of the stores that a handle may mean: several where a GatherV2 chooses it."""
    node = handle_node(handle)
    if node.op != "GatherV2":
        return [node]
    return [handle_node(value) for value in node.inputs[0].node.inputs]


def _place(job: Job, handle: Node) -> str:
    """Return the label of a store; handles with equal labels mean one store."""
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


Invariant = Callable[[Job], Iterable[Fault]]


def check_ranks(
    graphs: Sequence[bytes | Graph], original: Original | None = None, servers: Collection[str] = ()
) -> None:
    """Check that the finished graphs of all ranks fit together.

    Args:
        graphs: one per rank, in order, or their encoded GraphDefs.
        original: the item that was expanded; without it, the checks of what a step runs are left out.
        servers: devices that hold variables of all ranks.

    Raises:
        VerifyError: names every broken invariant.
        GraphError: some bytes are not a GraphDef.
    """
    raise_for(verify_ranks(graphs, original, servers))


@no_garbage_collection()
def verify_ranks(
    graphs: Sequence[bytes | Graph], original: Original | None = None, servers: Collection[str] = ()
) -> list[Fault]:
    """Return every fault that `check_ranks` raises."""
    ranks = tuple(_own(graphs))
    faults = list(_unusable(ranks))
    if faults or not ranks:
        return faults  # the other checks need topological orders
    if original is None:
        job = Job(ranks, len(ranks), servers=frozenset(servers))
    else:
        job = replace(job_of(ranks, original, len(ranks)), servers=frozenset(servers))
        faults += [fault for name, root in roots_in(ranks, original) for fault in _lost(ranks, root.what, name)]
    return faults + [fault for invariant in INVARIANTS for fault in invariant(job)]


def _own(graphs: Iterable[bytes | Graph]) -> Iterator[Graph]:
    """Yield each rank's graph; a Graph that is given twice is cloned, so that each rank has different nodes."""
    seen: set[int] = set()
    for given in graphs:
        graph = given if isinstance(given, Graph) else serde.from_bytes(given)
        yield graph.clone() if id(graph) in seen else graph
        seen.add(id(graph))


def _unusable(ranks: Sequence[Graph]) -> Iterator[Fault]:
    for rank, graph in enumerate(ranks):
        folded = next((node for node in graph if node.span != ONCE), None)
        if folded is not None:
            yield Fault(f"'{folded.name}' of rank {rank} is still folded", folded, "expand the graph first")
        try:
            topological_order(graph)
        except GraphError as error:
            yield Fault(f"rank {rank}: {error.problem}", graph.nodes.get(error.node_name or ""))


def _lost(ranks: Sequence[Graph], what: str, name: str) -> Iterator[Fault]:
    for rank, graph in enumerate(ranks):
        if name not in graph:
            yield Fault(f"rank {rank} cannot run {what}: its graph has no node '{name}'", hint=SAME_PLAN)


def processes_are_their_own(job: Job) -> Iterator[Fault]:
    """Every rank's graph is for a different process, and places no node in the process of another rank."""
    homes = _homes(job)
    first: dict[str, int] = {}
    for rank, home in homes.items():
        if (other := first.setdefault(home, rank)) != rank:
            problem = f"the graphs of rank {other} and rank {rank} are both for the process '{home}'"
            yield Fault(problem, hint="rewrite each for its own task")
    jobs = {spec.job for home in homes.values() if (spec := device_specs.parse(home)) is not None}
    for rank, graph in enumerate(job.graphs):
        for text, count in Counter(node.device for node in graph).items():
            process = device_specs.process(text)
            spec = device_specs.parse(process)
            if not process or process == homes.get(rank) or spec is None or spec.job not in jobs:
                continue  # other jobs are servers
            if device_specs.canonical(text) in job.servers:
                continue  # a worker may also be a server
            node = next(node for node in graph if node.device == text)
            owner = f"the process of rank {first[process]}" if process in first else "a process that no rank is for"
            problem = f"'{node.name}' of rank {rank} ({count} nodes) is on '{text}': {owner}"
            yield Fault(problem, node, f"place it in '{homes.get(rank)}', or leave it out")


def _homes(job: Job) -> dict[int, str]:
    """Return the process of each rank's graph: among those of its collectives, the process that fewest ranks use.

    For a graph without collectives all its devices count: it may share servers with other graphs, but not its process.
    """
    members = {node for group in job.found for node in group.members}
    used = []
    for graph in job.graphs:
        meeting = [node for node in graph if node in members]
        used.append(Counter(filter(None, (device_specs.process(node.device) for node in meeting or graph))))
    sharing = Counter(process for processes in used for process in processes)
    return {
        rank: min(processes, key=lambda process: (sharing[process], -processes[process]))
        for rank, processes in enumerate(used)
        if processes
    }


def variables_are_alike(job: Job) -> Iterator[Fault]:
    """A variable has one type and shape on all ranks; two variables share their storage on all ranks or on none."""
    each = [[node for node in graph if has(node.op, "variables")] for graph in job.graphs]
    of = {node: name for handles in each for node, name in _names(handles).items()}
    in_shards = {name for node, name in of.items() if name != common_name(node.name)}
    named: dict[tuple[str, str], dict[Node, str]] = {}
    for node, name in of.items():
        kind = f"{dtypes.dtype_name(node.attr('dtype'))}{shape_text(node.attr('shape'))}"
        where = device_specs.canonical(node.device) if name in in_shards else ""
        named.setdefault((name, where), {})[node] = kind
    for (name, _), kinds in named.items():
        if len(set(kinds.values())) > 1:
            yield Fault(f"the variable '{name}' is {job.sides(kinds)}", odd_one(kinds), SAME_PLAN)
    yield from _aliases(job, of)


def _names(handles: Iterable[Node]) -> dict[Node, str]:
    """Return the variable of each handle of a rank; a shard `w/part_1` counts as `w` if the rank also has `w`."""
    own = {node: common_name(node.name) for node in handles}
    names, found = set(own.values()), {}
    for node, name in own.items():
        whole, _, number = name.rpartition("/part_")
        found[node] = whole if number.isdigit() and whole in names else name
    return found


def _aliases(job: Job, handles: Mapping[Node, str]) -> Iterator[Fault]:
    """Yield a fault for each pair of handles that mean one variable on some ranks and two on others."""
    stored: dict[tuple[object, ...], list[Node]] = {}
    for node in handles:
        process = device_specs.process(node.device)
        where = device_specs.canonical(node.device)
        key = (where if process else (job.rank(node), where), variable_ops.storage_key(node))
        stored.setdefault(key, []).append(node)
    pairs: dict[tuple[str, str], set[int]] = {}
    seen: dict[tuple[str, str], tuple[Node, Node]] = {}
    for nodes in stored.values():
        for other in nodes[1:]:
            pair = (nodes[0].name, other.name)
            pairs.setdefault(pair, set()).add(job.rank(other))
            seen.setdefault(pair, (nodes[0], other))
    for pair, ranks in pairs.items():
        one, other = seen[pair]
        if job.rank(one) != job.rank(other):
            wrong = handles[one] != handles[other]
        else:
            having_both = (rank for rank, graph in enumerate(job.graphs) if all(name in graph for name in pair))
            wrong = not ranks.issuperset(having_both)
        if wrong:
            where = device_specs.short(other.device) or "one device"
            problem = f"{job.say(one)} and {job.say(other)} share their storage on {where}, elsewhere they do not"
            yield Fault(problem, other, "give each variable a shared_name of its own")


INVARIANTS: tuple[Invariant, ...] = (
    collective_faults,
    processes_are_their_own,
    variables_are_alike,
    stores_come_out_even,
)
