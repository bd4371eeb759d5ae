"""Ready order: in which order gradients are ready, measured by worker 0 in the first steps, then agreed and kept.

    step 1, 2         as planned: buckets filled in the order that the graph lets expect
    step 3, 4, 5      worker 0 runs the same step with a Timestamp behind each gradient; the others do not notice
    before step 6     all take the order of worker 0, if buckets would leave earlier; the step is rewritten with it

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020), section 3.2.3: buckets in the
order of the first backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ir.types.dtypes import DOUBLE
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.buckets import BucketFiller
from autograph_rewrite.runtime.consensus.rendezvous import Rendezvous
from autograph_rewrite.runtime.function.bound_captures import instances_of
from autograph_rewrite.training_graph import TrainingGraph

FIRST, LAST = 3, 5
"""The steps that are measured; the time of the first is not used: TensorFlow optimises that function in it."""
EARLIER = 0.05
"""Share of the time between the first and the last gradient by which the mean byte has to leave earlier."""
SCOPE = "autograph_ready"
_DRAWS = re.compile(
    rb"\x12.(Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson|PoissonV2|Crop)|Multinomial"
    rb"|(Parameterized)?TruncatedNormal|SampleDistortedBoundingBox(V2)?|\w+CandidateSampler)[\x1a\x22\x2a]"
)
"""An op that keeps the state of its draws in its kernel, as encoded in a node: another function begins anew with it."""


class Timed(NamedTuple):
    """A step that also returns when values were ready.

    Attributes:
        data: its graph, encoded.
        output: the tensor that has the times, in seconds.
    """

    data: bytes
    output: str


class ReadyOrder:
    """Learns the order in which the members of buckets are ready; every worker of a job has one.

    Args:
        item: rewritten, a function's.
        edges: the members of buckets.
    """

    def __init__(self, item: TrainingGraph, edges: Sequence[EdgePlan]) -> None:
        self._item, self._edges = item, edges
        self._member, self._plan = item.report.member, item.report.plan
        self._times: list[Any] = []
        self._call: Callable[..., list[Any]] | None = None

    def measures(self, number: int) -> bool:
        """Return whether this process measures in a step.

        Args:
            number: of the step; the first one has 1.
        """
        return bool(self._member.is_chief) and FIRST <= number <= LAST

    def measured(self, make: Callable[[Timed], Callable[..., list[Any]]], args: list[Any], more: Any) -> list[Any]:
        """Run a step, keep the times, and return its other results.

        Args:
            make: makes what runs a timed step, which returns the times behind the results.
            args: of the step.
            more: what cancels it.
        """
        if self._call is None:
            self._call = make(self._timed())
        *results, times = self._call(args, more)
        self._times.append(times)
        return results

    def _timed(self) -> Timed:
        graph = serde.from_bytes(self._item.graph_bytes)
        stamps = []
        for at, edge in enumerate(self._edges):
            names = instances_of(self._item, edge.node)
            controls = [node for name in names if (node := graph.nodes.get(name)) is not None]
            stamps.append(graph.add("Timestamp", name=f"{SCOPE}/{at}", controls=controls).output())
        attrs = {"T": DOUBLE, "N": len(stamps), "axis": 0}
        times = graph.add("Pack", stamps, name=f"{SCOPE}/times", attrs=attrs)
        return Timed(serde.to_bytes(graph), f"{times.name}:0")

    def agreed(self) -> tuple[str, ...]:
        """Return the order for all steps from now on, on which all workers agree, behind step LAST; () to leave it.

        Raises:
            ClusterError: somebody is missing.
        """
        values = tuple(dict.fromkeys(edge.value for edge in self._edges))
        order = [-1] * len(values)
        if len(self._times) > 1:  # else those steps ran in a loop, or in another function
            rows = zip(*(np.asarray(times).tolist() for times in self._times[1:]), strict=True)
            ready = {edge.value: median(row) for edge, row in zip(self._edges, rows, strict=True)}
            if leave_earlier(self._plan, self._edges, ready):
                order = [values.index(value) for value in sorted(values, key=ready.__getitem__)]
        meeting = Rendezvous(self._member, self._plan.timeout_seconds)
        (chosen,) = meeting.of_chief([np.asarray(order, np.int32)], "agree on the order of gradients")
        return tuple(values[at] for at in chosen.tolist() if at >= 0)


def ready_order(item: TrainingGraph) -> ReadyOrder | None:
    """Return what learns the order of a step's gradients; None where it would change nothing, or cannot be measured.

    On accelerators a Timestamp tells when work was handed to the device, not when it was done. What draws with a seed
    goes on only in the function in which it began.

    Args:
        item: a function's.
    """
    report = item.report
    if report is None or report.member is None or report.plan.bucket_order or report.plan.local_sgd is not None:
        return None
    plan: Plan = report.plan
    edges = [edge for edge in plan.edges if edge.bucket and edge.owner != STEP and edge.compressor == NONE]
    several = len({edge.bucket for edge in edges}) > 1
    is_plain = plan.microbatches == 1 and plan.pipeline is None and plan.steps_per_run <= 1
    on_cpu = all(parse(device).kind == "CPU" for device in plan.devices)
    if not (several and is_plain and on_cpu) or _DRAWS.search(item.graph_bytes):
        return None
    return ReadyOrder(item, edges)


def leave_earlier(plan: Plan, edges: Iterable[EdgePlan], ready: Mapping[str, float]) -> bool:
    """Return whether buckets that are filled in the measured order would leave earlier.

    Args:
        plan: says how large buckets get.
        edges: their members.
        ready: when each value is, in seconds.
    """
    now: dict[int, list[EdgePlan]] = {}
    then: dict[int, list[EdgePlan]] = {}
    filler = BucketFiller()
    for edge in sorted(edges, key=lambda one: ready[one.value]):
        options = plan.options_of(edge.owner)
        kind = (edge.dtype, options.hint, edge.logical, options.bucket_bytes)
        now.setdefault(edge.bucket, []).append(edge)
        then.setdefault(filler.put(kind, edge.bytes, options.bucket_bytes), []).append(edge)
    span = max(ready.values()) - min(ready.values())
    return _leaves(now.values(), ready) - _leaves(then.values(), ready) > EARLIER * span


def _leaves(buckets: Iterable[Sequence[EdgePlan]], ready: Mapping[str, float]) -> float:
    """Return when the mean byte leaves: with the last of its bucket."""
    listed = list(buckets)
    total = sum(edge.bytes for members in listed for edge in members)
    return sum(e.bytes * max(ready[m.value] for m in members) for members in listed for e in members) / max(total, 1)
