"""Computes what each node of the folded graph reads, and compares it with the claimed placement of that operand.

    %dw (original, each) ──► AddN(all) ──► ResourceApplyAdam
    own(0), own(1)           their sum      has to read: whole(%dw)

Original nodes are not computed: their results are sample data, which are right if their operands are right. All other
nodes are computed (`kernels`), whatever their names and the pass that made them.

Loops that a rewrite made are run, per replica and iteration.

    t = 0, 1, ...   Merge      takes the value of Enter, later that of NextIteration
                    Switch     forwards to one output; readers of the other one do not run
                    LoopCond   says whether there is another iteration
                    Exit       gives the only value that arrives there, when the loop ends

An original node in such a loop is not computed. Its k-th run on a replica stands for the k-th micro-batch there,
whatever the number of the iteration: in a pipeline a stage begins late. This assumes nothing: the run must read what
this micro-batch reads, each micro-batch must have a run, and all uses of its values are compared like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from autograph_rewrite.certify import kernels
from autograph_rewrite.certify.along_model import (
    COLLECTIVES,
    SHAPES_OF_ELEMENTS,
    check_lowered,
    is_along_model,
    is_exchange,
    met,
)
from autograph_rewrite.certify.baseline import Baseline, Leaf
from autograph_rewrite.certify.kernels import NoKernelError, UnknownError
from autograph_rewrite.certify.local_indices import kind_of
from autograph_rewrite.certify.order import BACK_EDGES, ENTERS, EXITS, writes_variable
from autograph_rewrite.certify.samples import Sample, Token
from autograph_rewrite.certify.seen import WHOLE
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.claims import OWN, Read
from autograph_rewrite.ir.control_flow import by_loops, frames_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, MODEL, ONCE, REPLICA, Mesh, PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ir.types.opdefs import is_pure

SAID = {
    "own": "its own instance of",
    "replicated": "the whole of",
    "split": "its own block of",
    "partial": "a contribution to",
    "entry": "the local size in",
}
RESTATED = frozenset(
    ("shared_name", "container", "element_shape", "element_shape_except0", "tensor_array_name", "stack_name")
)
"""Attributes that may differ between instances of one node; other checks compare their meaning."""


class Simulation:
    """One walk over a folded graph, with one sample.

    Args:
        order: the nodes, producers first.
        looped: a loop on each replica runs its micro-batches; else each node has an instance for each of them.
        device: the number of the simulated device of each replica, where its devices run one program.
    """

    def __init__(
        self, baseline: Baseline, sample: Sample, order: Sequence[Node], *, looped: bool = False, device: int = 0
    ) -> None:
        self._baseline, self._sample, self._order = baseline, sample, order
        self._micro = baseline.claims.micro if looped else 1
        self._copies = sample.instances // self._micro  # instances of an EACH node
        parts = 1 if looped else baseline.claims.micro
        self._mesh = Mesh.of(self._copies // parts, parts)
        claims = baseline.claims
        self._all = Mesh.of(self._copies // parts, parts, model=claims.model, divided=claims.divided)
        self._device = device
        self._held: dict[Value, Any] = {}
        self._loops: dict[Node, Loop] = {}  # the loop of each original node in one
        self.matches = {node: baseline.match(node) for node in order}
        self._of_all: set[Node] = set()  # copies that run once, for all micro-batches
        for node in order if looped else ():
            if self.matches[node] is None and (found := baseline.match_whole(node)):
                self.matches[node] = found
                self._of_all.add(node)
        self.not_covered: dict[str, None] = {}

    def run(self) -> None:
        """Compute the nodes that are not original; then compare the operands of original nodes.

        Raises:
            VerifyError: an operand is wrong.
        """
        for part, is_loop in parts_of(self._order, self.matches):
            if is_loop:
                self._run_loop(part)
            else:
                self._run_once(part)
        anchored = {value.node for node in self._order[:1] for value in node.graph.anchors.values()}
        for node in self._order:
            found = self.matches[node]
            # Marks of kind `of each` state the number of one device. A node without readers was replaced by a constant.
            if found is not None and kind_of(found) != "of each" and (node in anchored or not _is_dead(node)):
                self._compare(node, found)

    def _run_once(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            found = self.matches[node]
            if found is not None:
                self._held |= {value: self.leaf(node, value.index) for value in node.read_outputs}
                self._check_runs(node)
            elif not any(value in self._held for value in node.read_outputs):  # else a loop has computed it
                made = self._guarded(node, partial(self._results, node))
                self._held |= {node.output(index): data for index, data in enumerate(made)}

    def _check_runs(self, node: Node) -> None:
        each = self._micro > 1 and node.span == EACH
        if each and any(self._held[value].form == "own" for value in node.read_outputs):
            raise VerifyError(f"'{node.name}' runs once for all micro-batches, which differ", node=node)

    def _run_loop(self, nodes: Sequence[Node]) -> None:
        try:
            loop = Loop(self, nodes, self._copies, self._micro)
            loop.run()
        except UnknownError as error:
            unknown = UnknownError(f"a loop of the rewrite ({error})")
            self._held |= {value: unknown for node in nodes for value in node.read_outputs}
            return
        self._held |= loop.given
        self._loops |= dict.fromkeys(loop.read, loop)

    def leaf(self, node: Node, index: int, instance: int | None = None) -> Leaf:
        """Return the sample data of an output of an original node.

        Args:
            instance: of a replica, or of a micro-batch of one; None: of each.
        """
        found, claims = self.matches[node], self._baseline.claims
        assert found is not None
        name = found.output(index).name
        claim = claims.values.get(name)
        differs = claim is not None and claim.differs and found.name not in claims.folded
        return Leaf(name, "own", instance) if differs and node not in self._of_all else Leaf(name, "whole")

    def outputs(self, anchors: Mapping[str, Value]) -> None:
        """Check that declared outputs are whole.

        Raises:
            VerifyError: one is not.
        """
        for anchor, name in self._baseline.claims.outputs.items():
            value = anchors.get(anchor)
            if value is None:
                raise VerifyError(f"the output '{name}' is gone")
            if value.node.span != ONCE or value.dtype in (dtypes.VARIANT, dtypes.RESOURCE):
                continue  # the pass that merges outputs has not run yet
            held = self._held.get(value)
            self._same_data(value.node, f"the output '{name}'", held, name, WHOLE)

    # -- nodes that are not original

    def _guarded(self, node: Node, compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the results of `compute`, or its UnknownError for each output; other errors become VerifyErrors."""
        try:
            return compute()
        except UnknownError as error:
            return [error] * (1 + max((value.index for value in node.read_outputs), default=0))
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            raise VerifyError(
                f"'{node.name}' ({node.op}) cannot compute with a batch of {self._sample.batch}: {error}", node=node
            ) from error

    def _results(self, node: Node) -> Sequence[Any]:
        """Return the data of each output; for an EACH node, a list by instance."""
        if is_exchange(node, self._all):
            raise UnknownError("what the devices of a replica exchange")
        if node.op in COLLECTIVES:
            return [self._collective(node)]
        if node.op == "NoOp":
            return ()
        instances = range(self._mesh.count(node.span))
        per_instance = [self._of_instance(node, instance, self._operands(node, instance)) for instance in instances]
        if not node.span & EACH:
            return per_instance[0]
        return [list(each) for each in zip(*per_instance, strict=True)]

    def computed(self, node: Node, copy: int, items: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a node in a loop that is not original.

        Raises:
            VerifyError: it cannot compute with its operands.
        """
        return self._guarded(node, lambda: self._of_instance(node, copy, items))

    def _of_instance(self, node: Node, instance: int, items: Sequence[Any]) -> Sequence[Any]:
        if node.op == "Const":
            at = self._mesh.coordinates(node.span, instance) | {MODEL: self._device}
            return [_constant(node, self._all.number(self._all.whole(node.span), at))]
        if not items:
            raise NoKernelError(node.op)
        if node.op in LISTS:
            return [LISTS[node.op](*items, data=lambda item: self.data(item, instance))]
        return list(kernels.run(node, [self.data(item, instance) for item in items]))

    def _operands(self, node: Node, instance: int) -> list[Any]:
        selects = node.selects
        found = []
        for index, value in enumerate(node.inputs):
            select = selects.get(index)
            which = self._taken(node, instance, value, select)
            if select is Select.OWN:
                value = value.node.output(value.index + self._mesh.coordinates(node.span, instance)[REPLICA])
            found += [self._at(value, i) for i in which]
        return found

    def _taken(self, node: Node, instance: int, value: Value, select: Select | None) -> list[int]:
        return self._mesh.read(node.span, instance, value.node.span, select)

    def _at(self, value: Value, instance: int) -> Any:
        return self.data(self.item(value, instance), instance)

    def item(self, value: Value, copy: int) -> Any:
        """Return what is held for one instance of a value."""
        held = self._held.get(value)
        if held is None:
            return UnknownError(f"'{value.name}' of a loop that the rewrite made")
        return held[copy] if isinstance(held, list) else held

    def data(self, item: Any, instance: int) -> Any:
        """Return the data of a held item.

        Raises:
            UnknownError: the value is unknown, or has too many elements.
        """
        if isinstance(item, UnknownError):
            raise UnknownError(*item.args)
        if not isinstance(item, Leaf):
            return item
        if item.form == "whole":
            return self._sample.whole(item.name)
        return self._sample.own(item.name, instance if item.instance is None else item.instance)

    def _collective(self, node: Node) -> Any:
        value = node.inputs[0]
        if not node.span & EACH:  # the only member of its process
            return self._at(value, 0)
        own = [self._at(value, self._taken(node, r, value, None)[0]) for r in range(self._mesh.count(node.span))]
        members = int(self._at(node.inputs[1], 0))
        if members != len(own):
            raise ValueError(f"{members} members of {len(own)}")
        return met(node, own)

    def _compare(self, node: Node, found: Node) -> None:
        if is_along_model(found) and node.op != found.op:
            self._check_lowered(node, found)
            return
        if len(node.inputs) != len(found.inputs):
            raise VerifyError(
                f"'{node.name}' reads {len(node.inputs)} values, the original {len(found.inputs)}", node=node
            )
        self._compare_attributes(node, found)
        claims = self._baseline.claims
        for index, (value, wanted) in enumerate(zip(node.inputs, found.inputs, strict=True)):
            read = WHOLE if node in self._of_all else claims.reads.get((found.name, index), OWN)
            if wanted.node.name in claims.carriers and self.matches.get(value.node) is None:
                # An Enter that runs once where the original's runs on each replica: it holds the converted value.
                read = claims.reads.get((wanted.node.name, 0), OWN)
            what = f"input {index} of '{node.name}' ({node.op})"
            select = node.selects.get(index)
            if select is not None and select.is_of_many:
                raise VerifyError(f"{what} reads all instances of '{value.name}'", node=node)
            held = self._read(node, index)
            if node.op in SHAPES_OF_ELEMENTS and not index:
                self.not_covered["the shapes that lists state of their elements (their kernels check them)"] = None
                continue
            if self._is_read_as_it_is(held, self._wanted(wanted, read)):
                continue
            self._same_data(node, what, held, wanted.name, read)

    def _read(self, node: Node, index: int) -> Any:
        """Return what is held of an operand of an original node; in a loop of the rewrite, a list by instance."""
        if loop := self._loops.get(node):
            return [items[index] for items in loop.read[node]]
        value, select = node.inputs[index], node.selects.get(index)
        held = self._held.get(value)
        if not isinstance(held, list) or value.node.span == node.span:
            return held
        return [held[self._taken(node, i, value, select)[0]] for i in range(self._mesh.count(node.span))]

    def _wanted(self, wanted: Value, read: Read) -> Leaf | None:
        """Return the leaf that satisfies a read without comparing data; None where data has to be compared."""
        claim = self._baseline.claims.values.get(wanted.name)
        differs = claim is not None and claim.differs
        if read == OWN:
            return Leaf(wanted.name, "own" if differs else "whole")
        return Leaf(wanted.name, "whole") if read.kind == "replicated" else None

    def _is_read_as_it_is(self, held: Any, wanted: Leaf | None) -> bool:
        if wanted is None or not isinstance(held, list):
            return isinstance(held, Leaf) and held == wanted
        own = wanted.form == "own"
        return all(
            isinstance(item, Leaf) and item == wanted._replace(instance=instance if own else None)
            for instance, item in enumerate(held)
        )

    def _instances_of(self, node: Node) -> range:
        """Return, for each instance of a node, the number of the first EACH instance that it covers."""
        instances = self._sample.instances
        return range(0, instances, instances // self._mesh.count(node.span))

    def _check_lowered(self, node: Node, reshard: Node) -> None:
        """Check the lowered ops of a reshard among the devices of a replica."""
        name = reshard.inputs[0].name
        try:
            read = self._baseline.claims.reads.get((reshard.name, 0), OWN)
            shapes = [np.shape(self._expected(name, read, i)) for i in self._instances_of(node)]
            source = check_lowered(node, reshard, shapes, self._all)
            held = self._held.get(source)
            if not self._is_read_as_it_is(held, self._wanted(reshard.inputs[0], read)):
                self._same_data(node, f"what '{node.name}' converts", held, name, read)
        except UnknownError as error:
            self.not_covered[f"what devices exchange at '{reshard.name}': {error}"] = None

    def _compare_attributes(self, node: Node, found: Node) -> None:
        may_differ = any(text.startswith("random") for text in self._baseline.claims.inexact)
        for key in {*node.attrs, *found.attrs}:
            if key.startswith("_") or node.attrs.get(key) == found.attrs.get(key) or key in RESTATED:
                continue
            if key == "use_locking" and node.attr(key):
                continue  # asynchronous workers need it, and it changes no value
            if isinstance(node.attrs.get(key), PerInstance) and key in ("seed", "seed2") and may_differ:
                continue
            if key == "shape" and self._is_of_shards(node, found):
                continue
            if key == "frame_name" and _is_entered_apart(node, found, self._baseline.claims.micro):
                continue
            raise VerifyError(f"attribute '{key}' of '{node.name}' ({node.op}) is not the original's", node=node)

    def _is_of_shards(self, node: Node, found: Node) -> bool:
        """Return whether each instance of a handle has the shape of its shard."""
        claim, said = self._baseline.claims.values[found.name], node.attrs["shape"]
        if claim.kind != "split" or not isinstance(said, PerInstance):
            return False
        at = [self._all.coordinates(node.span, i)[REPLICA] for i in range(len(said.raws))]
        wanted = [tuple(self._sample.size(dim, one, node.name) for dim in claim.shape or ()) for one in at]
        return [decode(raw) for raw in said.raws] == wanted

    def _same_data(self, node: Node, what: str, held: Any, name: str, read: Read) -> None:
        if held is None:
            held = UnknownError("a value that the rewrite carries round a loop")
        instances = range(self._sample.instances) if node in self._loops else self._instances_of(node)
        try:
            items = held if isinstance(held, list) else [held] * len(instances)
            actual = [
                self.data(item, self._index(item.name if isinstance(item, Leaf) else "", i))
                for item, i in zip(items, instances, strict=True)
            ]
            if read.kind == "partial" and node.span & EACH:
                good = alike(sum(actual[1:], np.asarray(actual[0])), self._sample.whole(name))
            else:
                expected = [self._expected(name, read, i) for i in instances]
                good = all(map(alike, actual, expected))
        except IndexError:
            self.not_covered[f"{what}: its rows do not follow from the size of the batch"] = None
            return
        except UnknownError as error:
            if read != WHOLE or held != Leaf(name, "whole"):
                self.not_covered[f"{what}: {error}"] = None
            return
        if not good:
            raise VerifyError(
                f"{what} should read {SAID[read.kind]} '{name}', but does not with a batch of {self._sample.batch}",
                node=node,
            )

    def _index(self, name: str, instance: int) -> int:
        """Return which instance of a value a micro-batch reads: all of a replica's may share one."""
        micro = self._baseline.claims.micro if name in self._baseline.of_replicas else 1
        return instance // micro

    def _expected(self, name: str, read: Read, instance: int) -> Any:
        sample = self._sample
        if read == OWN:
            return sample.own(name, self._index(name, instance))
        whole = sample.whole(name)
        if read.shards:
            instance //= self._baseline.claims.micro
            begin = read.unit * sum(read.shards[:instance])
            return np.take(whole, np.arange(begin, begin + read.unit * read.shards[instance]), read.dim)
        if read.kind == "split":
            return sample.rows(whole, read.dim, read.unit, instance, read.segments)
        if read.kind == "entry":
            changed = np.array(whole)
            changed[read.dim] = sample.size(read.size, instance, name)
            return changed
        return whole


def _is_dead(node: Node) -> bool:
    """Return whether a pure node has no reader, so that the last pass removes it."""
    is_read = node.control_users or any(value.uses for value in node.read_outputs)
    return is_pure(node.op) and not is_read


def _constant(node: Node, instance: int) -> Any:
    contents = node.attr("value")
    return kernels.constant(contents[instance] if isinstance(contents, tuple) else contents)


def alike(left: Any, right: Any) -> bool:
    """Return whether two values are exactly the same."""
    if isinstance(left, Token) or isinstance(right, Token):
        return isinstance(left, Token) and isinstance(right, Token) and left.name == right.name
    left, right = np.asarray(left), np.asarray(right)
    return left.shape == right.shape and left.dtype == right.dtype and np.array_equal(left, right)


# -- loops that the rewrite made, or that each instance runs separately


def _is_entered_apart(node: Node, original: Node, micro: int) -> bool:
    """Return whether each instance, or each replica, enters a separate loop, named after the original loop."""
    names, name = node.attr("frame_name"), original.attr("frame_name")
    names = names if isinstance(names, tuple) else (names,)
    return any(names == tuple(name + b"/%d" % (i // each) for i in range(len(names))) for each in (1, micro))


IDLE = 64
"""Most consecutive iterations without a micro-batch: a stage of a pipeline waits for earlier stages."""
FORWARDED = frozenset(("Identity", "LoopCond", "NextIteration"))
"""Ops that forward their operand unchanged."""


DEAD = object()
"""The result of a node that does not run."""


def parts_of(order: Sequence[Node], matches: Mapping[Node, Node | None]) -> list[tuple[Sequence[Node], bool]]:
    """Return the nodes in runs, producers first, each with whether it is a loop that the rewrite made."""
    frames = frames_of(order)
    made = {
        frame[0]
        for node, frame in frames.items()
        if node.op == "LoopCond" and node.span == EACH and matches[node] is None and len(frame) == 1
    }
    if not made:
        return [(order, False)]
    return [(run, run[0] in frames and frames[run[0]][0] in made) for run in by_loops(order)]


class Loop:
    """One loop, which every replica runs separately.

    Attributes:
        read: by original node, what is held of its operands in each run.
        given: by value of an Exit, what is held of it on each replica.
    """

    def __init__(self, outside: Simulation, nodes: Sequence[Node], copies: int, micro: int) -> None:
        self._outside, self._nodes, self._copies, self._micro = outside, nodes, copies, micro
        readers = dict.fromkeys(use.node for node in nodes for value in node.read_outputs for use in value.uses)
        self._exits = [node for node in readers if node.op in EXITS]
        if any(node.span != EACH for node in nodes):
            raise UnknownError("replicas share a part of it")
        if sum(node.op == "LoopCond" for node in nodes) != 1:
            raise UnknownError("it is not one loop")
        self.read: dict[Node, list[Sequence[Any]]] = {node: [] for node in nodes if outside.matches[node] is not None}
        self.given: dict[Value, list[Any]] = {node.output(): [] for node in self._exits}
        self._copy, self._goes_on = 0, False
        self._runs: dict[Node, list[Sequence[Any]]] = {}
        self._now: dict[Value, Any] = {}
        self._before: Mapping[Value, Any] | None = None  # the values that the previous iteration passed on

    def run(self) -> None:
        """Run the loop on every replica.

        Raises:
            VerifyError: it does not end, writes a variable, leaves out a micro-batch, has an Exit that gives two values
                or none, or is one loop for several replicas.
            UnknownError: it is of another kind, or passes a value on after the last iteration.
        """
        self._check_frames()
        for node in self.read:
            if writes_variable(node.op):
                raise VerifyError(f"'{node.name}' writes in every iteration of a loop", node=node)
        for copy in range(self._copies):
            self._copy, self._before = copy, None
            self._runs = {node: [] for node in self.read}
            given = self._iterate()
            for node in self._exits:
                if node not in given:
                    raise VerifyError(f"'{node.name}' never leaves its loop", node=node)
                self.given[node.output()].append(given[node])
            for node, runs in self._runs.items():
                if len(runs) != self._micro:
                    raise VerifyError(f"'{node.name}' runs for {len(runs)} of {self._micro} micro-batches", node=node)
                self.read[node] += runs

    def _check_frames(self) -> None:
        for node in self._nodes:
            if node.op in ENTERS:
                raw = node.attrs["frame_name"]
                names = raw.raws if isinstance(raw, PerInstance) else (raw,)
                if len(set(names)) < self._copies:
                    raise VerifyError(f"'{node.name}' enters one loop on all replicas", node=node)

    def _iterate(self) -> dict[Node, Any]:
        """Run the iterations on one replica; return the values of the Exits."""
        given: dict[Node, Any] = {}
        idle = 0
        while idle <= IDLE:
            known = sum(map(len, self._runs.values()))
            self._iteration()
            for node in self._exits:
                item = self._now.get(node.inputs[0], DEAD)
                if item is DEAD:
                    continue
                if node in given:
                    raise VerifyError(f"'{node.name}' leaves its loop twice", node=node)
                given[node] = item
            carried = {v: item for v, item in self._now.items() if v.node.op in BACK_EDGES and item is not DEAD}
            if not self._goes_on and carried:
                raise UnknownError("something goes on after its last iteration")
            if not self._goes_on:
                return given
            self._before = carried
            idle = 0 if sum(map(len, self._runs.values())) > known else idle + 1
        raise VerifyError(f"the loop of '{self._nodes[0].name}' does not end", node=self._nodes[0])

    def _iteration(self) -> None:
        self._now, self._goes_on = {}, False
        dead: set[Node] = set()
        for node in self._nodes:
            items = [self._item(node, value) for value in node.inputs]
            if any(control in dead for control in node.controls):
                items = [DEAD]
            results = self._results(node, items)
            if not results:
                dead.add(node)
            for value in node.read_outputs:
                self._now[value] = results[value.index] if value.index < len(results) else DEAD

    def _item(self, node: Node, value: Value) -> Any:
        if node.op in ENTERS:
            first = self._before is None or bool(node.attr("is_constant", False))
            return self._outside.item(value, self._copy) if first else DEAD
        if value.node.op in BACK_EDGES:
            return DEAD if self._before is None else self._before.get(value, DEAD)
        if value not in self._now:
            raise UnknownError(f"'{node.name}' reads '{value.name}' by no door")
        return self._now[value]

    def _results(self, node: Node, items: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a node; none if it does not run."""
        if node.op == "Merge" and self._outside.matches[node] is None:
            return self._merged(node, items)
        if any(item is DEAD for item in items):
            return ()
        if self._outside.matches[node] is not None:
            return self._original(node, items)
        if node.op in ENTERS or node.op in FORWARDED:
            if node.op == "LoopCond":
                self._goes_on = self._holds(items[0])
            return items
        if node.op == "Switch":
            return [DEAD, items[0]] if self._holds(items[1]) else [items[0], DEAD]
        if node.op == "NoOp":
            return [None]
        return self._outside.computed(node, self._copy, items)

    def _merged(self, node: Node, items: Sequence[Any]) -> Sequence[Any]:
        alive = [index for index, item in enumerate(items) if item is not DEAD]
        if len(alive) > 1:
            raise VerifyError(f"'{node.name}' gets two values in one iteration", node=node)
        return [items[alive[0]], alive[0]] if alive else ()

    def _holds(self, item: Any) -> bool:
        return bool(self._outside.data(item, self._copy))

    def _original(self, node: Node, items: Sequence[Any]) -> Sequence[Any]:
        runs = self._runs[node]
        outputs = range(max((value.index for value in node.read_outputs), default=0) + 1)
        if len(runs) == self._micro:
            return [UnknownError(f"'{node.name}' after the last micro-batch") for _ in outputs]
        runs.append(items)
        instance = self._copy * self._micro + len(runs) - 1
        return [self._outside.leaf(node, index, instance) for index in outputs]


# -- lists that the rewrite made


@dataclass(frozen=True, eq=False)
class Kept:
    """A list of the items that are held for its elements."""

    items: tuple[Any, ...] = ()


def _item(made: Any, at: Any, data: Any) -> Any:
    elements, number = _list(made), int(data(at))
    if not 0 <= number < len(elements):
        raise IndexError(f"there is no element {number} of {len(elements)}")
    return elements[number]


def _list(made: Any) -> tuple[Any, ...]:
    if not isinstance(made, Kept):
        raise NoKernelError("a list of the original")
    return made.items


LISTS: Mapping[str, Callable[..., Any]] = {
    "EmptyTensorList": lambda *shape, data: Kept(),
    "TensorListPushBack": lambda made, item, data: Kept((*_list(made), item)),
    "TensorListGetItem": lambda made, at, shape, data: _item(made, at, data),
    "TensorListStack": lambda made, shape, data: np.stack([data(one) for one in _list(made)]),
    "TensorListConcatV2": lambda made, *sizes, data: np.concatenate([data(one) for one in _list(made)]),
}
"""By op, a function from held operands to the held result."""
