"""Cases of a mesh of several axes (tests/cases/mesh): a graph, and what it shall be folded, by hand; and their checker.

    # What it shows, in a sentence.
    # config: {devices: [CPU:0, CPU:1], ...}
    # mesh: {replica: 2, model: 2}        the axes, major to minor
    # pass: insert-reshards               the pass behind which the second graph stands
    # not yet: what is missing            left out once the passes make it
    # feed %x: [5, 4]                     shape of an input whose batch is open; [3] < 6 for integers below 6
    # output loss = %loss
    %x: float32[?,4] = Placeholder()
    ...
    ===
    %x/reshard: float32 @ split(0) = ar.reshard(%x) {...} each

Names, and which numbers edges have, are those of the passes; a reshard names the axes that it is over, and a value lies
along others as it did. Constants are on each replica, the devices of a replica run what the replica runs (so `each` is
their span, too), shapes are those of one device, a batch input is cut where it is read and an output joined by
`merge-instances` (`-> replicated`). That is not how the cases were first written; what they compute is.

The checker knows nothing of the rewriter: it cuts variables and inputs by the placements that are stated, runs every
instance by TensorFlow's kernels, and puts values of the second graph together again. They must be those of the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from autograph_rewrite.ir.format.annotations import Annotation, Others
from autograph_rewrite.ir.format.parser import Text, read
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MICRO, MODEL, ONCE, REPLICA
from autograph_rewrite.ir.traversal import ancestors, grouped, topological_order
from autograph_rewrite.ir.types.opdefs import EFFECT, REGION, RESHARD, find_op
from autograph_rewrite.ir.types.placement import REPLICATED, Placement
from autograph_rewrite.ir.verify.reshards import reshard_of
from tests.rules.runner import run
from tests.support.paths import CASES
from tests.support.text_cases import parts

FOLDER = CASES / "mesh"
At = tuple[tuple[str, int], ...]
"""Coordinates of an instance, by axis."""
Placements = Mapping[str, Placement]
DEAD: Any = None
"""What comes out of the side of a branch that is not taken."""
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
UPDATES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "ResourceApplyGradientDescent": lambda held, rate, slope: (held - rate * slope,),
    "ResourceApplyMomentum": lambda held, slot, rate, slope, keep: (
        held - rate * (slot * keep + slope),
        slot * keep + slope,
    ),
    "AssignVariableOp": lambda held, value: (value,),
}  # fmt: skip
"""What each op makes of the variables that it takes first, and of its other operands."""
SLOTS = {"ResourceApplyMomentum": 2}
"""How many variables an op takes first, where it is more than one."""
MOST_ITERATIONS = 20


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        before: the graph of the user, with its header.
        after: the graph that shall become of it.
        mesh: sizes of the axes, major to minor.
        last: the pass behind which it shall be so.
        missing: what the passes lack for it.
    """

    name: str
    before: str
    after: str
    mesh: Mapping[str, int]
    last: str
    missing: str
    feeds: Mapping[str, tuple[tuple[int, ...], int]]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> Case:
        """Read a case."""
        before, after = parts(path)
        said = {key: text for key, text in re.findall(r"^# ([a-z ]+): (.*)$", before, re.MULTILINE)}
        feeds = {
            name: (tuple(yaml.safe_load(shape)), int(below or 0))
            for name, shape, below in re.findall(r"^# feed %(\S+): (\[[\d, ]*\])(?: < (\d+))?$", before, re.MULTILINE)
        }
        outputs = tuple(re.findall(r"^# output \S+ = %(\S+)$", before, re.MULTILINE))
        mesh = yaml.safe_load(said["mesh"])
        return cls(path.stem, before, after, mesh, said["pass"], said.get("not yet", ""), feeds, outputs)

    @property
    def graphs(self) -> tuple[Text, Text]:
        """Both graphs, read."""
        counted = self.mesh.get(REPLICA, 1) * self.mesh.get(MICRO, 1)
        return read(self.before, name=self.name), read(self.after, replicas=counted, name=f"{self.name}, after")


def mesh_cases() -> list[Path]:
    """Return the files of all cases."""
    return sorted(FOLDER.glob("*.txt"))


def stated(placements: Mapping[str, Annotation], value: Value) -> dict[str, Placement]:
    """Return the placements by axis that a case states of a value, without those that are replicated."""
    one = placements.get(value.name)
    if one is None:
        return {}
    others: Others = one.others
    return ({} if one.placement == REPLICATED else {REPLICA: one.placement}) | dict(others)


def cut(whole: np.ndarray, placement: Placement, count: int, k: int) -> np.ndarray:
    """Return what member `k` of so many holds of a value."""
    if placement.is_split:
        return np.array_split(whole, count, placement.dim)[k]
    if placement.is_partial and placement.op != "own":
        return whole if k == 0 else np.zeros_like(whole)
    return whole


def together(members: list[Any], placement: Placement, what: str) -> Any:
    """Return the whole of what members hold."""
    if placement.is_split:
        return np.concatenate(members, placement.dim)
    if placement.is_partial:
        result = members[0]
        for one in members[1:]:
            result = COMBINE[placement.op](result, one)
        return result
    for one in members[1:]:
        np.testing.assert_allclose(one, members[0], rtol=1e-5, atol=1e-6, err_msg=f"{what}: not alike on all members")
    return members[0]


@dataclass
class Step:
    """One step of a graph on all coordinates of a mesh, instance by instance.

    Attributes:
        text: the graph, with its placements.
        mesh: sizes of axes, major to minor; none: one device.
        feeds: whole inputs.
        state: whole variables, by their names.
    """

    text: Text
    mesh: Mapping[str, int]
    feeds: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]
    known: dict[tuple[Node, At, int | None], Any] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.text.graph

    def coordinates(self, axes: Iterable[str]) -> Iterator[dict[str, int]]:
        """Yield all coordinates along some axes, major axis first."""
        names = [name for name in self.mesh if name in set(axes)]
        for at in product(*(range(self.mesh[name]) for name in names)):
            yield dict(zip(names, at, strict=True))

    def whole(self, value: Value) -> Any:
        """Return a value, put together as its placements say."""
        span = [axis for axis in self.mesh if axis in value.node.span]
        return self._together(value, stated(self.text.placements, value), span, {})

    def _together(
        self, value: Value, placements: Placements, axes: list[str], at: dict[str, int], t: int | None = None
    ) -> Any:
        """Return what the instances along some axes, major to minor, make together."""
        if not axes:
            return self.value(value, at, t)
        axis, *minor = axes
        members = [self._together(value, placements, minor, {**at, axis: k}, t) for k in range(self.mesh[axis])]
        if any(one is DEAD for one in members):
            assert all(one is DEAD for one in members), f"{value.name}: a branch is taken by some members only"
            return DEAD
        return together(members, placements.get(axis, REPLICATED), value.name)

    def value(self, value: Value, at: Mapping[str, int], t: int | None = None) -> Any:
        """Return what one instance of a value is, in an iteration of the loop that it is in."""
        made = self.results(value.node, at, t)
        return DEAD if made is DEAD else made[value.index]

    def results(self, node: Node, at: Mapping[str, int], t: int | None) -> Any:
        """Return the results of one instance of a node."""
        here = {axis: at.get(axis, 0) for axis in self.mesh if axis in node.span}
        key = node, tuple(here.items()), t
        if key not in self.known:
            self.known[key] = self._results(node, here, t)
        return self.known[key]

    def _results(self, node: Node, at: dict[str, int], t: int | None) -> Any:
        if node.op in _FLOW:
            return _FLOW[node.op](self, node, at, t)
        if any(self.results(one, at, t) is DEAD for one in node.controls):
            return DEAD
        inputs = [self.value(value, at, t) for value in node.inputs] if node.op != RESHARD else []
        if any(one is DEAD for one in inputs):
            return DEAD
        match node.op:
            case "Placeholder":
                return [self.feeds[node.name]]
            case "Const":
                return [node.attr("value")]
            case "NoOp":
                return []
            case "VarHandleOp":
                return [node]
            case "ReadVariableOp":
                return [self._content(node, inputs[0], at)]
            case _ if node.op == RESHARD:
                return [self._resharded(node, at, t)]
            case _ if node.op == REGION:
                return self._border(node, inputs, at)
            case _ if node.op in UPDATES:
                count = SLOTS.get(node.op, 1)
                held = [self._content(node, handle, at) for handle in inputs[:count]]
                new = UPDATES[node.op](*held, *inputs[count:])
                assert [one.shape for one in new] == [one.shape for one in held], f"{node.name} changes a shape"
                return list(zip(inputs[:count], new, strict=True))
            case _:
                return run(node.op, [np.asarray(one) for one in inputs], _attributes(node))

    def _content(self, reader: Node, handle: Node, at: Mapping[str, int]) -> np.ndarray:
        """Return what a reader finds in a variable: what the last update that it waits for has left there."""
        behind = ancestors([*reader.controls, *(value.node for value in reader.inputs)])
        order = [one for one in topological_order(self.graph) if one in behind and one.op in UPDATES]
        for update in reversed(order):
            made = self.results(update, at, None)
            for written, new in made or ():
                if written is handle:
                    return np.asarray(new)
        held = self._held(_name(handle))
        placements = stated(self.text.placements, handle.output())
        for axis, count in self.mesh.items():  # the major axis first: blocks of blocks lie within those
            if axis in placements:
                held = cut(held, placements[axis], count, at.get(axis, 0))
        return held

    def _held(self, name: str) -> np.ndarray:
        """Return a variable; one that is a block of another, which passes cut into variables, has its part of it."""
        if name in self.state:
            return self.state[name]
        whole, k = _block(name)
        names = (_name(node) for node in self.graph if node.op == "VarHandleOp")
        return np.array_split(self.state[whole], sum(_block(one)[0] == whole for one in names))[k]

    def _resharded(self, node: Node, at: dict[str, int], t: int | None) -> Any:
        said, (value,) = reshard_of(node), node.inputs
        read, made = (stated(self.text.placements, one) for one in (value, node.output()))
        along = {axis: (read.pop(axis, REPLICATED), made.pop(axis, REPLICATED)) for axis in said.over}
        told = {axis: (said.before.get(axis, REPLICATED), said.after.get(axis, REPLICATED)) for axis in said.over}
        assert told == along, f"{node.name}: {said} is not what it reads and makes"
        assert read == made, f"{node.name} changes how a value lies along other axes than {said.over}"
        axes = [axis for axis in self.mesh if axis in said.over]  # major to minor
        assert [axis for axis in reversed(axes)] == [axis for axis in said.over if axis in axes], f"{node.name}: order"
        found = self._together(value, said.before, axes, {k: v for k, v in at.items() if k not in axes}, t)
        if found is DEAD:
            return DEAD
        for axis in axes:
            placement = said.after.get(axis, REPLICATED)
            assert axis in node.span or not placement.differs, f"{node.name} differs along {axis}, and runs once"
            found = cut(found, placement, self.mesh[axis], at.get(axis, 0))
        return found

    def _border(self, node: Node, inputs: list[Any], at: dict[str, int]) -> list[Any]:
        """What goes into a region is as it is; what comes out is what exits make of it, as a share of a mean."""
        if node.attr("border") == b"begin":
            return inputs
        (axis,) = (one.decode() for one in node.attr("over"))
        is_first, count = at[axis] == 0, self.mesh[axis]
        exits = {
            b"mean": lambda one: one / np.asarray(count, one.dtype),
            b"sum": lambda one: one,
            b"first": lambda one: one if is_first else np.zeros_like(one),
            b"keep": lambda one: one,
        }
        return [exits[leaves](one) for leaves, one in zip(node.attr("exits"), inputs, strict=True)]

    def written(self) -> dict[str, np.ndarray]:
        """Return the variables that the step writes, by name; each instance of each must be written."""
        last: dict[str, Any] = {}
        for node in topological_order(self.graph):
            if node.op not in UPDATES:
                continue
            made = {tuple(at.items()): self.results(node, at, None) for at in self.coordinates(node.span)}
            if any(one is DEAD for one in made.values()):
                assert all(one is DEAD for one in made.values()), f"{node.name}: some members do not update"
                continue
            if any(one.op == "own" for one in stated(self.text.placements, node.inputs[0]).values()):
                continue  # within a region: what leaves it is written outside
            for i in range(SLOTS.get(node.op, 1)):
                handle = next(iter(made.values()))[i][0]
                assert handle.span == node.span, f"{node.name} does not write each instance of {handle.name}"
                placements = stated(self.text.placements, handle.output())
                name = _name(handle)
                last[name] = self._assembled(made, i, placements, [a for a in self.mesh if a in node.span], {}, name)
        blocks = [name for name in last if name not in self.state]
        for whole, names in grouped((_block(name)[0], name) for name in sorted(blocks, key=_block)).items():
            last[whole] = np.concatenate([last.pop(name) for name in names])
        return last

    def _assembled(
        self, made: Any, i: int, placements: Placements, axes: list[str], at: dict[str, int], name: str
    ) -> Any:
        if not axes:
            return made[tuple(at.items())][i][1]
        axis, *minor = axes
        members = [self._assembled(made, i, placements, minor, {**at, axis: k}, name) for k in range(self.mesh[axis])]
        return together(members, placements.get(axis, REPLICATED), name)


def _name(handle: Node) -> str:
    """Return the name of a variable."""
    found: bytes = handle.attr("shared_name")
    return found.decode()


def _block(name: str) -> tuple[str, int]:
    """Return the variable that another one is a block of, and the number of the block."""
    whole, _, k = name.rpartition("/part_")
    return whole, int(k)


def _attributes(node: Node) -> dict[str, Any]:
    op = find_op(node.op)
    assert op is not None, node.op
    return {key: node.attr(key) for key in op.attrs if node.attrs.get(key) is not None}


def _switch(step: Step, node: Node, at: dict[str, int], t: int | None) -> Any:
    if any(step.results(one, at, t) is DEAD for one in node.controls):
        return DEAD
    data, chosen = (step.value(value, at, t) for value in node.inputs)
    return DEAD if data is DEAD or chosen is DEAD else [DEAD, data] if chosen else [data, DEAD]


def _merge(step: Step, node: Node, at: dict[str, int], t: int | None) -> Any:
    back = [value.node for value in node.inputs if value.node.op == "NextIteration"]
    if back and t:
        return [step.value(back[0].inputs[0], at, t - 1), np.int32(1)]
    if back:
        return [step.value(node.inputs[0], at, None), np.int32(0)]
    alive = [(one, np.int32(i)) for i, value in enumerate(node.inputs) if (one := step.value(value, at, t)) is not DEAD]
    assert len(alive) <= 1, f"{node.name}: both sides of a branch"
    return list(alive[0]) if alive else DEAD


def _exit(step: Step, node: Node, at: dict[str, int], t: int | None) -> Any:
    for k in range(MOST_ITERATIONS):
        found = step.value(node.inputs[0], at, k)
        if found is not DEAD:
            return [found]
    raise AssertionError(f"{node.name}: the loop does not end")


def _same(step: Step, node: Node, at: dict[str, int], t: int | None) -> Any:
    if any(step.results(one, at, t) is DEAD for one in node.controls):
        return DEAD
    found = step.value(node.inputs[0], at, None if node.op == "Enter" else t)
    return DEAD if found is DEAD else [found]


_FLOW = {"Switch": _switch, "Merge": _merge, "Exit": _exit} | dict.fromkeys(
    ("Enter", "LoopCond", "Identity", EFFECT), _same
)


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    """Return what a case is fed."""
    rng = np.random.default_rng(7)
    return {
        name: rng.integers(0, below, shape).astype(np.int32) if below else rng.normal(size=shape).astype(np.float32)
        for name, (shape, below) in case.feeds.items()
    }


def variables_of(graph: Graph) -> dict[str, np.ndarray]:
    """Return what the variables of a graph hold."""
    rng = np.random.default_rng(8)
    handles = [node for node in graph if node.op == "VarHandleOp"]
    return {
        _name(node): rng.normal(size=node.attr("shape")).astype(np.float32)
        for node in sorted(handles, key=lambda one: one.name)
    }


def alone(case: Case) -> Step:
    """Return the step of the user's graph on one device."""
    before, _ = case.graphs
    return Step(before, {}, inputs_of(case), variables_of(before.graph))


def on_mesh(case: Case) -> Step:
    """Return the step of the folded graph on its mesh; the devices of a replica all run what the replica runs."""
    before, after = case.graphs
    assert all(node.span <= set(case.mesh) | {MICRO, REPLICA} for node in after.graph), "a span along no axis"
    for node in after.graph:
        if REPLICA in node.span and MODEL in case.mesh:
            node.set_span(node.span | {MODEL})
    assert all(node.span == ONCE for node in before.graph)
    text = after._replace(
        placements={name: _in_time(case, after.graph, name, one) for name, one in after.placements.items()}
    )
    return Step(text, case.mesh, inputs_of(case), variables_of(before.graph))


def _in_time(case: Case, graph: Graph, name: str, said: Annotation) -> Annotation:
    """Return what is stated of a value, which micro-batches cut as replicas do: they are parts of the same batch."""
    is_cut = MICRO in case.mesh and MICRO in graph.value(name).node.span and said.placement != REPLICATED
    return replace(said, others=((MICRO, said.placement), *said.others)) if is_cut else said
