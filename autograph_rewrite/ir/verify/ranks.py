"""Invariants across the graphs of all ranks of a job, checked before anything runs.

    rank 0's graph ─┐
    rank 1's graph ─┼──► verify_ranks ──► faults: what is wrong on which rank, in which collective, and what to do
    rank 2's graph ─┘

+ collectives: complete, alike, on distinct devices, in one order, on one condition, and whole in every run
+ processes:   every graph is for a process of its own, and keeps to it
+ the step:    what can be run can be run on all ranks
+ variables:   alike on all ranks, and two are one everywhere or nowhere
+ servers:     a step puts into accumulators and queues what it takes out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.replication import Span, common_name
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.verify.collectives import collective_faults
from autograph_rewrite.ir.verify.expanded import Original, job_of, roots_in
from autograph_rewrite.ir.verify.folded import Fault, raise_for
from autograph_rewrite.ir.verify.job import SAME_PLAN, Job, odd_one
from autograph_rewrite.ir.verify.stores import stores_come_out_even
from autograph_rewrite.ops.traits import has

Invariant = Callable[[Job], Iterable[Fault]]


def check_ranks(
    graphs: Sequence[bytes | Graph], original: Original | None = None, servers: Collection[str] = ()
) -> None:
    """Check that the finished graphs of all ranks fit together.

    Args:
        graphs: one per rank, in order, or their encoded GraphDefs.
        original: the item that was expanded; without it, it is not known what will be run.
        servers: devices on which variables live that all ranks use.

    Raises:
        VerifyError: names every broken invariant.
        GraphError: some bytes are not a GraphDef.
    """
    raise_for(verify_ranks(graphs, original, servers))


def verify_ranks(
    graphs: Sequence[bytes | Graph], original: Original | None = None, servers: Collection[str] = ()
) -> list[Fault]:
    """Return everything that keeps the finished graphs of all ranks from running together; see `check_ranks`.

    Args:
        graphs: finished, in the order of ranks.
        original: what they were made of; without it, what a step runs is not known.
        servers: canonical devices of parameter servers.
    """
    with no_garbage_collection():
        return _faults(graphs, original, frozenset(servers))


def _faults(graphs: Sequence[bytes | Graph], original: Original | None, servers: frozenset[str]) -> list[Fault]:
    ranks = tuple(_own(graphs))
    faults = list(_unusable(ranks))
    if faults or not ranks:
        return faults  # what follows relies on orders
    if original is None:
        job = Job(ranks, len(ranks), servers=servers)
    else:
        job = replace(job_of(ranks, original, len(ranks)), servers=servers)
        faults += [fault for name, root in roots_in(ranks, original) for fault in _lost(ranks, root.what, name)]
    return faults + [fault for invariant in INVARIANTS for fault in invariant(job)]


def _own(graphs: Iterable[bytes | Graph]) -> Iterator[Graph]:
    """Yield each rank's graph: a graph that is given twice is two graphs, like any others that are equal."""
    seen: set[int] = set()
    for given in graphs:
        graph = given if isinstance(given, Graph) else serde.from_bytes(given)
        yield graph.clone() if id(graph) in seen else graph
        seen.add(id(graph))


def _unusable(ranks: Sequence[Graph]) -> Iterator[Fault]:
    for rank, graph in enumerate(ranks):
        folded = next((node for node in graph if node.span is not Span.ONCE), None)
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
    """Every rank's graph is for another process, and places nothing in that of another rank."""
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
                continue  # a worker may be one, too
            node = next(node for node in graph if node.device == text)
            owner = f"the process of rank {first[process]}" if process in first else "a process that no rank is for"
            problem = f"'{node.name}' of rank {rank} ({count} nodes) is on '{text}': {owner}"
            yield Fault(problem, node, f"place it in '{homes.get(rank)}', or leave it out")


def _homes(job: Job) -> dict[int, str]:
    """Return the process that each rank's graph is for: of those where it meets others, the one that it has for itself.

    A graph that meets nobody in a collective may share a server with others; its own process it has alone.
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
    """A variable has one type and shape on all ranks, and two of them share their storage everywhere or nowhere."""
    handles = [node for graph in job.graphs for node in graph if has(node.op, "variables")]
    named: dict[str, dict[Node, str]] = {}
    for node in handles:
        kind = f"{dtypes.dtype_name(node.attr('dtype'))}{shape_text(node.attr('shape'))}"
        named.setdefault(common_name(node.name), {})[node] = kind
    for name, kinds in named.items():
        if len(set(kinds.values())) > 1:
            yield Fault(f"the variable '{name}' is {job.sides(kinds)}", odd_one(kinds), SAME_PLAN)
    yield from _aliases(job, handles)


def _aliases(job: Job, handles: Iterable[Node]) -> Iterator[Fault]:
    """Yield the pairs of handles that mean one variable here and two elsewhere."""
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
            wrong = common_name(one.name) != common_name(other.name)
        else:
            wrong = any(_both(graph, pair) and rank not in ranks for rank, graph in enumerate(job.graphs))
        if wrong:
            where = device_specs.short(other.device) or "one device"
            problem = f"{job.say(one)} and {job.say(other)} share their storage on {where}, elsewhere they do not"
            yield Fault(problem, other, "give each variable a shared_name of its own")


def _both(graph: Graph, names: Iterable[str]) -> bool:
    return all(name in graph for name in names)


INVARIANTS: tuple[Invariant, ...] = (
    collective_faults,
    processes_are_their_own,
    variables_are_alike,
    stores_come_out_even,
)
