"""Attribution: which original node, pass and exchange a kernel belongs to, by the name under which TensorFlow ran it.

replica_0/MatMul                         a copy of MatMul
dw/all_reduce                            an exchange of dw:0
dw/_7 (_Send), dw/_8 (_Recv)             dw, from one device to another
while/body/_12/while/mul                 mul in a function that TensorFlow has inlined; else the loop itself
ConstantFolding/a-folded-0               a, folded by Grappler; fused kernels keep the name of their last node
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from autograph_rewrite.inspect.communication import Meeting, meetings, origin_of
from autograph_rewrite.inspect.rank_trace import RunSource
from autograph_rewrite.ir.graph import PASS_ATTR, Node
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph

_NUMBERED = re.compile(r"(?:/_|_[SG])\d+$")
_INLINED = re.compile(r"/_\d+/")
_GRAPPLER = re.compile(r"^(?:ConstantFolding/|[A-Za-z]+Optimizer/){1,100}(?:[A-Z][A-Za-z]+_)?")
_FOLDED = re.compile(r"(?:-folded)?-\d+$|-[A-Za-z0-9]+-LayoutOptimizer$|_arg$|/eval_\d+$")


class Attribution:
    """What is known of the nodes of one rank.

    Args:
        items: rewritten or original, that ran; none of a program that is not distributed.
    """

    def __init__(self, items: Sequence[TrainingGraph] = ()) -> None:
        self._items = items

    def source(self, name: str, op: str, route: tuple[str, str] | None = None) -> RunSource:
        """Return what a kernel is.

        Args:
            name: under which TensorFlow ran it.
            op: type of the kernel.
            route: of a send or receive, from which device to which, where that is known.
        """
        if has(op, "sends", "receives"):
            return self._moved(_NUMBERED.sub("", name), op, route)
        if not self._items:
            return RunSource(name, op, "", name)
        node = self._found(name)
        if node is None:
            return RunSource(name, op, "", "")
        made_by = node.attr(PASS_ATTR, b"").decode()
        origin = self._original(node)
        meeting = self._meetings.get(node.name)
        exchange = told(meeting) if meeting is not None else ""
        met = f"{meeting.order} {meeting.value}" if meeting is not None and meeting.order is not None else ""
        return RunSource(node.name, op, device_of(node.device), origin, made_by, exchange, met)

    def _moved(self, name: str, op: str, route: tuple[str, str] | None) -> RunSource:
        """Return what a value's way from one device to another one is."""
        node = self._found(name)
        origin = name if node is None else self._original(node)
        if route is None and node is not None:
            route = node.device, self._reader(node)
        source, target = route or ("", "")
        way = f" from {_place(source)} to {_place(target)}" if source and target else ""
        device = device_of(source if op.endswith("Send") else target)
        return RunSource(name, op, device, origin if node is not None else "", "", f"send {origin}{way}")

    def _reader(self, node: Node) -> str:
        """Return the one other device, of this process if one is, that reads a node's values; else nothing."""
        found = {use.node.device for value in node.outputs for use in value.uses}
        found |= {user.device for user in node.control_users}
        found -= {node.device}
        own = {device for device in found if process_of(device) in self._processes} or found
        return own.pop() if len(own) == 1 else ""

    @cached_property
    def _processes(self) -> Collection[str]:
        """The process that this is, of a job."""
        reports = [item.report for item in self._items if item.report is not None and item.report.member is not None]
        return {f"/job:worker/replica:0/task:{report.member.task}" for report in reports}

    def _original(self, node: Node) -> str:
        origin = origin_of(node) if PASS_ATTR in node.attrs else node.name
        return self._renamed.get(origin, origin)

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        """The original names of nodes whose own only wait for them now."""
        layouts = [item.layout for item in self._items if item.layout is not None]
        return {new: old for layout in layouts for old, new in layout.moved.items()}

    def _found(self, name: str) -> Node | None:
        for candidate in _candidates(name):
            for item in self._items:
                node = item.graph.nodes.get(candidate)
                if node is not None:
                    return node
        return None

    @cached_property
    def _meetings(self) -> Mapping[str, Meeting]:
        return {member: one for item in self._items for one in _meetings(item) for member in one.members}


def device_of(text: str) -> str:
    """Return `CPU:0` of any name of that device: each rank has its own."""
    spec = device_specs.parse(text)
    return text if spec is None or not spec.kind else f"{spec.kind}:{spec.number or 0}"


def told(meeting: Meeting) -> str:
    """Return what is exchanged, how, and for whom, as a name."""
    owner = f" for {meeting.owner}" if meeting.owner else ""
    return f"{meeting.kind} {meeting.value}{owner}"


def _meetings(item: TrainingGraph) -> Iterable[Meeting]:
    if item.report is None and not any(PASS_ATTR in node.attrs for node in item.graph):
        return ()
    return meetings(item)


def _place(device: str) -> str:
    """Return `CPU:0`, or `ps 0 CPU:0` of another process."""
    spec = device_specs.parse(device)
    process = f"{spec.job} {spec.task or 0} " if spec is not None and spec.job not in ("", "localhost") else ""
    return process + device_of(device)


def _candidates(name: str) -> Iterator[str]:
    """Yield the names of the graph that a node may have had, the likeliest first."""
    yield name
    plain = _NUMBERED.sub("", name)
    yield plain
    parts = _INLINED.split(plain)
    for first in range(1, len(parts)):
        yield "/".join(parts[first:])
    yield _FOLDED.sub("", _GRAPPLER.sub("", plain))
    yield from (parts[0], parts[0].rpartition("/")[0]) if len(parts) > 1 else ()  # the call that the node is within
