"""Checks NCCL collectives: on GPUs, of types that NCCL has, in one order on each device.

    GPU:0   all_reduce 1 ──► all_reduce 2        kernels of a communicator wait on the device for their peers: two that
    GPU:1   all_reduce 1 ──► all_reduce 2        start in different orders on two devices wait for each other for ever

TensorFlow runs NCCL where the hint of a collective asks for it. `collectives` checks that no device has two members.
"""

from __future__ import annotations

from collections.abc import Iterator

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import grouped, marks_before
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.verify.collective_groups import sent_by
from autograph_rewrite.ir.verify.folded import Fault
from autograph_rewrite.ir.verify.job import Job

HINT = b"nccl"
TYPES = frozenset((dtypes.HALF, dtypes.BFLOAT16, dtypes.FLOAT, dtypes.DOUBLE, dtypes.INT32, dtypes.INT64))
"""The element types for which TensorFlow uses NCCL."""


def uses_nccl(node: Node) -> bool:
    """Return whether a collective asks for NCCL."""
    return bool(node.attr("communication_hint") == HINT)


def nccl_has_device_and_type(job: Job) -> Iterator[Fault]:
    """A collective that asks for NCCL is on GPUs, and sends an element type that NCCL has."""
    kinds = {node: _kind(node) for group in job.found for node in group.members}
    for group in job.found:
        for node in filter(uses_nccl, group.members):
            # If no collective is on a GPU, TensorFlow ignores the hint.
            if kinds[node] not in ("GPU", "") and "GPU" in kinds.values():
                problem = f"{job.say(node)} asks for NCCL, and is on '{node.device}'"
                yield Fault(problem, node, "NCCL is for GPUs: set strategy.hint to ring or auto")
            sent = [value.dtype for value in node.inputs[:1]] if sent_by(node) else []
            if any(dtype not in TYPES for dtype in sent):
                problem = f"{job.say(node)} sends {dtypes.dtype_name(sent[0])}, which NCCL has no type for"
                yield Fault(problem, node, "send it in another type, or set strategy.hint to ring")


def _kind(node: Node) -> str:
    spec = device_specs.parse(node.device)
    return spec.kind if spec is not None else ""


def nccl_has_one_order(job: Job) -> Iterator[Fault]:
    """A collective that asks for NCCL waits for all earlier ones on its device that may run in the same step."""
    asking = {node for group in job.found for node in group.members if uses_nccl(node)}
    in_order = (node for node in job.ordered[0] if node in asking)
    lanes = grouped(((job.rank(node), device_specs.canonical(node.device)), node) for node in in_order)
    marks = {node: 1 << i for i, node in enumerate(node for lane in lanes.values() for node in lane)}
    before = marks_before(job.ordered[0], marks) if marks else {}
    for (_, device), lane in lanes.items():
        earlier = 0
        for two in lane:
            missing = earlier & ~before[two]
            loose = [one for one in lane if missing & marks[one] and not _exclude(job, one, two)] if missing else []
            if loose:
                problem = f"{job.say(loose[0])} and {job.say(two)} ask for NCCL on {device_specs.short(device)}"
                yield Fault(f"{problem}, in any order", two, "let one wait for the other, on all devices alike")
                break
            earlier |= marks[two]


def _exclude(job: Job, one: Node, two: Node) -> bool:
    """Return whether two nodes are in branches of which only one is taken."""
    guards = job.conditions[1]
    others = guards.get(two, ())
    return any(guard._replace(taken=not guard.taken) in others for guard in guards.get(one, ()))
