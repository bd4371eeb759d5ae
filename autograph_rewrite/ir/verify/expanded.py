"""Checks the expanded graph: no collective can deadlock, no storage is shared by accident, no name or write is lost.

every invariant of a plain graph
+ collectives: complete, alike, on distinct devices, in one order, and whole in every fetch
+ resources:   two handles on one device mean two variables, as in the original
+ the step:    every name resolves, every variable is written as often as in the original
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import ONCE, Mesh, common_name
from autograph_rewrite.ir.run_writes import compared, original_name, writes_of
from autograph_rewrite.ir.traversal import ancestors, grouped
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.replica_marks import AVERAGES
from autograph_rewrite.ir.verify.collectives import collective_faults
from autograph_rewrite.ir.verify.dead_values import on_other_devices, values_arrive
from autograph_rewrite.ir.verify.folded import Fault, folded_faults, raise_for
from autograph_rewrite.ir.verify.job import Job, Root
from autograph_rewrite.ir.verify.reshards import unlowered
from autograph_rewrite.ops.traits import has


class _Tensor(Protocol):
    @property
    def tensor(self) -> str: ...


class _Input(_Tensor, Protocol):
    @property
    def batch_axis(self) -> int | None: ...


class Original(Protocol):
    """The item that was expanded, with which the result is compared."""

    @property
    def graph(self) -> Graph:
        """The graph, before the first pass."""

    @property
    def inputs(self) -> Mapping[str, _Input]:
        """By public name."""

    @property
    def outputs(self) -> Mapping[str, _Tensor]:
        """By public name."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The nodes that one step runs."""

    @property
    def init_op(self) -> str | None:
        """The node that initialises all variables."""


def roots_in(graphs: Sequence[Graph], original: Original) -> Iterator[tuple[str, Root]]:
    """Yield each name that a run may fetch: the original name, and its nodes in the finished graphs."""
    runnable = [(f"output '{name}'", info.tensor.partition(":")[0], True) for name, info in original.outputs.items()]
    runnable += [(f"target '{name}'", name, True) for name in original.targets]
    runnable += [(f"target '{name}'", name, False) for name in filter(None, [original.init_op])]
    for what, name, in_step in runnable:
        yield name, Root(what, tuple(graph.nodes[name] for graph in graphs if name in graph), in_step)


def job_of(graphs: Sequence[Graph], original: Original, processes: int) -> Job:
    """Return the job of finished graphs that were made from one item."""
    own = (info.tensor.partition(":")[0] for info in original.inputs.values() if info.batch_axis is not None)
    roots = (root for _, root in roots_in(graphs, original) if root.nodes)
    return Job(tuple(graphs), processes, tuple(roots), frozenset(own))


@dataclass(frozen=True)
class Finished:
    """A finished graph with its original."""

    graph: Graph
    original: Original
    devices: tuple[str, ...]
    micro: int = 1


def check_expanded(
    data: bytes | Graph, original: Original, devices: Sequence[str] = (), processes: int = 1, micro: int = 1
) -> None:
    """Check every invariant of a finished graph.

    Args:
        data: the expanded graph, or its encoded GraphDef.
        original: the item that was expanded (normalised, before the first pass).
        devices: the devices of the plan; empty to accept any.
        processes: how many processes share each collective; this graph holds one process's members.
        micro: how many micro-batches may each update a moving average.

    Raises:
        VerifyError: names every broken invariant.
        GraphError: the bytes are not a GraphDef.
    """
    raise_for(expanded_faults(data, original, devices, processes, micro))


def expanded_faults(
    data: bytes | Graph, original: Original, devices: Sequence[str] = (), processes: int = 1, micro: int = 1
) -> list[Fault]:
    """Return every broken invariant of a finished graph."""
    graph = data if isinstance(data, Graph) else serde.from_bytes(data)
    faults = folded_faults(graph, Mesh.of(1), devices)
    faults += [Fault(f"'{node.name}' is still folded", node) for node in graph if node.span != ONCE]
    faults += [Fault(problem, node) for node, problem in unlowered(graph)]
    if faults:
        return faults  # the other checks rely on consistent edges
    finished = Finished(graph, original, tuple(devices), micro)
    faults = list(names_resolve(finished))
    faults += no_storage_is_shared_by_accident(finished)
    faults += devices_are_the_plans(finished)
    faults += values_arrive(graph, original.graph.nodes, on_other_devices)
    if not faults:
        faults += variables_are_written_as_often(finished)
        faults += fetches_write_the_same(finished)
        faults += collective_faults(job_of([graph], original, processes))
    return faults


def names_resolve(finished: Finished) -> Iterator[Fault]:
    """Every input, output and target of the original exists under its name."""
    named = [("input", info.tensor) for info in finished.original.inputs.values()]
    named += [("output", info.tensor) for info in finished.original.outputs.values()]
    for role, tensor in named:
        try:
            found = finished.graph.value(tensor).dtype
            expected = finished.original.graph.value(tensor).dtype
        except GraphError as error:
            yield Fault(f"the {role} '{tensor}' does not resolve: {error.problem}")
            continue
        if found != expected:
            yield Fault(f"the {role} '{tensor}' has changed its element type", finished.graph.value(tensor).node)
    for target in (*finished.original.targets, *filter(None, [finished.original.init_op])):
        if target not in finished.graph:
            yield Fault(f"the target '{target}' is not in the graph")


def devices_are_the_plans(finished: Finished) -> Iterator[Fault]:
    """Every placed node is on a device of the plan, or on its host."""
    allowed = device_specs.reachable(finished.devices)
    if not allowed:
        return
    for text, count in sorted(Counter(node.device for node in finished.graph).items()):
        spec = device_specs.parse(text)
        if spec is not None and not any(spec.fits(device) for device in allowed):
            node = next(node for node in finished.graph if node.device == text)
            yield Fault(f"'{node.name}' ({count} nodes) is on '{text}', which the plan does not have", node)


def no_storage_is_shared_by_accident(finished: Finished) -> Iterator[Fault]:
    """Two handles on one device mean one variable only if they do in the original."""
    original = finished.original.graph
    first: dict[tuple[str, tuple[str, str, str]], Node] = {}
    for node in finished.graph:
        if not has(node.op, "variables"):
            continue
        other = first.setdefault((node.device, variable_ops.storage_key(node)), node)
        if other is node:
            continue
        names = original_name(node.name, original.nodes), original_name(other.name, original.nodes)
        known = [variable_ops.storage_key(original.nodes[name]) for name in names if name in original]
        if names[0] == names[1] or len(known) < 2 or known[0] != known[1]:
            where = device_specs.short(node.device) or "one device"
            yield Fault(f"'{node.name}' and '{other.name}' share their storage on {where}", node)


def variables_are_written_as_often(finished: Finished) -> Iterator[Fault]:
    """One step, and the initialisation, write each copy of a variable as often as in the original.

    The averaging of local SGD is not counted.
    """
    original = finished.original
    step = (*original.targets, *(info.tensor for info in original.outputs.values()))
    for what, names in (("step", step), ("initialisation", tuple(filter(None, [original.init_op])))):
        before = _writes(original.graph, names)
        after = _writes(finished.graph, names)
        copies = grouped((original_name(one.name, original.graph.nodes), (one, count)) for one, count in after.items())
        for handle, count in before.items():
            if handle.name not in copies:
                yield Fault(f"the {what} writes '{handle.name}' {count} times, now never", handle)
            for copy, found in copies.get(handle.name, ()):
                if found not in (count, count * finished.micro):
                    yield Fault(f"the {what} writes '{copy.name}' {found} times; the original {count} times", copy)
        for name in sorted(copies.keys() - {handle.name for handle in before}):
            if name in original.graph:
                yield Fault(f"the {what} writes '{name}', which the original never does", copies[name][0][0])


def fetches_write_the_same(finished: Finished) -> Iterator[Fault]:
    """Each output, target and initialiser, fetched alone, writes the variables that it writes in the original.

    A fetch that needs only a size may write less than the original if the whole step writes it; a session refuses it.
    """
    original = finished.original
    step = {name.partition(":")[0] for name in original.targets if name in finished.graph}
    handles = {handle.name for handle in _writes(finished.graph, sorted(step))}
    in_step = {original_name(name, original.graph.nodes) for name in handles}
    runs = compared(writes_of(original.graph), original.graph.nodes, finished.graph)
    names = [*original.targets, *(info.tensor for info in original.outputs.values()), original.init_op or ""]
    for name in dict.fromkeys(name.partition(":")[0] for name in names):
        more, less = runs.differences([name])
        less = [handle for handle in less if name == original.init_op or handle not in in_step]
        problems = [f"writes '{handle}', which the original does not" for handle in more]
        problems += [f"does not write '{handle}', which the original does" for handle in less]
        yield from (Fault(f"a run of '{name}' {problem}", finished.graph.nodes[name]) for problem in problems)


def _writes(graph: Graph, names: Iterable[str]) -> dict[Node, int]:
    roots = [graph.nodes[name.partition(":")[0]] for name in names]
    needed = ancestors(roots)
    steps = (n for n in graph if n in needed and not common_name(n.name).startswith(f"{AVERAGES}/"))
    return {handle: len(ops) for handle, ops in variable_ops.updates(steps).items()}
